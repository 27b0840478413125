"""Sampling parameters hold at every position, and seeds mean what they say."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import oracle
from nanodflash import SamplingParams

PROMPT, NEW = [12, 200, 7, 7, 31], 24
WARM = SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=42)
ROOT = Path(__file__).parents[2]
FILTERS = {
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "all": {"temperature": 1.25, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
}


def forbidden(expect: Any, params: SamplingParams, ids: list[int]) -> list[int]:
    """Places of new tokens that the oracle's filters leave out, each judged behind its own past."""
    logits = expect.logits([*PROMPT, *ids])[len(PROMPT) - 1 : -1] / params.temperature
    return [
        place
        for place, (row, token) in enumerate(zip(logits.tolist(), ids, strict=True))
        if not oracle.allowed(row, params)[token]
    ]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", FILTERS)
def test_no_position_escapes_the_filters(scripted: Any, expect: Any, name: str, seed: int) -> None:
    """First token, middle of a block, bonus, correction: none emits what the filters forbid."""
    params = replace(WARM, seed=seed, **FILTERS[name])
    wild = expect.ids(PROMPT, replace(WARM, seed=seed, temperature=params.temperature), NEW)
    assert len(forbidden(expect, params, wild)) >= 4, "the filters forbid nothing here"
    engine = scripted(5)
    for pattern in ("right", "third wrong", "wrong"):
        out = engine.run(PROMPT, params, pattern)
        assert forbidden(expect, params, out.token_ids) == []
        assert out.token_ids == expect(PROMPT, params)[0]
    assert engine.llm.generate(PROMPT, params, speculate=False)[0].token_ids == out.token_ids


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 1e-4, 1e4])
def test_temperature_at_every_position(scripted: Any, expect: Any, temperature: float) -> None:
    params = replace(WARM, temperature=temperature)
    for pattern in ("right", "alternating"):
        assert scripted(5).run(PROMPT, params, pattern).token_ids == expect(PROMPT, params)[0]
    texts = [expect(PROMPT, replace(WARM, temperature=t))[0] for t in (0.0, 0.5, 1.0, 3.0)]
    assert len({tuple(ids) for ids in texts}) == 4


def test_the_coldest_is_greedy(scripted: Any, expect: Any) -> None:
    greedy = expect(PROMPT, SamplingParams(max_new_tokens=NEW))[0]
    for changes in ({"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert scripted(5).run(PROMPT, replace(WARM, **changes)).token_ids == greedy


def test_filters_do_nothing_at_temperature_0(scripted: Any, expect: Any) -> None:
    params = SamplingParams(max_new_tokens=NEW, top_k=3, top_p=0.5, min_p=0.5, seed=9)
    greedy = expect(PROMPT, SamplingParams(max_new_tokens=NEW))[0]
    assert scripted(5).run(PROMPT, params).token_ids == greedy


# ---------------------------------------------------------------------- seeds


def test_the_same_seed_is_the_same_text(open_llm: Any, expect: Any) -> None:
    """Alone, again, behind other requests, in a list, with speculation off."""
    llm, wanted = open_llm(block_size=8), expect(PROMPT, WARM)[0]
    for _ in range(3):
        assert llm.generate(PROMPT, WARM)[0].token_ids == wanted
    others = [replace(WARM, seed=None), replace(WARM, seed=7), SamplingParams(max_new_tokens=5)]
    outs = llm.generate([[3], [4] * 9, [5], PROMPT], [*others, WARM])
    assert outs[-1].token_ids == wanted
    assert llm.generate(PROMPT, WARM, speculate=False)[0].token_ids == wanted


@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_the_same_seed_at_any_block_size(
    open_llm: Any, scripted: Any, expect: Any, size: int
) -> None:
    params = replace(WARM, top_p=0.9)
    assert (
        open_llm(block_size=size).generate(PROMPT, params)[0].token_ids == expect(PROMPT, params)[0]
    )
    out = scripted(size).run(PROMPT, params, "random")
    assert out.token_ids == expect(PROMPT, params)[0]


def test_the_same_seed_in_a_new_process(pair: Any, expect: Any) -> None:
    code = f"""
import json, sys, torch
torch.set_num_threads(1)
from nanodflash import LLM, SamplingParams
params = SamplingParams(max_new_tokens={NEW}, temperature=1.0, seed=42)
llm = LLM(sys.argv[1], sys.argv[2], dtype="fp64")
print(json.dumps(llm.generate({PROMPT}, params)[0].token_ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(pair.target), str(pair.draft)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == expect(PROMPT, WARM)[0]


EXTREMES = [0, -1, 1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**32, -(2**32), 2**31]


@pytest.mark.parametrize("seed", EXTREMES)
def test_extreme_seeds(scripted: Any, expect: Any, seed: int) -> None:
    params = SamplingParams(max_new_tokens=9, temperature=2.0, seed=seed)
    assert scripted(4).run(PROMPT, params, "alternating").token_ids == expect(PROMPT, params)[0]


def test_different_seeds_differ(expect: Any) -> None:
    """Also those that differ in one half of the 64 bits; a seed is a number modulo 2^64."""
    hot = SamplingParams(max_new_tokens=9, temperature=2.0)
    seeds = [*range(12), *EXTREMES]
    texts = {seed: tuple(expect(PROMPT, replace(hot, seed=seed))[0]) for seed in seeds}
    assert len(set(texts.values())) == len({seed % 2**64 for seed in seeds})
    assert texts[-1] == texts[2**64 - 1]


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.0, "1", True])
def test_seeds_that_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed"):
        SamplingParams(seed=seed)


def test_the_engines_seed_gives_the_seeds(open_llm: Any) -> None:
    """Requests without a seed: the same ones in order, not touched by those that bring one."""
    hot = SamplingParams(max_new_tokens=6, temperature=2.0)

    def texts(llm: Any, between: bool = False) -> list[list[int]]:
        made = []
        for _ in range(3):
            made.append(llm.generate(PROMPT, hot)[0].token_ids)
            if between:
                llm.generate(PROMPT, replace(hot, seed=1))
        return made

    wanted = texts(open_llm(seed=5))
    assert len({tuple(ids) for ids in wanted}) == 3
    assert texts(open_llm(seed=5, block_size=3), between=True) == wanted
    assert texts(open_llm(seed=6)) != wanted
    assert texts(open_llm()) != texts(open_llm())
