"""Say how many ranks share what, as in `dp=2,sp=4`. `oomb --help` reads this module, so it must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

PLANNED = ("pp", "tp", "ep", "fsdp", "cp")
"""Other kinds of parallelism that users may ask for."""


class TopologyError(ValueError):
    """The ranks cannot work together as asked."""


@dataclass(frozen=True)
class Topology:
    """How ranks share the work.

    Examples:
        >>> from oomb.distributed.topology import Topology
        >>> Topology.parse("sp=4").num_replicas(8)
        2
    """

    dp: int | None = None
    """Ranks, or groups of `sp` ranks, that train on different examples. None: as many as there are."""
    sp: int = 1
    """Ranks that share each example."""

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Return the topology that a text such as "dp=2,sp=4" describes; "auto" is data parallelism over all ranks.

        Raises:
            TopologyError: The text is wrong.
        """
        if text == "auto":
            return cls()
        found: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if name in PLANNED:
                raise TopologyError(f"{part.strip()} is not supported: use dp=N and sp=N, or auto")
            if name not in ("dp", "sp") or name in found or not size.isdecimal() or int(size) < 1:
                raise TopologyError(f"is {text!r}; use dp=N, sp=N or both, such as sp=4 or dp=2,sp=4, or auto")
            found[name] = int(size)
        return cls(**found)

    def num_replicas(self, world_size: int) -> int:
        """Return how many examples are trained on at once, given the number of ranks.

        Raises:
            TopologyError: That number of ranks does not fit.
        """
        if world_size % self.sp or self.dp not in (None, world_size // self.sp):
            needed = f"{self.dp * self.sp:,}" if self.dp is not None else f"a multiple of {self.sp:,}"
            raise TopologyError(f"{self} needs {needed} processes, but {world_size:,} are running")
        return world_size // self.sp

    def __str__(self) -> str:
        parts = [] if self.dp is None else [f"dp={self.dp}"]
        return ",".join([*parts, *([f"sp={self.sp}"] if self.sp > 1 else [])]) or "auto"
