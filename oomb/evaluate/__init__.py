"""How well a model uses a long context: its loss by position, needles in a haystack, and a sample of its text.

All of it stands on the engine's log-probabilities without a graph, which is the fill pass alone: a million tokens can
be evaluated wherever their K and V fit.
"""
