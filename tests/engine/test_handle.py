"""A handle can be waited for and read in any order, any number of times."""

from typing import Any
from unittest.mock import Mock

import pytest

from nanodflash import SamplingParams

THREE = SamplingParams(max_new_tokens=3)


@pytest.mark.parametrize("first", ["result", "iterate"])
@pytest.mark.parametrize("second", ["result", "iterate"])
def test_a_handle_is_read_twice(open_llm: Any, expect: Any, first: str, second: str) -> None:
    handle = open_llm().submit([5, 6], THREE)
    for how in (first, second):
        if how == "result":
            assert handle.result().token_ids == expect([5, 6], THREE)[0]
        else:
            list(handle)
    rest = [token for chunk in handle for token in chunk.token_ids]
    assert rest == ([] if "iterate" in (first, second) else handle.result().token_ids)
    assert list(handle) == []


@pytest.mark.parametrize("how", ["result", "iterate"])
def test_what_ended_it_is_raised(open_llm: Any, how: str) -> None:
    def fails(tokens: Any, length: Any) -> Any:
        raise RuntimeError("scripted failure")

    handle = open_llm(proposer=fails).submit([5, 6], THREE)
    with pytest.raises(RuntimeError, match="scripted failure"):
        handle.result() if how == "result" else list(handle)
    with pytest.raises(RuntimeError, match="scripted failure"):
        handle.result()


def test_a_tokenizer_that_fails_at_an_abort_ends_that_request_alone(
    open_llm: Any, expect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(model=None)
    long = llm.submit([5, 6], SamplingParams(max_new_tokens=200))
    monkeypatch.setattr(long._sequence, "show", Mock(side_effect=LookupError("no text")))
    long.abort()
    with pytest.raises(LookupError, match="no text"):
        long.result()
    assert llm.submit([5, 6], THREE).result().token_ids == expect([5, 6], THREE)[0]
