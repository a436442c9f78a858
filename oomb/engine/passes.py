"""The algorithm."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor

from oomb.attention.chunk import ChunkAttention, Spec, attend
from oomb.attention.sparse import ChosenPast
from oomb.engine.allocator import Wanted
from oomb.engine.batch import Batch
from oomb.engine.grads import collecting
from oomb.memory.store import PageStore
from oomb.models.hooks import callers_autocast, one_at_a_time
from oomb.models.state import ModelState
from oomb.planner.request import Placement

if TYPE_CHECKING:
    from oomb.engine.engine import Engine

RECOMPILE_LIMIT = 64
"""Layers are compiled anew for every batch size, in both passes; PyTorch's limit of 8 would stop at the fifth size."""


class Count:
    """Chunks of all sequences of a call: how many there are, and how many of them each pass has done."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done: Counter[str] = Counter()


class ChunkedLogProbs(torch.autograd.Function):
    """Joins the passes: forward fills, backward walks back. Parameters get their gradients from the backward calls
    nested inside, as with reentrant checkpointing; the anchor only makes autograd call us."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, sequence: Sequence) -> Tensor:
        ctx.sequence = sequence
        return sequence.fill()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlogp_BT: Tensor) -> tuple[None, None]:
        ctx.sequence.walk_back(dlogp_BT)
        return None, None


class Sequence:
    """A batch of sequences on its way through the passes, with the pages that live in between."""

    def __init__(self, engine: Engine, batch: Batch, trains: bool, state: ModelState) -> None:
        self.engine, self.config, self.model = engine, engine.config, engine.model
        self.batch, self.trains = batch, trains
        self.bounds = batch.chunks(self.config.chunk_size)
        self.count = Count(len(self.bounds))
        self.is_only = True
        """Of a call's sequences."""
        self.is_last = True
        """Of those of a call: it is filled last, and its backward comes first."""
        self.index, (self.start, self.end) = 0, self.bounds[0]
        self.is_random = self.model.draws_random_numbers()
        self.seed: int | None = None
        self.draws: dict[int, int | None] = {}
        """Where each chunk of the fill pass left the random numbers; None where it drew none."""
        self.autocast = callers_autocast(self.model.device.type)
        self.model_state = state
        self.store: PageStore | None = None
        self.checkpoint_layers = self.may_keep_last_chunk = False
        self.kept_attention: dict[int, tuple[Tensor, Tensor]] = {}
        """Output and lse of attention of the current chunk, by layer, where a layer will ask for them again."""
        self.last_hidden: Tensor | None = None
        self.is_walked = False

    def look_at_layers(self) -> None:
        """Send one token through the model, which shows the shapes of its layers."""
        with self._running(), self._random_numbers_untouched():
            self.engine.budget.layer_shapes()

    def open(self) -> Placement:
        """Decides what is kept and where, and takes the memory for it: all of it or none."""
        with self._running(), self._random_numbers_untouched():
            placement, self.store = self.engine.budget.open(
                Wanted(
                    batch_size=len(self.batch.ids),
                    length=self.bounds[-1][1],
                    longest=self.batch.longest,
                    trains=self.trains,
                    fused=self.engine.fuse,
                    float32_sums=self.engine.sums_in_float32,
                    is_only=self.is_only,
                )
            )
        self.checkpoint_layers = placement.checkpoint_layers
        self.may_keep_last_chunk = placement.keep_last_chunk
        return placement

    def close(self) -> None:
        """Gives all memory back."""
        with one_at_a_time:
            if self.store is not None:
                self.store.close()
        self.last_hidden = None
        self.kept_attention.clear()

    def fill(self) -> Tensor:
        """Fill pass. Returns log-probabilities [B, T] of the targets."""
        last, logp = len(self.bounds) - 1, []
        self.open()
        assert self.store is not None
        # Gradients at rest are rounded at random: anew for other tokens, and alike for the same.
        self.store.seed = crc32(self.batch.ids.numpy().tobytes())
        # Dropout must fall alike in both passes, so every chunk draws from a seed of its own.
        self.seed = int(torch.randint(2**62, ())) if self.is_random else None
        try:
            with self._running():
                for index in self._walk("fill", range(last + 1)):
                    keep = self.trains and index == last and self._keeps_last_chunk()
                    hidden = self._hidden(grad=keep)
                    if keep:
                        self.last_hidden, self.engine.keeper = hidden, weakref.ref(self)
                    logp.append(self.engine.head.logprobs(hidden, self._targets(), self._is_fused()))
                self.engine.budget.tiers.leave()
        except BaseException:
            self.close()
            raise
        if not self.trains:
            self.close()
        missing = self.batch.ids.shape[1] - self.bounds[last][1]
        return torch.cat([*logp, logp[0].new_zeros(len(self.batch.ids), missing)], dim=1)

    def walk_back(self, dlogp_BT: Tensor) -> None:
        """Gradient pass. `dlogp` is the loss's derivative by what `fill` returned."""
        if self.is_walked:
            raise RuntimeError(
                "backward ran a second time, but the pages of this sequence are freed: compute the loss again"
            )
        self.is_walked = True
        assert self.store is not None
        try:
            float32_sums, seed = self.engine.sums_in_float32, self.store.seed
            with self._running(with_sums=True), collecting(self.model.parameters(), float32_sums, seed):
                for _ in self._walk("gradient", reversed(range(len(self.bounds)))):
                    hidden, self.last_hidden = self.last_hidden, None
                    if hidden is None:
                        hidden = self._hidden(grad=True, goes_back=True)
                    dlogp = dlogp_BT[:, self.start : self.end]
                    dhidden = self.engine.head.backward(hidden, self._targets(), dlogp, self._is_fused())
                    if hidden.requires_grad:
                        self.store.expect_backward(self.start, self._own_end(), kept=self.checkpoint_layers)
                        # Autograd computes parts of the chunk again where a layer is checkpointed, by us or by users.
                        with self.model.computing():
                            torch.autograd.backward(hidden, dhidden)
                    self.kept_attention.clear()
                    self.store.cut(self.start)
            self.engine.budget.note_gradients()
        finally:
            self.close()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of one layer of the current chunk; the model calls this through the attention interface."""
        assert self.store is not None
        self.model.note_attention(layer, window)
        past = self.store.past(layer, self.start, self._own_end())
        spec = Spec(
            scale=scale,
            window=window,
            softcap=softcap,
            kernels=self.config.kernels,
            rule=self.config.page_rule,
            cuts=self.batch.cuts(self.start, self.end),
        )
        if not torch.is_grad_enabled():
            out, lse = attend(q, k, v, sinks, past, spec)
            if self.engine.watch is not None and isinstance(past, ChosenPast) and past.choice is not None:
                self.engine.watch(layer, self.start, past.choice)
            self.store.append(layer, self.start, k, v)
            self.store.keep(layer, self.start, out, lse)
            return out
        # Taken out: autograd makes the tensor that it is handed part of the graph, which would live on with it.
        kept = self.kept_attention.pop(layer, None) or self.store.kept(layer, self.start, self.end)
        out, lse = ChunkAttention.apply(q, k, v, sinks, past, spec, kept)
        if self.checkpoint_layers and kept is None:
            # The layer will run again in its backward; the costly part of it need not.
            self.kept_attention[layer] = (out.detach(), lse)
        return out

    def _walk(self, phase: str, order: Iterable[int]) -> Iterator[int]:
        """Makes one chunk after the other the current one, and reports each when it is done."""
        for index in order:
            self.index, (self.start, self.end) = index, self.bounds[index]
            yield index
            self.count.done[phase] += 1
            if self.engine.progress is not None:
                self.engine.progress(phase, self.count.done[phase], self.count.total)

    def _hidden(self, grad: bool, goes_back: bool = False) -> Tensor:
        """Last hidden states [B, T, D] of the current chunk, with a graph or not; `goes_back`: which is walked back
        next."""
        seeded = None
        if self.seed is not None:
            torch.manual_seed(self.seed + self.index)
            seeded = self._random_state()
        ids = self.batch.ids[:, self.start : self.end].to(self.model.device, non_blocking=True)
        checkpointed = grad and self.checkpoint_layers
        assert self.store is not None
        kept_behind = self.checkpoint_layers if goes_back else None
        self.store.expect_forward(self.start, self._own_end(), kept=grad, kept_behind=kept_behind)
        layer_calls = self.model.layer_calls(compiled=self._is_fused(), checkpointed=checkpointed)
        with layer_calls, torch.set_grad_enabled(grad):
            hidden = self.model.hidden(ids, self.batch.positions(self.start, self.end, ids.device))
        if self.trains and seeded is not None:
            self._note_draws(seeded)
        return hidden

    def _note_draws(self, seeded: int) -> None:
        """Note where the chunk's random numbers end, or raise if they ended elsewhere in the fill pass. Threads share
        PyTorch's generator: one that drew from it in between has spoilt one of the two forwards, unless these draw
        nothing themselves, which one that ends where it began shows."""
        end = self._random_state()
        now = None if end == seeded else end
        before = self.draws.setdefault(self.index, now)
        if before is not None and now is not None and before != now:
            raise RuntimeError(
                f"chunk {self.index} drew other random numbers in the gradient pass than in the fill pass, so dropout "
                "is not replayed: does another thread draw from PyTorch's default generator? Give it a torch.Generator "
                "of its own"
            )

    def _random_state(self) -> int:
        device = self.model.device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return crc32(state.numpy().tobytes())

    def _own_end(self) -> int:
        """Where the document ends that the chunk begins with: only that has a past."""
        cuts = self.batch.cuts(self.start, self.end)
        return self.start + cuts[0] if cuts else self.end

    def _targets(self) -> Tensor:
        return self.batch.targets[:, self.start : self.end]

    def _is_fused(self) -> bool:
        """Compiled code serves full chunks; a short last one is not worth a compilation."""
        return self.engine.fuse and self.end - self.start == self.config.chunk_size

    def _keeps_last_chunk(self) -> bool:
        other = self.engine.keeper() if self.engine.keeper is not None else None
        is_free = other is None or other.last_hidden is None
        # Kept by an earlier one, they would lie beside those of all that are walked back before it.
        return self.may_keep_last_chunk and ((is_free and self.is_last) or self.config.keep_last_chunk is True)

    @contextmanager
    def _running(self, *, with_sums: bool = False) -> Iterator[None]:
        """The model's attention comes to us, under the caller's autocast, and random numbers leave no trace."""
        with ExitStack() as stack:
            running = self.model.running(self, self.batch.longest, self.model_state, with_sums=with_sums)
            stack.enter_context(running)
            stack.enter_context(self.autocast)
            if self.seed is not None:
                stack.enter_context(self._random_numbers_untouched())
            if self.engine.fuse:
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT))
            yield

    def _random_numbers_untouched(self) -> AbstractContextManager[None]:
        device = self.model.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])
