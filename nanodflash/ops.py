"""Every device operation, as plain torch: the executable definition.

A faster implementation is tested against these. They take and return tensors, hold no state, and
make no host sync, so that a step made of them can be captured. Internal sums are fp32, or fp64
when the model is.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., C] scaled to unit mean square, rounded to its dtype, times `weight` [C]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def norm_rope(x: Tensor, weight: Tensor, eps: float, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """RMSNorm over the head, then rotate-half RoPE.

    Args:
        x:      [..., H, D].  weight: [D].
        rotary: cos, sin [..., 1, D]; the first half of sin carries the sign of the rotation.
    """
    cos, sin = rotary
    x = rms_norm(x, weight, eps)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2I] -> [..., I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
