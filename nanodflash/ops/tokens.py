"""What is chosen and what is kept of it: noise, filters, penalties, acceptance. The definitions."""

import torch
from torch import Tensor

from nanodflash.config import ACTIVE, BUDGET, FINISHED, STOP

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection on 32-bit words (held in int64) whose output bits look independent."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)


def keyed_gumbel(seed: Tensor, positions: Tensor, tokens: Tensor, like: Tensor) -> Tensor:
    """Gumbel noise that is a function of (seed, position, token) alone, never of a generator.

    Args:
        seed:      [B] int64.  positions: [B, S] int64, absolute.  tokens: [V] int64, 0 .. V-1.
        like:      a tensor of the wanted dtype, fp32 or fp64.
    Returns:
        [B, S, V]: -log(-log1p(-u)), u = (r + 0.5) / 2^32 kept below 1.
    """
    low, high = seed[:, None] & _WORD, (seed[:, None] >> 32) & _WORD
    a = _mix(_mix(_mix(low) ^ high) ^ positions)[..., None]
    b = _mix(_mix(_mix(high ^ 0x9E3779B9) ^ low) ^ positions)[..., None]
    r = _mix((_mix(tokens ^ a) + b) & _WORD)
    u = ((r.to(like.dtype) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return torch.log1p(-u).neg_().log_().neg_()


def block_counts(counts: Tensor, block: Tensor) -> Tensor:
    """How often the output holds each id when row i of a block chooses, [B, S, V] int32.

    Args:
        counts: [B, V] int32, of all that is emitted, the anchor included.
        block:  [B, S] int64, anchor and proposals; row i comes after block[1 .. i].
    """
    steps = counts.new_zeros(*block.shape, counts.shape[1])
    steps[:, 1:].scatter_(-1, block[:, 1:, None], 1)
    return counts[:, None] + steps.cumsum(1, dtype=counts.dtype)


def penalise(
    logits: Tensor,
    counts: Tensor,
    seen: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Repetition penalty on what prompt or output hold, the other two on the output.

    Args:
        logits, counts: [B, S, V].  seen: [B, S, V] bool.
        repetition:     [B], 1 = off.  presence, frequency: [B], 0 = off.
    """
    factor = repetition[:, None, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, repeated, logits)
    logits = logits - frequency[:, None, None] * counts
    return logits - presence[:, None, None] * (counts > 0)


def mask_ids(logits: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """-inf for some ids of some rows.

    Args:
        logits: [B, S, V].  ids: [B, K] int64; -1 and ids past the table count for nothing.
        rows:   [B, S] bool.
    """
    vocab = logits.shape[-1]  # a place for every id and one, the last, for what counts not
    hit = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=logits.device)
    hit.scatter_(1, ids.masked_fill((ids < 0) | (ids > vocab), vocab), True)
    return logits.masked_fill(hit[:, None, :-1] & rows[..., None], float("-inf"))


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of raw logits [B, S, V]: of `tokens` [B, S], and the `count` likeliest.

    Returns:
        [B, S], values [B, S, count], ids [B, S, count].
    """
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[..., None])[..., 0]
    return chosen, *logprobs.topk(count, -1)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """-inf for the tokens that a row's filters leave out; ties at a threshold stay in.

    Order: top-k, then top-p over what it left (keep while the mass before is below p), then
    min-p against the largest.

    Args:
        logits: [B, S, V], divided by the temperature.
        top_k:  [B] int64, 0 = off.  top_p: [B], 1 = off.  min_p: [B], 0 = off.
    """
    ordered = logits.sort(-1, descending=True).values
    k = torch.where(top_k == 0, ordered.shape[-1], top_k).clamp(max=ordered.shape[-1])
    threshold = ordered.gather(-1, (k - 1)[:, None, None].expand(*ordered.shape[:2], 1))
    mass = ordered.masked_fill(ordered < threshold, float("-inf")).softmax(-1)
    inside = (mass.cumsum(-1) - mass < top_p[:, None, None]).sum(-1, keepdim=True)
    nucleus = ordered.gather(-1, (inside - 1).clamp(min=0))
    nucleus = nucleus.masked_fill(top_p[:, None, None] >= 1, float("-inf"))
    floor = ordered[..., :1] + min_p.log()[:, None, None]
    threshold = torch.maximum(torch.maximum(threshold, nucleus), floor)
    return logits.masked_fill(logits < threshold, float("-inf"))


def argmax(logits: Tensor) -> Tensor:
    """Of [..., V]: [...] int64, the lowest id on ties."""
    return logits.max(-1).indices  # on a CPU four times as fast as `argmax`


def choose(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
) -> Tensor:
    """argmax(logits / T + noise(seed, position)) after the filters; the plain argmax at T = 0.

    Args:
        logits:    [B, S, V].  temperature, top_p, min_p: [B] fp32.  top_k, seed: [B] int64.
        positions: [B, S] int64, absolute position of the token that is chosen.
    Returns:
        [B, S] int64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperature, top_p, min_p = (x.to(logits.dtype) for x in (temperature, top_p, min_p))
    warm = temperature > 0
    scaled = logits / torch.where(warm, temperature, 1.0)[:, None, None]
    filtered = filter_logits(scaled, top_k, top_p, min_p)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    noise = keyed_gumbel(seed, positions, tokens, logits)
    return (filtered + noise * warm[:, None, None]).argmax(-1)


def propose(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    sure: float,
) -> Tensor:
    """The argmax where its share of the raw logits is above `sure`, else `choose`. [B, S] int64."""
    coupled = choose(logits, temperature, top_k, top_p, min_p, seed, positions)
    share, best = logits.softmax(-1).max(-1)
    return torch.where(share > sure, best, coupled)


# ---------------------------------------------------------------------- acceptance


def count_accepted(proposals: Tensor, tokens: Tensor, limit: Tensor) -> Tensor:
    """Length of the longest prefix of the proposals that the target chose itself.

    Args:
        proposals: [B, S-1] int64.  tokens: [B, S] int64, the target's choice at every row.
        limit:     [B] int64, at most so many.
    Returns:
        [B] int64, 0 .. S-1.
    """
    same = (proposals == tokens[:, :-1]).to(torch.int64)
    return torch.minimum(same.cumprod(1).sum(1), limit.clamp(min=0))


def cut_run(
    tokens: Tensor, accepted: Tensor, budget: Tensor, stop_ids: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Cut an accepted run at the earliest stop inside the budget, else at the budget.

    Args:
        tokens:   [B, S] int64.  accepted: [B] int64.
        budget:   [B] int64, tokens still allowed; 0 emits nothing.
        stop_ids: [B, 16] int64, padded with -1.  offsets: [S] int64, 0 .. S-1.
    Returns:
        num_emitted [B] int64 in 0 .. accepted+1, and stopped [B] bool.
    """
    is_stop = (tokens[:, :, None] == stop_ids[:, None, :]).any(-1)
    first = torch.where(is_stop, offsets, offsets.shape[0]).amin(1)
    run = torch.minimum(accepted + 1, budget)
    return torch.minimum(run, first + 1), first < run


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

    The columns are those of `decoding.plan`: emitted, accepted, accepted before the cut, finish,
    length, epoch, then the W tokens. All int64 where nothing else is said.

    Args:
        slots:     [B].
        proposals: [B, W-1].
        tokens:    [B, W], the target's choice after every row.
        length, anchor, budget, state, epoch, draft_limit: [slots], `DeviceState`'s.
        stop_ids:  [slots, 16], padded with -1.  history: [slots, Lmax], `DeviceState.tokens`.
        counts:    [slots, V] int32 or None.
    """
    width = tokens.shape[1]
    offsets = torch.arange(width, device=tokens.device)
    start, before = length[slots], state[slots]
    active = before == ACTIVE
    accepted = count_accepted(proposals, tokens, draft_limit[slots] - start - 1)
    left = budget[slots] * active
    emitted, stopped = cut_run(tokens, accepted, left, stop_ids[slots], offsets)
    end, left = start + emitted, left - emitted
    finished = (stopped | (left == 0)) & active
    finish = torch.where(stopped, STOP, BUDGET) * finished
    last = tokens.gather(1, (emitted - 1).clamp(min=0)[:, None])[:, 0]
    # Ids behind the cut are garbage behind `len`, like their K/V.
    history.index_put_((slots[:, None], start[:, None] + 1 + offsets), tokens)
    if counts is not None:
        kept = (offsets < emitted[:, None]).to(counts.dtype)
        place = slots[:, None] * counts.shape[1] + tokens
        counts.view(-1).scatter_add_(0, place.flatten(), kept.flatten())
    length.index_copy_(0, slots, end)
    anchor.index_copy_(0, slots, torch.where(emitted > 0, last, anchor[slots]))
    budget.index_copy_(0, slots, left)
    state.index_copy_(0, slots, torch.where(finished, FINISHED, before))
    kept, raw = torch.minimum(accepted, emitted), accepted * active
    head = torch.stack((emitted, kept, raw, finish, end, epoch[slots]), 1)
    return torch.cat((head, tokens), 1)
