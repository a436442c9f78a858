"""Run the two passes of chunk recurrence over a batch. This is the algorithm.

    for chunk in chunks:              # fill pass, without a graph
        hidden = model(chunk)         # every layer attends to the pages of earlier chunks and appends its K and V
        outputs += head(hidden)       # such as the log-probabilities of the targets; nothing else survives
    for chunk in reversed(chunks):    # gradient pass
        hidden = model(chunk)         # again, with a graph
        hidden.backward(d_hidden)     # attention adds dK and dV to the gradient pages of earlier chunks,
                                      # and to its own K and V what later chunks left in theirs
        free(pages of the chunk)

When the gradient pass reaches a chunk, every later chunk has added its share to the chunk's gradient pages, so one
ordinary backward yields exact gradients. Parameter gradients accumulate in `.grad`. Activation memory is that of one
chunk.

B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor

from oomb.attention.call import AttentionCall, AttentionSpec
from oomb.attention.chunk import ChunkAttention, attend
from oomb.attention.dense import DensePast
from oomb.attention.sparse import SparsePast
from oomb.distributed import watch
from oomb.engine.allocator import AllocationRequest
from oomb.engine.batch import Batch, Chunk
from oomb.engine.grads import accumulate
from oomb.engine.head import Head
from oomb.memory.store import PageStore
from oomb.models.hooks import current_autocast, engine_lock
from oomb.models.state import ModelState
from oomb.ops.logprob import IGNORE_INDEX
from oomb.planner.request import Placement

if TYPE_CHECKING:
    from oomb.engine.engine import Engine

RECOMPILE_LIMIT = 64
"""torch.compile compiles a layer once per batch size and pass; PyTorch's default limit of 8 stops at the fifth size."""

OnSelection = Callable[[int, int, Tensor], None]
"""Called with the layer, the start of the chunk and its selected pages [B, N, C]."""


class ChunkCounter:
    """Progress over the chunks of all batches of a call."""

    def __init__(self) -> None:
        self.total = 0
        self.done: Counter[str] = Counter()
        """Chunks done, by pass."""


class ChunkedOutputs(torch.autograd.Function):
    """The autograd function that connects the two passes: forward is the fill pass, backward the gradient pass.

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
        ctx.chunked.engine.replicas.queue()
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
        counter: progress of the call that this batch belongs to.
        is_exclusive: whether the call has no other batch.
        is_last_batch: whether this batch is the last of its call: filled last, and first in the gradient pass.
        on_selection: called with the pages that every layer of every chunk selects in the fill pass.
    """

    def __init__(
        self,
        engine: Engine,
        batch: Batch,
        head: Head,
        *,
        needs_grad: bool,
        state: ModelState,
        counter: ChunkCounter | None = None,
        is_exclusive: bool = True,
        is_last_batch: bool = True,
        on_selection: OnSelection | None = None,
    ) -> None:
        self.engine, self.config, self.model, self.shards = engine, engine.config, engine.model, engine.shards
        self.batch, self.head, self.needs_grad, self.model_state = batch, head, needs_grad, state
        self.is_exclusive, self.is_last_batch, self.on_selection = is_exclusive, is_last_batch, on_selection
        self.chunks = batch.chunks(self.config.chunk_size)
        self.chunk = self.chunks[0]
        """The chunk that is being computed."""
        self.counter = counter or ChunkCounter()
        self.counter.total += len(self.chunks)
        self.uses_rng = self.model.uses_rng()
        self.dropout_seed: int | None = None
        self.rng_checksums: dict[int, int | None] = {}
        """The random state after each chunk of the fill pass; None if the chunk drew no random numbers."""
        self.autocast = current_autocast(self.model.device.type)
        self.store: PageStore | None = None
        self.checkpoint_layers = self.can_keep_last_chunk = False
        self.saved_attention: dict[int, tuple[Tensor, Tensor]] = {}
        """Attention output and LSE of the current chunk by layer, for layers that recompute themselves."""
        self.last_chunk_hidden: Tensor | None = None
        self.has_run_backward = False

    def probe_layers(self) -> None:
        """Send one token through the model to learn the shapes of its layers."""
        with self._active(), self._preserve_rng():
            self.engine.allocator.layer_shapes()

    def allocate(self) -> Placement:
        """Decide what is kept and where, and allocate all of that memory or none."""
        with self._active(), self._preserve_rng():
            placement, self.store = self.engine.allocator.allocate(
                AllocationRequest(
                    batch_size=len(self.batch.ids),
                    length=self.chunks[-1].end,
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

    def fill(self) -> tuple[Tensor, ...]:
        """Run the fill pass. Return the fields of the head, each [B, T]."""
        self.allocate()
        assert self.store is not None
        # Seed stochastic rounding from the tokens: the same batch always rounds the same way.
        self.store.rounding_seed = crc32(self.batch.ids.numpy().tobytes()) + self.shards.rank
        # Seed every chunk on its own, so that dropout is the same in both passes.
        self.dropout_seed = int(torch.randint(2**62, ())) if self.uses_rng else None
        outputs = []
        try:
            with self._active():
                for chunk in self._each("fill", self.chunks):
                    keep = self._should_keep(chunk)
                    hidden = self._hidden(chunk, grad=keep)
                    if keep:
                        self._keep(hidden)
                    fields = self.head.forward(hidden, self._targets(chunk), fused=self._is_fused(chunk))
                    outputs.append([self.shards.whole(field, chunk.end - chunk.start) for field in fields])
                self.engine.allocator.tiers.end_pass()
        except BaseException:
            self.close()
            raise
        if not self.needs_grad:
            self.close()
        num_rows, num_tokens = self.batch.ids.shape
        return tuple(
            torch.cat([*parts, parts[0].new_zeros(num_rows, num_tokens - self.chunks[-1].end)], dim=1)
            for parts in zip(*outputs, strict=True)
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
            float32_sums, seed = self.engine.sums_grads_in_float32, self.store.rounding_seed
            with self._active(with_checksums=True), accumulate(self.model.parameters(), float32_sums, seed):
                for chunk in self._each("gradient", reversed(self.chunks)):
                    hidden, self.last_chunk_hidden = self.last_chunk_hidden, None
                    if hidden is None:
                        hidden = self._hidden(chunk, grad=True, runs_backward_next=True)
                    chunk_grads = [self._share_of_grad(grad, chunk) for grad in grads_BT]
                    dhidden = self.head.backward(hidden, self._targets(chunk), chunk_grads, fused=self._is_fused(chunk))
                    if hidden.requires_grad:
                        self.store.prefetch_backward(chunk.start, chunk.span_end, saved=self.checkpoint_layers)
                        # Autograd runs checkpointed layers again, and they call the model's attention.
                        with self.model.computing():
                            torch.autograd.backward(hidden, dhidden)
                    self.saved_attention.clear()
                    self.store.free_from(chunk.start)
            self.engine.allocator.after_backward()
        finally:
            self.close()

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output of one layer of the current chunk. The model calls this through its hooks."""
        assert self.store is not None
        self.model.count_attention(call.layer, call.window)
        chunk, tokens = self.chunk, self.chunk.end - self.chunk.start
        call = replace(
            call,
            q=self.shards.to_heads(call.q, tokens),
            k=self.shards.to_heads(call.k, tokens),
            v=self.shards.to_heads(call.v, tokens),
            sinks=self.shards.own_heads(call.sinks),
        )
        past = self.store.past(call.layer, chunk.start, chunk.span_end)
        spec = AttentionSpec(
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            kernels=self.config.kernels,
            rule=self.config.page_rule,
            spans=self.batch.spans(chunk.start, chunk.end),
            sum_scores=self.shards.group.sum_ if self.shards.size > 1 else None,
        )
        attend_chunk = self._attend_with_graph if torch.is_grad_enabled() else self._attend_and_store
        return self.shards.to_tokens(attend_chunk(call, past, spec))

    def _attend_and_store(self, call: AttentionCall, past: DensePast | SparsePast, spec: AttentionSpec) -> Tensor:
        """Attend in the fill pass, and write what later chunks and the gradient pass will read."""
        assert self.store is not None
        start = self.chunk.start
        out, lse = attend(call.q, call.k, call.v, call.sinks, past, spec)
        if self.on_selection is not None and isinstance(past, SparsePast) and past.selection is not None:
            self.on_selection(call.layer, start, past.selection)
        self.store.append(call.layer, start, call.k, call.v)
        self.store.save_output(call.layer, start, out, lse)
        return out

    def _attend_with_graph(self, call: AttentionCall, past: DensePast | SparsePast, spec: AttentionSpec) -> Tensor:
        """Attend in the gradient pass, or in a last chunk that the fill pass keeps: no chunk reads its K and V.

        A checkpointed layer calls this twice, in its forward and in its backward.
        """
        assert self.store is not None
        # Popped, because autograd makes this tensor part of the graph and would keep it alive.
        saved = self.saved_attention.pop(call.layer, None)
        if saved is None:
            saved = self.store.load_output(call.layer, self.chunk.start, self.chunk.end)
        out, lse = ChunkAttention.apply(call.q, call.k, call.v, call.sinks, past, spec, saved)
        if self.checkpoint_layers and saved is None:
            # The layer runs again in its backward. Attention, its most expensive part, need not.
            self.saved_attention[call.layer] = (out.detach(), lse)
        return out

    def close(self) -> None:
        """Give all memory back."""
        with engine_lock:
            if self.store is not None:
                self.store.close()
        self.last_chunk_hidden = None
        self.saved_attention.clear()

    def _each(self, phase: str, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Make one chunk after another the current one, and report each when it is done."""
        for chunk in chunks:
            watch.check()
            self.chunk = chunk
            yield chunk
            self.counter.done[phase] += 1
            if self.engine.progress is not None:
                self.engine.progress(phase, self.counter.done[phase], self.counter.total)

    def _hidden(self, chunk: Chunk, grad: bool, runs_backward_next: bool = False) -> Tensor:
        """Return the last hidden states [B, T, D] of a chunk, with a graph if `grad`.

        `runs_backward_next` lets the prefetcher continue with what the chunk's backward reads.
        """
        assert self.store is not None
        rng_start = None
        if self.dropout_seed is not None:
            # Ranks that share the chunk drop different tokens.
            torch.manual_seed(self.dropout_seed + chunk.index + (self.shards.rank << 40))
            rng_start = self._rng_checksum()
        ids = self.shards.share(self.batch.ids[:, chunk.start : chunk.end]).to(self.model.device, non_blocking=True)
        backward_saved = self.checkpoint_layers if runs_backward_next else None
        self.store.prefetch_forward(chunk.start, chunk.span_end, saved=grad, backward_saved=backward_saved)
        layer_calls = self.model.wrap_layers(
            compiled=self._is_fused(chunk), checkpointed=grad and self.checkpoint_layers
        )
        with layer_calls, torch.set_grad_enabled(grad):
            positions = self.shards.share(self.batch.positions(chunk.start, chunk.end, ids.device))
            hidden = self.model.hidden(ids, positions)
        if self.needs_grad and rng_start is not None:
            self._check_rng_replay(chunk, rng_start)
        return hidden

    def _check_rng_replay(self, chunk: Chunk, start: int) -> None:
        """Record the random state at the end of the chunk, or raise if the fill pass ended elsewhere.

        Threads share PyTorch's default generator, so another thread that draws from it spoils the replay. A forward
        that ends where it started drew nothing, and cannot be spoiled.
        """
        end = self._rng_checksum()
        now = None if end == start else end
        before = self.rng_checksums.setdefault(chunk.index, now)
        if before is not None and now is not None and before != now:
            raise RuntimeError(
                f"chunk {chunk.index} drew different random numbers in the gradient pass than in the fill pass, so "
                "dropout cannot be replayed: does another thread draw from PyTorch's default generator? Give it a "
                "torch.Generator of its own"
            )

    def _rng_checksum(self) -> int:
        device = self.model.device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return crc32(state.numpy().tobytes())

    def _targets(self, chunk: Chunk) -> Tensor:
        return self.shards.share(self.batch.targets[:, chunk.start : chunk.end], filler=IGNORE_INDEX)

    def _share_of_grad(self, grad_BT: Tensor | None, chunk: Chunk) -> Tensor | None:
        """Return the gradients of this rank's tokens.

        Parameter gradients are averaged over ranks, but these ranks share one loss, so each token's gradient is
        multiplied by their number.
        """
        if grad_BT is None:
            return None
        return self.shards.share(grad_BT[:, chunk.start : chunk.end]) * self.shards.size

    def _is_fused(self, chunk: Chunk) -> bool:
        """Return whether to run compiled code: only full chunks, since a short last one is not worth a compilation."""
        return self.engine.fuse and chunk.end - chunk.start == self.config.chunk_size

    def _should_keep(self, chunk: Chunk) -> bool:
        """Return whether to keep the chunk's activations from the fill pass, so the gradient pass starts with them."""
        if not (self.needs_grad and self.can_keep_last_chunk and chunk is self.chunks[-1]):
            return False
        owner = self.engine.last_chunk_owner() if self.engine.last_chunk_owner is not None else None
        is_free = owner is None or owner.last_chunk_hidden is None
        # Activations kept by an earlier batch would stay in memory during the gradient passes of all later ones.
        return (is_free and self.is_last_batch) or self.config.keep_last_chunk is True

    def _keep(self, hidden: Tensor) -> None:
        self.last_chunk_hidden, self.engine.last_chunk_owner = hidden, weakref.ref(self)

    @contextmanager
    def _active(self, *, with_checksums: bool = False) -> Iterator[None]:
        """Receive the model's attention calls, under the caller's autocast, and leave the random state as it was."""
        with ExitStack() as stack:
            stack.enter_context(
                self.model.activate(self, self.batch.longest_document, self.model_state, with_checksums=with_checksums)
            )
            stack.enter_context(self.autocast)
            if self.dropout_seed is not None:
                stack.enter_context(self._preserve_rng())
            if self.engine.fuse:
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT))
            yield

    def _preserve_rng(self) -> AbstractContextManager[None]:
        device = self.model.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])
