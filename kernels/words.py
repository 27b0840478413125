# mypy: allow-untyped-defs
"""fp32 numbers as words that sort alike, and the keyed noise: shared by sampling and filters."""

import triton
import triton.language as tl


@triton.jit
def sort_key(x):
    """fp32 -> uint32 that sorts alike: NaN above all, both zeros the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x == x, key, 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def number_of_key(key):
    """The fp32 number that a sort key stands for."""
    bits = tl.where((key >> 31) != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed, position):
    """The two uint32 of a (seed, position) that `uniform` takes."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    a = _mix(_mix(_mix(low) ^ high) ^ place)
    b = _mix(_mix(_mix(high ^ 0x9E3779B9) ^ low) ^ place)
    return a, b


@triton.jit
def uniform(a, b, token):
    """A number in (0, 1), a function of (seed, position, token) alone; `ops.keyed_gumbel`'s."""
    word = _mix(_mix(token.to(tl.uint32) ^ a) + b)
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)


@triton.jit
def gumbel(u):
    """-log(-log1p(-u)) of fp32 u in (0, 1)."""
    # log1p without a library call: the rounding of 1 - u cancels in the quotient.
    rest = 1.0 - u
    exact = rest == 1.0
    safe = tl.where(exact, 0.5, rest)
    return -tl.log(tl.where(exact, u, tl.log(safe) * tl.div_rn(u, safe - 1.0)))
