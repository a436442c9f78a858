"""Attention of one chunk to everything before it: exact, in pieces that merge by log-sum-exp."""
