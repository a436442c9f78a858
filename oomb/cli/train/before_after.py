"""Measure a model's use of long contexts before and after training: needles, loss by position, and a sample."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from oomb.cli.train.display import TrainingDisplay
from oomb.cli.train.settings import TrainSettings
from oomb.data.tokens import Split
from oomb.eval.needles import NeedleSettings, build_haystacks
from oomb.eval.run import evaluate
from oomb.eval.samples import PROMPT_SIZE, sample_text
from oomb.trainers.trainer import Trainer
from oomb.utils.metrics import JsonLines


class BeforeAfterEval:
    """Evaluation that is the same before and after training.

    It selects its texts when created, so that too little text for the needles is an error before weights are loaded.

    Args:
        settings: Settings of the run.
        split: Its examples. Needles are hidden in held-out text as far as there is enough.
        tokenizer: Tokenizer of the model; None reads bytes.
    """

    def __init__(self, settings: TrainSettings, split: Split, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.sample_tokens, self.seed, self.tokenizer = settings.sample_tokens, settings.seed, tokenizer
        source = split.train if split.held_out is None else split.held_out
        self.examples = [source[index]["input_ids"] for index in range(len(source))] if settings.needle_sizes else []
        first = source[0]["input_ids"]
        # Half of a short example at most, so that there is something to continue.
        self.prompt_T = first[: min(PROMPT_SIZE, max(1, len(first) // 2))]
        self.needle: NeedleSettings | None = None
        self.haystacks: list[Any] = []
        if settings.needle_sizes:
            self.needle = NeedleSettings(
                lengths=settings.needle_sizes,
                num_depths=settings.needle_depths,
                num_candidates=settings.needle_candidates,
                num_haystacks=settings.needle_haystacks,
                seed=settings.seed,
            )
            text = list(self.examples)
            for index in range(len(split.train) if split.held_out is not None else 0):
                if sum(map(len, text)) >= max(settings.needle_sizes):
                    break
                text.append(split.train[index]["input_ids"])
            self.haystacks = build_haystacks(torch.cat(text), tokenizer, self.needle)

    def run(self, when: str, step: int, trainer: Trainer, display: TrainingDisplay, log: JsonLines) -> None:
        """Evaluate, print the result, and write the events `eval` and `sample` to the metrics.

        Args:
            when: "before" or "after".
            step: Last completed step.
            trainer: Trainer with the model.
            display: Display of the run.
            log: The run's metrics.
        """
        if self.needle is not None:
            num_passes = len(self.examples) + self.needle.num_passes
            with display.evaluating("needles", num_passes), trainer.accelerator.autocast():
                found = evaluate(trainer.engine, self.examples, self.haystacks, self.needle)
            log.write(event="eval", when=when, step=step, **found)
            needle = found["needle"]
            display.print(
                f"needles found {when} training: {needle['accuracy']:.0%} (chance {needle['chance']:.0%}), "
                f"written exactly {needle['exact']:.0%}, gain {needle['gain']:+.2f} nats"
            )
        if self.sample_tokens:
            with trainer.accelerator.autocast():
                sample = sample_text(
                    trainer.engine, self.prompt_T, self.tokenizer, num_tokens=self.sample_tokens, seed=self.seed
                )
            log.write(event="sample", when=when, step=step, **sample)
