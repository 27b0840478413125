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
    table: ops.Ops, logits: Tensor, state: DeviceState, slots: Tensor, positions: Tensor
) -> Tensor:
    """The seeded choice at every row; rows at temperature 0 take the plain argmax.

    Args:
        logits:    [B, S, V].  slots: [B].
        positions: [B, S], absolute position of the token that is chosen.
    Returns:
        [B, S] int64.
    """
    return table.choose(logits, *_wishes(state, slots), positions)


def propose(
    table: ops.Ops, logits: Tensor, state: DeviceState, slots: Tensor, positions: Tensor
) -> Tensor:
    """A v1 block's proposals at temperature: argmax where the drafter is sure, coupled elsewhere.

    Coupled: drawn with the very noise of the target's token at that position, so that the two
    choices agree as often as their distributions allow. Arguments as `choose`.
    """
    return table.propose(logits, *_wishes(state, slots), positions, SURE)


def _wishes(state: DeviceState, slots: Tensor) -> list[Tensor]:
    """Temperature, filters and seed of the slots, [B] each."""
    wishes = (state.temperature, state.top_k, state.top_p, state.min_p, state.seed)
    return [wish[slots] for wish in wishes]


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
