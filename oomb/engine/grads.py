"""Sum parameter gradients over many chunks without losing small ones.

A thousand bfloat16 additions with round-to-nearest lose most of what they add. Each chunk's gradient is therefore added
to a float32 sum that is rounded once at the end of the pass or, if float32 takes too much memory, to a 16-bit sum with
stochastic rounding, which is unbiased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from oomb.ops.rounding import add_, mix
from oomb.planner import placement


@contextmanager
def accumulate(parameters: Iterable[nn.Parameter], in_float32: bool, seed: int = 0) -> Iterator[None]:
    """Sum the gradients of many backward calls into one, for the duration of a `with`.

    Hooks that users registered with `register_post_accumulate_grad_hook`, such as an optimizer that steps in the
    backward, run once, at the end.

    Args:
        parameters: Parameters of the model.
        in_float32: Sum gradients of less than 4 bytes in float32 and add the sums to `.grad` at the end. If the body
            raises, these `.grad` stay as they were. Otherwise add to `.grad` with stochastic rounding.
        seed: Seed for stochastic rounding.
    """
    parameters = [p for p in parameters if p.requires_grad]
    hooks = {p: dict(p._post_accumulate_grad_hooks) for p in parameters if p._post_accumulate_grad_hooks}
    for parameter in hooks:
        parameter._post_accumulate_grad_hooks.clear()
    narrow = [p for p in parameters if p.dtype.itemsize < 4]
    try:
        with _float32_sums(narrow) if in_float32 else _half_precision_sums(narrow, seed):
            yield
    finally:
        for parameter, own in hooks.items():
            parameter._post_accumulate_grad_hooks.update(own)
    for parameter, own in hooks.items():
        if parameter.grad is not None:
            for hook in own.values():
                hook(parameter)


def reject_tensor_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError for a `Parameter.register_hook`, which would take one chunk's gradient for the whole."""
    for name, parameter in parameters:
        if parameter._backward_hooks:
            raise ValueError(
                f"{name} has a hook from register_hook, which would run for every chunk: use "
                "register_post_accumulate_grad_hook, which runs once per backward"
            )


def reject_grad_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError for a hook on finished gradients, which would run before ranks have averaged them."""
    for name, parameter in parameters:
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has a hook from register_post_accumulate_grad_hook, which would see the gradient of one rank "
                "only: step the optimizer after the backward"
            )


@contextmanager
def _intercept(parameters: list[nn.Parameter], take: Callable[[nn.Parameter], None]) -> Iterator[list[Tensor | None]]:
    """Call `take` for every new gradient; it must reset `.grad`. Yield the gradients from before."""
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
    """Return whether `param_grad_dtype="auto"` means float32 for these parameters on this device."""
    sum_bytes = sum(p.numel() * max(4, p.dtype.itemsize) for p in parameters if p.requires_grad)
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return placement.float32_sums_fit(sum_bytes, gpu_bytes)


def reusable_bytes(parameters: Iterable[nn.Parameter], in_float32: bool) -> int:
    """Return the bytes of existing gradients that a gradient pass adds to, so that it need not allocate them."""
    kept = (
        p for p in parameters if p.requires_grad and p.grad is not None and (not in_float32 or p.dtype.itemsize >= 4)
    )
    return sum(p.nbytes for p in kept)
