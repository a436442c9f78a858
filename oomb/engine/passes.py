"""Run the two passes of chunk recurrence over a batch. This is the algorithm.

fill pass      Chunks in order, without a graph. Every layer attends to the pages of earlier chunks and to its own
               chunk, and appends its K and V to the pages. Nothing else of a chunk survives but the head's outputs,
               such as the log-probabilities of its targets.
gradient pass  Chunks in reverse. Recompute the chunk, now with a graph, and backpropagate. Its attention adds dK and dV
               to the gradient pages of earlier chunks, and adds to its own K and V what later chunks left in theirs.
               Parameter gradients accumulate in `.grad`. Then the pages of the chunk are freed.

When the gradient pass reaches a chunk, every later chunk has added its share to the chunk's gradient pages, so one
ordinary backward yields exact gradients. Activation memory is that of one chunk.

B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor

from oomb.attention.call import AttentionCall, AttentionSpec
from oomb.attention.chunk import ChunkAttention, attend
from oomb.attention.sparse import SparsePast
from oomb.engine.allocator import AllocationRequest
from oomb.engine.batch import Batch
from oomb.engine.grads import accumulate
from oomb.engine.head import Head
from oomb.memory.store import PageStore
from oomb.models.hooks import current_autocast, engine_lock
from oomb.models.state import ModelState
from oomb.planner.request import Placement

if TYPE_CHECKING:
    from oomb.engine.engine import Engine

RECOMPILE_LIMIT = 64
"""torch.compile compiles a layer once per batch size and pass; PyTorch's default limit of 8 stops at the fifth size."""

OnSelection = Callable[[int, int, Tensor], None]
"""Called with the layer, the start of the chunk and its selected pages [B, N, C]."""


class ChunkCounter:
    """Progress over the chunks of all batches of a call."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done: Counter[str] = Counter()
        """Chunks done, by pass."""


class _ChunkedOutputs(torch.autograd.Function):
    """The joint of the two passes: forward is the fill pass, backward the gradient pass.

    Parameters receive their gradients from the backward calls nested inside, as in reentrant checkpointing. The anchor
    only makes autograd call this function.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, chunked: ChunkedForward) -> tuple[Tensor, ...]:
        ctx.chunked = chunked
        ctx.set_materialize_grads(False)
        outputs = chunked.fill()
        head = chunked.head
        constant = [out for name, out in zip(head.fields, outputs, strict=True) if name in head.constant_fields]
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads_BT: Tensor | None) -> tuple[None, None]:
        ctx.chunked.backward(grads_BT)
        return None, None


class ChunkedForward:
    """One batch on its way through both passes, with the pages that live in between.

    Args:
        engine: the engine that runs the passes.
        batch: token ids and targets.
        head: what to compute from the last hidden states.
        needs_grad: whether a gradient pass will follow.
        state: the model's state, which both passes must see.
    """

    def __init__(self, engine: Engine, batch: Batch, head: Head, *, needs_grad: bool, state: ModelState) -> None:
        self.engine, self.config, self.model = engine, engine.config, engine.model
        self.batch, self.head, self.needs_grad = batch, head, needs_grad
        self.bounds = batch.chunks(self.config.chunk_size)
        self.counter = ChunkCounter(len(self.bounds))
        self.is_exclusive = True
        """Whether the call has no other batch."""
        self.is_last = True
        """Whether this batch is the last of its call: filled last, and first in the gradient pass."""
        self.on_selection: OnSelection | None = None
        self.index, (self.start, self.end) = 0, self.bounds[0]
        self.uses_rng = self.model.uses_rng()
        self.seed: int | None = None
        self.rng_checksums: dict[int, int | None] = {}
        """The random state after each chunk of the fill pass; None if the chunk drew no random numbers."""
        self.autocast = current_autocast(self.model.device.type)
        self.model_state = state
        self.store: PageStore | None = None
        self.checkpoint_layers = self.can_keep_last_chunk = False
        self.saved_attention: dict[int, tuple[Tensor, Tensor]] = {}
        """Attention output and LSE of the current chunk by layer, for layers that recompute themselves."""
        self.last_chunk_hidden: Tensor | None = None
        self.has_run_backward = False

    def fill(self) -> tuple[Tensor, ...]:
        """Run the fill pass. Return the fields of the head, each [B, T]."""
        self.allocate()
        assert self.store is not None
        # Seed stochastic rounding from the tokens: the same batch always rounds the same way.
        self.store.seed = crc32(self.batch.ids.numpy().tobytes())
        # Seed every chunk on its own, so that dropout is the same in both passes.
        self.seed = int(torch.randint(2**62, ())) if self.uses_rng else None
        outputs = []
        try:
            with self._active():
                for index in self._chunks("fill", range(len(self.bounds))):
                    keep = self.needs_grad and index == len(self.bounds) - 1 and self._should_keep_last_chunk()
                    hidden = self._hidden(grad=keep)
                    if keep:
                        self.last_chunk_hidden, self.engine._last_chunk_owner = hidden, weakref.ref(self)
                    outputs.append(self.head.forward(hidden, self._targets(), fused=self._is_fused()))
                self.engine.allocator.tiers.end_pass()
        except BaseException:
            self.close()
            raise
        if not self.needs_grad:
            self.close()
        num_rows, num_tokens = self.batch.ids.shape
        return tuple(
            torch.cat([*chunks, chunks[0].new_zeros(num_rows, num_tokens - self.bounds[-1][1])], dim=1)
            for chunks in zip(*outputs, strict=True)
        )

    def backward(self, grads_BT: Sequence[Tensor | None]) -> None:
        """Run the gradient pass, given the gradients of what `fill` returned."""
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
                        hidden = self._hidden(grad=True, runs_backward_next=True)
                    chunk_grads = [None if grad is None else grad[:, self.start : self.end] for grad in grads_BT]
                    dhidden = self.head.backward(hidden, self._targets(), chunk_grads, fused=self._is_fused())
                    if hidden.requires_grad:
                        self.store.prefetch_backward(self.start, self._first_span_end(), saved=self.checkpoint_layers)
                        # Autograd runs checkpointed layers again, and they call the model's attention.
                        with self.model.computing():
                            torch.autograd.backward(hidden, dhidden)
                    self.saved_attention.clear()
                    self.store.free_from(self.start)
            self.engine.allocator.after_backward()
        finally:
            self.close()

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output of one layer of the current chunk. The model calls this through its hooks."""
        assert self.store is not None
        self.model.count_attention(call.layer, call.window)
        layer, tensors = call.layer, (call.q, call.k, call.v, call.sinks)
        past = self.store.past(layer, self.start, self._first_span_end())
        spec = AttentionSpec(
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            kernels=self.config.kernels,
            rule=self.config.page_rule,
            spans=self.batch.spans(self.start, self.end),
        )
        if not torch.is_grad_enabled():
            out, lse = attend(*tensors, past, spec)
            if self.on_selection is not None and isinstance(past, SparsePast) and past.selection is not None:
                self.on_selection(layer, self.start, past.selection)
            self.store.append(layer, self.start, call.k, call.v)
            self.store.save_output(layer, self.start, out, lse)
            return out
        # Popped, because autograd makes this tensor part of the graph and would keep it alive.
        saved = self.saved_attention.pop(layer, None) or self.store.load_output(layer, self.start, self.end)
        out, lse = ChunkAttention.apply(*tensors, past, spec, saved)
        if self.checkpoint_layers and saved is None:
            # The layer runs again in its backward. Attention, its most expensive part, need not.
            self.saved_attention[layer] = (out.detach(), lse)
        return out

    def probe_layers(self) -> None:
        """Send one token through the model to learn the shapes of its layers."""
        with self._active(), self._preserve_rng():
            self.engine.allocator.layer_shapes()

    def allocate(self) -> Placement:
        """Decide what is kept and where, and take all of that memory or none."""
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
        """Give all memory back."""
        with engine_lock:
            if self.store is not None:
                self.store.close()
        self.last_chunk_hidden = None
        self.saved_attention.clear()

    def _chunks(self, phase: str, order: Iterable[int]) -> Iterator[int]:
        """Make one chunk after another the current one, and report each when it is done."""
        for index in order:
            self.index, (self.start, self.end) = index, self.bounds[index]
            yield index
            self.counter.done[phase] += 1
            if self.engine.progress is not None:
                self.engine.progress(phase, self.counter.done[phase], self.counter.total)

    def _hidden(self, grad: bool, runs_backward_next: bool = False) -> Tensor:
        """Return the last hidden states [B, T, D] of the current chunk, with a graph if `grad`.

        `runs_backward_next` lets the prefetcher continue with what the chunk's backward reads.
        """
        assert self.store is not None
        rng_start = None
        if self.seed is not None:
            torch.manual_seed(self.seed + self.index)
            rng_start = self._rng_checksum()
        ids = self.batch.ids[:, self.start : self.end].to(self.model.device, non_blocking=True)
        backward_saved = self.checkpoint_layers if runs_backward_next else None
        self.store.prefetch_forward(self.start, self._first_span_end(), saved=grad, backward_saved=backward_saved)
        layer_calls = self.model.wrap_layers(compiled=self._is_fused(), checkpointed=grad and self.checkpoint_layers)
        with layer_calls, torch.set_grad_enabled(grad):
            hidden = self.model.hidden(ids, self.batch.positions(self.start, self.end, ids.device))
        if self.needs_grad and rng_start is not None:
            self._check_rng_replay(rng_start)
        return hidden

    def _check_rng_replay(self, start: int) -> None:
        """Record the random state at the end of the chunk, or raise if the fill pass ended elsewhere.

        Threads share PyTorch's default generator, so another thread that draws from it spoils the replay. A forward
        that ends where it started drew nothing, and cannot be spoiled.
        """
        end = self._rng_checksum()
        now = None if end == start else end
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

    def _first_span_end(self) -> int:
        """Return the token after the chunk's first span, the only one with a past."""
        return self.start + self.batch.spans(self.start, self.end)[0].end

    def _targets(self) -> Tensor:
        return self.batch.targets[:, self.start : self.end]

    def _is_fused(self) -> bool:
        """Return whether to run compiled code: only full chunks, since a short last one is not worth a compilation."""
        return self.engine.fuse and self.end - self.start == self.config.chunk_size

    def _should_keep_last_chunk(self) -> bool:
        owner = self.engine._last_chunk_owner() if self.engine._last_chunk_owner is not None else None
        is_free = owner is None or owner.last_chunk_hidden is None
        # Activations kept by an earlier batch would stay in memory during the gradient passes of all later ones.
        return self.can_keep_last_chunk and ((is_free and self.is_last) or self.config.keep_last_chunk is True)

    @contextmanager
    def _active(self, *, with_sums: bool = False) -> Iterator[None]:
        """Receive the model's attention calls, under the caller's autocast, and leave the random state as it was."""
        with ExitStack() as stack:
            stack.enter_context(
                self.model.activate(self, self.batch.longest_document, self.model_state, with_sums=with_sums)
            )
            stack.enter_context(self.autocast)
            if self.seed is not None:
                stack.enter_context(self._preserve_rng())
            if self.engine.fuse:
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT))
            yield

    def _preserve_rng(self) -> AbstractContextManager[None]:
        device = self.model.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])
