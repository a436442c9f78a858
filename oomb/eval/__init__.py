"""Verify gradients, measure speed and memory, evaluate long contexts."""
