"""What must be the same in both passes over a sequence: weights, training modes, PEFT adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class ModelState:
    """A model's state at one time. Comparing two of them tells whether it changed in between."""

    addresses: dict[nn.Parameter, tuple[int, ...]]
    """By parameter and not in order: PEFT takes parameters out of their modules and puts them back at the end."""
    versions: dict[nn.Parameter, int]
    """Of trained parameters. PEFT raises those of frozen ones without changing them."""
    sums: Tensor | None
    """`checksums` of the parameters; None where no gradients will be computed."""
    modes: list[bool]
    adapters: list[tuple[Any, ...]]

    @classmethod
    def of(cls, model: nn.Module, *, with_sums: bool) -> ModelState:
        """Return the state of the model now. Sums cost one read of the weights."""
        parameters = list(model.parameters())
        return cls(
            addresses={p: tuple(part.data_ptr() for part in _parts(p)) for p in parameters},
            versions={p: p._version for p in parameters if p.requires_grad and not p.is_inference()},
            sums=checksums(parameters) if with_sums else None,
            modes=[module.training for module in model.modules()],
            adapters=[
                (module._disable_adapters, str(module.active_adapters), str(getattr(module, "merged_adapters", None)))
                for module in model.modules()
                if hasattr(module, "_disable_adapters")
            ],
        )

    def refuse_changes(self, now: ModelState) -> None:
        """Raise if weights or adapters are others by now. Modes may be: both passes run in those of the first."""
        changed = None
        if now.adapters != self.adapters:
            changed = "adapters"
        elif now.addresses != self.addresses or any(p._version != version for p, version in self.versions.items()):
            changed = "parameters"
        elif self.sums is not None and now.sums is not None:
            sums = dict(zip(now.addresses, now.sums.tolist(), strict=True))
            if self.sums.tolist() != [sums[p] for p in self.addresses]:
                changed = "parameters"
        if changed is not None:
            raise RuntimeError(
                f"the model's {changed} changed between the loss and its backward, so its gradients would be of "
                "neither: call backward before the optimizer steps or adapters are switched"
            )


@torch.no_grad()
def checksums(parameters: list[nn.Parameter]) -> Tensor:
    """Return one integer per parameter, the sum of its bits as 8-byte words, all on the first one's device.

    In-place changes through `.data` leave version and address alone; only the numbers tell. Every weight is read once:
    15 GB of a 7B model in bfloat16, about 4 ms at an H200's 4 TB/s. Nothing waits for the device here.
    """
    sums = [torch.stack([_sum(part) for part in _parts(p)]).sum() for p in parameters]
    return torch.stack([x.to(sums[0].device, non_blocking=True) for x in sums])


def _sum(x: Tensor) -> Tensor:
    """The sum, modulo 2^64, of a tensor's bytes in words of 8. Words are summed as they are: a sum of smaller integers
    would first make a copy of 8 bytes for each."""
    flat = x.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    end = len(flat) // 8 * 8
    return flat[:end].view(torch.int64).sum() + flat[end:].sum()


def _parts(x: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's numbers: itself, or those inside of a quantized one."""
    if is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _parts(getattr(x, name))
    else:
        yield x.detach()
