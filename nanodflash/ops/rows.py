"""Norms, rotation, K/V rows in pages, attention over them: the definitions."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor], Tensor]  # (q [B, S, Hq, D], rows of a layer) -> as q


class Rotary(NamedTuple):
    """Of each row's position, [..., 1, D]; the first half of sin carries the rotation's sign."""

    cos: Tensor
    sin: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., C] scaled to unit mean square, rounded to its dtype, times `weight` [C] or [H, C]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    # eps + the mean square, in one pass
    least = torch.full((), eps, dtype=wide.dtype, device=x.device)
    square = torch.addcmul(least, length, length, value=1 / x.shape[-1])
    return (wide * square.rsqrt()).to(x.dtype) * weight


def add_rms_norm(h: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`h + delta` [..., C], and its RMSNorm."""
    total = h + delta
    return total, rms_norm(total, weight, eps)


def norm_rope(
    x: Tensor, weight: Tensor, eps: float, rotary: Rotary, out: Tensor | None = None
) -> Tensor:
    """RMSNorm over the head, then rotate-half RoPE.

    Args:
        x: [..., H, D].  weight: [D], or [H, D] with one for each head.  out: as x; may be x.
    """
    cos, sin = rotary
    x = rms_norm(x, weight, eps)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=out)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2I] -> [..., I]."""
    gate, up = gate_up.chunk(2, -1)
    if torch.is_inference_mode_enabled():
        return F.silu(gate).mul_(up)
    return F.silu(gate) * up


def split_heads(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, rotary: Rotary, num_kv: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [..., Hq, D] and k [..., Hkv, D] normed and rotated, v as it is, of a fused projection.

    Args:
        qkv:    [..., Hq + 2 Hkv, D]; Hq may be 0.
        q_norm, k_norm: [D].
        num_kv: Hkv.
    """
    num_q = qkv.shape[-2] - 2 * num_kv
    qk, v = qkv.split([num_q + num_kv, num_kv], -2)
    # q and k in one pass, each head with its own weight
    weight = torch.cat((q_norm.expand(num_q, -1), k_norm.expand(num_kv, -1))) if num_q else k_norm
    q, k = norm_rope(qk, weight, eps, rotary).split([num_q, num_kv], -2)
    return q, k, v


# ---------------------------------------------------------------------- paged K/V


def write_rows(rows: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    """Scatter K/V rows into one layer's pages.

    Args:
        rows:  [N, P, 2, Hkv, D], K then V of every place in every page.
        index: [...] int64, page * P + offset. Rows that must not count point into page 0.
        k, v:  [..., Hkv, D].
    """
    rows.flatten(0, 1).index_put_((index,), torch.stack((k, v), -3))


def norm_rope_write(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rotary: Rotary,
    rows: Tensor,
    index: Tensor,
) -> Tensor:
    """Write one layer's K/V rows and return its queries [..., Hq, D]: `split_heads` and
    `write_rows`. The projection is its own, and what it returns may lie there.
    """
    num_kv = rows.shape[-2]
    num_q = qkv.shape[-2] - 2 * num_kv
    qk, kv = qkv[..., : num_q + num_kv, :], qkv[..., num_q:, :]
    weight = torch.cat((q_norm.expand(num_q, -1), k_norm.expand(num_kv, -1)))
    norm_rope(
        qk, weight, eps, rotary, out=qk
    )  # so that K and V lie side by side, to be copied once
    flat = rows.flatten(0, 1).flatten(1)
    flat.index_copy_(0, index.flatten(), kv.flatten(-2).flatten(0, -2))
    return qkv[..., :num_q, :]


def inject_rows(
    kv: Tensor, k_norms: Tensor, eps: float, rotary: Rotary, rows: Tensor, index: Tensor
) -> None:
    """Write the K/V rows of all layers: K normed and rotated, V as it is.

    Args:
        kv:      [..., L, 2 Hkv, D], K then V of every layer.
        k_norms: [L, D].  rows: [L, N, P, 2, Hkv, D].
        index:   [...] int64, as in `write_rows`.
    """
    kv = kv.unflatten(-2, (2, -1))  # [..., L, 2, Hkv, D]
    cos, sin = (part.unsqueeze(-2) for part in rotary)
    k = norm_rope(kv.select(-3, 0), k_norms[:, None], eps, Rotary(cos, sin))
    made = torch.stack((k, kv.select(-3, 1)), -3)
    layers = torch.arange(len(rows), device=rows.device)
    rows.flatten(1, 2).index_put_((layers, index[..., None]), made)


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


def row_places(pages: Tensor, end: Tensor, keys: Tensor, like: Tensor) -> Tensor:
    """Where the rows of all positions lie, page * P + offset, [B, K].

    What lies behind `end` counts for nothing, whatever it holds. A NaN times zero would still be
    NaN: such a position reads the last row of the pool, which nobody writes and which is zero.

    Args:
        pages: [B, n] int64 page ids in order of position.  end: [B] int64.
        keys:  [n*P] int64, 0, 1, 2, ...  like: [..., N, P, 2, Hkv, D], the pool.
    """
    num_pages, size = like.shape[-5:-3]
    places = (pages[:, :, None] * size + keys[:size]).flatten(1)
    return torch.where(keys < end[:, None], places, num_pages * size - 1)


def paged_attention(q: Tensor, rows: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    """Attention of S query rows a request over its pages.

    Args:
        q:      [B, S, Hq, D].  rows: [N, P, 2, Hkv, D], the last page all zero.
        places: [B, K] int64, where the row of each position lies, from `row_places`.
        mask:   [B, 1, S, K] from `attention_mask`.
    Returns:
        [B, S, Hq, D].
    """
    # As rows of a matrix: the one shape that index_select copies at memory speed.
    kv = rows.flatten(0, 1).flatten(1).index_select(0, places.flatten())
    kv = kv.view(*places.shape, *rows.shape[2:])
    k, v = kv.transpose(1, 3).unbind(2)  # [B, Hkv, K, D]
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True)
    return out.transpose(1, 2)


def attention(
    pages: Tensor, start: Tensor, size: int, causal: bool, window: int | None, like: Tensor
) -> Attend:
    """`paged_attention` of the rows at start .. start+size-1, for all layers that see alike.

    Args:
        pages: [B, n] int64 page ids, in order of position.  start: [B] int64.
        like:  [..., N, P, 2, Hkv, D], the pool.
    """
    offsets = torch.arange(size, device=start.device)
    keys = torch.arange(pages.shape[1] * like.shape[-4], device=start.device)
    mask = attention_mask(start, offsets, keys, causal, window, like)
    places = row_places(pages, start + size, keys, like)
    return lambda q, rows: paged_attention(q, rows, places, mask)
