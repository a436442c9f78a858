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

from oomb.attention.chunk import AttentionSpec, ChunkAttention, attend
from oomb.attention.sparse import SparsePast
from oomb.engine.allocator import AllocationRequest
from oomb.engine.batch import Batch
from oomb.engine.grads import accumulate
from oomb.memory.store import PageStore
from oomb.models.hooks import current_autocast, engine_lock
from oomb.models.state import ModelState
from oomb.planner.request import Placement

if TYPE_CHECKING:
    from oomb.engine.engine import Engine

RECOMPILE_LIMIT = 64
"""Layers are compiled anew for every batch size, in both passes; PyTorch's limit of 8 would stop at the fifth size."""


class ChunkCounter:
    """Chunks of all sequences of a call: how many there are, and how many of them each pass has done."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done: Counter[str] = Counter()


class _ChunkedLogProbs(torch.autograd.Function):
    """Joins the passes: forward fills, backward walks back. Parameters get their gradients from the backward calls
    nested inside, as with reentrant checkpointing; the anchor only makes autograd call us."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, sequence: ChunkedForward) -> Tensor:
        ctx.sequence = sequence
        return sequence.fill()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlogp_BT: Tensor) -> tuple[None, None]:
        ctx.sequence.backward(dlogp_BT)
        return None, None


class ChunkedForward:
    """A batch of sequences on its way through the passes, with the pages that live in between."""

    def __init__(self, engine: Engine, batch: Batch, needs_grad: bool, state: ModelState) -> None:
        self.engine, self.config, self.model = engine, engine.config, engine.model
        self.batch, self.needs_grad = batch, needs_grad
        self.bounds = batch.chunks(self.config.chunk_size)
        self.counter = ChunkCounter(len(self.bounds))
        self.is_exclusive = True
        """Of a call's sequences."""
        self.is_last = True
        """Of those of a call: it is filled last, and its backward comes first."""
        self.index, (self.start, self.end) = 0, self.bounds[0]
        self.uses_rng = self.model.uses_rng()
        self.seed: int | None = None
        self.rng_checksums: dict[int, int | None] = {}
        """Where each chunk of the fill pass left the random numbers; None where it drew none."""
        self.autocast = current_autocast(self.model.device.type)
        self.model_state = state
        self.store: PageStore | None = None
        self.checkpoint_layers = self.can_keep_last_chunk = False
        self.saved_attention: dict[int, tuple[Tensor, Tensor]] = {}
        """Output and lse of attention of the current chunk, by layer, where a layer will ask for them again."""
        self.last_chunk_hidden: Tensor | None = None
        self.has_run_backward = False

    def probe_layers(self) -> None:
        """Send one token through the model, which shows the shapes of its layers."""
        with self._active(), self._preserve_rng():
            self.engine.allocator.layer_shapes()

    def allocate(self) -> Placement:
        """Decides what is kept and where, and takes the memory for it: all of it or none."""
        with self._active(), self._preserve_rng():
            placement, self.store = self.engine.allocator.allocate(
                AllocationRequest(
                    batch_size=len(self.batch.ids),
                    length=self.bounds[-1][1],
                    longest=self.batch.longest_document,
                    needs_grad=self.needs_grad,
                    fused=self.engine.fuse,
                    float32_sums=self.engine.sums_grads_in_float32,
                    is_exclusive=self.is_exclusive,
                )
            )
        self.checkpoint_layers = placement.checkpoint_layers
        self.can_keep_last_chunk = placement.keep_last_chunk
        return placement

    def close(self) -> None:
        """Gives all memory back."""
        with engine_lock:
            if self.store is not None:
                self.store.close()
        self.last_chunk_hidden = None
        self.saved_attention.clear()

    def fill(self) -> Tensor:
        """Fill pass. Returns log-probabilities [B, T] of the targets."""
        last, logp = len(self.bounds) - 1, []
        self.allocate()
        assert self.store is not None
        # Gradients at rest are rounded at random: anew for other tokens, and alike for the same.
        self.store.seed = crc32(self.batch.ids.numpy().tobytes())
        # Dropout must fall alike in both passes, so every chunk draws from a seed of its own.
        self.seed = int(torch.randint(2**62, ())) if self.uses_rng else None
        try:
            with self._active():
                for index in self._chunks("fill", range(last + 1)):
                    keep = self.needs_grad and index == last and self._should_keep_last_chunk()
                    hidden = self._hidden(grad=keep)
                    if keep:
                        self.last_chunk_hidden, self.engine._last_chunk_owner = hidden, weakref.ref(self)
                    logp.append(self.engine.head.logprobs(hidden, self._targets(), self._is_fused()))
                self.engine.allocator.tiers.end_pass()
        except BaseException:
            self.close()
            raise
        if not self.needs_grad:
            self.close()
        missing = self.batch.ids.shape[1] - self.bounds[last][1]
        return torch.cat([*logp, logp[0].new_zeros(len(self.batch.ids), missing)], dim=1)

    def backward(self, dlogp_BT: Tensor) -> None:
        """Gradient pass. `dlogp` is the loss's derivative by what `fill` returned."""
        if self.has_run_backward:
            raise RuntimeError(
                "backward ran a second time, but the pages of this sequence are freed: compute the loss again"
            )
        self.has_run_backward = True
        assert self.store is not None
        try:
            float32_sums, seed = self.engine.sums_grads_in_float32, self.store.seed
            with self._active(with_sums=True), accumulate(self.model.parameters(), float32_sums, seed):
                for _ in self._chunks("gradient", reversed(range(len(self.bounds)))):
                    hidden, self.last_chunk_hidden = self.last_chunk_hidden, None
                    if hidden is None:
                        hidden = self._hidden(grad=True, goes_back=True)
                    dlogp = dlogp_BT[:, self.start : self.end]
                    dhidden = self.engine.head.backward(hidden, self._targets(), dlogp, self._is_fused())
                    if hidden.requires_grad:
                        self.store.prefetch_backward(
                            self.start, self._first_document_end(), kept=self.checkpoint_layers
                        )
                        # Autograd computes parts of the chunk again where a layer is checkpointed, by us or by users.
                        with self.model.computing():
                            torch.autograd.backward(hidden, dhidden)
                    self.saved_attention.clear()
                    self.store.free_from(self.start)
            self.engine.allocator.after_backward()
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
        self.model.count_attention(layer, window)
        past = self.store.past(layer, self.start, self._first_document_end())
        spec = AttentionSpec(
            scale=scale,
            window=window,
            softcap=softcap,
            kernels=self.config.kernels,
            rule=self.config.page_rule,
            document_starts=self.batch.document_starts(self.start, self.end),
        )
        if not torch.is_grad_enabled():
            out, lse = attend(q, k, v, sinks, past, spec)
            if self.engine.on_selection is not None and isinstance(past, SparsePast) and past.selection is not None:
                self.engine.on_selection(layer, self.start, past.selection)
            self.store.append(layer, self.start, k, v)
            self.store.save_output(layer, self.start, out, lse)
            return out
        # Taken out: autograd makes the tensor that it is handed part of the graph, which would live on with it.
        kept = self.saved_attention.pop(layer, None) or self.store.load_output(layer, self.start, self.end)
        out, lse = ChunkAttention.apply(q, k, v, sinks, past, spec, kept)
        if self.checkpoint_layers and kept is None:
            # The layer will run again in its backward; the costly part of it need not.
            self.saved_attention[layer] = (out.detach(), lse)
        return out

    def _chunks(self, phase: str, order: Iterable[int]) -> Iterator[int]:
        """Makes one chunk after the other the current one, and reports each when it is done."""
        for index in order:
            self.index, (self.start, self.end) = index, self.bounds[index]
            yield index
            self.counter.done[phase] += 1
            if self.engine.progress is not None:
                self.engine.progress(phase, self.counter.done[phase], self.counter.total)

    def _hidden(self, grad: bool, goes_back: bool = False) -> Tensor:
        """Last hidden states [B, T, D] of the current chunk, with a graph or not; `goes_back`: which is walked back
        next."""
        seeded = None
        if self.seed is not None:
            torch.manual_seed(self.seed + self.index)
            seeded = self._rng_checksum()
        ids = self.batch.ids[:, self.start : self.end].to(self.model.device, non_blocking=True)
        checkpointed = grad and self.checkpoint_layers
        assert self.store is not None
        kept_behind = self.checkpoint_layers if goes_back else None
        self.store.prefetch_forward(self.start, self._first_document_end(), kept=grad, kept_behind=kept_behind)
        layer_calls = self.model.wrap_layers(compiled=self._is_fused(), checkpointed=checkpointed)
        with layer_calls, torch.set_grad_enabled(grad):
            hidden = self.model.hidden(ids, self.batch.positions(self.start, self.end, ids.device))
        if self.needs_grad and seeded is not None:
            self._check_rng_replay(seeded)
        return hidden

    def _check_rng_replay(self, seeded: int) -> None:
        """Note where the chunk's random numbers end, or raise if they ended elsewhere in the fill pass. Threads share
        PyTorch's generator: one that drew from it in between has spoilt one of the two forwards, unless these draw
        nothing themselves, which one that ends where it began shows."""
        end = self._rng_checksum()
        now = None if end == seeded else end
        before = self.rng_checksums.setdefault(self.index, now)
        if before is not None and now is not None and before != now:
            raise RuntimeError(
                f"chunk {self.index} drew other random numbers in the gradient pass than in the fill pass, so dropout "
                "is not replayed: does another thread draw from PyTorch's default generator? Give it a torch.Generator "
                "of its own"
            )

    def _rng_checksum(self) -> int:
        device = self.model.device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return crc32(state.numpy().tobytes())

    def _first_document_end(self) -> int:
        """Where the document ends that the chunk begins with: only that has a past."""
        cuts = self.batch.document_starts(self.start, self.end)
        return self.start + cuts[0] if cuts else self.end

    def _targets(self) -> Tensor:
        return self.batch.targets[:, self.start : self.end]

    def _is_fused(self) -> bool:
        """Compiled code serves full chunks; a short last one is not worth a compilation."""
        return self.engine.fuse and self.end - self.start == self.config.chunk_size

    def _should_keep_last_chunk(self) -> bool:
        other = self.engine._last_chunk_owner() if self.engine._last_chunk_owner is not None else None
        is_free = other is None or other.last_chunk_hidden is None
        # Kept by an earlier one, they would lie beside those of all that are walked back before it.
        return self.can_keep_last_chunk and ((is_free and self.is_last) or self.config.keep_last_chunk is True)

    @contextmanager
    def _active(self, *, with_sums: bool = False) -> Iterator[None]:
        """The model's attention comes to us, under the caller's autocast, and random numbers leave no trace."""
        with ExitStack() as stack:
            running = self.model.activate(self, self.batch.longest_document, self.model_state, with_sums=with_sums)
            stack.enter_context(running)
            stack.enter_context(self.autocast)
            if self.seed is not None:
                stack.enter_context(self._preserve_rng())
            if self.engine.fuse:
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT))
            yield

    def _preserve_rng(self) -> AbstractContextManager[None]:
        device = self.model.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])
