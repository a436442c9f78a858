"""GPU memory of one chunk's computation, from a model's shape.

Constants name their measurements: peaks of torch.cuda.max_memory_allocated on one H200, PyTorch 2.11, bfloat16, batch
1, three chunks. tests/test_plan_measured.py holds the sums to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomb.planner.request import PlacementRequest

PLAIN_TILE, FUSED_TILE = 2**26, 5 * 2**26
"""Logits per tile of the head, as `oomb.loss` has them; a test holds the two to be equal."""

FUSED_GRAPH, PLAIN_GRAPH = 0.887, 1.3
"""Bytes a layer keeps for its backward, relative to itemsize x `layer_io_width`. Measured, fused: Qwen2.5-7B keeps
34.10 GiB at chunks of 8192 and 17.05 GiB at 4096 (0.887), Qwen2.5-0.5B 3.731 GiB at 4096 (0.889)."""
BACKWARD = 0.35
"""What the backward of one layer takes beside that. It is hidden below the head's peak; this is the most that the
measured peaks allow."""
FORWARD_ONLY = 0.58
"""What the forward of one layer takes without a graph: Qwen2.5-7B 0.80 GiB at 8192."""
LORA = (0.4664, 0.574, 0.462)
"""The three with LoRA, whose matrices count into the width: Qwen2.5-7B 17.98 GiB at 4096; 5.92 GiB (checkpointed) at
8192, 3.00 at 4096; 1.38 GiB at 8192, 0.69 at 4096."""
FLOAT32_LORA = (0.626, 0.7235, 0.90)
"""The same where adapters compute in float32. Qwen2.5-7B 24.15 GiB at 4096; 255 KiB a token (checkpointed, 6.78 GiB at
8192, 3.39 at 4096); 2.48 GiB at 8192, 1.24 at 4096."""
HIDDEN_COPIES, HIDDEN_COPIES_OF_GRAPH = 4.5, 1
"""Tensors like the hidden states that live while the head runs: of checkpointed layers 4.35 and 4.47 (Qwen2.5-7B, 4.92
GiB at 8192, 3.26 at 4096), 4.70 (Llama-3.1-8B, 3.63 at 4096); otherwise the graph above has all but the gradient."""


def chunk_memory(request: PlacementRequest, is_checkpointed: bool, keeps: bool) -> dict[str, int]:
    """GPU memory of a step beside weights and what grows, at its peak in the gradient pass: while the head or the last
    layer is walked back, and all that a chunk has saved is still there."""
    facts, tokens = request.shape, request.chunk_tokens
    hidden = tokens * facts.hidden_size * facts.itemsize
    one_layer = tokens * facts.layer_io_width * facts.itemsize
    graph, backward, fill = FUSED_GRAPH, BACKWARD, FORWARD_ONLY
    if facts.has_adapters:
        graph, backward, fill = FLOAT32_LORA if facts.has_float32_adapters else LORA
    if not request.is_fused:
        graph *= PLAIN_GRAPH / FUSED_GRAPH
    if not request.needs_grad:
        layer = one_layer * fill
        return {"one chunk's forward": int(2 * hidden + max(layer, _head(request)))}
    copies: float
    if is_checkpointed:
        # Attention is not computed again, so its outputs wait for the backward. Kept ones come from their pages, except
        # for the last chunk, which has none; the gradients of most parameters are not there yet when it is walked back.
        outs = [x.num_query_heads * (x.value_size * x.dtype.itemsize + 4) for x in facts.layers]
        waiting = tokens * sum(outs) - (request.missing_grad_bytes if keeps else 0)
        saved = len(facts.layers) * hidden + max(0, waiting)
        copies, backward = HIDDEN_COPIES, backward + graph
    else:
        saved, copies = int(len(facts.layers) * one_layer * graph), HIDDEN_COPIES_OF_GRAPH
    # LoRA's peak lies in a layer's backward, when most copies of the hidden states are gone (6.78 GiB leaves no room).
    peak = max(_head(request) + copies * hidden, one_layer * backward)
    return {
        "parameter gradients": request.missing_grad_bytes,
        "activations of a chunk": saved,
        "head or one layer's backward": int(peak),
    }


def _head(request: PlacementRequest) -> int:
    """What a tile of logits takes at its peak."""
    facts = request.shape
    most_rows = max(1, (FUSED_TILE if request.is_fused else PLAIN_TILE) // facts.vocab_size)
    num_tiles = -(-request.chunk_tokens // most_rows)
    logits = -(-request.chunk_tokens // num_tiles) * facts.vocab_size
    size, wide = facts.itemsize, max(4, facts.itemsize)
    widened = wide if size < wide else 0
    if not request.needs_grad:
        # Plain PyTorch widens the logits and holds their exponentials beside them.
        return logits * (size if request.is_fused else size + widened + wide)
    # Logits and their gradient; then the gradient and what it gives the head's weight. Unfused, three wide tensors and
    # a mask live beside the logits. Qwen2.5-7B 1.60 GiB, with LoRA 1.16, unfused 1.13; Qwen2.5-0.5B 1.16.
    arithmetic = 2 * size if request.is_fused else size + widened + 3 * wide + 1
    return max(logits * arithmetic, logits * size + facts.head_grad_bytes)
