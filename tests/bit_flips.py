"""Random wrong bits in the files of a folder, one at a time: how many does a check miss?

    python tests/bit_flips.py 200       # of a checkpoint of 1 GiB, and of a folder of token shards

The second form needs a few minutes and 3 GiB of disk.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    """Flip random bits, each bit of the folder as likely as any other; `check` must raise ValueError every time."""
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


def main(num_flips: int) -> None:
    from test_checkpoints import train
    from trainings import tiny_model

    import oomb
    from oomb import checkpoints

    del oomb
    with tempfile.TemporaryDirectory() as place:
        import test_checkpoints

        test_checkpoints.tiny_model = lambda **settings: tiny_model(
            **{**settings, "vocab_size": 350_000, "hidden_size": 256, "tie_word_embeddings": True}
        )
        train(Path(place), max_steps=1)
        folder = Path(place) / "checkpoint-1"
        began = time.monotonic()
        missed = num_undetected(folder, num_flips, checkpoints.check)
        took = (time.monotonic() - began) / num_flips
        size = checkpoints.size_of(folder) / 2**30
        print(f"checkpoint of {size:.2f} GiB: {num_flips - missed} of {num_flips} flips seen, {took:.2f} s a check")


if __name__ == "__main__":
    main(int(sys.argv[1]))
