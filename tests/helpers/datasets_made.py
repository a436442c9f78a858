"""Write small datasets and list the examples they give."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from oomb.data.dataset import open_dataset
from oomb.data.tokens import Examples, Split

HELLO = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, how are you?"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "And\n\nnow?"},
    {"role": "assistant", "content": " Still\nfine, thank you."},
]


def write_lines(path: Path, *rows: Any) -> Path:
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def opened(path: Path, **options: Any) -> Split:
    options = {"tokenizer": None, "max_length": 64, "num_held_out": 0, **options}
    return open_dataset(str(path), **options)


def examples(dataset: Examples | None) -> list[tuple[list[int], list[int]]]:
    """Return (ids, labels) of every example."""
    found = [] if dataset is None else [dataset[i] for i in range(len(dataset))]
    return [(example["input_ids"].tolist(), example["labels"].tolist()) for example in found]


def texts(split: Split) -> list[str]:
    return [bytes(i for i in ids if i < 256).decode() for ids, _ in examples(split.train)]


def texts_with_loss(split: Split, tokenizer: Any) -> list[list[str]]:
    """Return the texts in each example that loss is computed on."""
    found = []
    for ids, labels in examples(split.train):
        assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))
        runs, run = [], []
        for label in [*labels, -100]:
            if label != -100:
                run.append(label)
            elif run:
                runs.append(tokenizer.decode(run))
                run = []
        found.append(runs)
    return found
