"""GPUs by name, and the machine that `--gpu` and `--host` describe."""

from __future__ import annotations

import pytest

from oomb.planner.hardware import GPUS, MEASURED_GPU, Machine, find_gpu, find_machine, machine_named, peak_flops
from oomb.utils.units import GIB


@pytest.mark.parametrize(
    "name, key",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_driver_name_is_found_with_its_memory(name: str, key: str) -> None:
    assert find_gpu(name) == key
    machine = machine_named(name, 5)
    assert (machine.gpu_name, machine.gpu_bytes, machine.host_bytes) == (key, GPUS[key].memory_bytes, 5)


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "nvidia-rtx-4090"])
def test_a_name_may_be_spelled_in_one_word(name: str) -> None:
    assert machine_named(name, 0).gpu_name == "RTX 4090"


@pytest.mark.parametrize("name", ["H100 40GB", "NVIDIA H100 NVL", "GH200", "A100", "H2000"])
def test_the_memory_of_other_products_is_not_guessed(name: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        machine_named(name, 0)


def test_one_lookup_serves_rates_float8_and_link() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("NVIDIA GeForce RTX 4090") == 165e12
    # A product with other memory has the same chip; a name that only contains another is another chip.
    assert find_gpu("NVIDIA H100 NVL") == "H100" and find_gpu("NVIDIA A100-SXM-64GB") == "A100-80GB"
    for unknown in ("NVIDIA GH200 480GB", "Some GPU", "", None):
        assert find_gpu(unknown) is None and peak_flops(unknown) is None
        assert Machine(gpu_bytes=GIB, host_bytes=GIB, gpu_name=unknown).scale is None
    here = {name: Machine(gpu_bytes=GIB, host_bytes=GIB, gpu_name=name) for name in GPUS}
    assert [name for name, machine in here.items() if machine.is_measured] == [MEASURED_GPU]
    assert {name for name, machine in here.items() if not machine.has_float8} == {"A100-80GB", "A100-40GB", "RTX 3090"}
    assert here["RTX 5090"].link_bytes_per_second == 2 * here["RTX 4090"].link_bytes_per_second
    assert here["A100-80GB"].scale == pytest.approx(312 / 989)


def test_machines_by_size() -> None:
    machine = find_machine("24GiB", "64GiB")
    assert machine == Machine(gpu_bytes=24 * GIB, host_bytes=64 * GIB) and machine.scale is None and machine.has_float8
    assert 22.7 * GIB < machine.usable_gpu_bytes < 22.8 * GIB
    assert Machine(gpu_bytes=1, host_bytes=0).usable_gpu_bytes == 0
