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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, overload
from zlib import crc32

import torch
from torch import Tensor, nn

from oomb.attention.chunk import ChunkAttention, Spec, attend
from oomb.attention.sparse import ChosenPast
from oomb.config import Config
from oomb.engine.allocator import Budget, Stats, Wanted
from oomb.engine.batch import Batch
from oomb.engine.grads import collecting, float32_sums_fit, refuse_hooks
from oomb.engine.head import TiledHead
from oomb.engine.packing import Given, read
from oomb.memory.store import PageStore
from oomb.models.causal_lm import CausalLM, callers_autocast, one_at_a_time
from oomb.models.state import ModelState
from oomb.planner.placement import Placement

RECOMPILE_LIMIT = 64
"""Layers are compiled anew for every batch size, in both passes; PyTorch's limit of 8 would stop at the fifth size."""


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
        self.head = TiledHead(self.model)
        self.progress: Callable[[str, int, int], None] | None = None
        """Called as progress("fill" or "gradient", chunks done, chunks in all) after every chunk."""
        self.watch: Callable[[int, int, Tensor], None] | None = None
        """Called as watch(layer, start of the chunk, chosen pages [B, N, C]) when pages have been chosen."""
        self.keeper: weakref.ref[Sequence] | None = None
        """The sequence that keeps its last chunk's activations until its backward, if one does."""
        self.budget = Budget(self.model, self.config)

    @property
    def stats(self) -> Stats:
        """Counters of the traffic between GPU and host, since the engine was made or since `reset_stats`."""
        return self.budget.stats

    def reset_stats(self) -> None:
        """Counts from zero again."""
        self.budget.tiers.reset_counters()

    def reserve(self, batch_size: int, length: int) -> Placement:
        """Takes the memory that training on such a batch will need, or says why it can't. Calls do this by themselves;
        before a long run it is worth a few seconds to know."""
        for name, value in (("batch_size", batch_size), ("length", length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        ids = torch.zeros(1, 1, dtype=torch.long).expand(batch_size, length)
        with one_at_a_time:
            sequence = Sequence(self, Batch(ids=ids, targets=ids), trains=True, state=self.model.state())
        try:
            return sequence.open()
        finally:
            sequence.close()

    def release(self) -> None:
        """Gives back the memory that is held for the pages of later calls. The next call takes it anew."""
        with one_at_a_time:
            self.budget.tiers.release()

    @property
    def fuse(self) -> bool:
        return self.config.fuse == "compile" or (self.config.fuse == "auto" and self.model.device.type == "cuda")

    @property
    def sums_in_float32(self) -> bool:
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
        given = self.read(input_ids, labels, attention_mask, position_ids)
        num_counted = given.num_counted
        if num_counted == 0 and num_items is None:
            raise ValueError(
                "no token counts: each label is -100, padding, or the first of its row, which nothing predicts"
            )
        total = -torch.stack([logp.sum() for logp in self.target_logprobs(given)]).sum()
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
        given = self.read(input_ids, None, attention_mask, position_ids)
        logp = given.join(self.target_logprobs(given))
        return [_one_later(row) for row in logp] if isinstance(logp, list) else _one_later(logp)

    def read(
        self,
        input_ids: Tensor | list[Tensor],
        labels: Tensor | list[Tensor] | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> Given:
        """What a caller passes, checked and arranged in batches: the argument of `target_logprobs`."""
        return read(
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

    def target_logprobs(self, given: Given) -> list[Tensor]:
        """[B, T] of each batch: log-probability of every position's target. Their backward is the gradient pass."""
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
        with one_at_a_time:
            if not self.budget.knows_layer_shapes:
                # First of all: bitsandbytes' layers give their bias another dtype in their first forward.
                Sequence(self, given.batches[0], trains, self.model.state()).look_at_layers()
            # A pass in another thread may have changed training modes for its own time. Weights are summed up once for
            # all sequences.
            state = self.model.state(with_sums=trains)
            sequences = [Sequence(self, batch, trains, state) for batch in given.batches]
        count = Count(sum(len(sequence.bounds) for sequence in sequences))
        for sequence in sequences:
            sequence.count, sequence.is_last = count, sequence is sequences[-1]
            sequence.is_only = len(sequences) == 1
        if not trains:
            with torch.no_grad():
                return [sequence.fill() for sequence in sequences]
        refuse_hooks(self.model.lm.named_parameters())
        anchor = torch.zeros((), device=self.model.device, requires_grad=True)
        try:
            return [_TwoPasses.apply(anchor, sequence) for sequence in sequences]
        except BaseException:
            # Those that are filled wait for a backward that will not come, and the error holds on to them.
            for sequence in sequences:
                sequence.close()
            raise


class Count:
    """Chunks of all sequences of a call: how many there are, and how many of them each pass has done."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done: Counter[str] = Counter()


def _one_later(logp: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(logp[..., :1]), logp[..., :-1]], dim=-1)


class _TwoPasses(torch.autograd.Function):
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
