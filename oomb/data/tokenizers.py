"""Whether two tokenizers give the same ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Tokenizers that agree on all of this, and on their vocabulary, are taken for the same.
PROBE = "Hello, world! def f(x):\n    return x**2  # 3.14159\t\tÄpfel 北京 🙂 don't CamelCase  \n\n"


PROBES = (
    "The quick brown fox didn't jump; it's 12 o'clock, isn't it?",
    "def area(r):\n    return math.pi * r**2  # self.x_y != {'a': [0]}\n",
    "0 7 42 1984 3.14159 1,000,000 2024-01-31",
    "Äpfel, naïve façade, Привет, 北京市, 日本語, سلام, 🙂",
    "one  two   three\t\tfour\n\n\n        eight \r\n ",
    "CamelCase snake_case UPPER <b>&amp;</b> https://example.org/?a=b",
)
"""Texts of several kinds. Where two tokenizers give the same ids for all of them, they belong to the same models."""


MOST_SHOWN = 6
"""Ids in a message."""


def give_the_same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether a model that was trained with one of them can read what the other gives, as far as `PROBES` and special
    tokens that both have show. Tokens that only one has are no difference: text without them is read the same."""
    return difference_in_ids(one, other) is None


def difference_in_ids(
    one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, names: tuple[str, str] = ("the one", "the other")
) -> str | None:
    """The first text of which the two make different ids, with these: "'abc' is [1, 2] to the one and [3] to the
    other". None where they `give_the_same_ids`."""
    special = dict.fromkeys([*one.all_special_tokens, *other.all_special_tokens])
    shared = one.get_vocab().keys() & other.get_vocab().keys()
    made: list[tuple[str, list[int], list[int]]] = [(text, _ids(one, text), _ids(other, text)) for text in PROBES]
    # By their numbers, since what is special to one of them the other may take for letters.
    made += [
        (token, [one.convert_tokens_to_ids(token)], [other.convert_tokens_to_ids(token)])
        for token in special
        if token in shared
    ]
    for text, of_one, of_other in made:
        if of_one != of_other:
            pairs = zip(of_one, of_other, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(of_one), len(of_other)))
            shown = f"{_shown(of_one, first)} to {names[0]} and {_shown(of_other, first)} to {names[1]}"
            return f"{text!r} is {shown}"
    return None


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _shown(ids: list[int], first: int) -> str:
    """A few of them, from `first` on."""
    before, after = ["…"] if first else [], ["…"] if len(ids) > first + MOST_SHOWN else []
    return f"[{', '.join([*before, *map(str, ids[first : first + MOST_SHOWN]), *after])}]"


def another_tokenizer(
    name: str, tokenizer: PreTrainedTokenizerBase, model: str, own: PreTrainedTokenizerBase | None
) -> str | None:
    """Return what is wrong with a tokenizer for a model whose own is `own`, or None. The ids of another tokenizer mean
    other words to the model, though all of them may be in its vocabulary."""
    if name == model or own is None:
        return None
    difference = difference_in_ids(own, tokenizer, (model, name))
    if difference is None:
        return None
    return f"{name} is another tokenizer than that of {model}, which would read its ids as other words: {difference}"
