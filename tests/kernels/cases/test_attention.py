"""Paged attention against `ops.paged_attention` over pages full of NaN, and bit for bit."""

import os
import random

import pytest
import torch
from nanodflash.kernels.attention import paged_attention
from torch import Tensor

from nanodflash import ops

NAN = float("nan")
# Largest error of rows of values of size 1; the sums are fp32, fp16 rounds weights and result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
if os.environ.get("TRITON_INTERPRET") != "1":  # which multiplies the bit patterns of bf16
    TOLERANCE[torch.bfloat16] = 2e-2


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device="cpu").to(dtype)
    return values.to(torch.get_default_device())


class Case:
    """Random K/V of a few requests, scattered over shuffled pages; all else is NaN."""

    def __init__(
        self,
        starts: list[int],
        size: int,
        heads: tuple[int, int],
        dim: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        slack: int = 1,
    ) -> None:
        ends = [start + size for start in starts]
        counts = [-(-end // page_size) for end in ends]
        order = random.Random(seed).sample(range(1, 4 + sum(counts)), sum(counts))
        self.pages = torch.zeros(len(starts), max(counts) + slack, dtype=torch.int64)
        self.rows = torch.full((5 + sum(counts), page_size, 2, heads[1], dim), NAN, dtype=dtype)
        self.rows[-1] = 0.0  # the definition reads it for what is not written
        for i, (end, count) in enumerate(zip(ends, counts, strict=True)):
            mine = torch.tensor([order.pop() for _ in range(count)])
            self.pages[i, :count] = mine
            at = torch.arange(end)
            k, v = noise(2, end, heads[1], dim, seed=seed + i + 1, dtype=dtype)
            index = mine[at // page_size] * page_size + at % page_size
            ops.write_rows(self.rows, index, k, v)
        self.q = noise(len(starts), size, heads[0], dim, seed=seed, dtype=dtype)
        self.start, self.size = torch.tensor(starts), size

    def wanted(self, causal: bool, window: int | None) -> Tensor:
        keys = torch.arange(self.pages.shape[1] * self.rows.shape[1])
        offsets = torch.arange(self.size)
        mask = ops.attention_mask(self.start, offsets, keys, causal, window, self.q)
        places = ops.row_places(self.pages, self.start + self.size, keys, self.rows)
        return ops.paged_attention(self.q.float(), self.rows.float(), places, mask.float())

    def check(self, causal: bool, window: int | None, splits: int | None = None) -> None:
        got = paged_attention(self.q, self.rows, self.pages, self.start, causal, window, splits)
        assert (got.dtype, got.shape) == (self.q.dtype, self.q.shape)
        bound = TOLERANCE[got.dtype]
        wanted = self.wanted(causal, window)
        torch.testing.assert_close(got.float(), wanted, rtol=bound, atol=bound)


SIGHTS = [(True, None), (False, None), (True, 7), (False, 7), (True, 500), (False, 500)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("group", [2, 4, 5, 8])
def test_head_groups_and_dims(group: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """One tile of 16, 32 or 64 rows; context of one to three tiles of keys."""
    case = Case([61, 130], 5, (group * kv_heads, kv_heads), dim, dtype=dtype, seed=dim)
    causal, window = SIGHTS[(group + kv_heads + dim // 32) % len(SIGHTS)]
    case.check(causal, window, splits=1 if dim > 32 else 2)


@pytest.mark.parametrize(("page_size", "size"), [(1, 5), (3, 8), (16, 1), (16, 7), (64, 8)])
def test_page_edges(page_size: int, size: int) -> None:
    """Blocks that start before, on and after an edge of a page and of a tile, and end there."""
    starts = [64 - size, 63, 64, 65, page_size]
    case = Case(starts, size, (2, 1), 32, page_size, seed=page_size)
    for sight in SIGHTS[:4]:
        case.check(*sight, splits=1)
    case.check(True, None, splits=2)


@pytest.mark.parametrize("splits", [1, 2, 4, 16, None])
def test_splits(splits: int | None) -> None:
    """Fewer splits than tiles, more, and the default; with empty ones in front of a window."""
    case = Case([0, 700, 330], 3, (2, 1), 32, page_size=64)
    for sight in ((True, None), (False, 100)):
        case.check(*sight, splits=splits)


@pytest.mark.parametrize("window", [1, 2, 8, 63, 64, 65, 129, 400, 10_000])
def test_windows(window: int) -> None:
    case = Case([0, 5, 150, 321], 8, (2, 1), 32)
    for causal in (True, False):
        case.check(causal, window, splits=1 if causal else 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("start", "size"), [(0, 1), (0, 75), (37, 90), (200, 33), (64, 64)])
def test_prompt_chunks(start: int, size: int, dtype: torch.dtype) -> None:
    """More rows than one tile holds, with and without a context before them."""
    case = Case([start], size, (4, 1), 32, dtype=dtype)
    case.check(True, None, splits=1)
    case.check(True, None, splits=2)
    case.check(True, 40, splits=1)


def test_strided_inputs() -> None:
    """Queries cut out of a fused projection, one layer of a pool, the front of a table."""
    case = Case([0, 70], 4, (4, 2), 32, slack=5)
    fused = torch.full((2, 4, 8, 32), NAN)
    fused[:, :, :4] = case.q
    pool = torch.full((2, *case.rows.shape), NAN)
    pool[1] = case.rows
    table = case.pages[:, :5]
    got = paged_attention(fused[:, :, :4], pool[1], table, case.start, True, None, 2)
    wanted = paged_attention(case.q, case.rows, case.pages, case.start, True, None, 2)
    assert torch.equal(got, wanted)


def test_rows_that_are_not_active() -> None:
    """The dummy page all along, a start past the table: the others notice nothing, no fault."""
    case = Case([130, 0, 40], 4, (4, 2), 32)
    wanted = paged_attention(case.q, case.rows, case.pages, case.start, True, None, 2)
    case.pages[1], case.start[1] = 0, 10_000
    got = paged_attention(case.q, case.rows, case.pages, case.start, True, None, 2)
    assert torch.equal(got[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize(("splits", "window"), [(1, None), (4, None), (8, None), (4, 30), (3, 150)])
def test_bits_do_not_depend_on_where_a_block_starts(splits: int | None, window: int | None) -> None:
    """The row of a position, in blocks that start at all places around it."""
    size, last = 6, 216
    whole = Case([last], size, (2, 1), 32)
    q = noise(last + size, 2, 32, seed=9)
    seen: dict[int, Tensor] = {}
    for start in (58, 61, 63, 64, 65, 91, 94, 127, 128, 209, 212, 213, 214, last):
        block = q[None, start : start + size]
        at = torch.tensor([start])
        out = paged_attention(block, whole.rows, whole.pages, at, True, window, splits)[0]
        for position, row in zip(range(start, start + size), out, strict=True):
            assert torch.equal(seen.setdefault(position, row), row), (start, position)
    assert len(seen) < 14 * size - 20  # so many were compared


@pytest.mark.parametrize(("causal", "window"), SIGHTS)
def test_bits_do_not_depend_on_the_neighbours(causal: bool, window: int | None) -> None:
    """Other requests beside it, other lengths, another row of the batch, other page ids."""
    mine = Case([150], 6, (2, 1), 32)
    outs = []
    for other, place in (([0, 3], 0), ([0, 3], 2), ([200, 64], 0), ([149, 151], 1)):
        case = Case(other, 6, (2, 1), 32, seed=sum(other) + 5)
        width = max(case.pages.shape[1], mine.pages.shape[1])
        pages, start, q = [], [], []
        for i in range(3):
            source, row = (mine, 0) if i == place else (case, i - (i > place))
            shift = len(case.rows) if i == place else 0
            filler = [0] * (width - source.pages.shape[1])
            pages.append([p + shift for p in source.pages[row].tolist()] + filler)
            start.append(int(source.start[row]))
            q.append(source.q[row])
        rows = torch.cat([case.rows, mine.rows])
        table, at = torch.tensor(pages), torch.tensor(start)
        out = paged_attention(torch.stack(q), rows, table, at, causal, window, 4)
        outs.append(out[place])
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 5, 8, 16])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("group", [2, 4, 5, 8])
def test_grid(group: int, page_size: int, size: int, dtype: torch.dtype) -> None:
    rng = random.Random(f"{group} {page_size} {size} {dtype}")
    for dim in (32, 64, 128):
        kv_heads, starts = rng.choice((1, 2)), [0, 64 - size, 65, rng.randrange(700)]
        case = Case(starts, size, (group * kv_heads, kv_heads), dim, page_size, dtype)
        window = rng.choice((None, 1, 64, 200, 900))
        case.check(rng.random() < 0.5, window, rng.choice((1, 4, None)))
