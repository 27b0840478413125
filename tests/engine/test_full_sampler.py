"""Penalties, bias, `min_new_tokens` and logprobs, with whatever the drafter proposes."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kit
import oracle
from nanodflash import LLM, SamplingParams

PROMPT, NEW = [12, 200, 7, 7, 31], 20
PATTERNS = {4: ["right", "third wrong"], 8: ["right", "alternating", "wrong"]}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.5}
WORDY = [275, 272, 195]  # its first 26 greedy tokens are distinct words
MODES = {
    "greedy": SamplingParams(max_new_tokens=NEW),
    "warm": SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=2),
    "filtered": SamplingParams(max_new_tokens=NEW, temperature=1.25, seed=1, top_k=9, top_p=0.8),
}


@dataclass
class Wanted:
    """What the oracle says of one request."""

    ids: list[int]
    reason: str
    raw: list[Tensor]


@pytest.fixture(scope="module")
def want(expect: Any) -> Callable[..., Wanted]:
    @functools.cache
    def judge(prompt: tuple[int, ...], params: SamplingParams) -> Wanted:
        raw: list[Tensor] = []
        return Wanted(*oracle.decode(expect.target, list(prompt), params, raw=raw), raw)

    return lambda prompt, params: judge(tuple(prompt), replace(params, logprobs=None, stop=()))


@pytest.fixture(scope="module")
def alone(pair: Any) -> Iterator[LLM]:
    """Block size 1: no drafter."""
    with LLM(pair.target, None, dtype="fp64") as llm:
        yield llm


def run(engine: Any, prompt: list[int], params: SamplingParams, text: list[int], name: str) -> Any:
    """One request whose proposals are `text`, spoiled by the pattern."""
    engine.script = kit.Script([*prompt, *text], engine.size, name)
    return engine.llm.generate(prompt, params)[0]


def outputs(
    scripted: Any, alone: LLM, params: SamplingParams, text: list[int], prompt: list[int] = PROMPT
) -> Iterator[tuple[str, Any]]:
    """The request's output with every block size and script, and without speculation."""
    yield "no drafter", alone.generate(prompt, params)[0]
    yield "plain", scripted(4).llm.generate(prompt, params, speculate=False)[0]
    for size, names in PATTERNS.items():
        engine = scripted(size)
        for name in names:
            out = run(engine, prompt, params, text, name)
            decoded = len(text) - 1
            if name == "right":
                assert out.metrics.cycles == -(-decoded // size)
            elif name == "wrong":
                assert (out.metrics.cycles, out.metrics.accepted) == (decoded, 0)
            elif decoded > 2 * size:
                assert 0 < out.metrics.accepted < out.metrics.proposed
            yield f"{size} {name}", out


# ---------------------------------------------------------------------- penalties and bias


def asked(name: str, plain: list[int]) -> dict[str, Any]:
    """Parameters by name; `plain` is the text without them, for biases that matter."""
    if name in PENALTIES:
        return {name: PENALTIES[name]}
    bans = dict.fromkeys(plain[::3], -10000.0)
    return {
        "penalties": PENALTIES,
        "rewards": {key: 0.8 if value > 1 else -value for key, value in PENALTIES.items()},
        "strong": {"repetition_penalty": 100.0, "frequency_penalty": 9.0},
        "bans": {"logit_bias": bans},
        "boosts": {"logit_bias": {3: 4.0, 0: 3.5, 319: 5.0}},
        "first id": {"logit_bias": {0: 9.0}},
        "forced": {"logit_bias": {44: 1e4}},
        "forced, tired": {"logit_bias": {44: 20.0}, "frequency_penalty": 3.0},
        "everything": PENALTIES | {"logit_bias": bans | {3: 4.0}},
    }[name]


ASKED = [
    *PENALTIES,
    *("penalties", "rewards", "strong", "bans", "boosts", "first id", "forced"),
    *("forced, tired", "everything"),
]


CASES = [(name, mode) for name in ASKED for mode in ("greedy", "warm")]
CASES += [("penalties", "filtered"), ("bans", "filtered"), ("everything", "filtered")]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_ids_are_the_oracles(scripted: Any, alone: LLM, want: Any, name: str, mode: str) -> None:
    plain = want(PROMPT, MODES[mode]).ids
    params = replace(MODES[mode], **asked(name, plain))
    wanted = want(PROMPT, params)
    assert wanted.ids != plain, "the parameters change nothing here"
    for told, out in outputs(scripted, alone, params, wanted.ids):
        assert (out.token_ids, out.finish_reason) == (wanted.ids, wanted.reason), told
        assert out.logprobs is None


def test_what_is_banned_never_comes(want: Any, scripted: Any) -> None:
    """All but two ids cannot be banned (64 biases), but all that came so far, again and again."""
    banned: dict[int, float] = {}
    for _ in range(3):
        params = replace(MODES["warm"], logit_bias=banned)
        out = run(scripted(8), PROMPT, params, want(PROMPT, params).ids, "alternating")
        assert not {*banned} & {*out.token_ids}
        banned |= dict.fromkeys(out.token_ids, -10000.0)
    assert len(banned) > 40


def test_a_proposer_of_banned_ids(want: Any, scripted: Any) -> None:
    """Proposals are never emitted for their own sake."""
    params = replace(MODES["greedy"], logit_bias={44: -1e4})
    out = run(scripted(8), PROMPT, params, [44] * (NEW + 9), "right")
    assert out.token_ids == want(PROMPT, params).ids
    assert out.metrics.accepted == 0


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_only_repetition_sees_the_prompt(want: Any, scripted: Any, name: str) -> None:
    """An id of the prompt that the target likes best comes first unless repetition is penalised."""
    logits = want(PROMPT, MODES["greedy"]).raw[0]
    token = max(PROMPT, key=lambda token: abs(float(logits[token])))
    assert abs(float(logits[token])) > 1
    lift = float(logits.max() - logits[token]) + 0.5
    params = replace(MODES["greedy"], **{name: 100.0}, logit_bias={token: lift})
    wanted = want(PROMPT, params)
    assert (wanted.ids[0] == token) == (name != "repetition_penalty")
    assert token not in wanted.ids[1:]
    assert run(scripted(4), PROMPT, params, wanted.ids, "right").token_ids == wanted.ids


def test_penalties_in_a_batch(want: Any, scripted: Any) -> None:
    """Every slot has its own counts, and gives none to the next request in it."""
    llm = scripted(4).llm
    scripted(4).script = kit.Script([], 4, "wrong")
    many = [replace(MODES["warm"], seed=seed, **PENALTIES) for seed in range(3)]
    many += [MODES["warm"], MODES["greedy"], replace(MODES["greedy"], logit_bias={44: 6.0})]
    many += [replace(MODES["greedy"], repetition_penalty=1.3, logprobs=2)]
    hold = replace(MODES["greedy"], max_new_tokens=2, repetition_penalty=1.3)
    llm.generate([[*range(200)]] * 8, hold)  # every slot has seen most ids
    for prompts in ([PROMPT] * 7, [PROMPT[i % 4 :] for i in range(7)], [PROMPT] * 7):
        outs = llm.generate(prompts, many)
        for prompt, params, out in zip(prompts, many, outs, strict=True):
            assert out.token_ids == want(prompt, params).ids
            assert (out.logprobs is None) == (params.logprobs is None)


# ---------------------------------------------------------------------- min_new_tokens


@pytest.mark.parametrize("mode", ["greedy", "warm"])
@pytest.mark.parametrize("least", [0, 1, 4, 5, 8, 9, NEW])
def test_no_stop_before_min_new(
    scripted: Any, alone: LLM, want: Any, least: int, mode: str
) -> None:
    plain = want(PROMPT, MODES[mode]).ids
    stops = tuple({*plain[::2], *plain[:3]} - {319})[:16]
    params = replace(MODES[mode], stop_token_ids=stops, min_new_tokens=least)
    wanted = want(PROMPT, params)
    assert not {*stops} & {*wanted.ids[:least]}
    assert least or len(wanted.ids) == 1
    for told, out in outputs(scripted, alone, params, wanted.ids):
        assert (out.token_ids, out.finish_reason) == (wanted.ids, wanted.reason), told


def test_min_new_masks_the_end_ids(pair: Any, scripted: Any, want: Any, expect: Any) -> None:
    """The model's own end ids too; with ignore_eos they are ids as any other."""
    plain = expect.ids(WORDY, SamplingParams(), NEW)
    folder = pair.variant(pair.target, "ends", eos_token_id=[plain[2], plain[7]])
    engine = scripted(8, model=folder)
    for least in (1, 3, 8, 12):
        params = SamplingParams(max_new_tokens=NEW, min_new_tokens=least)
        wanted = want(WORDY, replace(params, stop_token_ids=(plain[2], plain[7])))
        for name in PATTERNS[8]:
            out = run(engine, WORDY, params, wanted.ids, name)
            assert (out.token_ids, out.finish_reason) == (wanted.ids, wanted.reason)
        out = run(engine, WORDY, replace(params, ignore_eos=True), plain, "right")
        assert (out.token_ids, out.finish_reason) == (plain, "length")


# ---------------------------------------------------------------------- logprobs


def same_logprobs(out: Any, raw: list[Tensor], count: int) -> None:
    """Chosen and top of every id, from the raw logits before it."""
    assert len(out.logprobs) == len(out.token_ids)
    for token, got, logits in zip(out.token_ids, out.logprobs, raw, strict=False):
        wanted = logits.log_softmax(-1)
        assert got.chosen == pytest.approx(float(wanted[token]), abs=1e-8)
        values, ids = wanted.topk(count)
        assert [token for token, _ in got.top] == ids.tolist()
        assert [x for _, x in got.top] == pytest.approx(values.tolist(), abs=1e-8)


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize(
    ("mode", "name"), [("greedy", "nothing"), ("greedy", "everything"), ("filtered", "everything")]
)
def test_logprobs_are_of_the_raw_logits(
    scripted: Any, alone: LLM, want: Any, mode: str, name: str, count: int
) -> None:
    plain = want(PROMPT, MODES[mode]).ids
    changes = asked(name, plain) if name != "nothing" else {}
    params = replace(MODES[mode], logprobs=count, **changes)
    wanted = want(PROMPT, params)
    assert len(wanted.raw) == len(wanted.ids) == NEW
    for told, out in outputs(scripted, alone, params, wanted.ids):
        assert out.token_ids == wanted.ids, told
        same_logprobs(out, wanted.raw, count)


@pytest.mark.parametrize("place", [0, 3, 7, 8, 9, 12])
@pytest.mark.parametrize("name", ["right", "third wrong"])
def test_a_stop_id_leaves_no_more_logprobs(scripted: Any, want: Any, place: int, name: str) -> None:
    plain = want(WORDY, MODES["greedy"])
    params = replace(MODES["greedy"], stop_token_ids=(plain.ids[place],), logprobs=3)
    engine = scripted(8)
    out = run(engine, WORDY, params, plain.ids, name)
    assert (out.token_ids, out.finish_reason) == (plain.ids[: place + 1], "stop")
    same_logprobs(out, plain.raw, 3)
    budget = replace(MODES["greedy"], max_new_tokens=place + 1, logprobs=3)
    out = run(engine, WORDY, budget, plain.ids, name)
    assert (out.token_ids, out.finish_reason) == (plain.ids[: place + 1], "length")
    same_logprobs(out, plain.raw, 3)


def words(ids: list[int]) -> str:
    """The text of ids in the worded model."""
    return "".join(f"{chr(97 + i % 26)}{i // 26}" for i in ids if i < 300)


@pytest.mark.parametrize("first", [0, 2, 4, 7, 8, 11])
@pytest.mark.parametrize("name", ["right", "wrong"])
def test_stop_strings_trim_logprobs(
    pair: Any, scripted: Any, want: Any, no_leak: Any, first: int, name: str
) -> None:
    engine, plain = scripted(8, model=pair.worded), want(WORDY, MODES["greedy"])
    stop = words(plain.ids[first : first + 2])[1:]
    params = replace(MODES["greedy"], stop=stop, logprobs=4, ignore_eos=True)
    out = run(engine, WORDY, params, plain.ids, name)
    kept = plain.ids[: first + 2]
    assert (out.token_ids, out.finish_reason) == (kept, "stop")
    assert out.text == words(kept)[: -len(stop)]
    same_logprobs(out, plain.raw, 4)
    engine.script = kit.Script([*WORDY, *plain.ids], 8, name)
    chunks = list(engine.llm.stream(WORDY, params))
    assert [len(c.logprobs or ()) for c in chunks] == [len(c.token_ids) for c in chunks]
    assert [one for chunk in chunks for one in chunk.logprobs or ()] == out.logprobs
    no_leak(engine.llm)


def test_logprobs_beside_those_who_ask_for_none(want: Any, open_llm: Any) -> None:
    """Rows of one batch, each with its own count; preempted ones keep those they had."""
    llm = open_llm(block_size=4, page_size=4, num_pages=20)
    many = [replace(MODES["warm"], seed=seed, logprobs=seed or None) for seed in range(4)]
    outs = llm.generate([PROMPT] * 4, many)
    assert sum(out.metrics.preemptions for out in outs) > 0
    for params, out in zip(many, outs, strict=True):
        wanted = want(PROMPT, params)
        assert out.token_ids == wanted.ids
        if params.logprobs is None:
            assert out.logprobs is None
        else:
            same_logprobs(out, wanted.raw, params.logprobs)


def test_shaping_does_not_touch_the_raw_logits(expect: Any) -> None:
    """The oracle's own: with nothing asked for it changes no number."""
    logits = expect.logits(PROMPT)[-1]
    shaped = oracle.shape(logits, MODES["warm"], PROMPT, [3, 3])
    assert torch.equal(shaped, logits)
