"""Check that ranks hold the same model, and start them from the same weights."""

from __future__ import annotations

import torch

from oomb.distributed.collectives import Group, TopologyError, require_same
from oomb.distributed.mesh import versions
from oomb.models.causal_lm import CausalLM
from oomb.models.state import checksums


def match_replicas(model: CausalLM, group: Group) -> None:
    """Give all ranks the trained weights of the first one, such as new adapters.

    Raises:
        TopologyError: The model, its frozen weights or package versions differ between ranks.
    """
    if group.size == 1:
        return
    named = list(model.lm.named_parameters())
    layout = {name: f"{tuple(p.shape)}, {p.dtype}, trained: {p.requires_grad}" for name, p in named}
    require_same(group, "package", versions())
    require_same(group, "parameter", layout)
    everywhere = group.gather([sum(int(parts.sum()) for parts in checksums([p]).values()) for _, p in named])
    for (name, parameter), found in zip(named, zip(*everywhere, strict=True), strict=True):
        if len(set(found)) == 1:
            continue
        if not parameter.requires_grad:
            rank = next(rank for rank, number in enumerate(found) if number != found[0])
            raise TopologyError(
                f"the frozen parameter {name} differs between rank {rank} and rank 0: load the same model on all ranks"
            )
        with torch.no_grad():
            group.broadcast_(parameter.data)
