"""Flip random bits in the files of a folder, one at a time, and count how many a check misses.

    PYTHONPATH=. python tests/helpers/bit_flips.py 200    # a checkpoint of 1 GiB, then token shards

Takes about ten minutes on two cores, and 2 GiB of disk.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainings import CHUNKED, Samples, arguments, tiny_model

import oomb
from oomb.data.dataset import open_dataset
from oomb.trainers import checkpoints
from oomb.utils import files


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    flip(path, bit)
    try:
        yield
    finally:
        flip(path, bit)


def num_undetected(folder: Path, num_flips: int, check: Callable[[Path], Any], seed: int = 0) -> int:
    """Return how many flips of random bits `check` does not detect. It must raise ValueError every time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    chance = random.Random(seed)
    check(folder)
    missed = 0
    for _ in range(num_flips):
        at = chance.randrange(sum(sizes))
        which = next(index for index in range(len(files)) if at < sum(sizes[: index + 1]))
        with flipped(files[which], 8 * (at - sum(sizes[:which])) + chance.randrange(8)):
            try:
                check(folder)
            except ValueError:
                continue
            missed += 1
    check(folder)
    return missed


def check_shards(folder: Path) -> None:
    open_dataset(str(folder), tokenizer=None, max_length=64)


def large_checkpoint(place: Path) -> Path:
    """Return a checkpoint of 1 GiB that a trainer wrote: 85M weights in float32, and AdamW's states."""
    model = tiny_model(vocab_size=350_000, hidden_size=256, tie_word_embeddings=True, num_hidden_layers=1)
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = oomb.Trainer(model, arguments(place, **options), train_dataset=Samples(4, 20), engine_config=CHUNKED)
    trainer.train()
    return place / "checkpoint-1"


def token_shards(place: Path) -> Path:
    """Return the Python standard library as token shards of 8 MiB of text."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "oomb",
            "tokenize",
            "--dataset",
            "stdlib",
            "--output",
            str(place / "tokens"),
            "--shard_size",
            "8MiB",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return place / "tokens"


def main(num_flips: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        for name, make, check in (
            ("checkpoint", large_checkpoint, checkpoints.check),
            ("token shards", token_shards, check_shards),
        ):
            folder = make(Path(place))
            began = time.monotonic()
            missed = num_undetected(folder, num_flips, check)
            took = (time.monotonic() - began) / num_flips
            size, num_files = files.folder_bytes(folder), sum(path.is_file() for path in folder.rglob("*"))
            print(
                f"{name}, {size / 2**20:,.0f} MiB in {num_files} files: {num_flips - missed} of {num_flips} flips "
                f"detected, {took:.2f} s a check"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]))
