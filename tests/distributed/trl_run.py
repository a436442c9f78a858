"""Train with a TRL trainer, alone or under torchrun: `trl_run.py OUT MODEL SFT|DPO ACCUMULATION PARALLEL`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import trl
from trl_data import CHUNKED, SETTINGS, pairs, texts

import oomb


def main(out: Path, folder: str, kind: str, accumulation: int, parallel: str) -> None:
    torch.set_num_threads(1)
    settings = {**SETTINGS, "per_device_train_batch_size": 1, "eval_strategy": "no", "max_steps": 2}
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(out / "run"), gradient_accumulation_steps=accumulation, data_seed=5, **settings
    )
    trainer = getattr(oomb, f"{kind}Trainer")(
        model=folder,
        args=args,
        train_dataset=texts() if kind == "SFT" else pairs(),
        engine_config=CHUNKED,
        parallel=parallel,
    )
    trainer.train()
    if args.should_save:
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        torch.save({"log": trainer.state.log_history, "weights": weights}, out / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
