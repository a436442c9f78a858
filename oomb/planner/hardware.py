"""Describe the machine to plan for: the GPU table, and a machine by name, by size or as it is.

Memory is what PyTorch sees, which is less than the product name says. TFLOP/s are the vendors' dense bfloat16 figures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from oomb.memory.host import FRAGMENTATION, free_host_bytes
from oomb.utils.units import GIB, parse_memory

PCIE_5_BYTES_PER_SECOND = 45e9
"""Bytes per second between host memory and GPU, each way, with both directions busy. An H200 on PCIe 5 reaches 47e9
alone and less during computation."""
PCIE_4_BYTES_PER_SECOND = PCIE_5_BYTES_PER_SECOND / 2


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """Memory and speed of a GPU model."""

    memory_gib: float
    """Total memory in GiB, as PyTorch reports it."""
    tflops: float
    """Dense bfloat16 TFLOP/s from the datasheet."""
    link_bytes_per_second: float = PCIE_5_BYTES_PER_SECOND
    """Copy rate from and to host memory, each way."""
    has_float8: bool = True
    """Whether Triton supports float8 on it: compute capability 8.9 or higher."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


GPUS: dict[str, GpuSpec] = {
    "B200": GpuSpec(memory_gib=178.0, tflops=2250),
    "H200": GpuSpec(memory_gib=139.8, tflops=989),
    "H100": GpuSpec(memory_gib=79.1, tflops=989),
    "A100-80GB": GpuSpec(memory_gib=79.2, tflops=312, link_bytes_per_second=PCIE_4_BYTES_PER_SECOND, has_float8=False),
    "A100-40GB": GpuSpec(memory_gib=39.4, tflops=312, link_bytes_per_second=PCIE_4_BYTES_PER_SECOND, has_float8=False),
    "L40S": GpuSpec(memory_gib=44.4, tflops=362, link_bytes_per_second=PCIE_4_BYTES_PER_SECOND),
    "RTX 5090": GpuSpec(memory_gib=31.3, tflops=209),
    "RTX 4090": GpuSpec(memory_gib=23.5, tflops=165, link_bytes_per_second=PCIE_4_BYTES_PER_SECOND),
    "RTX 3090": GpuSpec(memory_gib=23.6, tflops=71, link_bytes_per_second=PCIE_4_BYTES_PER_SECOND, has_float8=False),
}
MEASURED_GPU = "H200"
"""The GPU on which the rates in `step_time` were measured."""
VENDOR_WORDS = {"nvidia", "geforce", "tesla", "gpu", "sxm", "sxm4", "sxm5", "pcie", "hbm2", "hbm2e", "hbm3", "hbm3e"}
"""Words that drivers add to a product name. Any other word (Laptop, NVL) means a product with other memory."""

CONTEXT_BYTES = GIB // 2
"""Memory of the CUDA context and its kernels, which PyTorch does not see."""
WORKSPACE_BYTES = 80 << 20
"""Workspaces of cuBLAS and the like. Measured on top of the weights: 0.06 GiB with Llama-3.1-8B and Qwen2.5-0.5B, 0.04
to 0.10 GiB with Qwen2.5-7B."""


def find_gpu(name: str | None) -> str | None:
    """Return the key in `GPUS` for a GPU name such as "NVIDIA H100 80GB HBM3", or None if the GPU is unknown.

    A name matches if it contains all words of the key; the memory size in a key only breaks ties. "GH200" is one word
    and does not match "H200".

    >>> find_gpu("NVIDIA A100-SXM4-40GB")
    'A100-40GB'
    >>> find_gpu("NVIDIA GH200 480GB") is None
    True
    """
    words = _words(name or "")
    matches = [key for key in GPUS if {word for word in _words(key) if not _is_size(word)} <= words]
    return max(matches, key=lambda key: len(_words(key) & words), default=None)


def gpu_spec(name: str | None) -> GpuSpec | None:
    """Return memory and speed of a GPU by name, or None if the GPU is unknown."""
    key = find_gpu(name)
    return None if key is None else GPUS[key]


def peak_flops(name: str | None) -> float | None:
    """Return the peak bfloat16 FLOP/s of a GPU by name, or None if the GPU is unknown."""
    spec = gpu_spec(name)
    return None if spec is None else spec.tflops * 1e12


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU, its host memory and the link between them.

    Args:
        gpu_bytes: Total GPU memory.
        host_bytes: Free host memory.
        gpu_name: Name of the GPU, if known. Step times are predicted only for GPUs in `GPUS`.
    """

    gpu_bytes: int
    host_bytes: int
    gpu_name: str | None = None

    @property
    def spec(self) -> GpuSpec | None:
        return gpu_spec(self.gpu_name)

    @property
    def scale(self) -> float | None:
        """Speed relative to the GPU on which rates were measured; None if unknown."""
        return None if self.spec is None else self.spec.tflops / GPUS[MEASURED_GPU].tflops

    @property
    def is_measured(self) -> bool:
        return find_gpu(self.gpu_name) == MEASURED_GPU

    @property
    def link_bytes_per_second(self) -> float:
        return PCIE_5_BYTES_PER_SECOND if self.spec is None else self.spec.link_bytes_per_second

    @property
    def has_float8(self) -> bool:
        """Whether the GPU supports float8. An unknown GPU is assumed to be recent."""
        return self.spec is None or self.spec.has_float8

    @property
    def usable_gpu_bytes(self) -> int:
        """GPU memory that PyTorch can hand out: without the CUDA context and gaps between allocations."""
        return max(0, int((self.gpu_bytes - CONTEXT_BYTES) * (1 - FRAGMENTATION)))


def machine_named(gpu: str, host_bytes: int) -> Machine:
    """Return a machine with a known GPU.

    Args:
        gpu: Product or driver name: "H200", "a100-80gb", "rtx4090", "NVIDIA H100 80GB HBM3".
        host_bytes: Free host memory.

    Raises:
        ValueError: The GPU is unknown, or the name has words that mean another amount of memory.
    """
    for key, spec in GPUS.items():
        extra = _words(gpu) - _words(key) - VENDOR_WORDS
        # A name rounds up: the "80GB" of an H100 is 79.1 GiB.
        is_named = _words(key) <= _words(gpu) and all(
            _is_size(word) and 0.9 * int(word[:-2]) < spec.memory_gib < int(word[:-2]) for word in extra
        )
        if is_named or _joined(key) in (_joined(gpu), _joined(gpu).removeprefix("nvidia")):
            return Machine(gpu_bytes=spec.memory_bytes, host_bytes=host_bytes, gpu_name=key)
    raise ValueError(f"GPU {gpu!r} is unknown; use one of {', '.join(GPUS)}, or its memory, as in 24GiB")


def find_machine(gpu: str | None, host: str | None) -> Machine:
    """Return the machine that `--gpu` and `--host` describe.

    Args:
        gpu: A GPU by name ("H100") or by memory ("24GiB"); None for the GPU of this machine.
        host: Free host memory ("64GiB"); None or "auto" for what is free on this machine.
    """
    host_bytes = free_host_bytes() if host is None or host == "auto" else parse_memory(host, "--host", smallest=GIB)
    if gpu is None:
        if not torch.cuda.is_available():
            raise ValueError(
                f"this machine has no GPU; name the one to plan for with --gpu {' | '.join(GPUS)}, or its memory with "
                "--gpu 24GiB"
            )
        properties = torch.cuda.get_device_properties(0)
        return Machine(gpu_bytes=properties.total_memory, host_bytes=host_bytes, gpu_name=properties.name)
    if gpu.strip()[:1].isdigit():
        # A bare number may also be half of a name: "4090".
        name = next((key for key in GPUS if key.split()[-1] == gpu.strip()), None)
        num_bytes = parse_memory(gpu, "--gpu", smallest=GIB, meant=name, zero_ok=False)
        return Machine(gpu_bytes=num_bytes, host_bytes=host_bytes)
    return machine_named(gpu, host_bytes)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _is_size(word: str) -> bool:
    return re.fullmatch(r"\d+gb", word) is not None


def _joined(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
