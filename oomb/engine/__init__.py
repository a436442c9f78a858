"""One training step: batch, fill pass, gradient pass, head, gradients, optimizer."""
