"""Every device operation, as plain torch: the executable definition.

A faster implementation is tested against these. They take and return tensors, hold no state, and
make no host sync, so that a step made of them can be captured. Internal sums are fp32, or fp64
when the model is.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., C] scaled to unit mean square, rounded to its dtype, times `weight` [C] or [H, C]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def norm_rope(x: Tensor, weight: Tensor, eps: float, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """RMSNorm over the head, then rotate-half RoPE.

    Args:
        x:      [..., H, D].  weight: [D], or [H, D] with one for each head.
        rotary: cos, sin [..., 1, D]; the first half of sin carries the sign of the rotation.
    """
    cos, sin = rotary
    x = rms_norm(x, weight, eps)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2I] -> [..., I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


# ---------------------------------------------------------------------- paged attention


def write_rows(rows: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    """Scatter K/V rows into one layer's pages.

    Args:
        rows:  [N, P, 2, Hkv, D], K then V of every place in every page.
        index: [...] int64, page * P + offset. Rows that must not count point into page 0.
        k, v:  [..., Hkv, D].
    """
    rows.flatten(0, 1).index_put_((index,), torch.stack((k, v), -3))


def attention_mask(
    start: Tensor, offsets: Tensor, keys: Tensor, causal: bool, window: int | None, like: Tensor
) -> Tensor:
    """Which keys the rows of a block see, as 0 and -inf to be added to the scores.

    Args:
        start:   [B] int64, the position of block position 0.
        offsets: [S] int64, 0 .. S-1.  keys: [K] int64, 0 .. K-1.
        causal:  rows see no later position; otherwise all of the block.
        window:  keys within this distance, the row's own included; None = all.
        like:    a tensor of the wanted dtype.
    Returns:
        [B, 1, S, K].
    Source: dflash.md 1.6.
    """
    position = start[:, None, None] + offsets[:, None]  # [B, S, 1]
    end = start[:, None, None] + offsets.shape[0]
    unseen = keys > position if causal else keys >= end  # [B, S or 1, K]
    if window is not None:
        unseen = unseen | (position - keys >= window)
        if not causal:
            unseen = unseen | (keys - position >= window)
    mask = like.new_zeros(start.shape[0], offsets.shape[0], keys.shape[0])
    return mask.masked_fill_(unseen, float("-inf"))[:, None]


def paged_attention(
    q: Tensor, rows: Tensor, pages: Tensor, mask: Tensor, unwritten: Tensor
) -> Tensor:
    """Attention of S query rows a request over its pages.

    Args:
        q:         [B, S, Hq, D].  rows: [N, P, 2, Hkv, D].
        pages:     [B, n] int64 page ids in order of position.
        mask:      [B, 1, S, n*P] from `attention_mask`.
        unwritten: [B, n*P] bool, places behind the block. Whatever they hold counts for nothing:
                   a NaN times zero would still be NaN, so K and V are cleared.
    Returns:
        [B, S, Hq, D].
    """
    # Whole pages as rows of a matrix: the one shape that index_select copies at memory speed.
    kv = rows.flatten(1).index_select(0, pages.flatten())
    kv = kv.view(pages.shape[0], -1, *rows.shape[2:])
    kv.masked_fill_(unwritten[:, :, None, None, None], 0.0)  # `kv` is a copy, and ours
    k, v = kv.transpose(1, 3).unbind(2)  # [B, Hkv, n*P, D]
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True)
    return out.transpose(1, 2)


# ---------------------------------------------------------------------- choosing tokens

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
