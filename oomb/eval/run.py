"""The run behind `oomb eval`: check everything, load, evaluate, print tables, write JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oomb.data.dataset import open_dataset
from oomb.data.discover import STDLIB
from oomb.data.encode import NUM_BYTE_IDS
from oomb.data.sources import SEED
from oomb.data.tokens import Split
from oomb.engine.engine import Engine
from oomb.eval.needles import Haystack, NeedleSettings, needle_scores
from oomb.eval.perplexity import perplexity_by_position
from oomb.models import load, presets

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(kw_only=True)
class EvalSettings:
    """The choices of one evaluation, named as in `oomb train`."""

    model_name_or_path: str
    tokenizer_name: str | None = None
    trust_remote_code: bool = False
    dataset: str = STDLIB
    packing: str = "auto"
    dataset_join: str = "documents"
    skip_dataset_check: bool = False
    max_length: int = 16384
    max_eval_samples: int = 1
    needle: NeedleSettings | None = None
    sample_tokens: int = 0
    seed: int = SEED
    output: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of `oomb.Config`."""

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("max_eval_samples", 1), ("sample_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}; it must be {least} or more")
        if self.output is not None:
            path = Path(self.output)
            if path.is_dir():
                raise ValueError(f"--output {path} is a folder; name a file, {path / 'eval.json'} for example")
            parent = next(p for p in path.absolute().parents if p.exists())
            if not os.access(parent, os.W_OK):
                raise ValueError(f"--output {path} cannot be written: {parent} is read-only for you")


def evaluate(
    engine: Engine, examples: Sequence[Any], haystacks: Sequence[Haystack] = (), needle: NeedleSettings | None = None
) -> dict[str, Any]:
    """{"perplexity", and "needle" where there are haystacks}: plain values, as the `eval` event of a run holds them.

    There are `len(examples) + 2 * len(haystacks)` passes; `engine.progress` hears of their chunks.
    """
    found = {"perplexity": perplexity_by_position(engine, examples).as_dict()}
    if needle is not None and haystacks:
        found["needle"] = needle_scores(engine, haystacks, needle).as_dict()
    return found


def tokenizer_for(
    name_or_path: str,
    config: PretrainedConfig,
    tokenizer_name: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that is named, or the model's own; None for presets and what was trained from them on bytes."""
    vocab_size = config.get_text_config().vocab_size
    if tokenizer_name is not None:
        tokenizer = load.load_tokenizer(tokenizer_name, trust_remote_code=trust_remote_code)
    elif presets.is_preset(name_or_path):
        tokenizer = None
    else:
        try:
            tokenizer = load.load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)
        except ValueError:
            if vocab_size != presets.PRESETS["demo"]["vocab_size"]:
                raise
            tokenizer = None
    # Tokens added to it, padding for one, are no harm until a text has them.
    needed = NUM_BYTE_IDS if tokenizer is None else tokenizer.vocab_size
    if vocab_size < needed:
        what = "bytes need" if tokenizer is None else "the tokenizer has"
        raise ValueError(
            f"{name_or_path} has a vocabulary of {vocab_size} and {what} {needed} ids; name the tokenizer that belongs "
            "to the model with --tokenizer_name"
        )
    return tokenizer


def tokenizer_name_of(settings: EvalSettings, base: str | None) -> str | None:
    """Adapters are saved with the tokenizer that they were trained with; that one comes before the base model's."""
    if settings.tokenizer_name is not None or base is None:
        return settings.tokenizer_name
    folder = Path(settings.model_name_or_path).expanduser()
    has_tokenizer = any(any(folder.glob(pattern)) for pattern in load.TOKENIZER_FILES)
    return str(folder) if has_tokenizer else None


def read_examples(
    settings: EvalSettings,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    report: Callable[[int, int], None],
) -> tuple[Split, list[dict[str, Tensor]], Tensor]:
    """Return the examples to evaluate on, and text for haystacks. The first ones are those `oomb train` holds out."""
    most = max(settings.needle.lengths, default=0) if settings.needle is not None else 0
    num_examples = max(settings.max_eval_samples, -(-most // settings.max_length))
    skip_check = settings.skip_dataset_check
    while True:
        split = open_dataset(
            settings.dataset,
            tokenizer=tokenizer,
            max_length=settings.max_length,
            packing=settings.packing,
            join=settings.dataset_join,
            vocab_size=vocab_size,
            num_train=num_examples,
            num_held_out=settings.max_eval_samples,
            seed=settings.seed,
            skip_check=skip_check,
            report=report,
        )
        parts = [split.train] if split.held_out is None else [split.held_out, split.train]
        examples = [part[i] for part in parts for i in range(len(part))]
        text = torch.cat([example["input_ids"] for example in examples])
        # Documents may be short. How many of them a haystack takes is known once they are read.
        if len(text) >= most or len(split.train) < num_examples:
            return split, examples[: settings.max_eval_samples], text
        num_examples *= 4
        skip_check = True  # It has been checked.
