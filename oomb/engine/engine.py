"""Provide `Engine`: losses and log-probabilities of very long sequences, with gradients.

The two passes behind every call are in `oomb/engine/passes.py`. B batch, T tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import overload
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oomb.config import Config
from oomb.distributed.collectives import require_same
from oomb.distributed.data_parallel import GlobalSum, GradientSync
from oomb.distributed.mesh import Ranks
from oomb.distributed.ulysses import TokenShards
from oomb.engine.allocator import PageAllocator, TransferStats
from oomb.engine.batch import Batch
from oomb.engine.grads import float32_sums_fit, reject_grad_hooks, reject_tensor_hooks
from oomb.engine.head import Head, TokenHead
from oomb.engine.packing import PackedInputs, pack_inputs
from oomb.engine.passes import ChunkCounter, ChunkedForward, ChunkedOutputs, OnSelection
from oomb.engine.replicas import match_replicas
from oomb.models.causal_lm import CausalLM
from oomb.models.hooks import engine_lock
from oomb.planner.request import Placement


class Engine:
    """Losses and log-probabilities of a Hugging Face causal LM, in activation memory that does not grow with the
    sequence.

    The model stays an ordinary model: the engine changes it only while a pass runs, and then restores it.

    Args:
        model: any causal LM of transformers that calls the attention interface, PEFT-wrapped or not. Unsupported models
            raise `oomb.UnsupportedModelError`.
        config: settings of the engine. Defaults to `oomb.Config()`.
        mesh: ranks that train together, such as `oomb.init_mesh()`. Its dimension "dp" holds copies of the model that
            train on different sequences, and "sp" ranks that share each sequence: they pass the same inputs, and each
            computes a part of the tokens and holds pages of a part of the heads. Gradients are averaged at the end of
            every backward. Every rank must create the engine and make the same calls. Defaults to this process alone.

    Attributes:
        progress: called as `progress(phase, done, total)` after every chunk, where `phase` is "fill" or "gradient" and
            the others count chunks. None by default.

    Examples:
        >>> import oomb, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
        >>> engine = oomb.Engine(model, oomb.Config(chunk_size=128))
        >>> loss = engine.loss(torch.randint(64, (1, 1000)))
        >>> loss.backward()
        >>> all(parameter.grad is not None for parameter in model.parameters())
        True
    """

    def __init__(self, model: nn.Module, config: Config | None = None, *, mesh: DeviceMesh | None = None) -> None:
        if config is not None and not isinstance(config, Config):
            raise TypeError(
                f"config is a {type(config).__name__}; pass oomb.Config(...), or Config.from_dict(settings)"
            )
        self.config = config or Config()
        self.model = CausalLM(model)
        self.progress: Callable[[str, int, int], None] | None = None
        self.mesh = mesh
        ranks = Ranks.of(mesh)
        self.replicas = GradientSync(ranks.all, self.model.parameters, ranks.dp)
        self.shards = TokenShards(ranks.sp)
        match_replicas(self.model, ranks.all)
        self.allocator = PageAllocator(self.model, self.config, self.shards, is_alone=ranks.all.size == 1)
        self._head = TokenHead(self.model)
        # The batch whose last chunk keeps its activations until its backward, if there is one.
        self.last_chunk_owner: weakref.ref[ChunkedForward] | None = None

    def loss(
        self,
        input_ids: Tensor | list[Tensor],
        labels: Tensor | list[Tensor] | None = None,
        *,
        num_items: int | Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the cross-entropy of `labels`, a scalar whose backward is the gradient pass.

        The inputs may live on the CPU. They hold either rows [B, T], padded on the right if there is an
        `attention_mask`; or a list of documents, each of its own length; or rows of several documents each. Documents
        do not attend to each other, and padding is not computed.

        Args:
            input_ids: token ids, [B, T] or a list of [T].
            labels: as in Hugging Face: same shape as `input_ids`, shifted internally, -100 is ignored. Defaults to
                `input_ids`.
            num_items: divide the summed loss by this number. Defaults to the number of counted tokens: the mean.
                With a mesh, both the loss and this number are those of all ranks.
            attention_mask: [B, T], 0 at padding. Numbers above 1 tell the documents of a row apart (1, 1, 2, 2, 0).
            position_ids: [B, T]. They restart at 0 where a new document begins in a row.
        """
        packed = self.pack(input_ids, labels, attention_mask, position_ids)
        if num_items is None:
            num_items = self.replicas.group.sum(packed.num_counted)
            if num_items == 0:
                raise ValueError(
                    "no token contributes to the loss: each label is -100, padding, or the first of its row, which "
                    "nothing predicts"
                )
        total = -self._sum_logprobs(packed)
        if self.replicas.group.size > 1:
            total = GlobalSum.apply(total, self.replicas)
        return total / num_items

    def _sum_logprobs(self, packed: PackedInputs) -> Tensor:
        """Return the summed log-probability of the targets of this rank's sequences."""
        if not packed.batches:
            # This rank has no sequences, but takes part in the reduction of gradients.
            dtype = torch.promote_types(self.model.dtype, torch.float32)
            return torch.zeros((), dtype=dtype, device=self.model.device, requires_grad=True)
        return torch.stack([logp.sum() for logp in self.forward(packed)["logprob"]]).sum()

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
        """Return log p(token t | earlier tokens) for every token: [B, T], or a list of [T] for a list of documents.

        The result is differentiable, so any loss can be built on it. It is 0 at the first token of every document and
        at padding. Under `torch.no_grad()` only the fill pass runs. The arguments are those of `loss`.
        """
        packed = self.pack(input_ids, None, attention_mask, position_ids)
        logp = packed.unpack(self.forward(packed)["logprob"])
        return [_shift_right(row) for row in logp] if isinstance(logp, list) else _shift_right(logp)

    def reserve(self, batch_size: int, length: int) -> Placement:
        """Allocate the memory that training on such a batch needs, or raise `oomb.OutOfPages` with the numbers.

        This is optional, since every call allocates what it needs. Before a long run, use it to find out within seconds
        whether training will fit.

        Args:
            batch_size: rows of the batch.
            length: tokens per row.
        """
        for name, value in (("batch_size", batch_size), ("length", length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        ids = torch.zeros(1, 1, dtype=torch.long).expand(batch_size, length)
        with engine_lock:
            batch = Batch(ids=ids, targets=ids)
            chunked = ChunkedForward(self, batch, self._head, needs_grad=True, state=self.model.state())
        try:
            return chunked.allocate()
        finally:
            chunked.close()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank of a mesh for the duration of a `with`, without averaging them.

        The next backward outside of it averages all that has accumulated. Without a mesh this does nothing.
        """
        with self.replicas.paused():
            yield

    def sync_grads(self) -> None:
        """Average gradients over the ranks of a mesh now, as the end of a backward does.

        All ranks must call it. It is for ranks whose own loss has nothing to call backward on.
        """
        self.replicas.average()

    def expect_optimizer(self, *, on_host: bool) -> None:
        """Say where the optimizer will keep its states. By default the engine leaves room for them on the GPU."""
        self.allocator.optimizer_on_host = on_host

    def release(self) -> None:
        """Free the cached page memory. The next call allocates it again."""
        with engine_lock:
            self.allocator.tiers.release()

    @property
    def stats(self) -> TransferStats:
        """Traffic between GPU and host memory since the engine was created or `reset_stats` was called."""
        return self.allocator.stats

    def reset_stats(self) -> None:
        """Set the counters of `stats` to zero."""
        self.allocator.tiers.reset_counters()

    @property
    def fuse(self) -> bool:
        """Whether full chunks run compiled by torch.compile."""
        return self.config.fuse == "compile" or (self.config.fuse == "auto" and self.model.device.type == "cuda")

    @property
    def sums_grads_in_float32(self) -> bool:
        """Whether parameter gradients are summed over chunks in float32."""
        if self.config.param_grad_dtype == "auto":
            return float32_sums_fit(self.model.parameters(), self.model.device)
        return self.config.param_grad_dtype == "float32"

    def pack(
        self,
        input_ids: Tensor | list[Tensor],
        labels: Tensor | list[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> PackedInputs:
        """Validate a caller's inputs and arrange them in batches, the argument of `forward`."""
        return pack_inputs(
            input_ids,
            labels,
            attention_mask,
            position_ids,
            chunk_size=self.config.chunk_size,
            # If RoPE depends on the length, each document needs its own.
            can_share=not self.model.rotaries,
            vocab_size=self.model.vocab_size,
            num_positions=self.model.num_positions,
            pad_token_id=self.model.pad_token_id,
            placeholders=self.model.placeholders,
            may_be_empty=self.replicas.group.size > 1,
        )

    def forward(
        self, packed: PackedInputs, head: Head | None = None, on_selection: OnSelection | None = None
    ) -> dict[str, list[Tensor]]:
        """Run the fill pass over all batches. Return the head's fields by name, as [B, T] of each batch.

        The backward of the fields is the gradient pass.

        Args:
            packed: what `pack` returned.
            head: what to compute from the last hidden states. Defaults to the log-probability of every target.
            on_selection: called with the layer, the start of the chunk and its selected pages [B, N, C].
        """
        head = self._head if head is None else head
        needs_grad = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
        all_chunked = self._open(packed, head, needs_grad, on_selection)
        if not needs_grad:
            with torch.no_grad():
                outputs = [chunked.fill() for chunked in all_chunked]
        else:
            reject_tensor_hooks(self.model.lm.named_parameters())
            if self.replicas.ranks.size > 1:
                reject_grad_hooks(self.model.lm.named_parameters())
            anchor = torch.zeros((), device=self.model.device, requires_grad=True)
            try:
                outputs = [ChunkedOutputs.apply(anchor, chunked) for chunked in all_chunked]
            except BaseException:
                # The filled ones wait for a backward that will not come, and the exception keeps them alive.
                for chunked in all_chunked:
                    chunked.close()
                raise
        return {name: list(parts) for name, parts in zip(head.fields, zip(*outputs, strict=True), strict=True)}

    def _open(
        self, packed: PackedInputs, head: Head, needs_grad: bool, on_selection: OnSelection | None
    ) -> list[ChunkedForward]:
        """Return the forward of every batch, with the state of the model as it is now."""
        self._check_shared(packed, head)
        with engine_lock:
            if not self.allocator.knows_layer_shapes:
                # Before reading the state: bitsandbytes changes the dtype of biases in the first forward.
                state = self.model.state()
                ChunkedForward(self, packed.batches[0], head, needs_grad=needs_grad, state=state).probe_layers()
            # Under the lock, because a pass in another thread changes training modes while it runs. The checksums of
            # the weights are computed once for all batches.
            state, counter = self.model.state(with_checksums=needs_grad), ChunkCounter()
            return [
                ChunkedForward(
                    self,
                    batch,
                    head,
                    needs_grad=needs_grad,
                    state=state,
                    counter=counter,
                    is_exclusive=len(packed.batches) == 1,
                    is_last_batch=batch is packed.batches[-1],
                    on_selection=on_selection,
                )
                for batch in packed.batches
            ]

    def _check_shared(self, packed: PackedInputs, head: Head) -> None:
        """Raise if ranks that share sequences got different ones, or if the head cannot work on some of the tokens."""
        if self.shards.size == 1:
            return
        if type(head) is not TokenHead:
            raise ValueError(
                f"{type(head).__name__} needs all tokens of a chunk, but sp={self.shards.size} divides them over "
                "ranks: use a mesh without sp"
            )
        sums = {
            f"of sequence {index}": crc32(batch.targets.numpy().tobytes(), crc32(batch.ids.numpy().tobytes()))
            for index, batch in enumerate(packed.batches)
        }
        require_same(self.shards.group, "checksum", sums)


def _shift_right(logp: Tensor) -> Tensor:
    """Move log-probabilities from the position that predicts a token to the token itself."""
    return torch.cat([torch.zeros_like(logp[..., :1]), logp[..., :-1]], dim=-1)
