"""GPUs: memory, bfloat16 rate and link of well-known cards, and the machine to plan for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from oomb.memory.host import GAPS, free_host_bytes
from oomb.utils.units import GIB, parse_memory

PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "RTX 5090": 209,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""Dense bfloat16 rates by the vendors' datasheets. The words of a name are looked up in the device's name."""


CARDS = {
    "B200": 178.0,
    "H200": 139.8,
    "H100": 79.1,
    "A100-80GB": 79.2,
    "A100-40GB": 39.4,
    "L40S": 44.4,
    "RTX 5090": 31.3,
    "RTX 4090": 23.5,
    "RTX 3090": 23.6,
}
"""GiB of well-known cards as PyTorch sees them, which is less than the name says."""


OTHER_WORDS = {"nvidia", "geforce", "tesla", "gpu", "sxm", "sxm4", "sxm5", "pcie", "hbm2", "hbm2e", "hbm3", "hbm3e"}
"""Those that a driver puts around a card's name. Any other (Laptop, NVL) makes it another card."""


MEASURED_ON = "H200"


LINK_BYTES_PER_SECOND = 45e9
"""Host memory to GPU and back at the same time, each way, over PCIe 5 (H200: 47 alone, less beside computation)."""


PCIE_4 = ("A100", "L40S", "RTX 4090", "RTX 3090")
"""Cards whose link has half that rate."""


CONTEXT_BYTES = GIB // 2
"""The CUDA context with its kernels, which PyTorch does not see."""


WORKSPACE_BYTES = 80 << 20
"""cuBLAS and the like: 0.06 GiB beside the weights of Llama-3.1-8B and Qwen2.5-0.5B, 0.04 to 0.10 of Qwen2.5-7B."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to train on."""

    gpu_bytes: int
    host_bytes: int
    gpu_name: str | None = None
    """None, or a name that `PEAK_TFLOPS` does not have: no time is predicted."""

    @property
    def scale(self) -> float | None:
        """Rates relative to the measured ones."""
        rate = _look_up(self.gpu_name, PEAK_TFLOPS)
        return None if rate is None else PEAK_TFLOPS[rate] / PEAK_TFLOPS[MEASURED_ON]

    @property
    def is_measured(self) -> bool:
        return _look_up(self.gpu_name, PEAK_TFLOPS) == MEASURED_ON

    @property
    def link_bytes_per_second(self) -> float:
        return LINK_BYTES_PER_SECOND / (2 if _look_up(self.gpu_name, PCIE_4) else 1)


def usable_bytes(machine: Machine) -> int:
    return max(0, int((machine.gpu_bytes - CONTEXT_BYTES) * (1 - GAPS)))


def machine_named(gpu: str, host_bytes: int) -> Machine:
    """A well-known card by its name, as in "H200", "a100-80gb", "RTX 4090" or "NVIDIA H100 80GB HBM3"."""
    for name, size in CARDS.items():
        others = _words(gpu) - _words(name)
        # What a name says of the memory is more than PyTorch sees.
        sizes = {
            word for word in others if re.fullmatch(r"\d+gb", word) and 0.9 * int(word[:-2]) < size < int(word[:-2])
        }
        is_name = _words(name) <= _words(gpu) and others <= sizes | OTHER_WORDS
        if is_name or _plain(name) in (_plain(gpu), _plain(gpu).removeprefix("nvidia")):
            return Machine(gpu_bytes=int(size * GIB), host_bytes=host_bytes, gpu_name=name)
    raise ValueError(f"no GPU called {gpu!r} is known; name one of {', '.join(CARDS)}, or its memory, as in 24GiB")


def _look_up(gpu_name: str | None, names: Iterable[str]) -> str | None:
    return next((name for name in names if gpu_name is not None and _words(name) <= _words(gpu_name)), None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def find_machine(gpu: str | None, host: str | None) -> Machine:
    """The machine that is meant: a card by its name or its memory, this machine's where nothing is said."""
    host_bytes = free_host_bytes() if host in (None, "auto") else parse_memory(host, "--host", smallest=GIB)
    if gpu is None:
        if not torch.cuda.is_available():
            raise ValueError(
                f"this machine has no GPU, so say for which one to plan: --gpu {' | '.join(CARDS)}, or its memory, as "
                "in --gpu 24GiB"
            )
        properties = torch.cuda.get_device_properties(0)
        return Machine(gpu_bytes=properties.total_memory, host_bytes=host_bytes, gpu_name=properties.name)
    if gpu.strip()[:1].isdigit():
        # A number alone is also half of a name: "4090".
        card = next((name for name in CARDS if name.split()[-1] == gpu.strip()), None)
        num_bytes = parse_memory(gpu, "--gpu", smallest=GIB, meant=card, zero_ok=False)
        return Machine(gpu_bytes=num_bytes, host_bytes=host_bytes)
    return machine_named(gpu, host_bytes)


def peak_flops(gpu_name: str | None) -> float | None:
    """FLOP/s of a GPU in bfloat16 by its datasheet, where its name is known."""
    scale = Machine(gpu_bytes=0, host_bytes=0, gpu_name=gpu_name).scale
    return None if scale is None else scale * PEAK_TFLOPS[MEASURED_ON] * 1e12
