"""What must be the same in both passes over a sequence: weights, training modes, PEFT adapters."""

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
    """A model's state at one time. Comparing two of them tells whether it changed in between."""

    layouts: dict[nn.Parameter, list[tuple[Any, ...]]]
    """Where each parameter lies and in which order: sums of one that lies otherwise would be the same. By parameter
    and not in order: PEFT takes parameters out of their modules and puts them back at the end."""
    versions: dict[nn.Parameter, int]
    """Of trained parameters. PEFT raises those of frozen ones without changing them."""
    sums: dict[torch.device, Tensor] | None
    """`checksums` of the parameters; None where no gradients will be computed."""
    modes: list[bool]
    adapters: list[tuple[Any, ...]]
    compared_in: int = -1
    """The autograd call that compared the sums last. It walks back all sequences of a loss: one comparison does."""

    @classmethod
    def of(cls, model: nn.Module, *, with_sums: bool) -> ModelState:
        """Return the state of the model now. Sums cost one read of the weights."""
        parameters = list(model.parameters())
        return cls(
            layouts={p: [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in _parts(p)] for p in parameters},
            versions={p: p._version for p in parameters if p.requires_grad and not p.is_inference()},
            sums=checksums(parameters) if with_sums else None,
            modes=[module.training for module in model.modules()],
            adapters=[
                (module._disable_adapters, str(module.active_adapters), str(getattr(module, "merged_adapters", None)))
                for module in model.modules()
                if hasattr(module, "_disable_adapters")
            ],
        )

    def check_unchanged(self, now: ModelState, *, with_sums: bool = False) -> None:
        """Raise if weights or adapters are others by now; `with_sums` reads the weights. Modes may differ: both passes
        run in those of the first."""
        changed = None
        if now.adapters != self.adapters:
            changed = "adapters"
        elif (
            now.layouts != self.layouts
            or any(p._version != version for p, version in self.versions.items())
            or (with_sums and self._have_sums_changed())
        ):
            changed = "parameters"
        if changed is not None:
            raise RuntimeError(
                f"the model's {changed} changed between the loss and its backward, so its gradients would be of "
                "neither: call backward before the optimizer steps or adapters are switched"
            )

    def _have_sums_changed(self) -> bool:
        call = torch._C._current_graph_task_id()
        is_compared = call != -1 and call == self.compared_in
        # Users' hooks on finished gradients run between the sequences of a call, and may step an optimizer.
        if self.sums is None or (is_compared and not any(p._post_accumulate_grad_hooks for p in self.layouts)):
            return False
        now = checksums(list(self.layouts))
        self.compared_in = call
        return not all(torch.equal(sums, now[device]) for device, sums in self.sums.items())


@torch.no_grad()
def checksums(parameters: list[nn.Parameter]) -> dict[torch.device, Tensor]:
    """Return, by device, one integer for each tensor that parameters consist of: the sum of its bits as 8-byte words.

    In-place changes through `.data` leave version and address alone; only the numbers tell. Every weight is read once:
    15 GB of a 7B model in bfloat16, about 4 ms at an H200's 4 TB/s. A model has hundreds of parameters, so each costs
    one kernel. Nothing waits for the device here.
    """
    sums: dict[torch.device, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        for part in _parts(parameter):
            sums[part.device].append(_sum(part))
    return {device: torch.stack(found) for device, found in sums.items()}


def _sum(x: Tensor) -> Tensor:
    """Return the sum, modulo 2^64, of a tensor's bytes in words of 8. Words are summed as they are: a sum of smaller
    integers would first make a copy of 8 bytes for each."""
    if not x.is_contiguous():
        # In the order of its storage a transposed tensor is contiguous, and read without a copy.
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
    """Yield the plain tensors that hold a tensor's numbers: itself, or those inside of a quantized one."""
    if is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _parts(getattr(x, name))
    else:
        yield x
