"""Inspect the weight files of a saved model: find missing or damaged ones, and read the shapes of their tensors.

Reads only sizes and headers. Errors of the libraries that load the files rarely name the file at fault.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


def model_folder(name_or_path: str) -> Path | None:
    """Return the folder of a model's files (for a hub id, its copy in the cache), or None if there is none."""
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name_or_path, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would read, whether or not they exist.

    Raises:
        ValueError: The index that lists them is damaged.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            try:
                shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(f"{index} is damaged: it does not list the weight files") from error
            return [folder / shard for shard in shards]
    return []


def find_broken_file(folder: Path | None) -> str | None:
    """Return what is wrong with the first damaged weight file and what to do, or None if no damage is visible."""
    if folder is None:
        return None
    try:
        files = _weight_files(folder)
    except ValueError as error:
        return f"{error}; download or copy it again"
    for path in files:
        if not path.exists():
            return f"{path} is missing, one of {len(files)} files listed in the index; download or copy it again"
        fault = _find_fault(path)
        if fault is not None:
            # In the hub's cache the name links to the downloaded file, which must go, or it would be used again.
            first = f"remove {path.resolve()}, then " if path.is_symlink() else ""
            return f"{path} {fault}; {first}download or copy it again"
    return None


def _find_fault(path: Path) -> str | None:
    """Return what is wrong with a file, judging by its size and header, or None."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(9)
        if first.startswith(b"version "):
            return "is a Git LFS pointer, not the weights (`git lfs pull` fetches them)"
        if path.suffix == ".bin":
            # Files written before torch 1.6 are not zip archives.
            is_cut = size == 0 or (first.startswith(b"PK") and not zipfile.is_zipfile(path))
            return f"is cut short, at {size:,} bytes" if is_cut else None
        expected = 8 + int.from_bytes(first[:8], "little")
        if size < 9:
            return f"is cut short, at {size:,} bytes"
        if expected > MAX_HEADER_BYTES or first[8:] != b"{":
            return "is damaged: it does not start like a safetensors file"
        if size >= expected:
            file.seek(8)
            try:
                header = json.loads(file.read(expected - 8))
                header.pop("__metadata__", None)
                expected += max((entry["data_offsets"][1] for entry in header.values()), default=0)
            except (ValueError, KeyError, AttributeError, TypeError, IndexError):
                return "is damaged: its header cannot be read"
    if size == expected:
        return None
    what = "is cut short" if size < expected else "is damaged"
    return f"{what}: it has {size:,} bytes and its header says {expected:,}"


def saved_shapes(name_or_path: str) -> dict[str, tuple[str, list[int]]]:
    """Return file and shape of each tensor in a model's safetensors files, by name."""
    from safetensors import safe_open

    folder = model_folder(name_or_path)
    shapes: dict[str, tuple[str, list[int]]] = {}
    for path in _weight_files(folder) if folder is not None else []:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                shapes |= {key: (str(path), file.get_slice(key).get_shape()) for key in list(file.keys())}
    return shapes


def mismatched_shapes(name_or_path: str, model: nn.Module) -> dict[str, tuple[list[int], list[int]]]:
    """Return (shape in the file, shape in the model) of the parameters for which the two differ."""
    saved = saved_shapes(name_or_path)
    pairs = {key: (saved[key][1], list(p.shape)) for key, p in model.named_parameters() if key in saved}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def holds_adapters(name_or_path: str) -> bool:
    """Return whether a folder holds LoRA adapters and no model."""
    path = Path(name_or_path).expanduser()
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
