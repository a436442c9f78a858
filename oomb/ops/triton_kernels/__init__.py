"""The Triton kernels: the only modules that import triton."""
