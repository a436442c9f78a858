"""Numeric primitives. Each has a PyTorch reference; some have a Triton kernel."""
