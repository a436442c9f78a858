"""The algorithm. One step on a sequence is two walks over its chunks:

fill pass      chunks in order, no graph: every layer attends to the pages of earlier chunks and to its own chunk, and
               appends its K and V to the pages. All that remains of a chunk is the log-probabilities of its targets.
gradient pass  chunks in reverse: the chunk is computed again, now with a graph, and back-propagated. Its attention adds
               dK and dV to the gradient pages of earlier chunks, and gives its own K and V what later chunks have left
               there. Parameter gradients accumulate in `.grad`.

With `loss.backward()` in between this is exact back-propagation through the whole sequence; activation memory is that
of one chunk. B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor, nn

from oomb.config import Config
from oomb.engine.allocator import PageAllocator, TransferStats
from oomb.engine.batch import Batch
from oomb.engine.grads import float32_sums_fit, reject_tensor_hooks
from oomb.engine.head import TokenHead
from oomb.engine.packing import PackedInputs, pack_inputs
from oomb.engine.passes import ChunkCounter, ChunkedForward, _ChunkedLogProbs
from oomb.models.causal_lm import CausalLM
from oomb.models.hooks import engine_lock
from oomb.planner.request import Placement


class Engine:
    """Losses and log-probabilities of a Hugging Face causal LM, with activation memory that does not grow with the
    sequence. The model stays an ordinary model: it is changed only while a pass runs."""

    def __init__(self, model: nn.Module, config: Config | None = None) -> None:
        if config is not None and not isinstance(config, Config):
            raise TypeError(
                f"config is a {type(config).__name__}; pass oomb.Config(...), or Config.from_dict(settings)"
            )
        self.config = config or Config()
        self.model = CausalLM(model)
        self.head = TokenHead(self.model)
        self.progress: Callable[[str, int, int], None] | None = None
        """Called as progress("fill" or "gradient", chunks done, chunks in all) after every chunk."""
        self.on_selection: Callable[[int, int, Tensor], None] | None = None
        """Called as watch(layer, start of the chunk, chosen pages [B, N, C]) when pages have been chosen."""
        self._last_chunk_owner: weakref.ref[ChunkedForward] | None = None
        """The sequence that keeps its last chunk's activations until its backward, if one does."""
        self.allocator = PageAllocator(self.model, self.config)

    @property
    def stats(self) -> TransferStats:
        """Counters of the traffic between GPU and host, since the engine was made or since `reset_stats`."""
        return self.allocator.stats

    def reset_stats(self) -> None:
        """Counts from zero again."""
        self.allocator.tiers.reset_counters()

    def reserve(self, batch_size: int, length: int) -> Placement:
        """Takes the memory that training on such a batch will need, or says why it can't. Calls do this by themselves;
        before a long run it is worth a few seconds to know."""
        for name, value in (("batch_size", batch_size), ("length", length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        ids = torch.zeros(1, 1, dtype=torch.long).expand(batch_size, length)
        with engine_lock:
            sequence = ChunkedForward(self, Batch(ids=ids, targets=ids), needs_grad=True, state=self.model.state())
        try:
            return sequence.allocate()
        finally:
            sequence.close()

    def expect_optimizer(self, *, on_host: bool) -> None:
        """Say where the optimizer will keep its states. By default the engine leaves room for them on the GPU."""
        self.allocator.optimizer_on_host = on_host

    def release(self) -> None:
        """Gives back the memory that is held for the pages of later calls. The next call takes it anew."""
        with engine_lock:
            self.allocator.tiers.release()

    @property
    def fuse(self) -> bool:
        return self.config.fuse == "compile" or (self.config.fuse == "auto" and self.model.device.type == "cuda")

    @property
    def sums_grads_in_float32(self) -> bool:
        if self.config.param_grad_dtype == "auto":
            return float32_sums_fit(self.model.parameters(), self.model.device)
        return self.config.param_grad_dtype == "float32"

    def loss(
        self,
        input_ids: Tensor | list[Tensor],
        labels: Tensor | list[Tensor] | None = None,
        *,
        num_items: int | Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Cross-entropy of `labels` (default: `input_ids`), shifted inside, -100 ignored, as in Hugging Face: the mean
        over counted tokens, or the sum over `num_items` where that is given.

        A batch is [B, T], padded on the right if there is an `attention_mask`; or a list of documents, each of its own
        length; or rows of several documents, whose `position_ids` begin anew with each or whose `attention_mask`
        numbers them (1, 1, 2, 2, 0). No document sees another, and padding is not computed."""
        packed = self.pack(input_ids, labels, attention_mask, position_ids)
        num_counted = packed.num_counted
        if num_counted == 0 and num_items is None:
            raise ValueError(
                "no token counts: each label is -100, padding, or the first of its row, which nothing predicts"
            )
        total = -torch.stack([logp.sum() for logp in self.forward(packed)]).sum()
        return total / (num_counted if num_items is None else num_items)

    @overload
    def logprobs(
        self, input_ids: Tensor, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor: ...

    @overload
    def logprobs(self, input_ids: list[Tensor]) -> list[Tensor]: ...

    def logprobs(
        self,
        input_ids: Tensor | list[Tensor],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor | list[Tensor]:
        """[B, T]: log p(token t | tokens before t); 0 at the first token of a document and where `attention_mask` is 0.
        Of a list of documents, a list of [T]."""
        given = self.pack(input_ids, None, attention_mask, position_ids)
        logp = given.join(self.forward(given))
        return [_shift_right(row) for row in logp] if isinstance(logp, list) else _shift_right(logp)

    def pack(
        self,
        input_ids: Tensor | list[Tensor],
        labels: Tensor | list[Tensor] | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> PackedInputs:
        """What a caller passes, checked and arranged in batches: the argument of `target_logprobs`."""
        return pack_inputs(
            input_ids,
            labels,
            attention_mask,
            position_ids,
            chunk_size=self.config.chunk_size,
            # Where RoPE depends on the length, each document has its own.
            may_share=not self.model.rotaries,
            vocab_size=self.model.vocab_size,
            num_positions=self.model.num_positions,
            pad_token_id=self.model.pad_token_id,
            placeholders=self.model.placeholders,
        )

    def forward(self, packed: PackedInputs) -> list[Tensor]:
        """[B, T] of each batch: log-probability of every position's target. Their backward is the gradient pass."""
        needs_grad = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
        with engine_lock:
            if not self.allocator.knows_layer_shapes:
                # First of all: bitsandbytes' layers give their bias another dtype in their first forward.
                ChunkedForward(self, packed.batches[0], needs_grad, self.model.state()).probe_layers()
            # A pass in another thread may have changed training modes for its own time. Weights are summed up once for
            # all sequences.
            state = self.model.state(with_sums=needs_grad)
            sequences = [ChunkedForward(self, batch, needs_grad, state) for batch in packed.batches]
        count = ChunkCounter(sum(len(sequence.bounds) for sequence in sequences))
        for sequence in sequences:
            sequence.counter, sequence.is_last = count, sequence is sequences[-1]
            sequence.is_exclusive = len(sequences) == 1
        if not needs_grad:
            with torch.no_grad():
                return [sequence.fill() for sequence in sequences]
        reject_tensor_hooks(self.model.lm.named_parameters())
        anchor = torch.zeros((), device=self.model.device, requires_grad=True)
        try:
            return [_ChunkedLogProbs.apply(anchor, sequence) for sequence in sequences]
        except BaseException:
            # Those that are filled wait for a backward that will not come, and the error holds on to them.
            for sequence in sequences:
                sequence.close()
            raise


def _shift_right(logp: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(logp[..., :1]), logp[..., :-1]], dim=-1)
