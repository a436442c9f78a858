"""A picture of what sparse attention reads: tiles of queries against pages of the past, for one layer."""

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
from oomb.planner.report import check_plotting

MOST_CELLS = 2048
"""More tiles or pages than this are drawn several to a point."""


@dataclass(frozen=True)
class Selection:
    """What a layer reads of a sequence."""

    layer: int
    chosen_NP: Tensor
    """True where a tile of queries reads a page of an earlier chunk."""
    own_NP: Tensor
    """True where a page is of the tile's own chunk, all of which is read."""
    page_size: int
    budget: int

    @property
    def most_read(self) -> list[tuple[int, float]]:
        """The ten pages read most, with the share of tiles after them that do."""
        tiles_after = self._is_past.sum(0).clamp(min=1)
        shares = self.chosen_NP.sum(0) / tiles_after
        order = shares.argsort(descending=True, stable=True)[:10].tolist()
        return [(page, float(shares[page])) for page in order if shares[page] > 0]

    @property
    def _is_past(self) -> Tensor:
        """True where a page is of an earlier chunk."""
        first_own = self.own_NP.int().argmax(1)
        return torch.arange(self.chosen_NP.shape[1]) < first_own[:, None]


def record(engine: Engine, ids: Tensor, layer: int = 0) -> Selection:
    """Runs the model over ids [1, T], and notes what the layer reads."""
    config, (_, length) = engine.config, ids.shape
    if config.page_budget is None:
        raise ValueError("without a page_budget every page is read: set --page_budget to draw what is chosen")
    if length <= config.chunk_size:
        raise ValueError(f"{length} tokens are one chunk of {config.chunk_size}, which has no past to choose from")
    found: dict[int, Tensor] = {}

    def watch(watched: int, start: int, chosen_BNC: Tensor) -> None:
        if watched == layer:
            found[start] = chosen_BNC[0].cpu().long()

    engine.on_selection = watch
    try:
        with torch.no_grad():
            engine.logprobs(ids)
    finally:
        engine.on_selection = None
    if not found:
        raise ValueError(f"layer {layer} chooses no pages: there is no such layer, or it has a sliding window")
    num_tiles, num_pages = -(-length // TILE_SIZE), -(-length // config.page_size)
    chosen = torch.zeros(num_tiles, num_pages, dtype=torch.bool)
    for start, chosen_NC in found.items():
        first = start // TILE_SIZE
        chosen[first : first + len(chosen_NC)].scatter_(1, chosen_NC, True)
    chunk_of_tile = torch.arange(num_tiles) * TILE_SIZE // config.chunk_size
    chunk_of_page = torch.arange(num_pages) * config.page_size // config.chunk_size
    own = chunk_of_tile[:, None] == chunk_of_page[None, :]
    return Selection(layer, chosen, own, config.page_size, config.page_budget)


def check(num_layers: int, layer: int, budget: int | None, path: Path) -> None:
    """Bad input is told before anything long begins."""
    check_plotting(path, "--selection_map")
    if budget is None:
        raise ValueError("--selection_map draws the pages that are chosen: set --page_budget too")
    if not 0 <= layer < num_layers:
        raise ValueError(f"--selection_layer is {layer}; the model has layers 0 to {num_layers - 1}")


def text_ids(tokenizer: Any, context: int, dataset: str = STDLIB) -> Tensor:
    """[1, T] tokens of a text, by default the source of Python's standard library."""
    split = load(dataset, max_length=context, tokenizer=tokenizer, num_train=1, num_held_out=0)
    return split.train[0]["input_ids"][None]


def draw(selection: Selection, path: Path) -> Path:
    """Writes the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shades = torch.where(selection.chosen_NP, 1.0, torch.where(selection.own_NP, 0.2, 0.0))
    num_tiles, num_pages = shades.shape
    pooled = torch.nn.functional.adaptive_max_pool2d(
        shades[None], (min(num_tiles, MOST_CELLS), min(num_pages, MOST_CELLS))
    )
    figure = Figure(figsize=(9, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(pooled[0], cmap="magma_r", aspect="auto", extent=(0, num_pages, num_tiles, 0), interpolation="nearest")
    axes.set_xlabel(f"pages of {selection.page_size} tokens")
    axes.set_ylabel(f"tiles of {TILE_SIZE} queries")
    axes.set_title(
        f"layer {selection.layer}: dark, the {selection.budget} pages that a tile reads; light, its own chunk"
    )
    figure.savefig(path)
    return path
