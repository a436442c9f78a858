"""Decide whether two tokenizers give the same ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "Hello, world! def f(x):\n    return x**2  # 3.14159\t\tÄpfel 北京 🙂 don't CamelCase  \n\n"
"""Text whose ids are part of an encoder's fingerprint."""

PROBES = (
    "The quick brown fox didn't jump; it's 12 o'clock, isn't it?",
    "def area(r):\n    return math.pi * r**2  # self.x_y != {'a': [0]}\n",
    "0 7 42 1984 3.14159 1,000,000 2024-01-31",
    "Äpfel, naïve façade, Привет, 北京市, 日本語, سلام, 🙂",
    "one  two   three\t\tfour\n\n\n        eight \r\n ",
    "CamelCase snake_case UPPER <b>&amp;</b> https://example.org/?a=b",
)
"""Texts of several kinds. Two tokenizers that agree on all of them are taken for the same."""

MAX_SHOWN = 6
"""Ids in a message."""


def give_the_same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Return whether a model trained with one tokenizer can read the other's ids.

    Judged by `PROBES` and by the special tokens that both have. Tokens that only one has do not matter: text without
    them is read the same.
    """
    return difference_in_ids(one, other) is None


def difference_in_ids(
    one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, names: tuple[str, str] = ("the one", "the other")
) -> str | None:
    """Return the first text that two tokenizers encode differently, with both results, or None if there is none.

    For example "'abc' is [1, 2] to the one and [3] to the other".
    """
    special = dict.fromkeys([*one.all_special_tokens, *other.all_special_tokens])
    shared = one.get_vocab().keys() & other.get_vocab().keys()
    encoded: list[tuple[str, list[int], list[int]]] = [(text, _ids(one, text), _ids(other, text)) for text in PROBES]
    # Looked up rather than encoded: a token that is special to one may be plain letters to the other.
    encoded += [
        (token, [one.convert_tokens_to_ids(token)], [other.convert_tokens_to_ids(token)])
        for token in special
        if token in shared
    ]
    for text, ids, other_ids in encoded:
        if ids != other_ids:
            pairs = zip(ids, other_ids, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(other_ids)))
            shown = f"{_shown(ids, first)} to {names[0]} and {_shown(other_ids, first)} to {names[1]}"
            return f"{text!r} is {shown}"
    return None


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _shown(ids: list[int], first: int) -> str:
    """Return a few ids as text, from index `first` on."""
    before, after = ["…"] if first else [], ["…"] if len(ids) > first + MAX_SHOWN else []
    return f"[{', '.join([*before, *map(str, ids[first : first + MAX_SHOWN]), *after])}]"


def another_tokenizer(
    name: str, tokenizer: PreTrainedTokenizerBase, model: str, own: PreTrainedTokenizerBase | None
) -> str | None:
    """Return what is wrong with using a tokenizer for a model, or None.

    The ids of a different tokenizer would map to different tokens in the model, even if all of them are in its
    vocabulary.

    Args:
        name: Name of the tokenizer.
        tokenizer: The tokenizer.
        model: Name of the model.
        own: The model's own tokenizer, if it has one.
    """
    if name == model or own is None:
        return None
    difference = difference_in_ids(own, tokenizer, (model, name))
    if difference is None:
        return None
    return f"{name} is not the tokenizer of {model}, so its ids would map to different tokens: {difference}"
