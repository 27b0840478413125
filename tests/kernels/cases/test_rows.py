"""Norms, SwiGLU, RoPE and the writes into pages: where they round, and where they write."""

import pytest
import torch
from nanodflash.kernels.activation import silu_mul
from nanodflash.kernels.norm import add_rms_norm, rms_norm
from nanodflash.kernels.norm_rope_write import inject_rows, norm_rope_write
from torch import Tensor

from nanodflash import ops

# Relative; for the half types also the share of values that may differ from the definition's by
# this, the others are equal. The interpreter cuts bf16 off where it should round.
TOLERANCE = {torch.float32: (1e-6, 1.0), torch.float16: (2e-3, 0.02), torch.bfloat16: (3e-2, 1.0)}
EPS = 1e-6


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device="cpu").to(dtype)
    return values.to(torch.get_default_device())


def close(got: Tensor, wanted: Tensor, scale: float = 1.0) -> None:
    """Equal within the table; `scale` is the size of what was added up."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    bound, share = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound * scale)
    assert (got != wanted).float().mean() <= share


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [1, 31, 192, 1000, 5120])
def test_rms_norm(columns: int, dtype: torch.dtype) -> None:
    x, weight = 3 * noise(2, 3, columns, dtype=dtype), 1 + noise(columns, seed=1, dtype=dtype) / 8
    close(rms_norm(x, weight, EPS), ops.rms_norm(x, weight, EPS), 1e-3)
    close(rms_norm(x, weight, 10.0), ops.rms_norm(x, weight, 10.0), 1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [31, 192, 1000])
def test_add_rms_norm(columns: int, dtype: torch.dtype) -> None:
    """The sum is rounded before it is normed, and the inputs are left alone."""
    h, delta = 3 * noise(5, columns, dtype=dtype), noise(5, columns, seed=1, dtype=dtype)
    weight = 1 + noise(columns, seed=2, dtype=dtype) / 8
    before = h.clone()
    total, normed = add_rms_norm(h, delta, weight, EPS)
    close(total, h + delta, 1e-3)
    close(normed, ops.rms_norm(h + delta, weight, EPS), 3e-2)
    assert torch.equal(h, before)


def test_rms_norm_of_large_fp16_values() -> None:
    """300 squared is past fp16's range; the mean square is taken in fp32."""
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(64, dtype=torch.float16), EPS), x / 300)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 96, 512, 1500])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    both = 3 * noise(2, 3, 2 * width, dtype=dtype)
    close(silu_mul(both), ops.silu_mul(both), 1e-3)
    extremes = torch.tensor([[-200.0, 80.0, 0.0, 1.0, 2.0, 3.0]]).to(dtype)
    assert torch.equal(silu_mul(extremes), torch.tensor([[0.0, 160.0, 0.0]]).to(dtype))


def turns(*shape: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = 5 * noise(*shape, 1, dim // 2, seed=7)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    return angles.cos().repeat(*[1] * len(shape), 1, 2).to(dtype), sin.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "dim"), [((6, 3), 32), ((5, 1), 64), ((8, 2), 128), ((4, 2), 32), ((8, 1), 32)]
)
@pytest.mark.parametrize("page_size", [3, 16])
def test_norm_rope_write(
    page_size: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    """Queries come back, K and V lie in their places, and nothing else is touched."""
    num_q, num_kv = heads
    qkv = 2 * noise(2, 3, num_q + 2 * num_kv, dim, dtype=dtype)
    q_norm, k_norm = 1 + noise(2, dim, seed=1, dtype=dtype) / 4
    rotary = turns(2, 3, dim=dim, dtype=dtype)
    index = torch.tensor([[11, 2, 7], [29, 5, 0]])
    rows = noise(-(-30 // page_size), page_size, 2, num_kv, dim, seed=3, dtype=dtype)
    wanted = rows.clone()
    q, k, v = qkv.split([num_q, num_kv, num_kv], -2)
    ops.write_rows(wanted, index, ops.norm_rope(k, k_norm, EPS, rotary), v)
    got = norm_rope_write(qkv, q_norm, k_norm, EPS, rotary, rows, index)
    close(got, ops.norm_rope(q, q_norm, EPS, rotary), 3.0)
    assert torch.equal(rows[:, :, 1], wanted[:, :, 1])  # V exactly
    written = torch.zeros(rows.shape[0] * page_size, dtype=torch.bool)
    written[index.flatten()] = True
    k_rows, k_wanted = rows[:, :, 0].flatten(0, 1), wanted[:, :, 0].flatten(0, 1)
    assert torch.equal(k_rows[~written], k_wanted[~written])
    close(k_rows[written], k_wanted[written], 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layers", [1, 3])
def test_inject_rows(layers: int, dtype: torch.dtype) -> None:
    """All layers at once, each with its own norm, into a pool that is part of a larger one."""
    num_kv, dim = 3, 32
    kv = 2 * noise(7, layers, 2 * num_kv, dim, dtype=dtype)
    k_norms = 1 + noise(layers, dim, seed=1, dtype=dtype) / 4
    rotary = turns(7, dim=dim, dtype=dtype)
    index = torch.tensor([11, 2, 7, 29, 5, 0, 30])
    pool = noise(layers + 1, 4, 8, 2, num_kv, dim, seed=3, dtype=dtype)
    wanted, before = pool.clone(), pool.clone()
    for i in range(layers):
        k, v = kv[:, i].split(num_kv, -2)
        ops.write_rows(wanted[i + 1], index, ops.norm_rope(k, k_norms[i], EPS, rotary), v)
    inject_rows(kv, k_norms, EPS, rotary, pool[1:], index)
    assert torch.equal(pool[0], before[0])
    assert torch.equal(pool[:, :, :, 1], wanted[:, :, :, 1])
    close(pool[:, :, :, 0], wanted[:, :, :, 0], 3.0)
    assert not torch.equal(wanted[1:], before[1:])
