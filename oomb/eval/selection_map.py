"""Plot which pages sparse attention reads: query tiles against pages, for one layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomb.config import TILE_SIZE
from oomb.data.dataset import load
from oomb.data.discover import STDLIB
from oomb.engine.engine import Engine

MAX_CELLS = 2048
"""Tiles and pages that are drawn one by one; with more of them, several share a pixel."""


@dataclass(frozen=True)
class Selection:
    """Pages of a sequence that one layer reads."""

    layer: int
    selected_NP: Tensor
    """True where query tile N reads page P of an earlier chunk."""
    own_NP: Tensor
    """True where page P belongs to the chunk of tile N, which the tile always reads."""
    page_size: int
    budget: int

    @property
    def most_read(self) -> list[tuple[int, float]]:
        """The ten most read pages, each with the fraction of later tiles that read it."""
        num_later_tiles = self._is_past.sum(0).clamp(min=1)
        shares = self.selected_NP.sum(0) / num_later_tiles
        order = shares.argsort(descending=True, stable=True)[:10].tolist()
        return [(page, float(shares[page])) for page in order if shares[page] > 0]

    @property
    def _is_past(self) -> Tensor:
        """True where a page belongs to an earlier chunk than the tile."""
        first_own = self.own_NP.int().argmax(1)
        return torch.arange(self.selected_NP.shape[1]) < first_own[:, None]


def record(engine: Engine, ids: Tensor, layer: int = 0) -> Selection:
    """Run the model on ids [1, T] and record which pages a layer reads."""
    config, (_, length) = engine.config, ids.shape
    if config.page_budget is None:
        raise ValueError("every page is read without a page_budget: set --page_budget to plot a selection")
    if length <= config.chunk_size:
        raise ValueError(
            f"{length} tokens are one chunk of {config.chunk_size} and have no past pages: use more tokens"
        )
    by_chunk: dict[int, Tensor] = {}

    def on_selection(selecting_layer: int, start: int, pages_BNC: Tensor) -> None:
        if selecting_layer == layer:
            by_chunk[start] = pages_BNC[0].cpu().long()

    with torch.no_grad():
        engine.forward(engine.pack(ids), on_selection=on_selection)
    if not by_chunk:
        raise ValueError(f"layer {layer} selects no pages: it does not exist, or it has a sliding window")
    num_tiles, num_pages = -(-length // TILE_SIZE), -(-length // config.page_size)
    selected = torch.zeros(num_tiles, num_pages, dtype=torch.bool)
    for start, pages_NC in by_chunk.items():
        first = start // TILE_SIZE
        selected[first : first + len(pages_NC)].scatter_(1, pages_NC, True)
    chunk_of_tile = torch.arange(num_tiles) * TILE_SIZE // config.chunk_size
    chunk_of_page = torch.arange(num_pages) * config.page_size // config.chunk_size
    own = chunk_of_tile[:, None] == chunk_of_page[None, :]
    return Selection(layer, selected, own, config.page_size, config.page_budget)


def check(num_layers: int, layer: int, budget: int | None) -> None:
    """Raise for bad input before the model is loaded."""
    if budget is None:
        raise ValueError("--selection_map plots the selected pages: set --page_budget too")
    if not 0 <= layer < num_layers:
        raise ValueError(f"--selection_layer is {layer}; the model has layers 0 to {num_layers - 1}")


def text_ids(tokenizer: Any, context: int, dataset: str = STDLIB) -> Tensor:
    """Return ids [1, T] of a text, by default the source of Python's standard library."""
    split = load(dataset, max_length=context, tokenizer=tokenizer, num_train=1, num_held_out=0)
    return split.train[0]["input_ids"][None]


def draw(selection: Selection, path: Path) -> Path:
    """Write the plot to a file and return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shades = torch.where(selection.selected_NP, 1.0, torch.where(selection.own_NP, 0.2, 0.0))
    num_tiles, num_pages = shades.shape
    pooled = torch.nn.functional.adaptive_max_pool2d(
        shades[None], (min(num_tiles, MAX_CELLS), min(num_pages, MAX_CELLS))
    )
    figure = Figure(figsize=(9, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(pooled[0], cmap="magma_r", aspect="auto", extent=(0, num_pages, num_tiles, 0), interpolation="nearest")
    axes.set_xlabel(f"pages of {selection.page_size} tokens")
    axes.set_ylabel(f"query tiles of {TILE_SIZE} tokens")
    axes.set_title(
        f"layer {selection.layer}: the {selection.budget} selected pages (dark) and the tile's own chunk (light)"
    )
    figure.savefig(path)
    return path
