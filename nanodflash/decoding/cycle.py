"""The cycle: prefill once, then draft, verify, commit until a row is done.

A row of the batch is a slot. At the top of a cycle, tokens[0 .. len] are emitted, tokens[len] is
the anchor, and both pools hold K/V of 0 .. len-1 exactly. The draft step fills a block at
len .. len+S-1; the verify step runs the target over it; the commit step moves `len` past what
was accepted and injects the target's features of it into the draft pool.

No step asks the device for anything: shapes follow from `Facts` and the number of slots, so a
CUDA graph can hold draft, and verify with commit. Prefill of chunks runs eagerly; a short prompt
alone can be held too (`prompt_step`).

Source: dflash.md 2; design: state on the device, nothing rolled back, one acceptance rule.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanodflash.config import ACTIVE, MAX_LOGPROBS, EngineConfig
from nanodflash.decoding.kv_cache import (
    KVPool,
    RaggedMemory,
    RowWriter,
    paged_memory,
    row_index,
    sees,
)
from nanodflash.decoding.plan import Facts, Span
from nanodflash.decoding.sampling import Logprobs, choose, propose, shape_logits
from nanodflash.decoding.state import DeviceState
from nanodflash.models.dflash import DFlash
from nanodflash.models.qwen3 import Qwen3
from nanodflash.ops import REFERENCE, Ops, top_logprobs

Proposer = Callable[[Tensor, Tensor], Tensor]


class Decoder:
    """Everything the steps touch: models, pools, state and constant buffers, allocated once.

    Args:
        proposer: replaces the drafter's ids: (tokens [B, Lmax], len [B]) -> [B, S-1], where
                  tokens[b, len[b]] is the anchor. The drafter, where there is one, still runs.
        ops:      which implementation of every operation runs.
    """

    def __init__(
        self,
        target: Qwen3,
        draft: DFlash | None,
        config: EngineConfig,
        proposer: Proposer | None = None,
        ops: Ops = REFERENCE,
    ) -> None:
        self.target, self.draft, self.proposer, self.ops = target, draft, proposer, ops
        like, size = target.embed_tokens.detach(), config.block_size
        places = config.pages_per_seq * config.page_size
        target.prepare(config.max_model_len + size, ops)
        pages = (config.total_pages, config.page_size)
        self.target_pool = KVPool(target.config, *pages, like)
        self.draft_pool: KVPool | None = None
        self.taps: Sequence[int] = ()
        if draft is not None:
            draft.prepare(config.max_model_len + size, ops)
            draft.freeze()
            self.draft_pool = KVPool(draft.config, *pages, like)
            self.taps = draft.config.target_layer_ids
            self.masks = torch.full((size - 1,), draft.config.mask_token_id, device=like.device)
        self.state = DeviceState.allocate(config, like.device)
        self.positions = torch.arange(places + size, device=like.device)
        self.vocab_size = target.config.vocab_size
        self.block_size = size


class Verified(NamedTuple):
    """What the target said of a block."""

    positions: Tensor  # [B, W]
    places: Tensor  # [B, W], where their K/V rows lie, in both pools
    block: Tensor  # [B, W], anchor and proposals
    tokens: Tensor  # [B, W], the target's choice after every row
    features: Tensor | None  # [B, W, F*C]
    logprobs: Logprobs | None


class Result(NamedTuple):
    """What a step hands to the host."""

    record: Tensor  # [B, RECORD + W] int64: columns of `plan`, then the target's tokens
    logprobs: Logprobs | None  # of the same tokens; only the "full" sampler computes them


def _table(state: DeviceState, slots: Tensor) -> Tensor:
    """Page table rows of the slots; rows that are not active get the dummy page."""
    active = state.state[slots] == ACTIVE
    return state.page_table[slots] * active[:, None]


@torch.inference_mode()
def prefill_step(
    decoder: Decoder, spans: Sequence[Span], ready: Tensor, finals: Tensor, facts: Facts
) -> Result | None:
    """Run prompt chunks of several requests, flattened; emit the first token of those that end.

    Args:
        spans:  the chunks; what lies before a chunk is in the cache already.
        ready:  [R] int64, slots of the spans that are `last`, in order: their rows come alive.
        finals: [R'] int64, those of them that are not `resumed`: they choose a first token.
        facts:  of the step; width and `kv_bound` are not used, a span knows its end.
    Returns:
        The result of `finals`, W = 1, or None.
    """
    state, positions, pool = decoder.state, decoder.positions, decoder.target_pool
    ids = torch.cat([state.tokens[s.slot, s.start : s.stop] for s in spans])
    where = torch.cat([positions[s.start : s.stop] for s in spans])
    index, seen, ends, done = [], [], [], 0
    for span in spans:
        table, count = state.page_table[span.slot : span.slot + 1], span.stop - span.start
        start = positions[span.start : span.start + 1]
        index.append(row_index(table, positions[None, span.start : span.stop], pool.page_size)[0])
        sights = sees(pool, table, start, count, span.stop, decoder.ops)
        seen.append((done, done + count, sights))
        done += count
        if span.last and not span.resumed:
            ends.append(done - 1)
    places = torch.cat(index)
    memory = RaggedMemory(pool.rows, places, decoder.ops, seen)
    taps = decoder.taps if facts.speculate else ()
    hidden, features = decoder.target(ids, where, memory, taps)
    _inject(decoder, features, where, places)
    state.state.index_fill_(0, ready, ACTIVE)
    if not ends:
        return None
    last = torch.cat([hidden[end : end + 1] for end in ends])[:, None]
    after = state.len[finals][:, None] + 1
    block = state.anchor[finals][:, None]
    tokens, logprobs = _choose(decoder, last, finals, after, block, facts)
    return Result(_commit(decoder, finals, tokens[:, 1:], tokens), logprobs)


@torch.inference_mode()
def prompt_step(decoder: Decoder, slots: Tensor, start: Tensor, size: int, facts: Facts) -> Result:
    """`prefill_step` of whole prompts in one shape: each the last `size` rows or fewer.

    Rows behind a prompt's end hold whatever ids were there. Their K/V goes where the first block's
    will, behind `len`, and nobody sees it.

    Args:
        slots: [B] int64, their rows come alive.
        start: [B] int64, the first position that is not cached.
        size:  rows of each; passes the end of a prompt by less than a block.
        facts: of the step; width is not used.
    Returns:
        The result of the slots, W = 1.
    """
    state, pool = decoder.state, decoder.target_pool
    positions = start[:, None] + decoder.positions[:size]
    ids = state.tokens[slots].gather(1, positions)
    memory = paged_memory(
        pool, state.page_table[slots], start, positions, facts.kv_bound, decoder.ops
    )
    taps = decoder.taps if facts.speculate else ()
    hidden, features = decoder.target(ids, positions, memory, taps)
    _inject(decoder, features, positions, memory.index)
    state.state.index_fill_(0, slots, ACTIVE)
    end = state.len[slots][:, None]  # the last row's position, until the first token is there
    # Where the step with the admission has failed it is another request's: what comes is ignored.
    row = (end - start[:, None]).clamp(0, size - 1)[..., None]
    last = hidden.gather(1, row.expand(-1, 1, hidden.shape[-1]))
    block = state.anchor[slots][:, None]
    tokens, logprobs = _choose(decoder, last, slots, end + 1, block, facts)
    return Result(_commit(decoder, slots, tokens[:, 1:], tokens), logprobs)


@torch.inference_mode()
def draft_step(decoder: Decoder, slots: Tensor, facts: Facts) -> Tensor:
    """Propose a block for every slot [B]: ids for the positions after the anchor, [B, W-1], or
    [B, S-1] of a caller's proposer.

    The block's K/V rows go to len .. len+S-1 of the draft pool; the commit's injection, or the
    next block, overwrites them.
    """
    state, size = decoder.state, decoder.block_size
    start = state.len[slots]
    proposals = None
    if decoder.draft is not None and decoder.draft_pool is not None:
        block = torch.cat([state.anchor[slots][:, None], decoder.masks.expand(len(slots), -1)], 1)
        positions = start[:, None] + decoder.positions[:size]
        table, pool = _table(state, slots), decoder.draft_pool
        memory = paged_memory(pool, table, start, positions, facts.kv_bound, decoder.ops)
        hidden = decoder.draft(decoder.target.embed(block), positions, memory)
        # Copied: of a strided slice the head would be a product a row of the batch.
        logits = decoder.target.logits(hidden[:, 1 : facts.width].clone())
        if facts.sampler == "greedy":
            proposals = decoder.ops.argmax(logits)
        else:
            where = positions[:, 1 : facts.width]
            proposals = propose(decoder.ops, logits, state, slots, where)
    if decoder.proposer is not None:
        proposals = decoder.proposer(state.tokens[slots], start)
        if proposals.shape != (len(slots), size - 1):
            wanted = (len(slots), size - 1)
            raise ValueError(f"the proposer gave {tuple(proposals.shape)} ids, wanted {wanted}")
        proposals = proposals.clamp(0, decoder.vocab_size - 1)
    assert proposals is not None, "a draft step needs a drafter or a proposer"
    return proposals


@torch.inference_mode()
def verify_step(
    decoder: Decoder, slots: Tensor, proposals: Tensor | None, facts: Facts
) -> Verified:
    """Run the target over anchor and proposals, and choose its own token after every row.

    Args:
        slots:     [B].
        proposals: [B, at least W-1]; the first W-1 are verified. None when W is 1.
    """
    state, width = decoder.state, facts.width
    start, block = state.len[slots], state.anchor[slots][:, None]
    if proposals is not None:
        block = torch.cat([block, proposals[:, : width - 1]], 1)
    positions = start[:, None] + decoder.positions[:width]
    table, pool = _table(state, slots), decoder.target_pool
    memory = paged_memory(pool, table, start, positions, facts.kv_bound, decoder.ops)
    taps = decoder.taps if facts.speculate else ()
    hidden, features = decoder.target(block, positions, memory, taps)
    tokens, logprobs = _choose(decoder, hidden, slots, positions + 1, block, facts)
    return Verified(positions, memory.index, block, tokens, features, logprobs)


@torch.inference_mode()
def commit_step(decoder: Decoder, slots: Tensor, verified: Verified) -> Result:
    """Make the accepted run real: inject its features, cut it, move len, anchor, budget, state.

    All W rows are injected: those past the cut are garbage behind `len` that the next draft
    step's block overwrites before anything sees it.

    Returns:
        The result; of a row's W tokens the first `EMITTED` count.
    """
    _inject(decoder, verified.features, verified.positions, verified.places)
    record = _commit(decoder, slots, verified.block[:, 1:], verified.tokens)
    return Result(record, verified.logprobs)


def _inject(decoder: Decoder, features: Tensor | None, positions: Tensor, places: Tensor) -> None:
    """Write the draft pool's rows of these positions, where there is a drafter that is used."""
    if features is not None and decoder.draft is not None and decoder.draft_pool is not None:
        writer = RowWriter(decoder.draft_pool.rows, places, decoder.ops)
        decoder.draft.inject(features, positions, writer)


def _choose(
    decoder: Decoder, hidden: Tensor, slots: Tensor, positions: Tensor, block: Tensor, facts: Facts
) -> tuple[Tensor, Logprobs | None]:
    """The target's token after every row [B, W], and its logprobs with the "full" sampler."""
    logits, state = decoder.target.logits(hidden), decoder.state
    if facts.sampler == "greedy":
        return decoder.ops.argmax(logits), None
    if facts.sampler == "sampled":
        return choose(decoder.ops, logits, state, slots, positions), None
    shaped = shape_logits(logits, state, slots, positions, block)
    tokens = choose(decoder.ops, shaped, state, slots, positions)
    return tokens, top_logprobs(logits, tokens, min(MAX_LOGPROBS, logits.shape[-1]))


def _commit(decoder: Decoder, slots: Tensor, proposals: Tensor, tokens: Tensor) -> Tensor:
    """Accept, cut, and write the state of the slots: `ops.accept_commit`."""
    state = decoder.state
    return decoder.ops.accept_commit(
        slots,
        proposals,
        tokens,
        state.len,
        state.anchor,
        state.budget,
        state.state,
        state.epoch,
        state.draft_limit,
        state.stop_ids,
        state.tokens,
        state.counts,
    )
