"""Parameter gradients summed over many chunks in float32, for parameters of lower precision.

A thousand bfloat16 additions lose what each of them adds; here each chunk's gradient is added in float32 as soon as
autograd has it, and rounded once at the end of the pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def accumulate_in_float32(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While active, gradients of these parameters go to float32 sums; at the end they are added to `.grad`.

    If the body fails, `.grad` is left as it was before.
    """
    parameters = [p for p in parameters if p.requires_grad and p.dtype.itemsize < 4]
    before = [p.grad for p in parameters]
    sums: dict[nn.Parameter, Tensor] = {}

    def take(parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None
        if parameter in sums:
            sums[parameter].add_(grad)
        else:
            sums[parameter] = grad.float()
        parameter.grad = None

    handles = []
    for parameter in parameters:
        parameter.grad = None
        handles.append(parameter.register_post_accumulate_grad_hook(take))
    try:
        yield
    except BaseException:
        sums.clear()
        raise
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in zip(parameters, before, strict=True):
            total = sums.pop(parameter, None)
            if total is not None and grad is not None:
                total.add_(grad)
            parameter.grad = grad if total is None else total.to(parameter.dtype)


def pending_bytes(parameters: Iterable[nn.Parameter], in_float32: bool) -> int:
    """Bytes that gradients still have to take: those that do not exist yet, and float32 sums beside them."""
    total = 0
    for p in parameters:
        if p.requires_grad:
            total += p.numel() * (p.dtype.itemsize * (p.grad is None) + 4 * (in_float32 and p.dtype.itemsize < 4))
    return total

