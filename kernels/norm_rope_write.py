# mypy: allow-untyped-defs
"""Head norms, RoPE and the write of K/V rows into the pages, in one pass.

Definition: `ops.norm_rope` and `ops.write_rows`. One kernel serves both callers: a layer's fused
projection (queries come back, K and V go to the pages), and the context side of all draft layers
at once (no queries, a layer an axis of the grid).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 4  # heads a program, one a warp


@triton.jit
def _norm_rope_write_kernel(
    x_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    index_ptr,
    q_ptr,
    rows_ptr,
    x_token,
    x_layer,
    rows_layer,
    rows_page,
    rows_place,
    rows_kv,
    rows_head,
    eps,
    PAGE: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)  # queries, then keys, then values
    HALF: tl.constexpr = DIM // 2
    dims = tl.arange(0, HALF)
    inside = (head < NUM_Q + 2 * NUM_KV)[:, None]
    is_q, is_v = (head < NUM_Q)[:, None], (head >= NUM_Q + NUM_KV)[:, None]
    at = x_ptr + token * x_token + layer * x_layer + head[:, None] * DIM + dims[None, :]
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + HALF, mask=inside, other=0.0)

    dtype = low.dtype
    x1, x2 = low.to(tl.float32), high.to(tl.float32)
    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DIM + eps)[:, None]
    k_norm = k_norm_ptr + layer * DIM + dims[None, :]
    w1, w2 = tl.load(k_norm).to(tl.float32), tl.load(k_norm + HALF).to(tl.float32)
    if NUM_Q > 0:
        q_norm = q_norm_ptr + dims[None, :]
        w1 = tl.where(is_q, tl.load(q_norm).to(tl.float32), w1)
        w2 = tl.where(is_q, tl.load(q_norm + HALF).to(tl.float32), w2)
    # Rounded where the definition rounds: unit row, product with the weight, product with cos.
    x1 = ((x1 * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
    x2 = ((x2 * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    turn = token * DIM + dims[None, :]
    cos1, sin1 = tl.load(cos_ptr + turn).to(tl.float32), tl.load(sin_ptr + turn).to(tl.float32)
    turn += HALF
    cos2, sin2 = tl.load(cos_ptr + turn).to(tl.float32), tl.load(sin_ptr + turn).to(tl.float32)
    turned1 = ((x1 * cos1).to(dtype).to(tl.float32) + x2 * sin1).to(dtype)  # sin1 has the sign
    turned2 = ((x2 * cos2).to(dtype).to(tl.float32) + x1 * sin2).to(dtype)

    if NUM_Q > 0:
        q_at = q_ptr + token * NUM_Q * DIM + head[:, None] * DIM + dims[None, :]
        tl.store(q_at, turned1, mask=is_q)
        tl.store(q_at + HALF, turned2, mask=is_q)
    place = tl.load(index_ptr + token)
    row = rows_ptr + layer.to(tl.int64) * rows_layer
    row += place // PAGE * rows_page + place % PAGE * rows_place
    kv = head - NUM_Q  # 0 .. 2*NUM_KV-1 from here on
    kv_at = row + (kv // NUM_KV * rows_kv + kv % NUM_KV * rows_head)[:, None] + dims[None, :]
    is_kv = inside & (kv >= 0)[:, None]
    tl.store(kv_at, tl.where(is_v, low, turned1), mask=is_kv)
    tl.store(kv_at + HALF, tl.where(is_v, high, turned2), mask=is_kv)


def _launch(
    x: Tensor,
    x_layer: int,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    rows: Tensor,
    index: Tensor,
    q: Tensor,
    num_q: int,
) -> None:
    """x [T, ...] contiguous, rows [L, N, P, 2, Hkv, D]."""
    layers, _, page_size, _, num_kv, dim = rows.shape
    cos, sin = rotary
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert rows.stride(-1) == 1
    grid = (index.numel(), layers, triton.cdiv(num_q + 2 * num_kv, HEADS))
    _norm_rope_write_kernel[grid](
        x,
        q_norm,
        k_norm,
        cos,
        sin,
        index,
        q,
        rows,
        layers * (num_q + 2 * num_kv) * dim,
        x_layer,
        *rows.stride()[:5],
        eps,
        PAGE=page_size,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        DIM=dim,
        HEADS=HEADS,
        num_warps=HEADS,
        enable_fp_fusion=False,
    )


def norm_rope_write(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    rows: Tensor,
    index: Tensor,
) -> Tensor:
    """Write one layer's K/V rows and return its queries [..., Hq, D], normed and rotated.

    Args:
        qkv:    [..., Hq + 2 Hkv, D], the fused projection.
        q_norm, k_norm: [D].
        rotary: cos, sin [..., 1, D]; the first half of sin carries the sign.
        rows:   [N, P, 2, Hkv, D], one layer's pages.
        index:  [...] int64, page * P + offset, from `row_index`.
    """
    heads, dim = qkv.shape[-2:]
    num_q = heads - 2 * rows.shape[3]
    q = torch.empty(*qkv.shape[:-2], num_q, dim, dtype=qkv.dtype, device=qkv.device)
    _launch(
        qkv.contiguous(), 0, q_norm, k_norm, eps, rotary, rows[None], index.contiguous(), q, num_q
    )
    return q


def inject_rows(
    kv: Tensor,
    k_norms: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    rows: Tensor,
    index: Tensor,
) -> None:
    """Write the K/V rows of all draft layers: K normed and rotated, V as it is.

    Args:
        kv:      [..., L, 2 * Hkv, D], K then V of every layer, one projection of the context rows.
        k_norms: [L, D].
        rotary:  cos, sin [..., 1, D].
        rows:    [L, N, P, 2, Hkv, D].
        index:   [...] int64, page * P + offset.
    """
    kv = kv.contiguous()
    _launch(kv, kv.stride(-3), k_norms, k_norms, eps, rotary, rows, index.contiguous(), kv, num_q=0)
