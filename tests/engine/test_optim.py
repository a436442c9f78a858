"""OffloadedAdamW equals torch's AdamW bit for bit in float32 and closely in fewer bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import FORMS, STEPS, are_equal, groups, net, short_blocks, train, values
from torch import Tensor, nn

import oomb
from oomb.engine import optim, optim_state
from oomb.engine.optim import OffloadedAdamW
from oomb.memory import host
from oomb.ops import moments

__all__ = ["short_blocks"]


@pytest.mark.parametrize("block_size", [256, 512, 2**22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_bitwise_adamw(
    dtype: torch.dtype, block_size: int, monkeypatch: pytest.MonkeyPatch, poisoned_empty: None
) -> None:
    monkeypatch.setattr(optim_state, "BLOCK_SIZE", block_size)
    ours, theirs = net(dtype), net(dtype)
    optimizer = OffloadedAdamW(groups(ours), lr=1e-2)
    reference = torch.optim.AdamW(groups(theirs), lr=1e-2, foreach=False)
    train(ours, optimizer)
    train(theirs, reference)
    assert are_equal(values(ours), values(theirs))
    assert ours.first._version >= STEPS, "code that looks for changed parameters would not see it"
    assert not are_equal(values(ours)[:4], values(net(dtype))[:4])
    assert torch.equal(ours.unused, torch.ones(300)) and ours.unused not in optimizer.state
    for p, q in zip(ours.parameters(), theirs.parameters()):
        for name, state in reference.state[q].items() if p.numel() else ():
            assert torch.equal(optimizer.state[p][name], state)


def test_schedulers_clipping_closures_and_new_groups() -> None:
    def run(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> list[Tensor]:
        model = net()
        optimizer = kind([model.first], lr=1e-2, **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS, cycle_momentum=False)
        for step in range(STEPS):
            if step == 5:
                optimizer.add_param_group({"params": [model.second, model.bias], "lr": 1e-3})
                schedule = torch.optim.lr_scheduler.LinearLR(optimizer)

            def closure(seed: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = model(torch.randn(4, 33, generator=torch.Generator().manual_seed(seed))).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                return loss

            assert optimizer.step(closure) > 0
            schedule.step()
        return values(model)

    assert are_equal(run(OffloadedAdamW), run(torch.optim.AdamW, foreach=False))


def shared_gradients(models: list[nn.Module], seed: int) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        grad = torch.randn(parameters[0].shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for p in parameters:
            p.grad = grad.to(p.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_round_a_float32_run(dtype: torch.dtype) -> None:
    half = net(dtype)
    full = copy.deepcopy(half).float()
    optimizer = OffloadedAdamW(half.parameters(), lr=1e-4, master_weights=True)
    reference = torch.optim.AdamW(full.parameters(), lr=1e-4, foreach=False)
    for step in range(STEPS):
        shared_gradients([half, full], step)
        optimizer.step()
        reference.step()
    assert are_equal(values(half), [p.to(dtype) for p in values(full)])
    for p, q in zip(half.parameters(), full.parameters()):
        assert not p.numel() or torch.equal(optimizer.state[p]["master"], q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_of_16_bit_weights_survive_on_average(dtype: torch.dtype) -> None:
    """A hundred steps of 1/40 of the distance to the next value: round-to-nearest would lose all of them."""
    rate = torch.finfo(dtype).eps / 80
    parameter = nn.Parameter(torch.ones(4000, dtype=dtype))
    nearest = nn.Parameter(torch.ones(4000, dtype=dtype))
    optimizer = OffloadedAdamW([parameter], lr=rate, weight_decay=0)
    reference = torch.optim.AdamW([nearest], lr=rate, weight_decay=0)
    for _ in range(100):
        parameter.grad, nearest.grad = torch.ones_like(parameter), torch.ones_like(nearest)
        optimizer.step()
        reference.step()
    assert (nearest == 1).all()
    # 4000 random walks of 100 steps with probability 1/40 each have a standard deviation of 1% of the distance.
    assert float((1 - parameter.detach().double()).mean() / (100 * rate)) == pytest.approx(1, abs=0.04)
    assert parameter.detach().double().std() > 0


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_run_continues_bit_for_bit(form: dict[str, Any], dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = OffloadedAdamW(groups(model), lr=1e-2, **form)
    train(model, optimizer, range(7))
    other = net(dtype)
    other.load_state_dict(saved_and_loaded(model.state_dict()))
    resumed = OffloadedAdamW(groups(other), lr=0.5, **form)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    again = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    train(model, optimizer, range(7, STEPS))
    for m, o in ((other, resumed), again, pickled):
        train(m, o, range(7, STEPS))
        assert are_equal(values(m), values(model))
        assert o.host_bytes == optimizer.host_bytes
    # Load an earlier state into memory that is already allocated.
    before = {name: x.data_ptr() for name, x in optimizer.state[model.first].items() if name != "step"}
    state = resumed.state_dict()
    optimizer.load_state_dict(saved_and_loaded(state))
    assert before == {name: x.data_ptr() for name, x in optimizer.state[model.first].items() if name != "step"}
    # Then an empty state.
    optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    model.load_state_dict(net(dtype).state_dict())
    fresh = net(dtype)
    fresh_optimizer = OffloadedAdamW(groups(fresh), lr=1e-2, **form)
    train(model, optimizer)
    train(fresh, fresh_optimizer)
    assert are_equal(values(model), values(fresh)), "an empty state did not start from zero"


def test_states_are_interchangeable_with_torch() -> None:
    model, other = net(), net()
    reference = torch.optim.AdamW(groups(model), lr=1e-2, foreach=False)
    train(model, reference, range(7))
    other.load_state_dict(model.state_dict())
    optimizer = OffloadedAdamW(groups(other))
    optimizer.load_state_dict(reference.state_dict())
    back = copy.deepcopy(other)
    train(model, reference, range(7, STEPS))
    train(other, optimizer, range(7, 12))
    back.load_state_dict(other.state_dict())
    torchs = torch.optim.AdamW(groups(back), foreach=False)
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((other, optimizer), (back, torchs)):
        train(m, o, range(12, STEPS))
        assert are_equal(values(m), values(model))


@pytest.mark.parametrize("form", FORMS[1:3], ids=str)
def test_states_are_converted_when_loaded(form: dict[str, Any]) -> None:
    model = net()
    optimizer = OffloadedAdamW(groups(model), lr=1e-2)
    train(model, optimizer, range(7))
    expected = optimizer.state[model.second]
    narrow = OffloadedAdamW(groups(model), **form)
    narrow.load_state_dict(optimizer.state_dict())
    wide = OffloadedAdamW(groups(model), master_weights=True)
    wide.load_state_dict(narrow.state_dict())
    # The same with a transposed weight, where blocks of 256 elements differ.
    model.second.data = model.second.data.contiguous()
    turned = OffloadedAdamW(groups(model), **form)
    turned.load_state_dict(narrow.state_dict())
    turned_wide = OffloadedAdamW(groups(model))
    turned_wide.load_state_dict(turned.state_dict())
    for found in (wide.state[model.second], turned_wide.state[model.second]):
        assert found["step"] == 7 and "master" not in found
        for name in moments.MOMENTS:
            assert float((found[name] - expected[name]).norm() / expected[name].norm()) < 0.04


def test_states_follow_a_model_to_another_device() -> None:
    model, other = net(), net()
    optimizer, reference = OffloadedAdamW(groups(model), lr=1e-2), torch.optim.AdamW(groups(other), lr=1e-2)
    for m, o in ((model, optimizer), (other, reference)):
        train(m, o, range(5))
        m.second.data = m.second.data.contiguous()
        train(m, o, range(5, 10))
    assert are_equal(values(model), values(other))


def test_unsupported_parameters_raise() -> None:
    sparse = nn.Embedding(5, 3, sparse=True)
    optimizer = OffloadedAdamW([nn.Parameter(torch.ones(2)), *sparse.parameters()])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    sparse(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 1 is sparse.*sparse=False"):
        optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), torch.ones(2)) and not optimizer.state
    gaps = nn.Parameter(torch.ones(4, 6)[:, ::2])
    gaps.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"gaps or overlaps.*contiguous"):
        OffloadedAdamW([gaps]).step()
    apart = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    for p in apart:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="move the model to one device"):
        OffloadedAdamW(apart).step()
    with pytest.raises(ValueError, match=r"complex64; OffloadedAdamW updates torch.float64"):
        OffloadedAdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_dtype": "int4"}, "float32, bfloat16, 8bit"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"betas": (0.9, 1.0)}, "below 1"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
    ],
    ids=str,
)
def test_wrong_settings_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadedAdamW([nn.Parameter(torch.ones(2))], **options)


def test_foreign_states_raise() -> None:
    model = net()
    optimizer = OffloadedAdamW(model.parameters())
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    for options, message in (({"amsgrad": True}, "amsgrad=True"), ({"maximize": True}, "maximize=True")):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), **options).state_dict())
    with pytest.raises(ValueError, match="decoupled_weight_decay=False"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters(), weight_decay=0.1).state_dict())
    other = copy.deepcopy(before)
    other["state"][0]["exp_avg"] = torch.zeros(57, 33)
    other["param_groups"][0]["lr"] = 5.0
    with pytest.raises(ValueError, match=r"exp_avg of shape \(57, 33\) for parameter 0 of shape \(33, 57\)"):
        optimizer.load_state_dict(other)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(x, before["state"][key][name]) for name, x in state.items())


def test_hooks_see_the_complete_state() -> None:
    model = net()
    optimizer, seen = OffloadedAdamW(model.parameters()), []
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lambda _, given: seen.append(given["state"][0]["exp_avg"].shape))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[model.first]["exp_avg"].shape))
    optimizer.load_state_dict(state)
    assert seen == [(33, 57), (33, 57)]


@pytest.mark.parametrize(
    ("form", "num_bytes"),
    [
        ({}, 8), ({"state_dtype": "bfloat16"}, 4), ({"state_dtype": "8bit"}, 2 + 8 / 256),
        ({"master_weights": True}, 12), ({"state_dtype": "8bit", "master_weights": True}, 6 + 8 / 256),
    ],
    ids=str,
)  # fmt: skip
def test_host_bytes_is_the_memory_it_allocates(form: dict[str, Any], num_bytes: float) -> None:
    model = nn.Linear(512, 33, bias=False).bfloat16()
    optimizer = OffloadedAdamW(model.parameters(), **form)
    assert optimizer.host_bytes == 512 * 33 * num_bytes
    optimizer.reserve()
    assert not optimizer.state, "accelerate would move them to the GPU when it prepares the optimizer"
    model.weight.grad = torch.ones_like(model.weight)
    [state] = optimizer._host_states.values()
    optimizer.step()
    assert [state] == list(optimizer._host_states.values())
    assert sum(x.nbytes for name, x in optimizer.state[model.weight].items() if name != "step") == optimizer.host_bytes
    assert sum(slab.bytes.nbytes for slab in state.slabs) == optimizer.host_bytes


def test_too_little_host_memory_raises_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, master_weights=True)
    before = values(model)
    with monkeypatch.context() as patch:
        patch.setattr(optim, "free_host_bytes", lambda: 1000)
        message = (
            r'need [\d.]+ MiB.*0\.0 MiB are free.*state_dtype="bfloat16" needs.*"8bit" needs.*master_weights=False'
        )
        with pytest.raises(oomb.OutOfPages, match=message):
            train(model, optimizer, range(1))
    made = []

    def slab(num_bytes: int, device: torch.device) -> Any:
        if len(made) == 4:
            raise oomb.OutOfPages("the system refused")
        made.append(real(num_bytes, device))
        return made[-1]

    real = host.HostSlab
    with monkeypatch.context() as patch:
        patch.setattr(optim_state, "HostSlab", slab)
        with pytest.raises(oomb.OutOfPages, match=r"the system refused.*LoRA"):
            train(model, optimizer, range(1))
    assert are_equal(values(model), before) and not optimizer._host_states and not optimizer.state
    train(model, optimizer)
    expected = net(torch.bfloat16)
    train(expected, OffloadedAdamW(expected.parameters(), lr=1e-2, master_weights=True))
    assert are_equal(values(model), values(expected))


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, {"state_dtype": "8bit"}], ids=str)
def test_the_trainer_accepts_it_and_resumes(form: dict[str, Any], tmp_path: Path) -> None:
    from trainings import CHUNKED, Samples, tiny_model
    from transformers import TrainingArguments

    def run(optimizer_of: Callable[..., torch.optim.Optimizer], folder: str, resume: str | None = None) -> list[Tensor]:
        model = tiny_model()
        arguments = TrainingArguments(
            str(tmp_path / folder), max_steps=6, per_device_train_batch_size=2, save_steps=3, report_to=[],
            use_cpu=True, seed=3, disable_tqdm=True, max_grad_norm=0.5, lr_scheduler_type="cosine",
        )  # fmt: skip
        optimizer = optimizer_of(model.parameters(), lr=1e-2, weight_decay=0.1)
        trainer = oomb.Trainer(
            model, arguments, train_dataset=Samples(16, 33), optimizers=(optimizer, None), engine_config=CHUNKED
        )
        trainer.train(resume_from_checkpoint=resume)
        return values(model)

    ours = run(lambda p, **options: OffloadedAdamW(p, **form, **options), "ours")
    resumed = run(lambda p, **options: OffloadedAdamW(p, **form, **options), "on", str(tmp_path / "ours/checkpoint-3"))
    assert are_equal(ours, resumed)
    if not form:
        assert are_equal(ours, run(lambda p, **o: torch.optim.AdamW(p, foreach=False, **o), "theirs"))


def test_the_documented_example_runs() -> None:
    from documents import ROOT, fences
    from families import build, random_ids

    model = build("llama", dtype=torch.bfloat16)
    before = values(model)
    names = {"model": model, "batches": [random_ids(1, 40)] * 2}
    [example] = fences(ROOT / "docs" / "optimizer.md", "python")[:1]
    exec(example, names)
    assert not are_equal(values(model), before)
