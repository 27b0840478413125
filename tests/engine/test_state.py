"""Nothing of one request reaches another: not of a finished, an abandoned or a failed one."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nanodflash import SamplingParams

NEW = 14
PROMPTS = [[(7 * i + n) % 320 for i in range(n)] for n in (40, 7, 1, 200)]
GREEDY = SamplingParams(max_new_tokens=NEW)


def drafted(llm: Any, prompt: Sequence[int], params: SamplingParams) -> tuple[Any, torch.Tensor]:
    """A request's output, and what the drafter made of every block: [cycles, S, C]."""
    kept: list[torch.Tensor] = []
    handle = llm.engine.runner.steps.decoder.draft.register_forward_hook(
        lambda module, args, hidden: kept.append(hidden[0])
    )
    out = llm.generate(prompt, params)[0]
    handle.remove()
    return out, torch.stack(kept[: out.metrics.cycles])  # a surplus one may follow


def spoil(llm: Any) -> None:
    """NaN in every page: all are free between requests."""
    decoder = llm.engine.runner.steps.decoder
    decoder.target_pool.rows[:, :-1].fill_(float("nan"))
    decoder.draft_pool.rows[:, :-1].fill_(float("nan"))


@pytest.mark.parametrize("page", [3, 64])
def test_prompts_in_sequence(open_llm: Any, expect: Any, no_leak: Any, page: int) -> None:
    """Ids, cycles and all that the drafter computes are those of a fresh engine."""
    used = open_llm(page_size=page)
    for prompt in PROMPTS:
        out, hidden = drafted(used, prompt, GREEDY)
        assert (out.token_ids, out.finish_reason) == expect(prompt, GREEDY)
        fresh, wanted = drafted(open_llm(page_size=page), prompt, GREEDY)
        torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-10)
        assert out.metrics.emitted == fresh.metrics.emitted
        no_leak(used)
        spoil(used)


def test_params_of_the_last_request_are_gone(open_llm: Any, expect: Any) -> None:
    """Stop ids, filters, temperature, seed, budget: one slot serves all of these in turn."""
    llm = open_llm()
    stop = expect.ids(PROMPTS[1], GREEDY, NEW)[3]
    for params in (
        SamplingParams(max_new_tokens=NEW, stop_token_ids=tuple(range(16))),
        SamplingParams(max_new_tokens=NEW, temperature=2.0, top_k=3, top_p=0.5, min_p=0.2, seed=5),
        SamplingParams(max_new_tokens=NEW, temperature=2.0, seed=6),
        SamplingParams(max_new_tokens=2),
        GREEDY,
        SamplingParams(max_new_tokens=NEW, stop_token_ids=(stop,)),
        GREEDY,
    ):
        out = llm.generate(PROMPTS[1], params)[0]
        assert (out.token_ids, out.finish_reason) == expect(PROMPTS[1], params)


@pytest.mark.parametrize("chunks", [0, 1, 2, 5])
def test_an_abandoned_stream(open_llm: Any, expect: Any, no_leak: Any, chunks: int) -> None:
    llm = open_llm(page_size=4)
    stream = llm.stream(PROMPTS[0], GREEDY)
    for _ in range(chunks):
        next(stream)
    assert (llm.page_stats().live > 0) == (chunks > 0)
    stream.close()
    no_leak(llm)
    spoil(llm)
    for prompt in PROMPTS[1:3]:
        assert llm.generate(prompt, GREEDY)[0].token_ids == expect(prompt, GREEDY)[0]


def test_a_forgotten_stream(open_llm: Any, expect: Any, no_leak: Any) -> None:
    llm = open_llm()
    for chunk in llm.stream(PROMPTS[0], GREEDY):
        assert chunk.token_ids
        break
    no_leak(llm)
    assert llm.generate(PROMPTS[2], GREEDY)[0].token_ids == expect(PROMPTS[2], GREEDY)[0]


@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_failing_proposer(scripted: Any, expect: Any, no_leak: Any, call: int) -> None:
    """More failures than slots: each gives slot and pages back."""
    engine = scripted(4, page_size=4, prefix_cache=False)  # `spoil` would spoil cached pages
    for number in range(10):
        engine.prepare(PROMPTS[number % 3], GREEDY, "wrong")
        engine.fails_at = call
        with pytest.raises(RuntimeError, match="scripted failure"):
            engine.llm.generate(PROMPTS[number % 3], GREEDY)
        no_leak(engine.llm)
    engine.fails_at = None
    for prompt in PROMPTS[:3]:
        spoil(engine.llm)
        out = engine.run(prompt, GREEDY, "alternating")
        assert (out.token_ids, out.finish_reason) == expect(prompt, GREEDY)


def test_proposals_of_a_wrong_shape(open_llm: Any, expect: Any, no_leak: Any) -> None:
    llm = open_llm(block_size=4, proposer=lambda tokens, length: tokens[:, :1])
    with pytest.raises(ValueError, match=r"\(1, 1\) ids, wanted \(1, 3\)"):
        llm.generate(PROMPTS[1], GREEDY)
    no_leak(llm)
    out = llm.generate(PROMPTS[1], GREEDY, speculate=False)[0]
    assert out.token_ids == expect(PROMPTS[1], GREEDY)[0]


@pytest.mark.parametrize("token", [-1, 320, 2**40])
def test_proposals_that_are_no_tokens(open_llm: Any, expect: Any, token: int) -> None:
    llm = open_llm(block_size=4, proposer=lambda tokens, length: tokens[:, :3] * 0 + token)
    assert llm.generate(PROMPTS[1], GREEDY)[0].token_ids == expect(PROMPTS[1], GREEDY)[0]


def test_more_streams_than_slots(open_llm: Any, expect: Any) -> None:
    llm = open_llm()
    few = SamplingParams(max_new_tokens=3)
    streams = [llm.stream(PROMPTS[2], few) for _ in range(llm.config.max_seqs + 1)]
    heads = [next(stream).token_ids for stream in streams]  # the last one waits for a slot
    for head, stream in zip(heads, streams, strict=True):
        ids = head + [token for chunk in stream for token in chunk.token_ids]
        assert ids == expect(PROMPTS[2], few)[0]


def test_streams_side_by_side(open_llm: Any, expect: Any) -> None:
    """Several requests may be open at once, on slots and pages of their own."""
    llm = open_llm(page_size=4)
    wanted = [
        GREEDY,
        SamplingParams(max_new_tokens=NEW - 7, temperature=1.5, seed=3),
        SamplingParams(max_new_tokens=NEW, temperature=1.0, top_k=9, seed=4),
    ]
    streams = [llm.stream(*pair) for pair in zip(PROMPTS, wanted, strict=False)]
    made: list[list[int]] = [[] for _ in streams]
    running = [*range(len(streams))]
    while running:
        for number in [*running]:
            chunk = next(streams[number], None)
            if chunk is None:
                running.remove(number)
            else:
                made[number] += chunk.token_ids
    for ids, prompt, params in zip(made, PROMPTS, wanted, strict=False):
        assert ids == expect(prompt, params)[0]


def test_speculation_may_change_between_requests(open_llm: Any, expect: Any) -> None:
    llm = open_llm(page_size=4)
    for number in range(6):
        prompt = PROMPTS[number % 3]
        out = llm.generate(prompt, GREEDY, speculate=number % 2 == 0)[0]
        assert (out.token_ids, out.finish_reason) == expect(prompt, GREEDY)
        assert (out.metrics.proposed > 0) == (number % 2 == 0)
        spoil(llm)


# ---------------------------------------------------------------------- the mask id


@pytest.mark.parametrize("place", [0, 4, 9])
def test_the_mask_id_is_an_ordinary_token(
    pair: Any, scripted: Any, open_llm: Any, expect: Any, place: int
) -> None:
    """The text holds the drafter's mask id, at the first token, too; also in the prompt."""
    prompt = PROMPTS[1]
    ids = expect.ids(prompt, GREEDY, NEW)
    mask = ids[place]
    changed = {"dflash_config": {"mask_token_id": mask, "target_layer_ids": [0, 2]}}
    folder = pair.variant(pair.draft, f"mask {place}", **changed)
    assert json.loads((folder / "config.json").read_text())["dflash_config"]["mask_token_id"] in ids
    assert open_llm(draft=folder).generate(prompt, GREEDY)[0].token_ids == ids
    engine = scripted(8, draft=folder)
    for pattern in ("right", "alternating", "third wrong"):
        assert engine.run(prompt, GREEDY, pattern).token_ids == ids
    for asked in ([mask], [*prompt, mask], [mask] * 9):
        assert engine.run(asked, GREEDY).token_ids == expect(asked, GREEDY)[0]
