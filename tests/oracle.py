"""The oracle: decodes with no cache, no pages, no batch and no drafter.

Every token costs a whole forward over everything before it. The choice of a token is written out
again here, one row at a time, in plain Python numbers.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanodflash import SamplingParams
from nanodflash.models.layers import Heads
from nanodflash.models.qwen3 import Qwen3

MASK = 0xFFFFFFFF


@dataclass
class Causal:
    """Attention over the rows of one forward [T, H, D], written out head by head."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        q, k, v = heads.split()
        group = q.shape[1] // k.shape[1]
        seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
        heads = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[2])
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            heads.append(weights @ v[:, head // group])
        return torch.stack(heads, 1)


def mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def gumbel(seed: int, position: int, token: int) -> float:
    low, high = seed & MASK, (seed >> 32) & MASK
    a = mix(mix(mix(low) ^ high) ^ position)
    b = mix(mix(mix(high ^ 0x9E3779B9) ^ low) ^ position)
    u = min((mix((mix(token ^ a) + b) & MASK) + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-u))


def allowed(scaled: list[float], params: SamplingParams) -> list[bool]:
    """Which tokens the filters leave: top-k, then top-p over the rest, then min-p."""
    order = sorted(scaled, reverse=True)
    kth = order[min(params.top_k or len(order), len(order)) - 1]
    weights = [math.exp(x - order[0]) for x in order if x >= kth]
    threshold, before = kth, 0.0
    if params.top_p < 1:
        for value, weight in zip(order, weights, strict=False):
            if before / sum(weights) >= params.top_p:
                break
            threshold, before = value, before + weight
    floor = order[0] + math.log(params.min_p) if params.min_p else -math.inf
    return [x >= max(threshold, floor) for x in scaled]


def shape(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """Penalties, then bias, then the mask of stop ids that come too early, token by token."""
    times, seen, biases = Counter(output), {*prompt, *output}, dict(params.logit_bias)
    early = params.stop_token_ids if len(output) < params.min_new_tokens else ()
    shaped = []
    for token, x in enumerate(logits.tolist()):
        if token in seen:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * times[token]
        x -= params.presence_penalty if times[token] else 0.0
        x += biases.get(token, 0.0)
        shaped.append(-math.inf if token in early else x)
    return torch.tensor(shaped, dtype=torch.float64)


def choose(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The one token for `position`, from the logits [V] before it."""
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = [x / params.temperature for x in logits.tolist()]
    keep = allowed(scaled, params)
    assert params.seed is not None
    noisy = [
        x + gumbel(params.seed, position, token) if keep[token] else -math.inf
        for token, x in enumerate(scaled)
    ]
    return noisy.index(max(noisy))


@torch.no_grad()
def decode(
    target: Qwen3,
    prompt: Sequence[int],
    params: SamplingParams,
    limit: int = 10**9,
    raw: list[Tensor] | None = None,
) -> tuple[list[int], str]:
    """New ids and the finish reason.

    Args:
        limit: bounds prompt and new tokens together.
        raw:   takes the target's logits [V] before each new id.
    """
    ids, start = list(prompt), len(prompt)
    budget = min(params.max_new_tokens, limit - len(ids))
    for _ in range(budget):
        hidden, _ = target(torch.tensor(ids), torch.arange(len(ids)), Causal())
        logits = target.logits(hidden[-1])
        if raw is not None:
            raw.append(logits)
        shaped = shape(logits, params, prompt, ids[start:])
        ids.append(choose(shaped, params, len(ids)))
        if ids[-1] in params.stop_token_ids:
            return ids[start:], "stop"
    return ids[start:], "length"
