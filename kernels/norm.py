# mypy: allow-untyped-defs
"""RMSNorm over the hidden size, alone or with the residual add before it.

Definition: `ops.rms_norm`. Rounded where it rounds: the sum, the unit row, the product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(
    h_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    columns,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = tl.program_id(0).to(tl.int64) * columns + column
    x = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if ADD:
        x += tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype)
        tl.store(sum_ptr + at, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    unit = (x * scale).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (unit * weight).to(dtype), mask=inside)


def _launch(h: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    columns = h.shape[-1]
    h = h.contiguous()
    out = torch.empty_like(h)
    total = h if delta is None else torch.empty_like(h)
    block = triton.next_power_of_2(columns)
    _norm_kernel[(h.numel() // columns,)](
        h,
        h if delta is None else delta.contiguous(),
        weight,
        total,
        out,
        columns,
        eps,
        ADD=delta is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        enable_fp_fusion=False,
    )
    return total, out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., C] scaled to unit mean square, rounded to its dtype, times `weight` [C]."""
    return _launch(x, None, weight, eps)[1]


def add_rms_norm(h: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`h + delta` [..., C], both new tensors: the sum, and its RMSNorm times `weight` [C]."""
    return _launch(h, delta, weight, eps)
