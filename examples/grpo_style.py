"""Train with rewards in the style of GRPO, using only `engine.logprobs`.

    python examples/grpo_style.py               # a toy model, seconds on a CPU

The script samples several completions of a prompt and scores them. Completions above the mean of their group become
more likely, with PPO's clipping and a KL penalty against a reference model. The prompt may be as long as the engine can
train. B completions, T tokens.
"""

import copy

import torch
import toy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import oomb

STEPS, UPDATES, GROUP, NEW_TOKENS = 12, 2, 16, 12
CLIP, KL_WEIGHT, LEARNING_RATE = 0.2, 0.02, 1e-2
PROMPT = "write digits, nothing but digits. " * 4 + "begin: "


def reward(text: str) -> float:
    """Return the share of digits. Yours may run tests, ask a judge or look for the answer in a long document."""
    return sum(letter.isdigit() for letter in text) / NEW_TOKENS


def sample(model: torch.nn.Module, prompt_ids: Tensor, eos: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [B, T] of prompt and completion, a mask of all real tokens, and a mask of the sampled tokens."""
    prompts = prompt_ids.repeat(GROUP, 1)
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=eos,
    )
    is_sampled = torch.zeros_like(ids, dtype=torch.bool)
    is_sampled[:, prompt_ids.shape[1] :] = True
    is_end = (ids == eos) & is_sampled
    ended_before = is_end.cumsum(1) - is_end.long() > 0
    return ids, ~ended_before, is_sampled & ~ended_before


def grpo_loss(logp: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, is_sampled: Tensor) -> Tensor:
    """Return the loss from log-probabilities [B, T] now, at sampling and by the reference, and advantages [B]."""
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    # An unbiased estimate of the KL divergence that is never negative.
    kl = (reference - logp).exp() - (reference - logp) - 1
    return -((gain - KL_WEIGHT * kl) * is_sampled).sum() / is_sampled.sum()


def train(name: str) -> list[float]:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).to("cuda" if torch.cuda.is_available() else "cpu")
    config = oomb.Config(chunk_size=64)
    engine = oomb.Engine(model, config)
    reference_engine = oomb.Engine(copy.deepcopy(model).requires_grad_(False), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    prompt_ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(model.device)

    mean_rewards = []
    for step in range(STEPS):
        ids, mask, is_sampled = sample(model, prompt_ids, tokenizer.eos_token_id)
        texts = [tokenizer.decode(row[mask_T]) for row, mask_T in zip(ids, is_sampled)]
        rewards = torch.tensor([reward(text) for text in texts], device=ids.device)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        with torch.no_grad():
            old = engine.logprobs(ids, attention_mask=mask)
            reference = reference_engine.logprobs(ids, attention_mask=mask)
        for _ in range(UPDATES):
            logp = engine.logprobs(ids, attention_mask=mask)
            loss = grpo_loss(logp, old, reference, advantages, is_sampled)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean_rewards.append(float(rewards.mean()))
        print(f"step {step + 1:2}: reward {mean_rewards[-1]:.2f}, loss {loss.item():+.3f}: {texts[0]!r}")
    return mean_rewards


if __name__ == "__main__":
    train(toy.model_folder())
