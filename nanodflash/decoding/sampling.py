"""One rule chooses every token: argmax(logits / T + noise(seed, position)) after the filters.

The target's own choice decides what is emitted; a proposal is accepted while it equals it. So
the law of the output is the target's for any drafter, and a token is a function of the true
prefix and of the noise at its own position alone (design: one acceptance rule).
"""

from typing import Literal

import torch
from torch import Tensor

from nanodflash import ops
from nanodflash.decoding.state import DeviceState

Sampler = Literal["greedy", "sampled"]


def choose(
    logits: Tensor, state: DeviceState, slots: Tensor, positions: Tensor, vocabulary: Tensor
) -> Tensor:
    """The seeded choice at every row; rows at temperature 0 take the plain argmax.

    Args:
        logits:     [B, S, V].  slots: [B].
        positions:  [B, S], absolute position of the token that is chosen.
        vocabulary: [V] int64, 0 .. V-1.
    Returns:
        [B, S] int64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperature = state.temperature[slots].to(logits.dtype)
    warm = temperature > 0
    scaled = logits / torch.where(warm, temperature, 1.0)[:, None, None]
    filtered = ops.filter_logits(
        scaled,
        state.top_k[slots],
        state.top_p[slots].to(logits.dtype),
        state.min_p[slots].to(logits.dtype),
    )
    noise = ops.keyed_gumbel(state.seed[slots], positions, vocabulary, logits)
    return (filtered + noise * warm[:, None, None]).argmax(-1)


def propose(
    logits: Tensor, state: DeviceState, slots: Tensor, positions: Tensor, vocabulary: Tensor
) -> Tensor:
    """A v1 block's proposals at temperature: argmax where the drafter is sure, coupled elsewhere.

    Coupled: drawn with the very noise of the target's token at that position, so that the two
    choices agree as often as their distributions allow. Arguments as `choose`.
    """
    coupled = choose(logits, state, slots, positions, vocabulary)
    sure, best = logits.softmax(-1).max(-1)
    return torch.where(sure > 0.5, best, coupled)
