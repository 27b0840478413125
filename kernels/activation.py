# mypy: allow-untyped-defs
"""SwiGLU. Definition: `ops.silu_mul`."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up_ptr + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + column, (silu * up).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2I] -> [..., I]."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(width), 1024)
    grid = (gate_up.numel() // (2 * width), triton.cdiv(width, block))
    _silu_mul_kernel[grid](
        gate_up, out, width, BLOCK=block, num_warps=max(block // 256, 1), enable_fp_fusion=False
    )
    return out
