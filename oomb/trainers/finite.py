"""Stop training before a NaN or infinite loss or gradient reaches the weights, or such weights reach a checkpoint."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from oomb.distributed.collectives import Group

ADVICE = (
    "Lower the learning rate, clip gradients (max_grad_norm), use bfloat16 or float32 instead of float16, or remove "
    "these examples from the data"
)
MAX_NAMED = 4
"""Most examples or parameters in a message."""


class NonFiniteError(ArithmeticError):
    """Training stopped because a loss, a gradient norm or a weight is NaN or infinite.

    Args:
        message: what is not finite, where, and what to do about it.
        step: the optimizer step that did not finish, counted from 1.
        examples: the training examples of the batches at fault.
        weights_lost: whether the weights themselves are not finite. If not, they are those of the step before.

    Examples:
        >>> import oomb
        >>> error = oomb.NonFiniteError("the loss is nan in step 7 of 100", step=7, examples=["example 12"])
        >>> error.step, error.weights_lost
        (7, False)
    """

    def __init__(self, message: str, *, step: int, examples: list[str], weights_lost: bool = False) -> None:
        super().__init__(message)
        self.step = step
        self.examples = examples
        self.weights_lost = weights_lost


class FiniteSteps(transformers.Trainer):
    """A `transformers.Trainer` that keeps NaN and infinity out of the weights.

    Args:
        max_skipped_steps: how many steps with a NaN or infinite loss or gradient norm to skip before training stops
            with `NonFiniteError`. None turns the checks off.
    """

    def __init__(self, *positional: Any, max_skipped_steps: int | None = 0, **options: Any) -> None:
        is_number = isinstance(max_skipped_steps, int) and not isinstance(max_skipped_steps, bool)
        if max_skipped_steps is not None and not (is_number and max_skipped_steps >= 0):
            raise ValueError(
                f"max_skipped_steps is {max_skipped_steps!r}; use an integer, 0 or more, or None for no checks"
            )
        self.max_skipped_steps = max_skipped_steps
        self.num_skipped_steps = 0
        """Steps skipped so far, including those before a resume."""
        self._batches: list[Any] = []
        """The batches of the current step."""
        self._num_computed = 0
        """How many of them have a loss by now."""
        self._is_bad = False
        """Whether to skip the current step."""
        self._infinite_from_the_start: set[str] = set()
        self._ranks = Group()
        """The ranks that take the same steps."""
        super().__init__(*positional, **options)
        if self.args.world_size > 1:
            self._ranks = Group(dist.group.WORLD)

    @property
    def ranks_per_example(self) -> int:
        """How many ranks share each example."""
        return 1

    def get_batch_samples(self, *positional: Any, **options: Any) -> Any:
        result = super().get_batch_samples(*positional, **options)
        self._batches, self._num_computed, self._is_bad = result[0], 0, False
        return result

    def training_step(self, *positional: Any, **options: Any) -> Tensor:
        loss = super().training_step(*positional, **options)
        self._num_computed += 1
        if self.max_skipped_steps is not None and not self._is_bad:
            is_bad = not self._is_own_loss_finite(loss)
            if self._ranks.any(is_bad or not bool(torch.isfinite(loss).all())):
                self._stop_or_skip(f"the loss is {float(loss)}", is_bad=is_bad, only=self._num_computed - 1)
        return loss

    def _is_own_loss_finite(self, loss: Tensor) -> bool:
        """Return whether the loss of this rank's batch is finite."""
        return bool(torch.isfinite(loss).all())

    def _get_grad_norm(self, *positional: Any, **options: Any) -> Any:
        """Check the norm. transformers calls this once per step, after the last backward and before the optimizer."""
        norm = super()._get_grad_norm(*positional, **options)
        # With fp16=True a gradient scaler skips steps that overflow and lowers its scale.
        is_scaled = getattr(self.accelerator, "scaler", None) is not None
        is_finite = norm is None or bool(torch.isfinite(torch.as_tensor(norm)))
        if self.max_skipped_steps is not None and not (is_finite or is_scaled or self._is_bad):
            self._stop_or_skip(f"the gradient norm is {float(norm)}", is_bad=True)
        if self._is_bad:
            # Without gradients the optimizer changes nothing.
            self.model.zero_grad(set_to_none=True)
        return norm

    def _stop_or_skip(self, what: str, *, is_bad: bool, only: int | None = None) -> None:
        """Skip the current step, or raise if no more may be skipped. All ranks call this together.

        Args:
            what: What is not finite.
            is_bad: Whether this rank's batches are at fault.
            only: The batch at fault, if known.
        """
        assert self.max_skipped_steps is not None
        everyones = self._ranks.gather((what, self._describe_examples(only)) if is_bad else None)
        at_fault = [found for found in everyones if found is not None]
        if at_fault:
            what = at_fault[0][0]
        step, examples = self.state.global_step + 1, _limited(text for _, found in at_fault for text in found)
        where = f"{what} in step {step:,} of {self.state.max_steps:,}, on {'; '.join(examples)}"
        if self.num_skipped_steps < self.max_skipped_steps:
            self.num_skipped_steps += 1
            self._is_bad = True
            count = f"{self.num_skipped_steps:,} of at most {self.max_skipped_steps:,}"
            warnings.warn(f"{where}: skipping the step ({count})", stacklevel=2)
            return
        skipped = f", with {self.num_skipped_steps:,} steps skipped before" if self.num_skipped_steps else ""
        raise NonFiniteError(
            f"{where}: training stopped{skipped}. The optimizer did not step: the weights are those of step "
            f"{step - 1:,}. {ADVICE}. To skip such steps, set max_skipped_steps",
            step=step,
            examples=examples,
        )

    def note_weights(self) -> None:
        """Remember which weights are not finite before training, such as a bias of -inf on unused tokens."""
        if self.max_skipped_steps is not None:
            self._infinite_from_the_start = set(nonfinite_names(self._trained()))

    def _trained(self) -> Iterable[tuple[str, Tensor]]:
        """Return the trained parameters by name."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def check_weights_finite(self) -> None:
        """Raise if the last update made trained weights NaN or infinite."""
        if self.max_skipped_steps is None:
            return
        if lost := [name for name in nonfinite_names(self._trained()) if name not in self._infinite_from_the_start]:
            everyones = self._ranks.gather(self._describe_examples())
            step, examples = self.state.global_step + 1, _limited(text for found in everyones for text in found)
            raise NonFiniteError(
                f"the update in step {step:,} of {self.state.max_steps:,}, on {'; '.join(examples)}, made weights NaN "
                f"or infinite: {_shortened(lost)}. They will not be saved. {ADVICE}",
                step=step,
                examples=examples,
                weights_lost=True,
            )

    def _describe_examples(self, only: int | None = None) -> list[str]:
        """Return where to find the examples of the step's batches in the dataset, or how they begin."""
        indices = range(len(self._batches)) if only is None else [only]
        numbers: list[list[int]] = []
        # A dataset may have no indices, or an order that cannot be reproduced. The batches themselves are always known.
        with suppress(Exception):
            numbers = self._example_numbers()
        found: list[str] = []
        for index in indices:
            ids = self._batches[index].get("input_ids") if hasattr(self._batches[index], "get") else None
            texts = [self._beginning(row) for row in ids] if isinstance(ids, Tensor) else []
            known = numbers[index] if index < len(numbers) else []
            where = getattr(self.train_dataset, "where", None)
            if known and where is not None:
                found += [f"example {number:,} ({where(number)})" for number in known]
            elif known:
                found += [f"example {number:,}{text}" for number, text in zip(known, texts, strict=False)]
            else:
                found += [f"an example{text}" for text in texts] or [f"batch {index + 1} of the step"]
        return found

    def _example_numbers(self) -> list[list[int]]:
        """Return the dataset indices of each batch of the step, or nothing if they cannot be determined.

        Draws the sampler's order again, as a resume does, and compares the examples with the batches.
        """
        loader: Any = self.callback_handler.train_dataloader
        num_steps = math.ceil(len(loader) / self.args.gradient_accumulation_steps)
        epoch, step = divmod(self.state.global_step, num_steps)
        sampler: Any = getattr(loader.batch_sampler, "sampler", None)
        before = getattr(sampler, "epoch", None)
        if before is not None:
            sampler.set_epoch(epoch)
        first = step * self.args.gradient_accumulation_steps
        try:
            numbers = list(islice(loader.batch_sampler, first, first + len(self._batches)))
        finally:
            if before is not None:
                sampler.set_epoch(before)
        for indices, batch in zip(numbers, self._batches, strict=True):
            again = loader.collate_fn([self.train_dataset[index] for index in indices])
            if not torch.equal(again["input_ids"].cpu(), batch["input_ids"].cpu()):
                return []
        return numbers

    def _beginning(self, ids: Tensor) -> str:
        """Return the first words of an example, or its first token ids if there is no tokenizer."""
        decode = getattr(self.processing_class, "decode", None)
        if decode is None:
            return f", which begins with the token ids {ids[:8].tolist()}"
        return f', which begins with "{" ".join(str(decode(ids[:32].tolist())).split())}"'


def nonfinite_names(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors with NaN or infinite values. Reads each tensor once, syncs once per device."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append((name, tensor.detach()))
    lost: list[str] = []
    for group in groups.values():
        # The largest magnitude needs no copy of the tensor and, unlike a sum, cannot overflow.
        peaks = torch._foreach_norm([tensor for _, tensor in group], float("inf"))
        is_finite = torch.stack(peaks).isfinite().tolist()
        lost += [name for (name, _), finite in zip(group, is_finite, strict=True) if not finite]
    return lost


def _limited(found: Iterable[str]) -> list[str]:
    """Return the first few examples, and how many more there are. Ranks that share examples name them again."""
    examples = list(dict.fromkeys(found))
    rest = len(examples) - MAX_NAMED
    return [*examples[:MAX_NAMED], f"{rest:,} more"] if rest > 0 else examples


def _shortened(names: list[str]) -> str:
    """Return the first few names."""
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")
