"""Prompts: what is taken, what is refused with one line, and that nothing runs before that."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nanodflash import SamplingParams

FEW = SamplingParams(max_new_tokens=3)
V = 320
BAD: dict[str, tuple[Any, str]] = {
    "empty list": ([], "empty"),
    "empty tuple": ((), "empty"),
    "empty text": ("", "empty|tokenizer"),
    "negative id": ([3, -1], "-1"),
    "id past the table": ([V, 3], str(V)),
    "huge id": ([2**63], str(2**63)),
    "bool": ([3, True], "True"),
    "fraction": ([1.5, 3], "1.5"),
    "whole fraction": ([3, 2.0], "2.0"),
    "text among ids": ([3, "5"], "'5'"),
    "none": ([3, None], "None"),
    "nested": ([[3, 4]], r"\[3, 4\]"),
    "bytes": (b"abc", r"a prompt is b'abc', wanted a text or a list of token ids"),
    "bytearray": (bytearray(b"abc"), "a prompt is bytearray"),
    "fractions of an array": (np.array([3.0, 4.0]), "is 3.0, wanted a whole"),
    "bools of a tensor": (torch.tensor([True]), "is True, wanted a whole"),
    "array past the table": (np.array([3, V]), f"is {V}, wanted a whole"),
    "a long text among ids": ([3, "x" * 9999], r"is 'x{30,60}\.\.\.x{30,60}', wanted a whole"),
    "a long number": ([3, 10**9999], "is a very long int, wanted a whole"),
}
NO_PROMPT: dict[str, Any] = {
    "number": 5,
    "fraction": 2.5,
    "none": None,
    "table": {"prompt": "a1"},
    "set": {1, 2},
    "scalar": torch.tensor(5),
    "function": print,
}


@pytest.fixture(scope="module")
def counted(pair: Any, scripted: Callable[..., Any]) -> tuple[Any, Any]:
    """An LLM with a tokenizer and one without, and a block of 4 each."""
    return scripted(4, model=pair.worded).llm, scripted(4).llm


@pytest.fixture
def untouched(counted: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The two LLMs, on which any run fails the test."""

    def run(*_: Any, **__: Any) -> Any:
        raise AssertionError("a request was run")

    for llm in counted:
        monkeypatch.setattr(llm.engine, "submit", run)
    return counted


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_is_refused(untouched: Any, no_leak: Any, name: str) -> None:
    prompt, told = BAD[name]
    for llm in untouched:
        with pytest.raises(ValueError, match=told):
            llm.stream(prompt, FEW)
        for prompts in ([prompt], [[5, 6], prompt], [prompt, [5, 6]], [[5], [6], prompt, [7]]):
            with pytest.raises(ValueError, match=told):
                llm.generate(prompts, FEW)
        no_leak(llm)


@pytest.mark.parametrize(
    "name",
    [
        "empty text",
        "negative id",
        "id past the table",
        "huge id",
        "bool",
        "fraction",
        "whole fraction",
        "text among ids",
        "none",
    ],
)
def test_a_bad_prompt_alone(untouched: Any, name: str) -> None:
    """`generate` takes one prompt without a list around it: the refusal is the same."""
    prompt, told = BAD[name]
    for llm in untouched:
        with pytest.raises(ValueError, match=told):
            llm.generate(prompt, FEW)


@pytest.mark.parametrize("name", [*NO_PROMPT, "bytes", "bytearray"])
def test_what_is_no_prompt_at_all(untouched: Any, name: str) -> None:
    value = NO_PROMPT.get(name, BAD.get(name, [None])[0])
    for llm in untouched:
        calls = [(use, value) for use in (llm.submit, llm.stream, llm.generate)]
        calls += [(llm.generate, [[5], value]), (llm.generate, [[5], value, "a1"])]
        for use, given in calls:
            with pytest.raises(ValueError, match=r"^a prompt is [^\n]{1,80}, wanted [^\n]*$"):
                use(given, FEW)
    with pytest.raises(ValueError, match=r"^a prompt is [^\n]{1,80}, wanted [^\n]*$"):
        untouched[0].generate(["a1", value], FEW)


@pytest.mark.parametrize("wrong", [{}, {"top_k": 3}, 5, {FEW}, [5], [{}], [None], (FEW.sampler,)])
def test_params_of_another_kind(untouched: Any, wrong: Any) -> None:
    llm = untouched[0]
    calls = [(llm.generate, [[3]]), (llm.generate, [3])]
    calls += [(llm.submit, [3]), (llm.stream, [3])] if wrong else []
    for use, prompt in calls:
        with pytest.raises(ValueError, match=r"^params is [^\n]*, wanted SamplingParams"):
            use(prompt, wrong)


ARRAYS: dict[str, Any] = {
    "int64": lambda ids: np.array(ids),
    "uint16": lambda ids: np.array(ids, dtype=np.uint16),
    "tensor": lambda ids: torch.tensor(ids),
    "int32 tensor": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "list of numbers of an array": lambda ids: list(np.array(ids)),
    "strided": lambda ids: np.array(ids).repeat(2)[::2],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_ids(open_llm: Any, expect: Any, name: str) -> None:
    llm, make = open_llm(), ARRAYS[name]
    short, long = [5, 6], [7, 300, 12]
    wanted = [expect(prompt, FEW)[0] for prompt in (short, long)]
    outs = llm.generate([make(short), make(long)], FEW)
    assert [out.token_ids for out in outs] == wanted
    assert [out.token_ids for out in llm.generate(make(long), FEW)] == wanted[1:]
    assert llm.submit(make(long), FEW).result().token_ids == wanted[1]
    assert [x for chunk in llm.stream(make(short), FEW) for x in chunk.token_ids] == wanted[0]
    if name in ("int64", "tensor"):
        outs = llm.generate(make([short, short[::-1]]), FEW)
        assert [out.metrics.prompt_tokens for out in outs] == [2, 2]
        assert outs[0].token_ids == wanted[0]


def test_no_prompts_are_no_outputs(untouched: Any) -> None:
    assert untouched[0].generate([], FEW) == []
    assert untouched[0].generate((), FEW) == []


def test_text_needs_a_tokenizer(untouched: Any) -> None:
    for call in (
        lambda: untouched[1].generate("a1 b1", FEW),
        lambda: untouched[1].generate([[3], "a1 b1"], FEW),
        lambda: untouched[1].stream("a1 b1", FEW),
        lambda: untouched[1].chat([{"role": "user", "content": "a1"}], FEW),
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            call()


def test_text_without_tokens_is_refused(untouched: Any) -> None:
    for text in ("", "   ", "\n"):
        with pytest.raises(ValueError, match="empty"):
            untouched[0].generate([text], FEW)


def test_other_prompts_go_on_after_a_refusal(scripted: Any, expect: Any) -> None:
    engine = scripted(4)
    with pytest.raises(ValueError, match="empty"):
        engine.llm.generate([[3], []], FEW)
    assert engine.run([3], FEW).token_ids == expect([3], FEW)[0]


@pytest.mark.parametrize("prompt", [[0], [V - 1], (5, 6), range(4), [7] * 30])
def test_prompts_that_are_taken(open_llm: Any, expect: Any, prompt: Any) -> None:
    llm = open_llm()
    for out in (*llm.generate(prompt, FEW), *llm.generate([prompt], FEW)):
        assert out.token_ids == expect(prompt, FEW)[0]
        assert out.metrics.prompt_tokens == len(prompt)


def test_text_is_its_tokens(pair: Any, open_llm: Any, expect: Any) -> None:
    llm = open_llm(pair.worded)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    for out in (*llm.generate("b0 d0 a1", params), *llm.generate(["b0 d0 a1"], params)):
        assert out.token_ids == expect([1, 3, 26], params)[0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_params_for_each_prompt(open_llm: Any, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} params for 2 prompts"):
        open_llm().generate([[3], [4]], [FEW] * count)
