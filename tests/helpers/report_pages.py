"""Helpers for tests of the report: the events of a run, an HTML parser, a browser."""

from __future__ import annotations

import html
import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from browser import browse, find_browser

__all__ = ["browse", "find_browser"]

GIB = 1 << 30
EVIL = '<script>alert("x")</script>&\'"><img src=x onerror=alert(1)>'
VOID = {"meta", "link", "br", "img", "input", "hr"}


def start(**changes: Any) -> dict[str, Any]:
    settings = {"model_name_or_path": "owner/model", "dataset": "books/", "max_length": 131072, "max_steps": 30}
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "device": "auto", "seed": 1}
    gpu = {"name": "NVIDIA H200", "memory_gib": 139.8, "count": 1}
    machine = {"cpu": "a CPU", "ram_gib": 200.0, "gpu": gpu, "versions": {"torch": "2.13.0"}, "commit": "abc"}
    engine = {"chunk_size": 8192, "gpu_memory": "20GiB", "host_memory": "auto", "page_budget": None}
    return {"event": "start", "settings": settings | changes, "engine": engine, "machine": machine}


def step(number: int, loss: float | None = None) -> dict[str, Any]:
    loss = 1.5 + 2 * math.exp(-number / 8) + 0.1 * math.sin(3 * number) if loss is None else loss
    time = 30 + 2 * math.sin(number)
    return {
        "event": "step", "step": number, "loss": loss, "grad_norm": 1 + 3 / number,
        "learning_rate": 1e-5 * (31 - number), "step_s": time,
        "tokens_per_s": round(262144 / time, 1), "peak_memory_bytes": (60 + number / 10) * GIB,
        "gpu_page_bytes": 18 * GIB, "host_page_bytes": 70 * GIB, "loaded_bytes": 300 * GIB, "stored_bytes": 110 * GIB,
        "waited_s": 0.05 + 0.01 * (number % 3),
    }  # fmt: skip


def evaluation(when: str, shift: float) -> dict[str, Any]:
    edges = [0, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
    buckets = [
        {
            "start": a,
            "end": b,
            "count": b - a,
            "loss": 2.5 + shift - 0.05 * i,
            "standard_error": 0.02,
            "perplexity": 9.0,
        }
        for i, (a, b) in enumerate(pairwise(edges))
    ]
    cells = [
        {"length": length, "depth": depth, "accuracy": min(1.0, 0.25 + (0.5 if when == "after" else 0.0) * depth)}
        for length in (4096, 131072)
        for depth in (0.1, 0.5, 0.9)
    ]
    needle: dict[str, Any] = {
        "accuracy": 0.25 if when == "before" else 0.875,
        "chance": 0.25,
        "gain": 1.5,
        "cells": cells,
    }
    needle["lengths"] = [{"length": length, "accuracy": needle["accuracy"]} for length in (4096, 16384, 131072)]
    return {"event": "eval", "when": when, "step": 0, "perplexity": {"buckets": buckets}, "needle": needle}


def whole_run() -> list[dict[str, Any]]:
    """A run of 30 steps that was killed after step 22, resumed from 20, and finished."""
    first = [start(), {"event": "held_out", "step": 0, "loss": 3.6}, evaluation("before", 0.5)]
    first += [{"event": "sample", "when": "before", "step": 0, "prompt": "Once", "text": f" upon {EVIL}"}]
    first += [step(n) for n in range(1, 23)]
    second = [start(resume_from_checkpoint="checkpoint-20"), {"event": "held_out", "step": 20, "loss": 2.0}]
    second += [evaluation("before", 0.1), *(step(n, loss=1.0 + n / 100) for n in range(21, 31))]
    second += [{"event": "held_out", "step": 30, "loss": 1.75}, evaluation("after", 0.0)]
    second += [{"event": "sample", "when": "after", "step": 30, "prompt": "Once", "text": " upon a time\x00\x07"}]
    return [*first, *second, {"event": "end", "stopped": False, "steps": 30, "wall_s": 400.0}]


def compared() -> dict[str, Any]:
    """The output of `oomb demo`; standard training did not fit at the longest context."""
    rows = []
    for i, context in enumerate((2048, 4096, 8192, 16384)):
        oomb = {"seconds": 0.6 * 3**i, "peak_bytes": (36 + 10 * i) << 20, "loss": 5.7, "problem": None}
        standard = {"seconds": 2.0 * 3**i, "peak_bytes": 52 * 2**i << 20, "loss": 5.7, "problem": None}
        rows.append({"context": context, "standard": standard, "oomb": oomb, "grad_difference": (i + 1) * 1e-7})
    failed = {"seconds": None, "peak_bytes": None, "loss": None, "problem": "skipped: needs about 0.41 GiB"}
    rows[-1] |= {"standard": failed, "grad_difference": None}
    settings = {"chunk_size": 1024, "dtype": "float32", "device": "cpu", "tolerance": 1e-3}
    return {"model": "runs/demo/model", "settings": settings, "machine": {"cpu": "a CPU"}, "rows": rows}


def write_run(folder: Path, events: list[Any], tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return folder


class Tree(HTMLParser):
    """Parser of a page. `elements` have a tag, attributes, text and ancestors. Mismatched tags fail an assertion."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[dict[str, Any]] = []
        self._open: list[dict[str, Any]] = []
        self.feed(page)
        self.close()
        assert not self._open, [element["tag"] for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        inside = [element["tag"] for element in self._open]
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} repeats an attribute"
        element = {"tag": tag, "text": "", "inside": inside, "parents": list(self._open), **dict(attrs)}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1]["tag"] == tag, f"</{tag}> where {self._open[-1:]} is open"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element["text"] += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, Any]]:
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [e for e in self.elements if e["tag"] == tag and all(e.get(k) == v for k, v in wanted.items())]

    def paths(self, chart: str) -> dict[str, list[tuple[float, float]]]:
        """Return the points of each series of a chart."""
        found = {}
        for path in self.all("path"):
            if any(parent.get("id") == f"chart-{chart}" for parent in path["parents"]):
                found[path["data-name"]] = points(path["d"])
        return found


def points(d: str) -> list[tuple[float, float]]:
    assert re.fullmatch(r"([ML]-?\d+\.\d -?\d+\.\d)*", d), d[:80]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", d)]


WIDTHS = (1000, 390)
"""Widths of a laptop window and of a phone."""

MEASURE = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, root = page.documentElement, left = frame.getBoundingClientRect().left;
    const look = (element) => {
      const box = element.getBoundingClientRect();
      return {x: box.x + left, y: box.y, width: box.width, height: box.height};
    };
    return {
      width: root.scrollWidth, height: Math.ceil(page.body.getBoundingClientRect().bottom), visible: root.clientWidth,
      headings: [...page.querySelectorAll("h2")].map((h) => h.textContent),
      charts: [...page.querySelectorAll("figure")].map((figure) => ({
        id: figure.id, ...look(figure.querySelector("svg")),
        paths: [...figure.querySelectorAll("path")].map((path) => ({
          name: path.dataset.name, kind: path.getAttribute("class"), d: path.getAttribute("d"),
          color: getComputedStyle(path).getPropertyValue("--c"), length: path.getTotalLength(),
        })),
      })),
      texts: [...page.querySelectorAll("svg text")].map((text) => look(text).height),
    };
  });
  document.getElementById("found").textContent = JSON.stringify(found);
});
"""


def side_by_side(page: str) -> str:
    """Return a document that shows and measures the page at each of WIDTHS."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="border:0;width:{width}px;height:9000px;float:left"></iframe>'
        for width in WIDTHS
    )
    head = '<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">'
    return f'{head}<body style="margin:0">{frames}<pre id="found" hidden></pre><script>{MEASURE}</script>'


def measured(dom: str) -> list[dict[str, Any]]:
    found = re.search(r'<pre id="found"[^>]*>(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-500:]
    return json.loads(html.unescape(found[1]))


def is_near(image: np.ndarray, x: float, y: float, color: str, reach: int = 2) -> bool:
    """Return whether a pixel near (x, y) has about this color. A thin line on a phone is half paper."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    row, column = round(y), round(x)
    part = image[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1, :3]
    return bool((np.abs(part.astype(int) - rgb).max(-1) < 100).any())
