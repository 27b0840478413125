"""The thresholds keep what `ops.filter_logits` keeps."""

import itertools

import pytest
import torch
from nanodflash.kernels import filter as filters
from torch import Tensor

from nanodflash import ops

INF = float("inf")


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device())


def compare(logits: Tensor, asked: list[tuple[float, int, float, float]]) -> Tensor:
    """Kept sets of a row for each of (temperature, k, p, min-p), S rows each; returns them.

    They may differ where the mass before a token is p but for the rounding of fp32.
    """
    heat, k, p, least = (torch.tensor(column) for column in zip(*asked, strict=True))
    heat, p, least = heat.float(), p.float(), least.float()
    threshold = filters.filter_thresholds(logits, heat, k, p, least)
    assert (threshold.dtype, threshold.shape) == (torch.float32, logits.shape[:2])
    scaled = logits.float() / heat[:, None, None].where(heat[:, None, None] > 0, 1.0)
    kept = scaled >= threshold[..., None]
    wanted = ops.filter_logits(scaled.double(), k, p.double(), least.double()) > -INF
    warm = (heat > 0)[:, None, None]
    differ = (kept != wanted) & warm
    if differ.any():  # only at the edge of a nucleus
        left = scaled.double().masked_fill(scaled < kth(scaled, k), -INF)
        before = torch.stack([mass_before(x) for x in left.flatten(0, 1)]).view_as(left)
        assert ((before - p[:, None, None]).abs() < 2e-6)[differ].all()
    assert kept[(heat == 0)].all()
    return kept


def kth(scaled: Tensor, k: Tensor) -> Tensor:
    """The k-th largest of every row, [B, S, 1]."""
    ordered = scaled.sort(-1, descending=True).values
    place = torch.where(k > 0, k, scaled.shape[-1]).clamp(max=scaled.shape[-1]) - 1
    return ordered.gather(-1, place[:, None, None].expand(*scaled.shape[:2], 1))


def mass_before(row: Tensor) -> Tensor:
    """The mass of all that is larger, for every token."""
    share, order = row.softmax(-1).sort(descending=True)
    larger = torch.empty_like(share)
    larger[order] = share.cumsum(-1) - share
    return larger


ASKED = [
    (heat, k, p, least)
    for heat, k, p, least in itertools.product(
        (0.6, 1.0), (0, 1, 5, 40), (1.0, 0.95, 0.3), (0.0, 0.02)
    )
]


@pytest.mark.parametrize("vocab", [3, 40, 2048, 9001])
def test_kept_sets(vocab: int) -> None:
    asked = [*ASKED, (0.0, 3, 0.5, 0.1), (1.0, 10**9, 1.0, 0.0)][:: 1 if vocab == 40 else 4]
    logits = 4 * noise(len(asked), 1 + (vocab < 100), vocab, seed=vocab)
    kept = compare(logits, asked)
    assert kept.any(-1).all()


@pytest.mark.parametrize("spread", [0.0, 0.3, 30.0])
def test_flat_and_sharp_rows(spread: float) -> None:
    """More candidates than one program holds, so that it walks the row; and one that has all."""
    asked = [(1.0, 6000, 1.0, 0.0), (1.0, 0, 0.97, 0.0), (2.0, 7000, 0.9, 0.0), (0.7, 2, 0.5, 0.5)]
    logits = spread * noise(4, 1, 9500, seed=5)
    kept = compare(logits, asked)
    if spread == 0.3:
        assert kept.sum(-1).flatten().tolist()[0] == 6000
        assert (kept.sum(-1)[1:3] > filters.HELD).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_are_kept(dtype: torch.dtype) -> None:
    """Half types tie often, and all that ties with the threshold stays."""
    logits = (2 * noise(4, 2, 3000)).to(dtype)
    asked = [(0.7, 50, 1.0, 0.0), (0.7, 0, 0.6, 0.0), (1.3, 300, 0.9, 0.0), (1.0, 0, 1.0, 0.05)]
    kept = compare(logits, asked)
    assert dtype == torch.float16 or (kept[0].sum(-1) > 50).any()


@pytest.mark.parametrize(
    ("row", "asked", "wanted"),
    [
        ([3.0, 2.0, 2.0, 1.0], (1.0, 2, 1.0, 0.0), [0, 1, 2]),
        ([2.0, 2.0, 2.0, 2.0], (1.0, 1, 1.0, 0.0), [0, 1, 2, 3]),
        ([-2.0, 0.0, -0.0, -1.0], (1.0, 1, 1.0, 0.0), [1, 2]),
        ([0.0, 5.0, 1.0], (1.0, 0, 1e-300, 0.0), [1]),
        ([0.0, 5.0, 5.0], (1.0, 0, 1e-30, 0.0), [1, 2]),
        ([0.0, 5.0, 5.0], (1.0, 0, 1.0, 1.0), [1, 2]),
        ([-INF, 0.0, -INF], (1.0, 3, 0.9, 0.1), [1]),
        ([-INF, 0.0, -INF, 1.0], (1.0, 0, 0.9, 0.0), [1, 3]),
        ([-1e30, -2e30, -1e30, -3e30], (1.0, 3, 1.0, 0.0), [0, 1, 2]),
        ([0.7, 0.0, -0.01, -0.02], (1.0, 2, 0.6, 0.0), [0]),  # top-p over what top-k left
        ([0.7, 0.0, -0.01, -0.02], (1.0, 0, 0.6, 0.0), [0, 1]),
        ([0.7, 0.0], (0.0, 1, 0.5, 0.5), [0, 1]),  # greedy: no filter
    ],
)
def test_by_hand(row: list[float], asked: tuple[float, int, float, float], wanted: list) -> None:
    heat, k, p, least = (torch.tensor([value]) for value in asked)
    logits = torch.tensor([[row]])
    threshold = filters.filter_thresholds(logits, heat, k, p, least)
    scaled = logits / (heat if asked[0] else 1.0)
    assert (scaled[0, 0] >= threshold[0, 0]).nonzero().flatten().tolist() == wanted


def test_rows_without_a_filter_are_not_read() -> None:
    """Neither greedy rows nor plain ones: NaN there, and the threshold is still none."""
    logits = torch.full((3, 1, 500), float("nan"))
    logits[2] = noise(1, 500)
    heat, k = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([5, 0, 5])
    p, least = torch.tensor([0.5, 1.0, 1.0]), torch.tensor([0.5, 0.0, 0.0])
    got = filters.filter_thresholds(logits, heat, k, p, least).flatten().tolist()
    assert got[:2] == [-INF, -INF]
    assert got[2] == logits[2, 0].sort(descending=True).values[4]
