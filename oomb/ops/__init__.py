"""Numeric primitives, each with a PyTorch reference and some with a Triton kernel."""
