"""One rule chooses every token: argmax(logits / T + noise(seed, position)) after the filters.

The target's own choice decides what is emitted; a proposal is accepted while it equals it. So
the law of the output is the target's for any drafter, and a token is a function of the true
prefix and of the noise at its own position alone (design: one acceptance rule).
"""

import torch
from torch import Tensor

from nanodflash import ops
from nanodflash.decoding.state import DeviceState

SURE = 0.3  # probability from which the drafter's best is proposed; measured, docs/LOG.md

# Of the chosen token [B, S], and the likeliest: values and ids [B, S, 20].
Logprobs = tuple[Tensor, Tensor, Tensor]


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


def shape_logits(
    logits: Tensor, state: DeviceState, slots: Tensor, positions: Tensor, block: Tensor
) -> Tensor:
    """Penalties, then bias, then the mask of stop ids below `min_new`: before the temperature.

    Row i of a block sees the history as it is if the proposals before it are accepted; where they
    are not, the row counts for nothing.

    Args:
        logits:    [B, S, V].  positions: [B, S], of the tokens that are chosen.
        block:     [B, S], the tokens of the rows: anchor and proposals.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    assert state.counts is not None
    assert state.in_prompt is not None
    counts = ops.block_counts(state.counts[slots], block)
    seen = state.in_prompt[slots][:, None] | (counts > 0)
    logits = ops.penalise(
        logits,
        counts,
        seen,
        state.repetition[slots].to(logits.dtype),
        state.presence[slots].to(logits.dtype),
        state.frequency[slots].to(logits.dtype),
    )
    every = logits.shape[1]
    bias_ids = state.bias_ids[slots][:, None].expand(-1, every, -1)
    bias = state.bias[slots].to(logits.dtype)[:, None].expand(-1, every, -1)
    logits = logits.scatter_add(-1, bias_ids, bias)
    early = positions - state.prompt_len[slots][:, None] < state.min_new[slots][:, None]
    return ops.mask_ids(logits, state.stop_ids[slots], early)


def propose(
    logits: Tensor, state: DeviceState, slots: Tensor, positions: Tensor, vocabulary: Tensor
) -> Tensor:
    """A v1 block's proposals at temperature: argmax where the drafter is sure, coupled elsewhere.

    Coupled: drawn with the very noise of the target's token at that position, so that the two
    choices agree as often as their distributions allow. Arguments as `choose`.
    """
    coupled = choose(logits, state, slots, positions, vocabulary)
    sure, best = logits.softmax(-1).max(-1)
    return torch.where(sure > SURE, best, coupled)
