"""Verify gradients, measure speed and memory, and evaluate models on long contexts.

Evaluation needs log-probabilities only, so it runs the fill pass without a graph: a context of a million tokens can be
evaluated wherever its K and V fit.
"""
