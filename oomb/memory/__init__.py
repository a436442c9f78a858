"""Page memory: K, V, their gradients and attention outputs between chunks, in GPU and host memory."""
