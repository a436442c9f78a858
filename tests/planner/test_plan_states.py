"""Forecasts of AdamW's states in host memory match what the optimizer takes."""

from __future__ import annotations

import pytest

from oomb.cli.plan.table import notes
from oomb.config import OFFLOADED_STATES
from oomb.engine.optim import OffloadedAdamW
from oomb.models import load
from oomb.planner import forecast
from oomb.planner.hardware import machine_named
from oomb.planner.plan import plan_step
from oomb.utils.units import GIB

H200 = machine_named("H200", 100 * GIB)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", OFFLOADED_STATES)
def test_states_on_the_host_match_the_optimizer(name: str, lora: bool, dtype: str) -> None:
    """float32 copies are not counted; the plan says how much more they take."""
    if lora:
        pytest.importorskip("peft")
    report = plan_step("demo", 4096, H200, dtype=dtype, lora=lora, optimizer=name)
    [states] = [term.num_bytes for term in report.forecast.terms if term.name == forecast.STATES]
    model = load.load_model("demo", dtype=dtype, device="cpu")
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    plain, with_copies = (
        OffloadedAdamW(model.parameters(), state_dtype=OFFLOADED_STATES[name], master_weights=master_weights)
        for master_weights in (False, True)
    )
    # The last block of every parameter has its own scales, even if it is shorter than 256 numbers.
    assert states == pytest.approx(plain.host_bytes, rel=1e-3) and states <= plain.host_bytes
    assert report.master_weight_bytes == with_copies.host_bytes - plain.host_bytes
    with_copies.reserve()
    taken = sum(x.nbytes for host in with_copies._host_states.values() for x in host.rows.values())
    assert taken == with_copies.host_bytes
    lines = [line for line in notes(report) if line.startswith("not counted: float32 copies")]
    assert len(lines) == (dtype == "bfloat16" and not lora) == bool(report.master_weight_bytes)


def test_other_optimizers_keep_no_copies() -> None:
    report = plan_step("demo", 4096, H200, optimizer="adamw")
    assert report.master_weight_bytes and not any("copies" in line for line in notes(report))
