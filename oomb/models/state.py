"""Detect changes of a model between the two passes: weights, training modes, PEFT adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass
class ModelState:
    """State of a model at one time. Comparing two states shows whether the model changed in between."""

    layouts: dict[nn.Parameter, list[tuple[Any, ...]]]
    """Address, dtype, shape and strides of each parameter, since a transposed weight has the same checksum. A dict,
    because PEFT may reorder a module's parameters."""
    versions: dict[nn.Parameter, int]
    """Version counters of trained parameters. PEFT increments those of frozen ones without changing them."""
    checksums: dict[torch.device, Tensor] | None
    """`checksums` of the parameters; None if no gradients will be computed."""
    modes: list[bool]
    """Whether each module is in training mode."""
    adapters: list[tuple[Any, ...]]
    """Enabled, active and merged adapters of each PEFT layer."""
    compared_in: int = -1
    """Autograd call that last compared the checksums. It runs the gradient passes of all sequences of a loss, and one
    comparison is enough for them."""

    @classmethod
    def capture(cls, model: nn.Module, *, with_checksums: bool) -> ModelState:
        """Return the current state of a model. `with_checksums` reads all weights once."""
        parameters = list(model.parameters())
        return cls(
            layouts={p: [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in _parts(p)] for p in parameters},
            versions={p: p._version for p in parameters if p.requires_grad and not p.is_inference()},
            checksums=checksums(parameters) if with_checksums else None,
            modes=[module.training for module in model.modules()],
            adapters=[
                (module._disable_adapters, str(module.active_adapters), str(getattr(module, "merged_adapters", None)))
                for module in model.modules()
                if hasattr(module, "_disable_adapters")
            ],
        )

    def check_unchanged(self, now: ModelState, *, with_checksums: bool = False) -> None:
        """Raise RuntimeError if weights or adapters have changed.

        Training modes may differ, because both passes run in the modes of the first.

        Args:
            now: The current state.
            with_checksums: Compare checksums, too, which reads all weights.
        """
        changed = None
        if now.adapters != self.adapters:
            changed = "adapters"
        elif (
            now.layouts != self.layouts
            or any(p._version != version for p, version in self.versions.items())
            or (with_checksums and self._have_checksums_changed())
        ):
            changed = "parameters"
        if changed is not None:
            raise RuntimeError(
                f"the model's {changed} changed between the loss and its backward, so the gradients would be wrong: "
                "call backward before the optimizer steps or adapters are switched"
            )

    def _have_checksums_changed(self) -> bool:
        call = torch._C._current_graph_task_id()
        is_compared = call != -1 and call == self.compared_in
        # Users' hooks on finished gradients run between the sequences of a call and may step an optimizer.
        if self.checksums is None or (is_compared and not any(p._post_accumulate_grad_hooks for p in self.layouts)):
            return False
        now = checksums(list(self.layouts))
        self.compared_in = call
        return not all(torch.equal(before, now[device]) for device, before in self.checksums.items())


@torch.no_grad()
def checksums(parameters: list[nn.Parameter]) -> dict[torch.device, Tensor]:
    """Return one integer per tensor, grouped by device: the sum of its bytes as 8-byte words.

    In-place changes through `.data` touch neither version nor address; only the values show them. Reading 15 GB, a 7B
    model in bfloat16, takes about 4 ms at an H200's 4 TB/s, with one kernel per parameter and no synchronization.
    """
    sums: dict[torch.device, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        for part in _parts(parameter):
            sums[part.device].append(_sum(part))
    return {device: torch.stack(found) for device, found in sums.items()}


def _sum(x: Tensor) -> Tensor:
    """Return the sum of a tensor's bytes as 8-byte words, modulo 2^64.

    Summing smaller integers would first widen each of them to 8 bytes in a copy.
    """
    if not x.is_contiguous():
        # A transposed tensor is contiguous in the order of its storage, so it is read without a copy.
        x = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).contiguous()
    flat = x.view(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    if flat.nbytes % 8 == 0:
        return flat.view(torch.int64).sum()
    flat = flat.view(torch.uint8)
    end = len(flat) // 8 * 8
    return flat[:end].view(torch.int64).sum() + flat[end:].sum()


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a tensor's values: itself, or the parts of a quantized one."""
    if is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _parts(getattr(x, name))
    else:
        yield x
