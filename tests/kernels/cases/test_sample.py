"""The keyed noise, argmax, the seeded choice and the proposals."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from nanodflash.kernels import sample, words
from torch import Tensor

from nanodflash import ops
from nanodflash.decoding import sampling

NAN, INF = float("nan"), float("inf")
SEEDS = [0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**63 - 1, -1, -2, -(2**63), 0x123456789ABCDEF]
POSITIONS = [0, 1, 2, 511, 512, 40959, 2**31 - 1]


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device())


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, u_ptr, gumbel_ptr, COUNT: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, COUNT)
    a, b = words.row_keys(tl.load(seed_ptr + row), tl.load(position_ptr + column))
    u = words.uniform(a, b, token + column * 100_003)
    at = (row * tl.num_programs(1) + column) * COUNT + token
    tl.store(u_ptr + at, u)
    tl.store(gumbel_ptr + at, words.gumbel(u))


def test_noise_is_the_definition_s() -> None:
    """u bit for bit (so the hash is), its two logarithms to the rounding of fp32."""
    count, shape = 128, (len(SEEDS), len(POSITIONS), 128)
    u, got = torch.empty(shape), torch.empty(shape)
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    _noise_kernel[shape[:2]](seeds, positions, u, got, COUNT=count)
    for column, position in enumerate(POSITIONS):
        at = torch.full((len(SEEDS), 1), position)
        tokens = torch.arange(count) + column * 100_003
        args = seeds, at, tokens, torch.zeros(1, dtype=torch.float32)
        wanted = ops.keyed_gumbel(*args)[:, 0]
        torch.testing.assert_close(got[:, column], wanted, rtol=2e-6, atol=5e-7)
        exact = ops.keyed_gumbel(*args[:3], torch.zeros(1, dtype=torch.float64))[:, 0]
        word = (-torch.expm1(-torch.exp(-exact)) * 2.0**32 - 0.5).round()  # back from fp64 noise
        there = ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
        assert torch.equal(u[:, column], there)


@triton.jit
def _gumbel_kernel(u_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, words.gumbel(tl.load(u_ptr + at)))


def test_gumbel_is_right_at_both_ends() -> None:
    """The winners of a vocabulary come from the smallest u: there 1 - u is 1 in fp32."""
    powers = 2.0 ** -torch.arange(1, 34, dtype=torch.float64)
    u = torch.cat([powers, 1 - powers[:24], torch.tensor([0.3, 0.632, 0.9])])
    u = torch.nn.functional.pad(u, (0, 64 - len(u)), value=0.5).float()
    got = torch.empty(64)
    _gumbel_kernel[(1,)](u, got, COUNT=64)
    wanted = -torch.log(-torch.log1p(-u.double()))
    torch.testing.assert_close(got.double(), wanted, rtol=5e-7, atol=3e-7)
    assert got.isfinite().all()


@triton.jit
def _key_kernel(x_ptr, key_ptr, back_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    key = words.sort_key(tl.load(x_ptr + at))
    tl.store(key_ptr + at, key.to(tl.int64))
    tl.store(back_ptr + at, words.number_of_key(key))


def test_keys_sort_as_the_numbers() -> None:
    ends = [-INF, -3e38, -1.0, -1e-38, -1e-45, -0.0, 0.0, 1e-45, 1e-38, 1.0, 3e38, INF]
    x = torch.cat([torch.tensor(ends), noise(51) * 10, torch.tensor([NAN])])
    key, back = torch.empty(64, dtype=torch.int64), torch.empty(64)
    _key_kernel[(1,)](x, key, back, COUNT=64)
    assert torch.equal(back[:-1], x[:-1])
    assert key[:-1].max() < key[-1] == 2**32 - 1
    assert key.min() > 0
    assert torch.equal(key[:-1, None] < key[None, :-1], x[:-1, None] < x[None, :-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 2048, 8192, 8193, 20_001])
def test_argmax(vocab: int, dtype: torch.dtype) -> None:
    """Odd vocabularies, chunk edges, and many ties in the half types: the lowest id wins."""
    logits = noise(2, 3, vocab, seed=vocab).to(dtype)
    logits[0, 1] = logits[0, 1].round()
    logits[1, 0] = -INF
    logits[1, 1] = 0.0
    logits[1, 1, vocab // 2 :] = -0.0
    logits[1, 2, -1] = INF
    got = sample.argmax(logits)
    assert (got.dtype, got.shape) == (torch.int64, (2, 3))
    assert torch.equal(got, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))


def test_argmax_of_nan_is_an_id() -> None:
    logits = noise(3, 1, 9000)
    logits[0] = NAN
    logits[1, 0, 8500] = NAN
    logits[2] = -NAN
    got = sample.argmax(logits).flatten().tolist()
    assert got == [0, 8500, 0]


def request(**values: Any) -> SimpleNamespace:
    """The fields of `DeviceState` that a choice reads."""
    count = len(values["temperature"])
    plain = {"top_k": [0] * count, "top_p": [1.0] * count, "min_p": [0.0] * count}
    named = {"seed": list(range(7, 7 + count))} | plain | values
    return SimpleNamespace(**{name: torch.tensor(value) for name, value in named.items()})


def args(state: SimpleNamespace) -> tuple[Tensor, ...]:
    return state.temperature, state.top_k, state.top_p, state.min_p, state.seed


def agree(got: Tensor, logits: Tensor, wanted: Tensor) -> None:
    """Equal ids. The noise is rounded apart by an ulp, so a near tie could fall either way."""
    assert (got.dtype, got.shape) == (torch.int64, logits.shape[:2])
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [5, 2048, 9000])
def test_choose(vocab: int, dtype: torch.dtype) -> None:
    """Greedy rows, warm rows, and rows with every kind of filter, in one batch."""
    state = request(
        temperature=[0.0, 1.0, 0.6, 3.0, 0.0, 0.8],
        top_k=[0, 0, 20, 0, 3, 0],
        top_p=[1.0, 1.0, 0.95, 0.9, 0.5, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.9, 0.05],
        seed=[1, -5, 2**40, 2**63 - 1, 0, 77],
    )
    logits = (4 * noise(6, 3, vocab, seed=vocab)).to(dtype)
    positions = torch.arange(18).view(6, 3) * 1000
    got = sample.choose(logits, *args(state), positions)
    agree(got, logits, ops.choose(logits, *args(state), positions))
    assert torch.equal(got[[0, 4]], logits[[0, 4]].argmax(-1))


def test_a_row_s_choice_does_not_depend_on_the_batch() -> None:
    state = request(temperature=[1.0, 0.7, 0.0], top_p=[0.9, 1.0, 1.0], seed=[3, 4, 5])
    logits, positions = noise(3, 2, 3000), torch.tensor([[8, 9]] * 3)
    got = sample.choose(logits, *args(state), positions)
    for row in range(3):
        one = [value[row : row + 1] for value in args(state)]
        alone = sample.choose(logits[row : row + 1], *one, positions[:1])
        assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("vocab", [100, 9000])
def test_propose(vocab: int) -> None:
    """The likeliest where it has more than 0.3, drawn with the target's noise elsewhere."""
    state = request(temperature=[1.0, 1.2, 0.0], top_p=[1.0, 0.99, 1.0])
    logits = noise(3, 6, vocab, seed=3)
    logits[..., 17] = -INF
    rest = logits.logsumexp(-1)
    logits[..., 17] = rest + torch.tensor([-0.6, 5.0, -1.0, -1.0, -1.0, -5.0])  # .35 .99 .27 .01
    positions = torch.arange(18).view(3, 6)
    got = sample.propose(logits, *args(state), positions, sampling.SURE)
    wanted = ops.propose(logits, *args(state), positions, sampling.SURE)
    agree(got, logits, wanted)
    assert (got[:, :2] == 17).all()
    assert (got[:2, 2:5] != 17).any()
