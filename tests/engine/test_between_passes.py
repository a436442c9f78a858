"""What users may do between the loss and its backward, and what raises an error."""

from __future__ import annotations

import gc
import threading
from typing import Any

import peft
import pytest
import torch
from checks import CHUNK, TOLERANCE, backward_gradients, check_loss, engine_for, function_gradients, lora
from families import assert_same_gradients, build, grads, random_ids, relative_error, whole_gradients, whole_loss
from torch import Tensor, nn

import oomb
from oomb.memory.store import PageStore

LENGTH = 30


@pytest.mark.parametrize("trains_at_first", [True, False])
def test_gradient_pass_uses_the_modes_of_the_fill_pass(trains_at_first: bool) -> None:
    model = lora(build("llama"), dropout=0.3).train(trains_at_first)
    ids = random_ids(1, LENGTH)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return engine_for(model, keep_last_chunk=False).loss(ids)

    expected = backward_gradients(model, loss())
    value = loss()
    model.train(not trains_at_first)
    actual = backward_gradients(model, value)
    assert_same_gradients(actual, expected, TOLERANCE)
    assert all(module.training is not trains_at_first for module in model.modules())


def test_changed_weights_raise(model: Any) -> None:
    loss = engine_for(model, keep_last_chunk=False).loss(random_ids(1, LENGTH))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(RuntimeError, match="parameters changed"):
        loss.backward()
    assert all(g is None for g in grads(model).values())


def replaced(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 1.1, module.weight.requires_grad)


def changed_in_place(module: nn.Module) -> None:
    module.weight.data.mul_(1.1)


def given_other_data(module: nn.Module) -> None:
    module.weight.data = module.weight.data * 1.1


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("change", [replaced, changed_in_place, given_other_data])
def test_changes_without_a_version_raise(model: Any, change: Any, is_frozen: bool) -> None:
    module = model.model.layers[1].mlp.up_proj
    module.weight = nn.Parameter(module.weight.detach().clone(), not is_frozen)
    loss = engine_for(model, keep_last_chunk=False).loss(random_ids(1, LENGTH))
    change(module)
    with pytest.raises(RuntimeError, match="parameters changed"):
        loss.backward()
    assert all(g is None for g in grads(model).values())


def transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def misaligned(weight: Tensor) -> Tensor:
    return torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)


@pytest.mark.parametrize("layout", [transposed, misaligned])
def test_changed_weights_with_unusual_layouts_raise(layout: Any) -> None:
    """Inference-mode, empty and quantized parameters next to them do no harm."""
    model = build("llama").to(torch.bfloat16)
    module = model.model.layers[1].self_attn.q_proj
    module.weight = nn.Parameter(layout(module.weight.detach()))
    with torch.inference_mode():
        kinds = {"inference": torch.ones(3), "empty": torch.ones(0), "quantized": torch.ones(5, dtype=torch.uint8)}
    for name, value in kinds.items():
        value = value if name == "inference" else value.clone()
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    engine = engine_for(model, keep_last_chunk=False)
    engine.loss(random_ids(1, LENGTH)).backward()
    loss = engine.loss(random_ids(1, LENGTH))
    module.weight.data[3, 2] += 1
    with pytest.raises(RuntimeError, match="parameters changed"):
        loss.backward()


def test_a_change_between_two_backwards_of_one_call_raises(model: Any) -> None:
    documents = [random_ids(1, LENGTH, seed=seed)[0] for seed in (0, 1)]
    first, second = engine_for(model, keep_last_chunk=False).logprobs(documents)
    first.sum().backward()
    model.model.norm.weight.data.mul_(1.1)
    with pytest.raises(RuntimeError, match="parameters changed"):
        second.sum().backward()


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral"])
def test_adapters_of_expert_weights_train(name: str, checkpoint_layers: bool, in_float64: None) -> None:
    """PEFT replaces the weights while the layer computes and restores them, which is not a change."""
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    base = build(name, **experts, sliding_window=None, use_sliding_window=False)
    base.set_experts_implementation("eager")
    model = lora(
        base, dropout=0.0, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    ids = random_ids(1, LENGTH)
    expected_loss, expected = function_gradients(model, lambda m: whole_loss(m, ids))
    for _ in range(2):
        loss = engine_for(model, keep_last_chunk=False, checkpoint_layers=checkpoint_layers).loss(ids)
        assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
        assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def test_switched_adapters_raise() -> None:
    model = lora(build("llama"), dropout=0.0)
    loss = engine_for(model).loss(random_ids(1, LENGTH))
    with model.disable_adapter(), pytest.raises(RuntimeError, match="adapters changed"):
        loss.backward()


def test_input_buffer_can_be_reused(model: Any) -> None:
    ids = random_ids(1, LENGTH)
    _, expected = whole_gradients(model, ids.clone())
    loss = engine_for(model, keep_last_chunk=False).loss(ids)
    ids.fill_(5)
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


@pytest.mark.parametrize("param_grad_dtype", ["param", "float32"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_hooks_on_finished_gradients_run_once(dtype: torch.dtype, param_grad_dtype: str) -> None:
    model = build("llama").to(dtype)
    ids = random_ids(1, LENGTH)
    engine = engine_for(model, param_grad_dtype=param_grad_dtype)
    expected = backward_gradients(model, engine.loss(ids))
    model.zero_grad()
    seen: dict[str, list[Tensor]] = {}

    def note(name: str) -> Any:
        return lambda p: seen.setdefault(name, []).append(p.grad.clone())

    handles = [p.register_post_accumulate_grad_hook(note(name)) for name, p in model.named_parameters()]
    engine.loss(ids).backward()
    assert {name: len(gradients) for name, gradients in seen.items()} == dict.fromkeys(expected, 1)
    assert_same_gradients({name: gradients[0] for name, gradients in seen.items()}, expected, TOLERANCE)
    for handle in handles:
        handle.remove()
    engine.loss(ids).backward()
    assert all(len(gradients) == 1 for gradients in seen.values())


def test_tensor_hooks_are_refused(model: Any) -> None:
    model.model.norm.weight.register_hook(lambda g: g.clamp(-1, 1))
    with pytest.raises(ValueError, match=r"norm\.weight .* register_post_accumulate_grad_hook"):
        engine_for(model).loss(random_ids(1, LENGTH))
    with torch.no_grad():
        engine_for(model).loss(random_ids(1, LENGTH))


def test_head_can_be_wrapped_later() -> None:
    base = build("llama")
    engine = engine_for(base)
    ids = random_ids(1, LENGTH)
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(base, config).double()
    expected_loss, expected = function_gradients(wrapped, lambda m: m(ids, labels=ids).loss)
    loss = engine.loss(ids)
    # Hugging Face computes this loss in float32.
    assert relative_error(loss.detach(), expected_loss) <= 1e-6
    assert_same_gradients(backward_gradients(wrapped, loss), expected, 1e-6)


def test_vocabulary_can_be_resized_later(model: Any) -> None:
    engine = engine_for(model)
    model.resize_token_embeddings(120)
    ids = random_ids(1, LENGTH, high=120)
    expected_loss, expected = whole_gradients(model, ids)
    loss = engine.loss(ids)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


@pytest.mark.timing
def test_two_threads_take_turns() -> None:
    models = [build("llama", seed=seed) for seed in (0, 1)]
    failures: list[BaseException] = []

    def work(model: Any) -> None:
        try:
            for _ in range(3):
                check_loss(model, random_ids(1, LENGTH))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_ddp_with_two_processes_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    wrapped = DistributedDataParallel(model)
    oomb.Engine(wrapped)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(oomb.UnsupportedModelError, match="DistributedDataParallel"):
        oomb.Engine(wrapped)


@pytest.mark.parametrize("ending", ["evaluated", "dropped", "backward"])
def test_pages_are_freed_without_the_garbage_collector(model: Any, ending: str) -> None:
    """Reference cycles would hold GPU memory until Python's next collection."""
    ids = random_ids(1, LENGTH)

    def stores() -> list[PageStore]:
        return [x for x in gc.get_objects() if type(x) is PageStore]

    gc.collect()
    # Ignore stores that earlier tests still hold.
    others = {id(store): store for store in stores()}
    gc.disable()
    try:
        if ending == "evaluated":
            with torch.no_grad():
                engine_for(model).loss(ids)
        else:
            loss = engine_for(model).loss(ids)
            if ending == "backward":
                loss.backward()
            del loss
        assert not [store for store in stores() if id(store) not in others]
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_sliding"])
def test_autocast_costs_no_more_than_in_standard_training(family: str) -> None:
    """gemma2 attends in plain PyTorch, whose products autocast would round."""
    model = build(family).float()
    ids = random_ids(2, 41)

    def total_error(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
        pairs = [(actual[name], g) for name, g in expected.items() if g is not None]
        return float(sum((a - g).square().sum() for a, g in pairs) / sum(g.square().sum() for _, g in pairs)) ** 0.5  # type: ignore[operator]

    _, expected = whole_gradients(model, ids)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        standard_loss = model(ids, labels=ids).loss
    standard = total_error(backward_gradients(model, standard_loss), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = engine_for(model).loss(ids)
    assert total_error(backward_gradients(model, loss), expected) <= 1.1 * standard


def in_another_thread(work: Any) -> list[Any]:
    """Return a list of what `work` returns or raises in another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("phase", ["fill", "gradient"])
@pytest.mark.parametrize("part", ["model", "decoder", "layer"])
def test_forward_in_another_thread_raises(phase: str, checkpoint_layers: bool, part: str) -> None:
    """It raises wherever it enters the model, and the pass stays exact."""
    model = build("llama")
    ids = random_ids(1, LENGTH)
    other = {"input_ids": random_ids(1, CHUNK)}
    _, expected = whole_gradients(model, ids)
    engine = engine_for(model, keep_last_chunk=False, checkpoint_layers=checkpoint_layers)
    called = {"model": model, "decoder": model.model, "layer": model.model.layers[1]}[part]
    if part == "layer":
        hidden = torch.randn(1, CHUNK, 48, dtype=torch.float64)
        cos_sin = model.model.rotary_emb(hidden, torch.arange(CHUNK)[None])
        other = {"hidden_states": hidden, "position_embeddings": cos_sin}
    engine.reserve(1, 2)
    found: list[Any] = []
    wanted, now = {"fill": 3, "gradient": 8}[phase], 0  # of five chunks in each pass

    def interfere(module: nn.Module, args: Any) -> None:
        nonlocal now
        now += 1
        if now == wanted:
            found.extend(in_another_thread(lambda: called(**other)))

    model.lm_head.register_forward_pre_hook(interfere)
    actual = backward_gradients(model, engine.loss(ids))
    assert len(found) == 1
    assert_same_gradients(actual, expected, TOLERANCE)
    assert isinstance(found[0], RuntimeError) and "another thread" in str(found[0]), found[0]


def test_forward_in_a_callback_raises(model: Any) -> None:
    ids = random_ids(1, LENGTH)
    _, expected = whole_gradients(model, ids)
    engine, refused = engine_for(model), list[str]()
    loss = engine.loss(ids)

    def call_the_model(*_: Any) -> None:
        try:
            model(random_ids(1, CHUNK))
        except RuntimeError as error:
            refused.append(str(error))

    engine.progress = call_the_model
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)
    assert refused and all("a callback" in text for text in refused)


@pytest.mark.parametrize("where", ["attention", "layer"])
def test_forward_that_began_before_the_pass_raises(where: str) -> None:
    """The pass begins while the other forward is inside a layer or between two layers."""
    model = build("llama")
    ids = random_ids(1, LENGTH)
    _, expected = whole_gradients(model, ids)
    # SDPA asks for no mask, as the engine does.
    model.set_attn_implementation("sdpa")
    engine = engine_for(model, keep_last_chunk=False)
    engine.reserve(1, 2)
    began, goes_on = threading.Event(), threading.Event()
    layer = model.model.layers[1]
    found: list[Any] = []

    def wait(*_: Any) -> None:
        if threading.current_thread() is thread:
            began.set()
            assert goes_on.wait(60)

    def other() -> None:
        try:
            found.append(model(random_ids(1, CHUNK)).logits)
        except Exception as error:
            found.append(error)

    def let_it_go_on(*_: Any) -> None:
        if not found and threading.current_thread() is not thread:
            goes_on.set()
            thread.join()

    (layer.self_attn.q_proj if where == "attention" else layer).register_forward_hook(wait)
    model.lm_head.register_forward_hook(let_it_go_on)
    thread = threading.Thread(target=other)
    thread.start()
    assert began.wait(60)
    actual = backward_gradients(model, engine.loss(ids))
    assert_same_gradients(actual, expected, TOLERANCE)
    assert len(found) == 1 and isinstance(found[0], RuntimeError), found[0]


def test_passes_in_two_threads_keep_their_own_training_modes() -> None:
    """A gradient pass restores the modes of its fill pass. A call in another thread meanwhile uses the user's modes."""
    model = lora(build("llama"), dropout=0.5).train()
    ids = random_ids(1, LENGTH)
    loss = engine_for(model).loss(ids)
    model.eval()
    other = engine_for(model)
    losses: list[Tensor] = []
    thread = threading.Thread(target=lambda: losses.append(other.loss(ids).detach()))

    def start_the_other(*_: Any) -> None:
        if thread.ident is None:
            thread.start()
            # The other call waits for this pass to end, and must not capture the model's state before that.
            thread.join(timeout=0.3)

    model.base_model.model.model.layers[0].mlp.register_forward_hook(start_the_other)
    loss.backward()
    thread.join()
    with torch.no_grad():
        assert relative_error(losses[0], other.loss(ids)) <= TOLERANCE


def test_random_numbers_drawn_by_another_thread_raise() -> None:
    """Threads share PyTorch's generator, so dropout would differ between the passes."""
    model = lora(build("llama"), dropout=0.3)
    engine = engine_for(model, keep_last_chunk=False, checkpoint_layers=False)
    loss = engine.loss(random_ids(1, LENGTH))
    model.base_model.model.model.layers[1].register_forward_pre_hook(
        lambda *_: in_another_thread(lambda: torch.rand(3)) and None
    )
    with pytest.raises(RuntimeError, match=r"chunk \d+ .*random numbers"):
        loss.backward()


def test_random_numbers_of_another_thread_do_not_matter_without_dropout(model: Any) -> None:
    ids = random_ids(1, LENGTH)
    _, expected = whole_gradients(model, ids)
    engine = engine_for(model, keep_last_chunk=False, checkpoint_layers=False)
    loss = engine.loss(ids)
    model.model.layers[1].register_forward_pre_hook(lambda *_: in_another_thread(lambda: torch.rand(3)) and None)
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)
