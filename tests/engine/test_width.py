"""How much of a block is verified: by what a cycle costs and keeps."""

import random
from typing import Any

import pytest

from nanodflash import SamplingParams
from nanodflash.engine.width import AGAIN, TRIES, VerifyWidth

ACCEPT = 0.857


def roofline(rows: int, width: int) -> float:
    """Seconds of a cycle that reads its weights for up to 160 tokens, then is bound by arithmetic;
    what is not verified (the draft) is the same for all.
    """
    return 1e-3 * (0.5 * (width > 1) + 4.0 * max(1.0, rows * width / 160))


def kept(rng: random.Random, width: int, accept: float) -> int:
    count = 0
    while count < width - 1 and rng.random() < accept:
        count += 1
    return count


def settle(policy: VerifyWidth, rows: int, accept: float, steps: int = 200) -> list[int]:
    rng, chosen = random.Random(rows), []
    for _ in range(steps):
        width = policy.choose(rows)
        chosen.append(width)
        accepted = [kept(rng, width, accept) for _ in range(rows)]
        policy.count(rows, width, roofline(rows, width), accepted)
    return chosen


@pytest.mark.parametrize(
    ("rows", "accept", "wanted"),
    [
        (1, ACCEPT, 16),
        (8, ACCEPT, 16),
        (32, ACCEPT, 8),
        (64, ACCEPT, 8),
        (1, 0.02, 1),
        (64, 0.1, 1),
    ],
)
def test_it_settles_on_what_pays(rows: int, accept: float, wanted: int) -> None:
    chosen = settle(VerifyWidth(16, None), rows, accept)
    assert set(chosen[: 3 * TRIES]) == {16, 8, 1}  # each was tried
    assert set(chosen[-50:]) == {wanted}


def test_each_batch_size_has_its_own() -> None:
    policy = VerifyWidth(16, None)
    settle(policy, 2, ACCEPT)
    settle(policy, 64, ACCEPT)
    assert (policy.choose(2), policy.choose(64)) == (16, 8)


def test_it_looks_again() -> None:
    """A width that was dear once is tried now and then, and taken when it has become cheap."""
    policy = VerifyWidth(16, None)
    assert set(settle(policy, 16, 0.5)[-50:]) == {8}
    chosen = settle(policy, 16, 0.995, 60 * AGAIN)
    assert set(chosen[-50:]) == {16}


def test_an_outlier_does_not_decide() -> None:
    """A pause of seconds in a step, here and there: the width that pays stays."""
    policy = VerifyWidth(16, None)
    settle(policy, 8, ACCEPT)
    for _ in range(5):
        assert policy.choose(8) == 16
        policy.count(8, 16, 9.0, [15] * 8)
        settle(policy, 8, ACCEPT, 30)
    assert policy.choose(8) == 16


def test_a_fixed_width_measures_nothing() -> None:
    policy = VerifyWidth(16, 5)
    assert set(settle(policy, 64, ACCEPT)) == {5}


@pytest.mark.parametrize("width", ["measure", 5, 1, 16])
def test_any_width_gives_the_oracles_tokens(open_llm: Any, expect: Any, width: int | str) -> None:
    llm = open_llm(verify_width=width, max_seqs=4)
    params = SamplingParams(max_new_tokens=40)
    prompts = [[5, 6, 7 + i] for i in range(7)]
    for output, asked in zip(llm.generate(prompts, params), prompts, strict=True):
        assert output.token_ids == expect(asked, params)[0]
    widths = llm.metrics.widths
    assert set(widths) == ({16, 8, 1} if width == "measure" else {width})


@pytest.mark.parametrize("width", [0, 17, "wide", 2.5, True, None])
def test_a_bad_width_is_refused(open_llm: Any, width: Any) -> None:
    with pytest.raises(ValueError, match="verify_width is"):
        open_llm(verify_width=width)
