"""Gradients of parameters of 16 bits, summed over many chunks.

A thousand bfloat16 additions lose what each of them adds. So each chunk's gradient is added, as soon as autograd has
it, to a sum in float32 that is rounded once at the end of the pass; or, where these take too much memory, to one of 16
bits that is rounded at random, which loses nothing on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from oomb.ops.rounding import add_, mix


@contextmanager
def accumulate(parameters: Iterable[nn.Parameter], in_float32: bool, seed: int = 0) -> Iterator[None]:
    """A gradient pass: many backward calls that make one gradient.

    With `in_float32`, gradients of lower precision are summed in float32 and added to `.grad` at the end; if the body
    fails, those `.grad` are as before. Without, they are added to `.grad` and rounded at random by `seed`. Users' hooks
    that want a parameter's finished gradient (an optimizer that steps in the backward, say) run once, at the end.
    """
    parameters = [p for p in parameters if p.requires_grad]
    hooks = {p: dict(p._post_accumulate_grad_hooks) for p in parameters if p._post_accumulate_grad_hooks}
    for parameter in hooks:
        parameter._post_accumulate_grad_hooks.clear()
    short = [p for p in parameters if p.dtype.itemsize < 4]
    try:
        with _float32_sums(short) if in_float32 else _half_precision_sums(short, seed):
            yield
    finally:
        for parameter, own in hooks.items():
            parameter._post_accumulate_grad_hooks.update(own)
    for parameter, own in hooks.items():
        if parameter.grad is not None:
            for hook in own.values():
                hook(parameter)


def reject_tensor_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """`Parameter.register_hook` would see the gradient of one chunk at a time and take it for the whole."""
    for name, parameter in parameters:
        if parameter._backward_hooks:
            raise ValueError(
                f"{name} has a hook on its gradient, which would run for every chunk: use "
                "register_post_accumulate_grad_hook, which runs once"
            )


@contextmanager
def _intercept(parameters: list[nn.Parameter], take: Callable[[nn.Parameter], None]) -> Iterator[list[Tensor | None]]:
    """Every gradient that autograd makes goes to `take`, which leaves none behind. Yields those of before."""
    before = [p.grad for p in parameters]
    handles = []
    for parameter in parameters:
        parameter.grad = None
        handles.append(parameter.register_post_accumulate_grad_hook(take))
    try:
        yield before
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _float32_sums(parameters: list[nn.Parameter]) -> Iterator[None]:
    sums: dict[nn.Parameter, Tensor] = {}

    def take(parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None
        if parameter in sums:
            add_(sums[parameter], grad, 0)
        else:
            sums[parameter] = grad.float()
        parameter.grad = None

    with _intercept(parameters, take) as before:
        try:
            yield
        except BaseException:
            sums.clear()
            raise
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                total = sums.pop(parameter, None)
                if total is not None and grad is not None:
                    total.add_(grad)
                parameter.grad = grad if total is None else total.to(parameter.dtype)


@contextmanager
def _half_precision_sums(parameters: list[nn.Parameter], seed: int) -> Iterator[None]:
    sums: dict[nn.Parameter, Tensor] = {}
    taken = Counter[nn.Parameter]()
    numbers = {parameter: number for number, parameter in enumerate(parameters)}

    def take(parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None
        if parameter in sums:
            add_(sums[parameter], grad, mix(seed, numbers[parameter], taken[parameter]))
        else:
            sums[parameter] = grad
        taken[parameter] += 1
        parameter.grad = None

    with _intercept(parameters, take) as before:
        sums.update({p: grad for p, grad in zip(parameters, before, strict=True) if grad is not None})
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.grad = sums.pop(parameter, None)


def float32_sums_fit(parameters: Iterable[nn.Parameter], device: torch.device) -> bool:
    """Whether float32 sums take at most a quarter of the GPU. The rule does not look at the sequence, so that a longer
    one takes more pages and nothing else."""
    if device.type != "cuda":
        return True
    return missing_bytes(parameters, in_float32=True) <= torch.cuda.get_device_properties(device).total_memory / 4


def missing_bytes(parameters: Iterable[nn.Parameter], in_float32: bool) -> int:
    """Bytes that a gradient pass has to take for parameter gradients: float32 sums, or those that do not exist yet."""
    total = 0
    for p in parameters:
        if p.requires_grad and in_float32 and p.dtype.itemsize < 4:
            total += p.numel() * 4
        elif p.requires_grad and p.grad is None:
            total += p.nbytes
    return total
