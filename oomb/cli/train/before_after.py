"""What the model makes of long texts before training and after it: needles, loss by position, a sample of its text."""

from __future__ import annotations

from typing import Any

import torch
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from oomb.cli.train.display import TrainingDisplay
from oomb.cli.train.settings import TrainSettings
from oomb.cli.train.signals import StopRequested
from oomb.data.tokens import Split
from oomb.eval.needles import NeedleSettings, build_haystacks
from oomb.eval.run import evaluate
from oomb.eval.samples import PROMPT_SIZE, sample_text
from oomb.trainers.trainer import Trainer


class BeforeAfterEval:
    """Asks the same of the model both times. What it takes is looked for when it is made, before weights are loaded."""

    def __init__(self, settings: TrainSettings, split: Split, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.sample_tokens, self.seed, self.tokenizer = settings.sample_tokens, settings.seed, tokenizer
        source = split.train if split.held_out is None else split.held_out
        self.windows = [source[index]["input_ids"] for index in range(len(source))] if settings.needle_sizes else []
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
            # Text that is never trained on, as far as it goes.
            text = list(self.windows)
            for index in range(len(split.train) if split.held_out is not None else 0):
                if sum(map(len, text)) >= max(settings.needle_sizes):
                    break
                text.append(split.train[index]["input_ids"])
            self.haystacks = build_haystacks(torch.cat(text), tokenizer, self.needle)

    def run(self, when: str, trainer: Trainer, display: TrainingDisplay, step: int) -> None:
        """Leaves `eval` and `sample` among the metrics. Nothing that happens here is worth a trained model."""
        if display.interrupts.terminated:
            return
        display.interrupts.stop("skipping the rest of the evaluation at the next chunk; Ctrl-C again ends the program")
        try:
            if self.needle is not None:
                num_passes = len(self.windows) + self.needle.num_passes
                with display.evaluating("needles", num_passes), trainer.accelerator.autocast():
                    found = evaluate(trainer.engine, self.windows, self.haystacks, self.needle)
                display.log.write(event="eval", when=when, step=step, **found)
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
                display.log.write(event="sample", when=when, step=step, **sample)
        except StopRequested:
            return
        except Exception as error:
            if when == "before":
                raise
            reason = escape(f"{type(error).__name__}: {error}".splitlines()[0])
            display.print(f"[yellow]the evaluation after training failed and is left out ({reason})[/]")
