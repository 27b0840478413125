# mypy: allow-untyped-defs
"""Acceptance and commit, one program a row.

Definition: `ops.count_accepted`, `ops.cut_run` and the writes of `decoding.cycle`. Rows of a
padded batch may name the spare slot more than once: they all write what stands there already.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVE, FINISHED = tl.constexpr(1), tl.constexpr(2)  # of `decoding.state`
STOP, BUDGET = tl.constexpr(1), tl.constexpr(2)  # of `decoding.plan`
RECORD = 6  # columns before the ids


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "proposals_ptr"])
def _commit_kernel(
    slots_ptr,
    proposals_ptr,
    tokens_ptr,
    len_ptr,
    anchor_ptr,
    budget_ptr,
    state_ptr,
    epoch_ptr,
    draft_limit_ptr,
    stop_ids_ptr,
    history_ptr,
    counts_ptr,
    record_ptr,
    proposals_row,
    history_row,
    counts_row,
    WIDTH: tl.constexpr,
    STOPS: tl.constexpr,
    COUNTED: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    place = tl.arange(0, BLOCK)
    inside = place < WIDTH
    token = tl.load(tokens_ptr + row * WIDTH + place, mask=inside, other=-1)
    start = tl.load(len_ptr + slot)
    state = tl.load(state_ptr + slot)
    anchor = tl.load(anchor_ptr + slot)
    active = (state == ACTIVE).to(tl.int64)
    budget = tl.load(budget_ptr + slot) * active

    drafted = place < WIDTH - 1
    proposal = tl.load(proposals_ptr + row * proposals_row + place, mask=drafted, other=0)
    differs = tl.where(drafted & (proposal != token), place, WIDTH - 1)
    limit = tl.maximum(tl.load(draft_limit_ptr + slot) - start - 1, 0)
    accepted = tl.minimum(tl.min(differs, 0).to(tl.int64), limit)

    stop = tl.load(stop_ids_ptr + slot * STOPS + tl.arange(0, STOPS))
    is_stop = tl.max((token[:, None] == stop[None, :]).to(tl.int32), 1) > 0
    first = tl.min(tl.where(is_stop & inside, place, WIDTH), 0).to(tl.int64)
    run = tl.minimum(accepted + 1, budget)
    emitted = tl.minimum(run, first + 1)
    stopped = first < run
    left, end = budget - emitted, start + emitted
    done = stopped | (left == 0)
    finish = tl.where(done, tl.where(stopped, STOP, BUDGET), 0) * active
    last = tl.sum(tl.where(place == emitted - 1, token, 0), 0)

    # Ids behind the cut are garbage behind `len`, like their K/V.
    tl.store(history_ptr + slot * history_row + start + 1 + place, token, mask=inside)
    if COUNTED:
        kept = place < emitted
        tl.atomic_add(counts_ptr + slot * counts_row + token, 1, mask=kept)
    tl.store(len_ptr + slot, end)
    tl.store(anchor_ptr + slot, tl.where(emitted > 0, last, anchor))
    tl.store(budget_ptr + slot, left)
    tl.store(state_ptr + slot, tl.where(done & (active > 0), FINISHED, state))
    head = record_ptr + row * (RECORD + WIDTH)
    tl.store(head, emitted)
    tl.store(head + 1, tl.minimum(accepted, emitted))
    tl.store(head + 2, accepted * active)
    tl.store(head + 3, finish)
    tl.store(head + 4, end)
    tl.store(head + 5, tl.load(epoch_ptr + slot))
    tl.store(head + RECORD + place, token, mask=inside)


def accept_commit(
    slots: Tensor,
    proposals: Tensor,
    tokens: Tensor,
    length: Tensor,
    anchor: Tensor,
    budget: Tensor,
    state: Tensor,
    epoch: Tensor,
    draft_limit: Tensor,
    stop_ids: Tensor,
    history: Tensor,
    counts: Tensor | None,
) -> Tensor:
    """Count what the target agrees with, cut it, and write it into the slots: [B, 6 + W] int64.

    The columns are those of `plan`: emitted, accepted, accepted before the cut, finish, length,
    epoch, then the W tokens. All int64 where nothing else is said; the state is written in place.

    Args:
        slots:     [B].
        proposals: [B, W-1], places contiguous.
        tokens:    [B, W], the target's choice after every row.
        length, anchor, budget, state, epoch, draft_limit: [slots], `DeviceState`'s.
        stop_ids:  [slots, 16], padded with -1.  history: [slots, Lmax], `DeviceState.tokens`.
        counts:    [slots, V] int32 or None.
    """
    batch, width = tokens.shape
    tokens = tokens.contiguous()
    record = torch.empty(batch, RECORD + width, dtype=torch.int64, device=tokens.device)
    _commit_kernel[(batch,)](
        slots,
        proposals,
        tokens,
        length,
        anchor,
        budget,
        state,
        epoch,
        draft_limit,
        stop_ids,
        history,
        history if counts is None else counts,
        record,
        proposals.stride(0),
        history.stride(0),
        history.stride(0) if counts is None else counts.stride(0),
        WIDTH=width,
        STOPS=stop_ids.shape[1],
        COUNTED=counts is not None,
        RECORD=RECORD,
        BLOCK=max(triton.next_power_of_2(width), 2),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return record
