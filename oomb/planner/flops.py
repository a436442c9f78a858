"""Floating-point operations of a training step."""

from __future__ import annotations

from oomb.models.causal_lm import CausalLM


def step_flops(model: CausalLM, context: int, keys: int | None = None) -> float:
    """FLOPs of a step's forward and backward: 6 per trained matrix element and token, and causal attention, to the last
    `keys` tokens at the most."""
    config = model.config
    embedding = model.lm.get_input_embeddings().weight
    used = {2: 1.0, 3: (getattr(config, "num_experts_per_tok", None) or 1.0)}
    matrices = 0.0
    for p in model.parameters():
        if p.ndim in used and (p is not embedding or model.lm.get_output_embeddings().weight is embedding):
            # A frozen matrix costs no gradient of its own; of experts, [E, in, out], a token uses some.
            matrices += p.numel() * used[p.ndim] / (p.shape[0] if p.ndim == 3 else 1) * (6 if p.requires_grad else 4)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = context if keys is None else min(keys, context)
    # Pairs of a query and a key that it sees, over the queries; half of them if they see all before.
    seen = keys - keys * keys / 2 / context
    attention = 12 * seen * config.num_hidden_layers * config.num_attention_heads * head_size
    return context * (matrices + attention)
