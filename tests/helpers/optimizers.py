"""Small networks and optimizer settings for tests of OffloadedAdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomb.engine import optim_state

STEPS = 20


FORMS: list[dict[str, Any]] = [
    {},
    {"state_dtype": "bfloat16"},
    {"state_dtype": "8bit"},
    {"master_weights": True},
    {"state_dtype": "8bit", "master_weights": True},
]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several blocks per parameter, the last one of an odd size."""
    monkeypatch.setattr(optim_state, "BLOCK_SIZE", 512)


class Net(nn.Module):
    """A network with parameters of odd sizes: one transposed in memory, one without gradient, one empty."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(33, 57, generator=generator) / 6)
        self.bias = nn.Parameter(torch.zeros(57))
        self.second = nn.Parameter((torch.randn(7, 57, generator=generator) / 8).T)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(300))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first + self.bias) @ self.second * self.gain + self.none.sum()


def net(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Net:
    return Net().to(device, dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    parameter = next(model.parameters())
    for step in steps:
        x = torch.randn(16, 33, generator=torch.Generator().manual_seed(step)).to(parameter)
        optimizer.zero_grad()
        (model(x) - x.mean(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def groups(model: Net) -> list[dict[str, Any]]:
    others = [model.bias, model.gain, model.unused, model.none]
    return [
        {"params": [model.first], "lr": 3e-3, "weight_decay": 0.1},
        {"params": [model.second], "betas": (0.8, 0.95), "eps": 1e-5},
        {"params": others, "weight_decay": 0.0},
    ]


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
