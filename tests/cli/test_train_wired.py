"""Test `oomb train` with conversations, needles, samples and the report."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command import invoke
from tokenizer import save_chats

from oomb.cli.train.before_after import BeforeAfterEval
from oomb.cli.train.settings import TrainSettings
from oomb.data.dataset import load


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(Path(argparse.__file__).read_text())
    return tmp_path


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_conversations_of_different_lengths(here: Path) -> None:
    save_chats(9)
    result = invoke(
        "train", "--model", "model", "--dataset", "chats.jsonl", "--max_length", "512", "--chunk_size", "32",
        "--per_device_train_batch_size", "2", "--device", "cpu", "--output_dir", "out", "--sample_tokens", "0",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    steps = [event for event in records(here / "out") if event["event"] == "step"]
    # Eight conversations, two per step; padding does not count as tokens.
    assert len(steps) == 4
    assert len({step["tokens"] for step in steps}) > 1 and all(step["tokens"] < 2 * 512 for step in steps)
    assert not any(step["loss"] != step["loss"] for step in steps)

    Path("chats.jsonl").write_text('{"messages": 5}\n')
    refused = invoke("train", "--model", "model", "--dataset", "chats.jsonl", "--device", "cpu")
    assert refused.exit_code == 2
    assert "chats.jsonl:1: " in refused.output


def test_needles_samples_and_the_report(here: Path) -> None:
    run = [
        "train", "--dataset", "text.txt", "--max_length", "1K", "--chunk_size", "512", "--max_steps", "2",
        "--device", "cpu", "--output_dir", "out",
    ]  # fmt: skip
    probe = ["--needle_depths", "3", "--needle_candidates", "2", "--needle_haystacks", "1"]
    result = invoke(*run, "--needle_lengths", "2K", *probe, "--sample_tokens", "8")
    assert result.exit_code == 0, result.output
    events = records(here / "out")
    for kind in ("eval", "sample"):
        assert [event["when"] for event in events if event["event"] == kind] == ["before", "after"]
    assert re.search(r"needles found before training: \d+% \(chance 50%\), written exactly \d+%, gain", result.output)
    assert "needles found after training: " in result.output
    asked = [event["needle"] for event in events if event["event"] == "eval"]
    assert [(found["count"], found["chance"], found["settings"]["num_depths"]) for found in asked] == [(3, 0.5, 3)] * 2
    assert "out/report.html" in result.output
    assert "<svg" in (here / "out" / "report.html").read_text()
    # A text too short for them is refused before anything is loaded.
    refused = invoke(*run[:-1], "other", "--needle_lengths", "1M")
    assert refused.exit_code == 2
    assert "a haystack of 1,048,576" in refused.output
    assert not (here / "other").exists()
    few = invoke(*run[:-1], "other", "--needle_lengths", "2K", "--needle_candidates", "1")
    assert few.exit_code == 2 and "--needle_candidates is 1; it must be 2 or more" in few.output


def test_needles_are_hidden_in_text_that_is_never_trained_on(here: Path) -> None:
    split = load("text.txt", max_length=2048, num_train=3, num_held_out=2)
    assert split.held_out is not None
    probe = BeforeAfterEval(TrainSettings(needle_lengths="2K,4K", needle_haystacks=2, max_length=2048), split, None)
    held_out = torch.cat([split.held_out[index]["input_ids"] for index in range(2)])
    for haystack in probe.haystacks:
        text = held_out[:2048] if haystack is probe.haystacks[0] else held_out[-haystack.length :]
        assert torch.equal(haystack.control_T[:1500], text[:1500])
    # If there is too little held-out text, training text follows.
    longer = BeforeAfterEval(TrainSettings(needle_lengths="6K", needle_haystacks=1, max_length=2048), split, None)
    assert torch.equal(longer.haystacks[0].control_T[4096:5000], split.train[0]["input_ids"][:904])
