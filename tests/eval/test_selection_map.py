"""The plot of the pages that sparse attention reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import engine_for
from command import invoke
from families import build, random_ids

from oomb.eval import selection_map
from oomb.planner import placement


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (placement, selection_map):
        monkeypatch.setattr(module, "TILE_SIZE", 8)


def test_the_recorded_pages_are_those_read() -> None:
    engine = engine_for(build("llama"), 16, page_size=8, page_budget=2)
    found = selection_map.record(engine, random_ids(1, 70), layer=1)
    assert found.selected_NP.shape == (9, 9)
    # Tiles 2 and 3 belong to the second chunk, with two past pages; later chunks select two of more.
    assert found.selected_NP.sum(1).tolist() == [0, 0, 2, 2, 2, 2, 2, 2, 2]
    assert found.own_NP[2].nonzero().flatten().tolist() == [2, 3]
    assert not (found.selected_NP & found.own_NP).any()
    assert found.selected_NP[2:, 0].all(), "the first page"
    assert found.most_read[0] == (0, 1.0)


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    engine = engine_for(build("llama"), 16, page_size=8, page_budget=2)
    path = selection_map.draw(selection_map.record(engine, random_ids(1, 70)), tmp_path / "map.png")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_plots_it(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "map.png"
    few = ["--contexts", "1K", "--chunk_size", "256", "--page_size", "128", "--page_budget", "2", "--device", "cpu"]
    result = invoke("bench", "--model", "demo", *few, "--selection_map", str(path), "--selection_layer", "1")
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "layer 1: most read pages: 0" in output and f"written to {path}" in output
    # Four large areas: selected, own chunk, not read, and the background. Letters have far fewer pixels.
    colors = (image.imread(path)[..., :3] * 255).astype(int).reshape(-1, 3)
    found, counts = torch.tensor(colors).unique(dim=0, return_counts=True)
    assert (counts > 50_000).sum() == 4, (found, counts)


def test_selections_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="set --page_budget"):
        selection_map.record(engine_for(model, 16), random_ids(1, 70))
    engine = engine_for(model, 16, page_size=8, page_budget=2)
    with pytest.raises(ValueError, match="one chunk of 16"):
        selection_map.record(engine, random_ids(1, 16))
    with pytest.raises(ValueError, match="layer 9 selects no pages"):
        selection_map.record(engine, random_ids(1, 70), layer=9)
    windowed = engine_for(build("mistral_sliding"), 16, page_size=8, page_budget=2)
    with pytest.raises(ValueError, match="sliding window"):
        selection_map.record(windowed, random_ids(1, 70))


def test_text_of_the_standard_library() -> None:
    ids = selection_map.text_ids(None, 500)
    assert ids.shape == (1, 500) and ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--page_budget", "4", "--selection_map", "map.txt"], "--selection_map 'map.txt' is not a picture"),
        (["--selection_map", "map.png"], "set --page_budget too"),
        (["--page_budget", "4", "--selection_map", "map.png", "--selection_layer", "99"], "--selection_layer is 99"),
        (["--page_budget", "4", "--chunk_size", "1000"], "1024"),
        (["--page_budget", "0"], "it must be a number of pages"),
    ],
)
def test_bad_input_is_refused_before_loading_the_model(options: list[str], message: str) -> None:
    pytest.importorskip("matplotlib")
    result = invoke("bench", "--model", "demo", *options)
    assert result.exit_code == 2 and message in " ".join(result.output.split())
