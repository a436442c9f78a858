"""Verify gradients, measure speed and memory, evaluate long contexts.

Evaluation uses the engine's log-probabilities without a graph, which is the fill pass alone: a million tokens can be
evaluated wherever their K and V fit.
"""
