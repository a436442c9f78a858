"""Trainer subclasses with their own loss: it trains through the engine, or the step is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import load
from trainings import CHUNKED, Samples, arguments, quick_collection, tiny_model
from transformers import AutoTokenizer

import oomb

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

import toy  # noqa: E402
from trl_data import SETTINGS, pairs, texts  # noqa: E402

pytestmark = pytest.mark.usefixtures(quick_collection.__name__)


class CallsTheModel:
    """A mixin whose loss calls the model, as transformers documents it. `before` runs before each forward."""

    before: Any = staticmethod(lambda model: None)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.before(model)
        ids = next(value for name, value in inputs.items() if name.endswith("input_ids"))
        outputs = model(input_ids=ids, labels=ids)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def adapted() -> Any:
    return peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


REFUSED = r"calls the model itself on a batch of shape \(\d, \d+\).*self\.engine\.loss or self\.engine\.logprobs"


@pytest.mark.parametrize(
    ("make", "options"), [(tiny_model, {}), (tiny_model, {"bf16": True}), (adapted, {})], ids=["plain", "bf16", "lora"]
)
def test_a_loss_that_calls_the_model_is_refused(tmp_path: Path, make: Any, options: dict[str, Any]) -> None:
    trained = type("Trained", (CallsTheModel, oomb.Trainer), {})
    samples, model, seen = Samples(4, 41, padded=False), make(), []
    ids = samples[0]["input_ids"][None]

    def score_and_generate(model: Any) -> None:
        with torch.no_grad():
            model(input_ids=ids)
        seen.append(tuple(model.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape))

    trainer = trained(
        model, arguments(tmp_path, **options), train_dataset=samples, eval_dataset=samples, engine_config=CHUNKED
    )
    trainer.before = score_and_generate
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda module, args: seen.append("graph") if torch.is_grad_enabled() else None)
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.train()
    # Forwards without gradients ran; the one of the training step did not reach the first module.
    assert seen == [(1, 43)]
    # Outside a training step the model can be called.
    assert trainer.evaluate()["eval_loss"] > 0
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize(("kind", "data"), [("SFT", texts), ("DPO", pairs)])
def test_trl_trainers_refuse_a_loss_that_calls_the_model(tmp_path: Path, kind: str, data: Any) -> None:
    folder = toy.model_folder(str(tmp_path / "model"))
    trained = type("Trained", (CallsTheModel, getattr(oomb, f"{kind}Trainer")), {})
    args = getattr(trl, f"{kind}Config")(output_dir=str(tmp_path), **{**SETTINGS, "eval_strategy": "no"})
    trainer = trained(
        model=load(folder), args=args, train_dataset=data(), processing_class=AutoTokenizer.from_pretrained(folder)
    )
    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.train()


@pytest.mark.parametrize("way", ["in eval mode", "another model"])
def test_a_step_without_the_engine_is_an_error(tmp_path: Path, way: str) -> None:
    other = tiny_model(seed=2)

    class Elsewhere(oomb.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return (model.eval() if way == "in eval mode" else other)(**inputs).loss

    samples = Samples(4, 41, padded=False)
    trainer = Elsewhere(tiny_model(), arguments(tmp_path), train_dataset=samples, engine_config=CHUNKED)
    with pytest.raises(RuntimeError, match=r"does not come from the engine\."):
        trainer.train()
    assert trainer.state.global_step == 0
