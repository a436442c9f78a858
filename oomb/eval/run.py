"""Evaluate a model on long contexts: settings, tokenizer and data of `oomb eval`, and the evaluation itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oomb.data.dataset import open_configured
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
    """Settings of one evaluation, named as in `oomb train`."""

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
        for name, minimum in (("max_length", 2), ("max_eval_samples", 1), ("sample_tokens", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"--{name} is {getattr(self, name)}; it must be {minimum} or more")
        if self.output is not None:
            path = Path(self.output)
            if path.is_dir():
                raise ValueError(f"--output {path} is a folder; pass a file, for example {path / 'eval.json'}")
            parent = next(p for p in path.absolute().parents if p.exists())
            if not os.access(parent, os.W_OK):
                raise ValueError(f"--output {path} cannot be written: you have no write permission in {parent}")


def evaluate(
    engine: Engine, examples: Sequence[Any], haystacks: Sequence[Haystack] = (), needle: NeedleSettings | None = None
) -> dict[str, Any]:
    """Return {"perplexity": ..., "needle": ...} in plain values; "needle" only if there are haystacks.

    It takes `len(examples) + 2 * len(haystacks)` passes, and `engine.progress` is called for each of their chunks.

    Args:
        engine: The engine to evaluate.
        examples: Examples for the loss by position; see `perplexity_by_position`.
        haystacks: What `build_haystacks` returned.
        needle: The settings the haystacks were built with.
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
    """Return the tokenizer of that name or the model's own; None for models that read bytes.

    Presets read bytes, and so do models trained from them.
    """
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
    # Do not count added tokens such as padding: they do no harm unless a text contains them.
    needed = NUM_BYTE_IDS if tokenizer is None else tokenizer.vocab_size
    if vocab_size < needed:
        what = "bytes need" if tokenizer is None else "the tokenizer has"
        raise ValueError(
            f"{name_or_path} has a vocabulary of {vocab_size} and {what} {needed} ids: pass the model's own tokenizer "
            "as --tokenizer_name"
        )
    return tokenizer


def resolve_tokenizer_name(settings: EvalSettings, base: str | None) -> str | None:
    """Return the tokenizer to load: `tokenizer_name`, or the one saved with LoRA adapters; None for the model's own."""
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
    """Return the dataset, the examples to evaluate and the text for haystacks.

    The first examples are those that `oomb train` holds out. `report` is called with the bytes checked and the total.
    """
    longest = max(settings.needle.lengths, default=0) if settings.needle is not None else 0
    num_examples = max(settings.max_eval_samples, -(-longest // settings.max_length))
    skip_check = settings.skip_dataset_check
    while True:
        split = open_configured(
            settings,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            num_train=num_examples,
            skip_check=skip_check,
            report=report,
        )
        parts = [split.train] if split.held_out is None else [split.held_out, split.train]
        examples = [part[i] for part in parts for i in range(len(part))]
        text = torch.cat([example["input_ids"] for example in examples])
        # Only reading the documents tells how many of them fill a haystack.
        if len(text) >= longest or len(split.train) < num_examples:
            return split, examples[: settings.max_eval_samples], text
        num_examples *= 4
        skip_check = True  # The first round has checked the dataset.
