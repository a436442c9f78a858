"""Estimate the GPU memory that computing one chunk takes, from the shape of the model.

The constants are fitted to peaks of torch.cuda.max_memory_allocated on one H200 (PyTorch 2.11, bfloat16, batch size 1,
three chunks), which each docstring names. tests/planner/test_measured.py holds the sums to these peaks.
"""

from __future__ import annotations

from oomb.ops.logprob import FUSED_TILE, PLAIN_TILE
from oomb.planner.request import PlacementRequest

FUSED_GRAPH, PLAIN_GRAPH = 0.887, 1.3
"""Bytes a layer saves for its backward, relative to itemsize x `layer_io_width`. Fused: Qwen2.5-7B saves 34.10 GiB with
chunks of 8192 and 17.05 GiB with 4096 (0.887), Qwen2.5-0.5B 3.731 GiB with 4096 (0.889)."""
BACKWARD = 0.35
"""What the backward of one layer takes on top of that. The peak of the head hides it; this is the largest value that
the measured peaks allow."""
FORWARD_ONLY = 0.58
"""What the forward of one layer takes without a graph: Qwen2.5-7B 0.80 GiB with chunks of 8192."""
LORA = (0.4664, 0.574, 0.462)
"""Graph, backward and forward with LoRA, whose matrices count in `layer_io_width`. Qwen2.5-7B: 17.98 GiB with chunks of
4096; 5.92 GiB (checkpointed) with 8192 and 3.00 with 4096; 1.38 GiB with 8192 and 0.69 with 4096."""
FLOAT32_LORA = (0.626, 0.7235, 0.90)
"""The same if adapters compute in float32. Qwen2.5-7B: 24.15 GiB with chunks of 4096; 255 KiB per token (checkpointed,
6.78 GiB with 8192, 3.39 with 4096); 2.48 GiB with 8192 and 1.24 with 4096."""
HIDDEN_COPIES, HIDDEN_COPIES_WITH_GRAPH = 4.5, 1
"""Tensors of the size of the hidden states that are alive while the head runs. With checkpointed layers 4.35 and 4.47
(Qwen2.5-7B, 4.92 GiB with chunks of 8192, 3.26 with 4096), 4.70 (Llama-3.1-8B, 3.63 with 4096). Otherwise the graph
above holds all of them but the gradient."""


def chunk_memory(request: PlacementRequest, *, is_checkpointed: bool, keeps_all_outputs: bool) -> dict[str, int]:
    """Return the GPU memory of one chunk's computation at its peak, by name.

    The peak is in the gradient pass: while the head or the last layer runs its backward, everything that the chunk
    saved is still allocated.

    Args:
        request: The batch.
        is_checkpointed: Whether layers are recomputed in the backward.
        keeps_all_outputs: Whether the attention outputs of all tokens come from pages.
    """
    shape, tokens = request.shape, request.chunk_tokens
    hidden = tokens * shape.hidden_size * shape.itemsize
    one_layer = tokens * shape.layer_io_width * shape.itemsize
    graph, backward, forward = FUSED_GRAPH, BACKWARD, FORWARD_ONLY
    if shape.has_adapters:
        graph, backward, forward = FLOAT32_LORA if shape.has_float32_adapters else LORA
    if not request.is_fused:
        graph *= PLAIN_GRAPH / FUSED_GRAPH
    if not request.needs_grad:
        return {"one chunk's forward": int(2 * hidden + max(one_layer * forward, _head_bytes(request)))}
    copies: float
    if is_checkpointed:
        # Attention is not recomputed, so its outputs wait for the backward. Kept outputs are read from their pages,
        # except those of the last chunk, which has no pages. When that chunk runs its backward, the gradients of most
        # parameters are not allocated yet.
        outs = [x.num_query_heads * (x.value_size * x.dtype.itemsize + 4) for x in shape.layers]
        # Ranks that share the tokens have these of all tokens, for a part of the heads.
        waiting = tokens * request.num_shards * sum(outs) - (request.missing_grad_bytes if keeps_all_outputs else 0)
        saved = len(shape.layers) * hidden + max(0, waiting)
        copies, backward = HIDDEN_COPIES, backward + graph
    else:
        saved, copies = int(len(shape.layers) * one_layer * graph), HIDDEN_COPIES_WITH_GRAPH
    # With LoRA the peak is in a layer's backward, when most copies of the hidden states are freed: the measured
    # 6.78 GiB leaves no room for them.
    peak = max(_head_bytes(request) + copies * hidden, one_layer * backward)
    return {
        "parameter gradients": request.missing_grad_bytes,
        "activations of a chunk": saved,
        "head or one layer's backward": int(peak),
    }


def _head_bytes(request: PlacementRequest) -> int:
    """Return what a tile of logits takes at its peak."""
    shape = request.shape
    max_rows = max(1, (FUSED_TILE if request.is_fused else PLAIN_TILE) // shape.vocab_size)
    num_tiles = -(-request.chunk_tokens // max_rows)
    num_logits = -(-request.chunk_tokens // num_tiles) * shape.vocab_size
    size, wide = shape.itemsize, max(4, shape.itemsize)
    upcast = wide if size < wide else 0
    if not request.needs_grad:
        # Plain PyTorch holds the upcast logits and their exponentials at the same time.
        return num_logits * (size if request.is_fused else size + upcast + wide)
    # First the logits and their gradient, then the gradient and the head's weight gradient. Unfused, three wide tensors
    # and a mask are alive next to the logits. Qwen2.5-7B 1.60 GiB, with LoRA 1.16, unfused 1.13; Qwen2.5-0.5B 1.16.
    arithmetic = 2 * size if request.is_fused else size + upcast + 3 * wide + 1
    return max(num_logits * arithmetic, num_logits * size + shape.head_grad_bytes)
