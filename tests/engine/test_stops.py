"""The earliest terminator wins: stop ids, the model's own end ids, the budget, stop strings."""

from typing import Any

import pytest

from nanodflash import SamplingParams

PROMPT = [275, 272, 195]  # its first 26 greedy tokens are distinct
SIZE = 4


def first_occurrences(ids: list[int], count: int) -> None:
    assert len(set(ids[:count])) == count, "pick another prompt: a stop id would occur earlier"


@pytest.mark.parametrize("pattern", ["right", "third wrong"])
def test_a_stop_id_at_every_place_of_two_blocks(
    scripted: Any, expect: Any, no_leak: Any, pattern: str
) -> None:
    size = 8
    engine, ids = scripted(size), expect.ids(PROMPT, SamplingParams(), 40)
    first_occurrences(ids, 2 * size + 1)
    for place in range(2 * size + 1):
        params = SamplingParams(max_new_tokens=40, stop_token_ids=(ids[place],))
        out = engine.run(PROMPT, params, pattern)
        assert (out.token_ids, out.finish_reason) == (ids[: place + 1], "stop")
        assert out.metrics.decoded_tokens == place
        if pattern == "right":
            assert out.metrics.cycles == -(-place // size)
            assert out.metrics.accepted == place - place // size
    no_leak(engine.llm)


@pytest.mark.parametrize("pattern", ["right", "alternating", "wrong"])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 7, 8, 12])
def test_stop_or_budget(scripted: Any, expect: Any, pattern: str, stop: int) -> None:
    """The budget just before, at and just after the stop; the whole grid is in test_cycle.py."""
    ids = expect.ids(PROMPT, SamplingParams(), 24)
    for budget in {max(stop, 1), stop + 1, stop + 2}:
        params = SamplingParams(max_new_tokens=budget, stop_token_ids=(ids[stop],))
        out = scripted(SIZE).run(PROMPT, params, pattern)
        reason = "stop" if stop < budget else "length"
        assert (out.token_ids, out.finish_reason) == (ids[: min(stop + 1, budget)], reason)
        assert (out.token_ids, out.finish_reason) == expect(PROMPT, params)
        assert len(out.token_ids) == 1 + out.metrics.decoded_tokens


def test_the_earliest_of_many_stop_ids(scripted: Any, expect: Any) -> None:
    ids = expect.ids(PROMPT, SamplingParams(), 24)
    for places in [(9, 4), (4, 9, 20), (13, 12), (0, 1)]:
        stops = tuple(ids[place] for place in places)
        out = scripted(SIZE).run(PROMPT, SamplingParams(max_new_tokens=24, stop_token_ids=stops))
        assert (out.token_ids, out.finish_reason) == (ids[: min(places) + 1], "stop")


def test_sixteen_stop_ids_but_not_seventeen(scripted: Any, expect: Any, no_leak: Any) -> None:
    ids = expect.ids(PROMPT, SamplingParams(), 24)
    unused = [token for token in range(320) if token not in ids]
    engine = scripted(SIZE)
    stops = (*unused[:15], ids[6])
    out = engine.run(PROMPT, SamplingParams(max_new_tokens=24, stop_token_ids=stops))
    assert (out.token_ids, out.finish_reason) == (ids[:7], "stop")
    doubled = SamplingParams(max_new_tokens=24, stop_token_ids=(*stops, *stops))
    assert engine.run(PROMPT, doubled).token_ids == ids[:7]
    calls = engine.calls
    with pytest.raises(ValueError, match="17 stop ids, at most 16"):
        engine.llm.generate(PROMPT, SamplingParams(stop_token_ids=tuple(unused[:17])))
    assert engine.calls == calls
    no_leak(engine.llm)


def test_a_stop_id_that_no_token_has(scripted: Any, expect: Any) -> None:
    params = SamplingParams(max_new_tokens=9, stop_token_ids=(320, 10**6))
    out = scripted(SIZE).run(PROMPT, params)
    assert (out.token_ids, out.finish_reason) == (expect.ids(PROMPT, params, 9), "length")


# ---------------------------------------------------------------------- the model's own end ids


def end_ids(pair: Any, name: str, ids: Any, where: str) -> Any:
    """The worded model with these end ids, in config.json or generation_config.json."""
    if where == "config":
        folder = pair.variant(pair.target, name, eos_token_id=ids)
    else:
        folder = pair.variant(pair.target, name, eos_token_id=999)
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    return folder


@pytest.mark.parametrize("where", ["config", "generation_config"])
@pytest.mark.parametrize("many", [True, False])
def test_end_ids_of_the_checkpoint(
    pair: Any, scripted: Any, expect: Any, where: str, many: bool
) -> None:
    ids = expect.ids(PROMPT, SamplingParams(), 24)
    first_occurrences(ids, 12)
    name, listed = f"{where} {many}", [ids[10], ids[6]] if many else ids[6]
    engine = scripted(SIZE, model=end_ids(pair, name, listed, where))
    out = engine.run(PROMPT, SamplingParams(max_new_tokens=24))
    assert (out.token_ids, out.finish_reason) == (ids[:7], "stop")
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    out = engine.run(PROMPT, params)
    assert (out.token_ids, out.finish_reason) == (ids, "length")
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop_token_ids=(ids[8],))
    assert engine.run(PROMPT, params).token_ids == ids[:9]
    params = SamplingParams(max_new_tokens=24, stop_token_ids=(ids[3],))
    assert engine.run(PROMPT, params).token_ids == ids[:4]
    unused = tuple(token for token in range(320) if token not in ids)
    room = 16 - (2 if many else 1)
    full = SamplingParams(max_new_tokens=24, stop_token_ids=unused[:room])
    assert engine.run(PROMPT, full).token_ids == ids[:7]
    with pytest.raises(ValueError, match="17 stop ids"):
        engine.llm.generate(PROMPT, SamplingParams(stop_token_ids=unused[: room + 1]))


# ---------------------------------------------------------------------- stop strings


def words(ids: list[int]) -> list[str]:
    """Each id's text in the worded model."""
    return [f"{chr(97 + i % 26)}{i // 26}" if i < 300 else "" for i in ids]


def cut(ids: list[int], stops: tuple[str, ...], budget: int) -> tuple[list[int], str, str]:
    """Ids, text and reason: the first token that completes a stop string is the last one."""
    for count in range(1, budget + 1):
        text = "".join(words(ids[:count]))
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return ids[:count], text[: min(found)], "stop"
    return ids[:budget], "".join(words(ids[:budget])), "length"


NEW = 26
STOP_STRINGS = [
    # (first word, characters left out of it, words): what the stop string is made of
    *[(place, 1, 2) for place in range(0, 2 * 8 + 2)],  # across every border
    *[(place, 0, 1) for place in (0, 1, 7, 8, 9)],  # a whole word
    *[(place, 1, 1) for place in (0, 7, 8)],  # the end of one word
    (2, 1, 12),  # more than a block
]


def options(pair: Any) -> dict[str, Any]:
    return {"model": pair.worded}


@pytest.mark.parametrize("size", [8, 3])
@pytest.mark.parametrize("pattern", ["right", "third wrong"])
def test_stop_strings(pair: Any, scripted: Any, expect: Any, size: int, pattern: str) -> None:
    engine = scripted(size, **options(pair))
    ids = expect.ids(PROMPT, SamplingParams(), NEW)
    stopped = set()
    for first, left_out, count in STOP_STRINGS:
        stop = "".join(words(ids[first : first + count]))[left_out:]
        params = SamplingParams(max_new_tokens=NEW, stop=stop, ignore_eos=True)
        out = engine.run(PROMPT, params, pattern)
        wanted = cut(ids, (stop,), NEW)
        assert (out.token_ids, out.text, out.finish_reason) == wanted
        kept = len(wanted[0])
        assert out.metrics.decoded_tokens == kept - 1
        assert out.metrics.accepted <= out.metrics.decoded_tokens
        if pattern == "right":
            assert out.metrics.cycles == -(-(kept - 1) // size)
            assert out.metrics.accepted == kept - 1 - (kept - 1) // size
        stopped.add(kept)
    assert len(stopped) > 12


def test_stop_strings_in_chunks(pair: Any, scripted: Any, expect: Any, no_leak: Any) -> None:
    """A stream shows nothing of the stop string, and its chunks make up ids, flags and text."""
    engine = scripted(8, **options(pair))
    ids = expect.ids(PROMPT, SamplingParams(), NEW)
    for first in (3, 7, 8, 12):
        stop = "".join(words(ids[first : first + 3]))[1:]
        params = SamplingParams(max_new_tokens=NEW, stop=(stop, "not there"), ignore_eos=True)
        engine.prepare(PROMPT, params, "right")
        chunks = list(engine.llm.stream(PROMPT, params))
        wanted = cut(ids, (stop,), NEW)
        made = [token for chunk in chunks for token in chunk.token_ids]
        text = "".join(chunk.text for chunk in chunks)
        assert (made, text, chunks[-1].finish_reason) == wanted
        flags = [flag for chunk in chunks for flag in chunk.accepted]
        assert len(flags) == len(made)
        assert sum(flags) == chunks[-1].metrics.accepted
    no_leak(engine.llm)


def test_the_first_of_two_stop_strings(pair: Any, scripted: Any, expect: Any) -> None:
    engine = scripted(8, **options(pair))
    ids = expect.ids(PROMPT, SamplingParams(), NEW)
    early, late = "".join(words(ids[4:6])), "".join(words(ids[5:8]))
    for stops in ((early, late), (late, early), (late, late[:-1])):
        params = SamplingParams(max_new_tokens=NEW, stop=stops, ignore_eos=True)
        out = engine.run(PROMPT, params)
        assert (out.token_ids, out.text, out.finish_reason) == cut(ids, stops, NEW)


@pytest.mark.parametrize("budget", [7, 8, 9, 10, 11])
def test_a_stop_string_at_the_budget(pair: Any, scripted: Any, expect: Any, budget: int) -> None:
    engine = scripted(8, **options(pair))
    ids = expect.ids(PROMPT, SamplingParams(), NEW)
    stop = "".join(words(ids[7:10]))
    params = SamplingParams(max_new_tokens=budget, stop=stop, ignore_eos=True)
    out = engine.run(PROMPT, params)
    assert (out.token_ids, out.text, out.finish_reason) == cut(ids, (stop,), budget)
    assert out.finish_reason == ("stop" if budget >= 10 else "length")


@pytest.mark.parametrize("ahead", [-1, 0, 1, 2])
def test_a_stop_string_and_a_stop_id_in_one_block(
    pair: Any, scripted: Any, expect: Any, ahead: int
) -> None:
    """The id of a stop gives no text: at the string's last word the id has it."""
    engine = scripted(8, **options(pair))
    ids = expect.ids(PROMPT, SamplingParams(), NEW)
    first_occurrences(ids, 16)
    stop, last = "".join(words(ids[2:5])), 4
    params = SamplingParams(
        max_new_tokens=NEW, stop=stop, stop_token_ids=(ids[last + ahead],), ignore_eos=True
    )
    out = engine.run(PROMPT, params)
    assert out.finish_reason == "stop"
    if ahead > 0:
        assert (out.token_ids, out.text) == (ids[: last + 1], "".join(words(ids[:2])))
    else:
        kept = ids[: last + ahead + 1]
        assert (out.token_ids, out.text) == (kept, "".join(words(kept[:-1])))
    assert out.metrics.decoded_tokens == len(out.token_ids) - 1


def test_the_text_of_the_stop_id_is_not_shown(pair: Any, scripted: Any, expect: Any) -> None:
    engine = scripted(8, **options(pair))
    ids = expect.ids(PROMPT, SamplingParams(), NEW)
    for place in (0, 5, 8):
        params = SamplingParams(max_new_tokens=NEW, stop_token_ids=(ids[place],), ignore_eos=True)
        out = engine.run(PROMPT, params)
        assert out.text == "".join(words(ids[:place]))


def test_stop_strings_need_a_tokenizer(scripted: Any) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        scripted(SIZE).llm.generate(PROMPT, SamplingParams(stop="x"))
