"""How well a model uses a long context: its loss by position, needles in a haystack, and a sample of its text.

All of it stands on the engine's log-probabilities without a graph, which is the fill pass alone: a million tokens can
be evaluated wherever their K and V fit.
"""

from __future__ import annotations

from oomb.evaluate.needles import Haystack, NeedleScores, NeedleSettings, build_haystacks, needle_scores
from oomb.evaluate.positions import PositionLosses, perplexity_by_position
from oomb.evaluate.run import Settings, evaluate, needle_table, position_table, run, tokenizer_for
from oomb.evaluate.samples import decode, sample_text

__all__ = [
    "Haystack",
    "NeedleScores",
    "NeedleSettings",
    "PositionLosses",
    "Settings",
    "build_haystacks",
    "decode",
    "evaluate",
    "needle_scores",
    "needle_table",
    "perplexity_by_position",
    "position_table",
    "run",
    "sample_text",
    "tokenizer_for",
]
