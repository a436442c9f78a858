"""Attention of one chunk to its past and itself, forward and backward."""
