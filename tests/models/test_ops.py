"""The device operations: where they round, what they read, what they choose."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

import oracle
from nanodflash import SamplingParams, ops
from nanodflash.config import MAX_STOP_IDS

NAN, INF = float("nan"), float("inf")
HALF = [torch.bfloat16, torch.float16]
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2e-7, torch.float64: 1e-15}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", HALF)
def test_rms_norm_rounds_before_the_weight(dtype: torch.dtype) -> None:
    x, weight = 3 * noise(50, 96, dtype=dtype), 1 + 0.1 * noise(96, seed=1, dtype=dtype)
    wide = x.float()
    unit = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    got = ops.rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    wanted = unit.to(dtype) * weight
    assert (got != wanted).float().mean() < 0.01  # rsqrt and a square root round apart now and then
    torch.testing.assert_close(got, wanted, rtol=2 * ULP[dtype], atol=0)
    once = (unit * weight.float()).to(dtype)  # not this: rounded once, at the end
    assert (got != once).float().mean() > 0.1
    narrow = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight  # nor this
    assert (got != narrow).float().mean() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_is_as_wide_as_the_model(dtype: torch.dtype) -> None:
    x, weight = noise(20, 64, dtype=dtype), noise(64, seed=1, dtype=dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    got = ops.rms_norm(x, weight, 1e-3)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact * weight.double(), rtol=8 * ULP[dtype], atol=0)


def test_rms_norm_of_large_fp16_values() -> None:
    """300 squared is past fp16's range; the mean square is taken in fp32."""
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(ops.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6), x / 300)


@pytest.mark.parametrize("dtype", ULP)
def test_norm_rope(dtype: torch.dtype) -> None:
    """Normed, weighted, then turned: pair (i, i + D/2) by its angle."""
    x, weight = noise(7, 3, 16, dtype=dtype), 1 + 0.3 * noise(16, seed=1, dtype=dtype)
    angles = 5 * noise(7, 1, 8, seed=2).abs()
    cos = angles.cos().repeat(1, 1, 2).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    got = ops.norm_rope(x, weight, 1e-6, (cos, sin))
    assert got.dtype == dtype
    normed = ops.rms_norm(x, weight, 1e-6).double()
    turned = torch.complex(*normed.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    wanted = torch.cat([turned.real, turned.imag], -1)
    bound = 3 * ULP[dtype] * normed.abs().max().item()
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", ULP)
def test_silu_mul(dtype: torch.dtype) -> None:
    both = 2 * noise(40, 96, dtype=dtype)
    gate, up = both.double().chunk(2, -1)
    got = ops.silu_mul(both)
    assert got.dtype == dtype
    silu = gate / (1 + (-gate).exp())
    torch.testing.assert_close(got.double(), silu * up, rtol=3 * ULP[dtype], atol=1e-6)
    if dtype in HALF:  # silu is rounded, then the product
        wanted = silu.to(dtype) * up.to(dtype)
        assert (got != wanted).float().mean() < 0.01


# ---------------------------------------------------------------------- paged attention


def visible(query: int, key: int, end: int, causal: bool, window: int | None) -> bool:
    if window is not None and abs(query - key) >= window:
        return False
    return key <= query if causal else key < end


def brute_force(
    q: Tensor, k: Tensor, v: Tensor, start: int, causal: bool, window: int | None
) -> Tensor:
    """One request, one head at a time, in fp64: q [S, Hq, D], k and v [start+S, Hkv, D]."""
    q, k, v, out = q.double(), k.double(), v.double(), torch.empty_like(q, dtype=torch.float64)
    rows, keys = range(start, start + len(q)), range(len(k))
    seen = torch.tensor([[visible(j, p, len(k), causal, window) for p in keys] for j in rows])
    for head in range(q.shape[1]):
        kv = head // (q.shape[1] // k.shape[1])
        scores = (q[:, head] @ k[:, kv].T / math.sqrt(q.shape[2])).masked_fill(~seen, -INF)
        out[:, head] = scores.softmax(-1) @ v[:, kv]
    return out


def compare_attention(
    starts: list[int],
    size: int,
    heads: tuple[int, int],
    page_size: int,
    causal: bool,
    window: int | None,
    dtype: torch.dtype = torch.float64,
    slack: int = 0,
) -> None:
    """Scatter random rows over shuffled NaN-filled pages; attention must not notice."""
    dim, count = 16, len(starts)
    ends = [start + size for start in starts]
    width = -(-(max(ends) + slack) // page_size)
    pages = [-(-end // page_size) for end in ends]
    shuffled = random.Random(size).sample(range(1, 6 + sum(pages)), sum(pages))
    table = torch.zeros(count, width, dtype=torch.int64)  # page 0 where nothing is allocated
    rows = torch.full((7 + sum(pages), page_size, 2, heads[1], dim), NAN, dtype=dtype)
    rows[-1] = 0.0  # never given out
    q = noise(count, size, heads[0], dim, seed=1, dtype=dtype)
    kept = []
    for i, end in enumerate(ends):
        mine = torch.tensor([shuffled.pop() for _ in range(pages[i])])
        table[i, : pages[i]] = mine
        k, v = noise(2, end, heads[1], dim, seed=2 + i, dtype=dtype)
        position = torch.arange(end)
        ops.write_rows(rows, mine[position // page_size] * page_size + position % page_size, k, v)
        kept.append((k, v))
    start, offsets, keys = torch.tensor(starts), torch.arange(size), torch.arange(width * page_size)
    mask = ops.attention_mask(start, offsets, keys, causal, window, q)
    places = ops.row_places(table, torch.tensor(ends), keys, rows)
    before = rows.clone()
    got = ops.paged_attention(q, rows, places, mask)
    assert torch.equal(rows.isnan(), before.isnan())  # the pool itself is left alone
    assert (got.dtype, got.shape) == (dtype, q.shape)
    bound = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for i, (k, v) in enumerate(kept):
        wanted = brute_force(q[i], k, v, starts[i], causal, window)
        torch.testing.assert_close(got[i].double(), wanted, rtol=0, atol=bound)


SIGHTS = [(c, w) for c in (False, True) for w in (None, 1, 2, 4, 7, 50)]


@pytest.mark.parametrize("size", [1, 5, 8])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_attention_at_page_edges(page_size: int, size: int) -> None:
    """Blocks that start before, on and after an edge, and end there, in every kind of sight."""
    edge = page_size * -(-20 // page_size)
    starts = [0, 1, 7, max(edge - size, 0), edge - 1, edge, edge + 1, 37]
    for causal, window in SIGHTS:
        compare_attention(starts, size, (4, 2), page_size, causal, window)


@pytest.mark.parametrize("heads", [(6, 3), (5, 1), (8, 8), (1, 1)])
@pytest.mark.parametrize("slack", [0, 1, 40])
def test_attention_of_head_groups(heads: tuple[int, int], slack: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for causal, window in ((True, None), (False, None), (True, 6), (False, 6)):
            compare_attention([0, 13, 29, 5], 7, heads, 16, causal, window, dtype, slack)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 5, 64, None])
def test_attention_of_long_contexts(window: int | None, causal: bool, dtype: torch.dtype) -> None:
    """More than 1200 keys before a small window: whole tiles of scores are -inf."""
    compare_attention([1201, 2049, 3], 8, (4, 2), 64, causal, window, dtype)


def test_attention_mask_by_hand() -> None:
    """Start 3, two rows: window 3 is the row itself and two before it."""
    like, start = torch.zeros(1), torch.tensor([3])
    for causal, window, wanted in (
        (True, None, ["11110000", "11111000"]),
        (False, None, ["11111000", "11111000"]),
        (True, 3, ["01110000", "00111000"]),
        (False, 3, ["01111000", "00111000"]),
        (False, 1, ["00010000", "00001000"]),
    ):
        mask = ops.attention_mask(start, torch.arange(2), torch.arange(8), causal, window, like)
        assert mask.shape == (1, 1, 2, 8)
        assert ["".join("1" if x == 0 else "0" for x in row) for row in mask[0, 0]] == wanted
        assert set(mask.flatten().tolist()) == {0.0, -INF}


def test_write_rows() -> None:
    rows = torch.zeros(4, 3, 2, 2, 5)
    k, v = noise(2, 2, 3, 2, 5, dtype=torch.float32)
    index = torch.tensor([[3, 11, 7], [4, 5, 10]])
    ops.write_rows(rows, index, k, v)
    flat = rows.view(12, 2, 2, 5)
    for (i, j), place in zip(itertools.product(range(2), range(3)), index.flatten(), strict=True):
        assert torch.equal(flat[place], torch.stack([k[i, j], v[i, j]]))
    assert flat[[0, 1, 2, 6, 8, 9]].eq(0).all()


# ---------------------------------------------------------------------- noise

SEEDS = [0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**63 - 1, -1, -2, -(2**63), 0x123456789ABCDEF]
POSITIONS = [0, 1, 2, 511, 512, 40959, 2**31 - 1]


def gumbel(
    seeds: list[int], positions: list[int], count: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """[seeds, positions, tokens]."""
    position = torch.tensor(positions).expand(len(seeds), -1)
    like = torch.zeros(1, dtype=dtype)
    return ops.keyed_gumbel(torch.tensor(seeds), position, torch.arange(count), like)


def test_gumbel_is_the_oracle_s() -> None:
    wanted = [
        [[oracle.gumbel(seed, position, token) for token in range(64)] for position in POSITIONS]
        for seed in SEEDS
    ]
    exact = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(gumbel(SEEDS, POSITIONS, 64), exact, rtol=0, atol=1e-9)
    single = gumbel(SEEDS, POSITIONS, 64, torch.float32)
    assert single.dtype == torch.float32
    likely = exact > -1.5  # u is rounded to 24 bits: near 1 that shows
    torch.testing.assert_close(single[likely].double(), exact[likely], rtol=0, atol=1e-4)
    vocabulary = torch.tensor([0, 151_642, 151_935])
    last = ops.keyed_gumbel(
        torch.tensor([5]), torch.tensor([[9]]), vocabulary, torch.zeros(1, dtype=torch.float64)
    )
    wanted_last = [oracle.gumbel(5, 9, token) for token in vocabulary.tolist()]
    assert last.flatten().tolist() == pytest.approx(wanted_last, abs=1e-9)


def test_gumbel_knows_nothing_but_its_keys() -> None:
    """Not the batch, not the order, not the size of the vocabulary, no generator."""
    whole = gumbel(SEEDS, POSITIONS, 64)
    torch.manual_seed(1)
    for i, j in itertools.product(range(len(SEEDS)), range(len(POSITIONS))):
        alone = gumbel([SEEDS[i]], [POSITIONS[j]], 17)
        assert torch.equal(alone[0, 0], whole[i, j, :17])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_of_extreme_words(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    last = INF
    for r in (0, 1, 2, 2**16, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1):
        monkeypatch.setattr("nanodflash.ops.tokens._mix", lambda x, r=r: torch.full_like(x, r))
        monkeypatch.setattr(
            "nanodflash.ops.tokens._WORD", r
        )  # the sum of two words is cut to r too
        (value,) = gumbel([0], [0], 1, dtype).flatten().tolist()
        u = min((r + 0.5) / 2**32, 1 - 2**-24)
        assert math.isfinite(value)
        assert value <= last
        assert value == pytest.approx(-math.log(-math.log1p(-u)), abs=0.05)
        last = value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_distribution(dtype: torch.dtype) -> None:
    values = gumbel([3, 4, 2**40, -7], list(range(100, 150)), 5000, dtype).flatten().double()
    assert values.isfinite().all()
    assert values.mean().item() == pytest.approx(0.57722, abs=0.005)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.015)
    ordered = values.sort().values
    exact = torch.exp(-torch.exp(-ordered))
    steps = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    assert (exact - steps).abs().max() < 2.5 / math.sqrt(len(ordered))  # Kolmogorov-Smirnov


def correlation(a: Tensor, b: Tensor) -> float:
    """In units of its own standard error."""
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item() * a.numel() ** 0.5


def test_gumbel_neighbours_are_independent() -> None:
    positions = list(range(256, 256 + 65))
    seeds = [7, 8, 9, 7 + 2**32, 7 << 32, 7 + 2**63 - 2**64, -7]
    x = gumbel(seeds, positions, 2000)
    for distance in (1, 2, 3, 16, 64):
        assert abs(correlation(x[:, distance:], x[:, :-distance])) < 4.5
        assert abs(correlation(x[..., distance:], x[..., :-distance])) < 4.5
        assert abs(correlation(x[:, distance:, :-distance], x[:, :-distance, distance:])) < 4.5
        assert abs(correlation(x[:, distance:, distance:], x[:, :-distance, :-distance])) < 4.5
    for one, other in itertools.combinations(range(len(seeds)), 2):
        assert abs(correlation(x[one], x[other])) < 4.5
        assert abs(correlation(x[one, 1:], x[other, :-1])) < 4.5
        assert abs(correlation(x[one, :, 1:], x[other, :, :-1])) < 4.5
    # the largest of a row, which is what counts, is as uniform as it should be and as fresh
    best = gumbel([1, 2, 3, 4], list(range(5000)), 16).argmax(-1)
    for counted in (best, best[:, 1:] * 16 + best[:, :-1], best[1:] * 16 + best[:-1]):
        cells = 16 if counted is best else 256
        counts = torch.bincount(counted.flatten(), minlength=cells).double()
        wanted = counts.sum() / cells
        chi = ((counts - wanted).square() / wanted).sum().item()
        assert chi < cells + 5 * math.sqrt(2 * cells)


def test_argmax_with_noise_follows_softmax() -> None:
    logits = 2 * noise(12, seed=4)
    chosen = (logits + gumbel([11, 12], list(range(20_000)), 12)).argmax(-1).flatten()
    counts = torch.bincount(chosen, minlength=12).double()
    wanted = logits.softmax(0) * len(chosen)
    assert ((counts - wanted).square() / wanted).sum().item() < 40  # 11 degrees of freedom


# ---------------------------------------------------------------------- filters

VOCAB = 40


def random_logits(rng: random.Random) -> list[float]:
    """Of several kinds: smooth, with many ties, with one giant, with tokens ruled out."""
    row = [rng.gauss(0, 2) for _ in range(VOCAB)]
    kind = rng.randrange(4)
    if kind == 1:
        row = [round(x) / 2 for x in row]
    if kind == 2:
        row[rng.randrange(VOCAB)] = 60.0
    if kind == 3:
        row = [-INF if rng.random() < 0.5 else x for x in row]
        row[rng.randrange(VOCAB)] = 1.0
    return row


def filtered(rows: list[list[float]], params: list[SamplingParams]) -> Tensor:
    """One request a row."""
    return ops.filter_logits(
        torch.tensor(rows, dtype=torch.float64)[:, None],
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float64),
    )[:, 0]


def test_filters_keep_what_the_oracle_keeps() -> None:
    rng = random.Random(8)
    params = [
        SamplingParams(top_k=k, top_p=p, min_p=m)
        for k in (0, 1, 2, 5, 39, 40, 41, 1000)
        for p in (1.0, 0.999, 0.9, 0.5, 0.1, 1e-6, 1e-300)
        for m in (0.0, 1e-9, 0.02, 0.3, 1.0)
    ] * 3
    rows = [random_logits(rng) for _ in params]
    got = filtered(rows, params)
    for row, param, out in zip(rows, params, got.tolist(), strict=True):
        keep = oracle.allowed(row, param)
        assert out == [x if kept else -INF for x, kept in zip(row, keep, strict=True)], param
        assert max(out) == max(row)


@pytest.mark.parametrize(
    ("row", "params", "kept"),
    [
        ([3.0, 2.0, 2.0, 1.0], {"top_k": 2}, [0, 1, 2]),  # a tie at the k-th stays
        ([2.0, 2.0, 2.0, 2.0], {"top_k": 1}, [0, 1, 2, 3]),
        ([1.0, 0.0, -1.0], {"top_k": 4}, [0, 1, 2]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5}, [0, 1, 2, 3]),  # the second brings mass and ties
        ([1.0, 0.0, 0.0, -1.0], {"top_p": 0.7}, [0, 1, 2]),
        ([0.0, -math.log(2), -math.log(2)], {"top_p": 0.5}, [0]),  # 0.5 before is not below 0.5
        ([0.0, -math.log(2), -math.log(2)], {"top_p": 0.501}, [0, 1, 2]),
        ([0.0, 5.0, 1.0], {"top_p": 1e-300}, [1]),
        ([0.0, 5.0, 5.0], {"top_p": 1e-300}, [1, 2]),
        ([0.0, 5.0, 5.0], {"min_p": 1.0}, [1, 2]),
        ([0.0, math.log(2), math.log(4)], {"min_p": 0.49}, [1, 2]),
        ([0.0, math.log(2), math.log(4)], {"min_p": 0.51}, [2]),
        ([-INF, 0.0, -INF], {"top_k": 3, "top_p": 0.9, "min_p": 0.1}, [1]),
        # top-p counts the mass that top-k left: 2/3 and 1/3 of it here, not 1/2 and 1/4
        ([math.log(2), 0.0, -0.01, -0.02], {"top_k": 2, "top_p": 0.6}, [0]),
        ([math.log(2), 0.0, -0.01, -0.02], {"top_p": 0.6}, [0, 1]),
    ],
)
def test_filters_by_hand(row: list[float], params: dict[str, float], kept: list[int]) -> None:
    out = filtered([row], [SamplingParams(**params)])[0]  # type: ignore[arg-type]
    assert out.isfinite().nonzero().flatten().tolist() == kept
    allowed = oracle.allowed(row, SamplingParams(**params))  # type: ignore[arg-type]
    assert allowed == [i in kept for i in range(len(row))]


def test_filters_are_off_by_default() -> None:
    rng = random.Random(2)
    rows = [random_logits(rng) for _ in range(50)]
    assert filtered(rows, [SamplingParams()] * 50).tolist() == rows


def test_filters_in_fp32_and_over_a_block() -> None:
    logits = noise(3, 5, VOCAB, dtype=torch.float32)
    keys = torch.tensor([3, 0, 0]), torch.tensor([1.0, 0.5, 1.0]), torch.tensor([0.0, 0.0, 0.4])
    got = ops.filter_logits(logits, *keys)
    assert got.dtype == torch.float32
    params = SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=0.4)
    for row, out, param in zip(logits.tolist(), got.tolist(), params, strict=True):
        for mine, kept in zip(row, out, strict=True):
            assert [x > -INF for x in kept] == oracle.allowed(mine, param)


# ---------------------------------------------------------------------- acceptance


def loop_accepted(proposals: list[int], tokens: list[int], limit: int) -> int:
    count = 0
    for mine, wanted in zip(proposals, tokens, strict=False):
        if mine != wanted or count >= limit:
            break
        count += 1
    return count


def loop_run(tokens: list[int], accepted: int, budget: int, stops: list[int]) -> tuple[int, bool]:
    emitted = 0
    for token in tokens[: accepted + 1]:
        if emitted == budget:
            break
        emitted += 1
        if token in stops:
            return emitted, True
    return emitted, False


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_count_accepted(size: int) -> None:
    rng = random.Random(size)
    cases = []
    for limit in (-5, -1, 0, 1, 2, size - 1, size, 10**9):
        for _ in range(60):
            tokens = [rng.randrange(4) for _ in range(size)]
            proposals = [t if rng.random() < 0.8 else rng.randrange(4) for t in tokens[:-1]]
            cases.append((proposals, tokens, limit))
    proposals, tokens, limits = zip(*cases, strict=True)
    got = ops.count_accepted(
        torch.tensor(proposals, dtype=torch.int64).view(len(cases), size - 1),
        torch.tensor(tokens),
        torch.tensor(limits),
    )
    assert got.dtype == torch.int64
    assert got.tolist() == [loop_accepted(*case) for case in cases]
    assert size == 1 or {0, size - 1} <= set(got.tolist())


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_cut_run(width: int) -> None:
    """Every acceptance with every budget, a stop at every place, several stops, none."""
    rng, cases = random.Random(width), []
    for accepted, budget in itertools.product(range(width), range(width + 2)):
        for place in range(-1, width):
            tokens = [rng.randrange(10, 100) for _ in range(width)]
            stops = [rng.randrange(100, 200) for _ in range(rng.randrange(MAX_STOP_IDS))]
            if place >= 0:
                stops.insert(rng.randrange(len(stops) + 1), tokens[place])
            if place >= 0 and rng.random() < 0.3:
                tokens[rng.randrange(width)] = tokens[place]
            cases.append((tokens, accepted, budget, stops))
    tokens, accepted, budget, stops = zip(*cases, strict=True)
    emitted, stopped = ops.cut_run(
        torch.tensor(tokens),
        torch.tensor(accepted),
        torch.tensor(budget),
        torch.tensor([s + [-1] * (MAX_STOP_IDS - len(s)) for s in stops]),
        torch.arange(width),
    )
    assert (emitted.dtype, stopped.dtype) == (torch.int64, torch.bool)
    got = list(zip(emitted.tolist(), stopped.tolist(), strict=True))
    assert got == [loop_run(*case) for case in cases]
    assert {True, False} == set(stopped.tolist())
