"""Data: `open_dataset` turns what `--dataset` names into examples, `tokenizing` writes them to disk once and for all.

stdlib | file | folder | JSON lines | table  ->  records  ->  tokens  ->  windows or documents  ->  (held-out, train)
"""

from __future__ import annotations

from oomb.data.encode import NUM_BYTE_IDS, PAD_ID, SEPARATOR_ID, difference_in_ids, give_the_same_ids
from oomb.data.finding import STDLIB, find_documents
from oomb.data.opening import PACKINGS, SHORTEST_ADVISED, load, open_dataset, unchecked
from oomb.data.sources import JOINS, SEED
from oomb.data.tokens import Split, Tokens, Windows

__all__ = [
    "JOINS",
    "NUM_BYTE_IDS",
    "PACKINGS",
    "PAD_ID",
    "SEED",
    "SEPARATOR_ID",
    "SHORTEST_ADVISED",
    "STDLIB",
    "Split",
    "Tokens",
    "Windows",
    "difference_in_ids",
    "find_documents",
    "give_the_same_ids",
    "load",
    "open_dataset",
    "unchecked",
]
