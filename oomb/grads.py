"""Parameter gradients summed over many chunks in float32, for parameters of lower precision.

A thousand bfloat16 additions lose what each of them adds; here each chunk's gradient is added in float32 as soon as
autograd has it, and rounded once at the end of the pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor, nn

HAS_TRITON = find_spec("triton") is not None


@contextmanager
def collecting(parameters: Iterable[nn.Parameter], in_float32: bool) -> Iterator[None]:
    """A gradient pass: many backward calls that make one gradient.

    With `in_float32`, gradients of lower precision are summed in float32 and added to `.grad` at the end; if the body
    fails, those `.grad` are as before. Users' hooks that want a parameter's finished gradient (an optimizer that steps
    in the backward, say) run once, at the end.
    """
    parameters = [p for p in parameters if p.requires_grad]
    hooks = {p: dict(p._post_accumulate_grad_hooks) for p in parameters if p._post_accumulate_grad_hooks}
    for parameter in hooks:
        parameter._post_accumulate_grad_hooks.clear()
    try:
        with _float32_sums(parameters) if in_float32 else nullcontext():
            yield
    finally:
        for parameter, own in hooks.items():
            parameter._post_accumulate_grad_hooks.update(own)
    for parameter, own in hooks.items():
        if parameter.grad is not None:
            for hook in own.values():
                hook(parameter)


def refuse_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """`Parameter.register_hook` would see the gradient of one chunk at a time and take it for the whole."""
    for name, parameter in parameters:
        if parameter._backward_hooks:
            raise ValueError(
                f"{name} has a hook on its gradient, which would run for every chunk: use "
                "register_post_accumulate_grad_hook, which runs once"
            )


@contextmanager
def _float32_sums(parameters: list[nn.Parameter]) -> Iterator[None]:
    parameters = [p for p in parameters if p.dtype.itemsize < 4]
    before = [p.grad for p in parameters]
    sums: dict[nn.Parameter, Tensor] = {}

    def take(parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None
        if parameter in sums:
            add_to_float32(sums[parameter], grad)
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


def add_to_float32(total: Tensor, grad: Tensor) -> None:
    """total += grad. PyTorch's own kernel for two different dtypes does not load vectors, ours does."""
    if HAS_TRITON and grad.is_cuda and total.is_contiguous() and grad.is_contiguous():
        launch_add(total, grad)
    else:
        total.add_(grad)


def launch_add(total: Tensor, grad: Tensor) -> None:
    from oomb.triton_kernels import add_to_float32_kernel

    tile = 4096
    with torch.cuda.device_of(grad):
        add_to_float32_kernel[(-(-grad.numel() // tile),)](total, grad, grad.numel(), TILE=tile)


def float32_sums_fit(parameters: Iterable[nn.Parameter], device: torch.device) -> bool:
    """Whether float32 sums take at most a quarter of the GPU. The rule does not look at the sequence, so that a longer
    one takes more pages and nothing else."""
    if device.type != "cuda":
        return True
    return pending_bytes(parameters, in_float32=True) <= torch.cuda.get_device_properties(device).total_memory / 4


def pending_bytes(parameters: Iterable[nn.Parameter], in_float32: bool) -> int:
    """Bytes that a gradient pass has to take for parameter gradients: float32 sums, or those that do not exist yet."""
    total = 0
    for p in parameters:
        if p.requires_grad and in_float32 and p.dtype.itemsize < 4:
            total += p.numel() * 4
        elif p.requires_grad and p.grad is None:
            total += p.nbytes
    return total
