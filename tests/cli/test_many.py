"""Many prompts: JSON lines in and out, what runs at once, progress, Ctrl-C."""

import io
import json
import re
import signal
import sys
from dataclasses import asdict, replace

import pytest

import generate
from nanodflash import cli
from nanodflash import llm as library
from nanodflash.config import SamplingParams
from nanodflash.engine.engine import RequestHandle
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.steps import ModelSteps
from nanodflash.llm import LLM

BASE = SamplingParams(max_new_tokens=12)
SHORT = ("--max-new-tokens", "12")
TIMED = {"prefill_seconds", "decode_seconds", "tokens_per_second"}


def rendered(prompt: str) -> str:
    return f"[user]{prompt}\n[assistant]"


def lines_of(text: str) -> list[dict]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def error_of(code: int, capsys) -> str:
    """The one line that refuses bad input."""
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", shown.err)
    return shown.err


@pytest.fixture
def write(tmp_path):
    """Write objects or texts into a file, one a line; returns its name."""

    def write(*lines) -> str:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "prompts").write_text("\n".join(texts) + "\n")
        return str(tmp_path / "prompts")

    return write


@pytest.fixture
def widths(monkeypatch) -> list[int]:
    """How many requests took part in each cycle."""
    seen, original = [], Scheduler.plan

    def plan(self):
        made = original(self)
        if made is not None:
            seen.append(len(made.rows))
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    return seen


@pytest.fixture
def look(monkeypatch):
    """Let somebody look at the streams of these names."""

    def look(*names: str) -> None:
        def is_terminal(stream) -> bool:
            return stream is not None and any(stream is getattr(sys, n) for n in names if n)

        monkeypatch.setattr(cli, "is_terminal", is_terminal)
        monkeypatch.setattr(generate, "is_terminal", is_terminal)

    return look


@pytest.fixture
def interrupt(monkeypatch):
    """Press Ctrl-C when so many chunks have been read."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    original = RequestHandle.__iter__

    def interrupt(*after: int) -> None:
        count = 0

        def read(self):
            nonlocal count
            for chunk in original(self):
                count += 1
                for _ in range(after.count(count)):
                    signal.raise_signal(signal.SIGINT)
                yield chunk

        monkeypatch.setattr(RequestHandle, "__iter__", read)

    yield interrupt
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)
    signal.signal(signal.SIGINT, before)


# JSON lines

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "more"},
]
ASKED = [
    ({"prompt": "hi"}, {}),
    ({"messages": TALK}, {"max_new_tokens": 3, "logprobs": None}),
    ({"prompt": "hello"}, {"temperature": 0.8, "seed": 7, "top_k": 50, "top_p": 0.9}),
    ({"prompt": "there"}, {"logprobs": 2, "min_new_tokens": 2, "ignore_eos": True}),
    ({"prompt": "\u2028\u20ac"}, {"logit_bias": {"65": 100.0}, "max_new_tokens": 5}),
    ({"prompt": "hi"}, {"repetition_penalty": 1.5, "stop": ["never", "not"], "min_p": 0.1}),
    ({"prompt": "hi"}, {"stop_token_ids": [1, 2], "presence_penalty": 1, "frequency_penalty": 1}),
]


def test_json_lines_say_what_the_library_says(pair, llm, capsys, write, widths):
    file = write("", *(asked | given for asked, given in ASKED), "  ")
    flags = pair.flags("--prompt-file", file, "--jsonl", *SHORT, "--max-seqs", "16")
    assert generate.main(flags) == 0
    shown = capsys.readouterr()
    assert re.fullmatch(r"\d+ tokens, tau \d\.\d\d, [\d.]+ tokens/s\n", shown.err)
    assert max(widths) == len(ASKED)
    told = lines_of(shown.out)
    assert [line["index"] for line in told] == list(range(len(ASKED)))
    for line, (asked, given) in zip(told, ASKED, strict=True):
        bias = {int(token): number for token, number in given.get("logit_bias", {}).items()}
        params = replace(BASE, **given | {"logit_bias": bias})
        prompt = rendered(asked["prompt"]) if "prompt" in asked else llm.render(TALK)
        wanted = llm.generate([prompt], params)[0]
        assert {key: line[key] for key in asked} == asked
        assert (line["text"], line["token_ids"]) == (wanted.text, wanted.token_ids)
        assert (line["finish_reason"], line["seed"]) == (wanted.finish_reason, params.seed)
        counts = {k: v for k, v in wanted.metrics.as_dict().items() if k not in TIMED}
        for varies in ("cached_tokens", "preemptions"):
            counts.pop(varies)
        assert {k: line["metrics"][k] for k in counts} == counts
        assert ("logprobs" in line) == (params.logprobs is not None)
    logprobs = told[3]["logprobs"]
    assert [len(each["top"]) for each in logprobs] == [2] * len(told[3]["token_ids"])
    wanted = llm.generate(rendered("there"), replace(BASE, logprobs=2, ignore_eos=True))[0]
    first = json.loads(json.dumps(asdict(wanted.logprobs[0])))
    assert logprobs[0]["chosen"] == pytest.approx(first["chosen"])
    assert [token for token, _ in logprobs[0]["top"]] == [token for token, _ in first["top"]]


def test_json_lines_from_stdin_with_flags_for_all(pair, capsys, monkeypatch):
    data = b'\xef\xbb\xbf{"prompt": "hi"}\r\n{"prompt": "hi", "temperature": 0}\r\n{"prompt": "hi"}'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))
    flags = pair.flags("--prompt-file", "-", "--jsonl", *SHORT, "--temperature", "1")
    assert generate.main([*flags, "--logprobs", "0", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    told = lines_of(shown.out)
    assert all(len(line["logprobs"]) == len(line["token_ids"]) for line in told)
    seeds = [line["seed"] for line in told]
    assert seeds[1] is None
    assert seeds[0] != seeds[2]
    again = json.dumps({"prompt": "hi", "seed": seeds[2]}).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(again), "ascii"))
    assert generate.main(flags) == 0
    assert lines_of(capsys.readouterr().out)[0]["token_ids"] == told[2]["token_ids"]


def test_messages_and_the_flags_of_the_prompt(pair, llm, capsys, write):
    own = [{"role": "system", "content": "own"}, *TALK]
    file = write({"messages": TALK}, {"messages": own}, {"prompt": "hi"})
    flags = ["--prompt-file", file, "--jsonl", *SHORT]
    assert generate.main(pair.flags(*flags, "--system", "be", "--thinking")) == 0
    system = [{"role": "system", "content": "be"}]
    talks = [system + TALK, own, [*system, {"role": "user", "content": "hi"}]]
    wanted = [llm.chat(talk, BASE, enable_thinking=True).text for talk in talks]
    told = lines_of(capsys.readouterr().out)
    assert [line["text"] for line in told] == wanted
    assert told[0]["messages"] == TALK, "as it was asked"
    assert "line 1: --raw" in error_of(generate.main(pair.flags(*flags, "--raw")), capsys)
    mute = ["--model", str(pair.untemplated), "--dtype", "fp64", *flags]
    assert "line 1: this model has no chat" in error_of(generate.main(mute), capsys)


BAD = {
    "{": "not JSON",
    "[" * 100_000: "not JSON",
    "[]": "prompt",
    "7": "prompt",
    "{}": "prompt",
    '{"prompt": "a", "messages": []}': "either",
    '{"prompt": 5}': "a string",
    '{"prompt": null}': "a string",
    '{"messages": "hi"}': "a list",
    '{"messages": []}': "non-empty",
    '{"messages": [5]}': "messages must be",
    '{"messages": [{"role": "user"}]}': "content",
    '{"prompt": "a", "max_tokens": 5, "n": 1}': "unknown key 'max_tokens'",
    '{"prompt": "a", "index": 5}': "unknown key 'index'",
    '{"prompt": "a", "max_new_tokens": 0}': "max_new_tokens is 0",
    '{"prompt": "a", "max_new_tokens": null}': "max_new_tokens is None",
    json.dumps({"prompt": "a", "max_new_tokens": 2**70}): f"max_new_tokens is {2**70}",
    json.dumps({"prompt": "a", "seed": 2**70}): f"seed is {2**70}",
    json.dumps({"prompt": "a", "temperature": 10**400}): "temperature is 1000",
    json.dumps({"prompt": ["a" * 99] * 999}): "..., wanted a string",
    '{"prompt": "a", "max_new_tokens": ' + "9" * 5000 + "}": "not JSON",
    '{"prompt": "a", "temperature": "1"}': "temperature is '1'",
    '{"prompt": "a", "temperature": NaN}': "temperature is nan",
    '{"prompt": "a", "stop": 5}': "stop is 5",
    '{"prompt": "a", "logit_bias": {"320": 1}}': "an id of logit_bias is 320",
    '{"prompt": "a", "logit_bias": {"x": 1}}': "'x'",
    '{"prompt": "a", "logit_bias": [1]}': "logit_bias is [1]",
    '{"prompt": "a", "logprobs": 21}': "logprobs is 21",
    '{"prompt": "\\ud800"}': r"valid Unicode, got '\ud800'",
    json.dumps({"prompt": "x" * 999}): "leaves no room",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40])
def test_a_bad_line_is_named_and_nothing_is_run(pair, capsys, write, widths, line):
    file = write("", {"prompt": "good"}, line, {"prompt": "good"})
    code = generate.main(pair.flags("--prompt-file", file, "--jsonl"))
    told = error_of(code, capsys)
    assert f"{file}, line 3: " in told
    assert len(told) < 300 + len(file)
    assert BAD[line] in told
    assert widths == []


@pytest.mark.parametrize("more", ["--json", "--compare", "--chat", "hi"])
def test_jsonl_goes_with_none_of_these(pair, capsys, write, more):
    flags = [more, "--jsonl"] + (["--prompt-file", write("{}")] if more[:2] == "--" else [])
    told = error_of(generate.main(pair.flags(*flags)), capsys)
    assert "do not go together" in told
    assert more in told or "a prompt" in told


def test_a_line_is_written_once_it_and_all_before_it_are_done(pair, capsys, write, monkeypatch):
    running, made, original = [], [], cli.Screen.write

    def remember(*args, **kwargs) -> LLM:
        made.append(LLM(*args, **kwargs))
        return made[-1]

    def note(self, told):
        running.append(len(made[0].engine.scheduler.running))
        original(self, told)

    monkeypatch.setattr(library, "LLM", remember)
    monkeypatch.setattr(cli.Screen, "write", note)
    lengths = [60, 2, 2, 240]
    file = write(*({"prompt": "hi", "max_new_tokens": n} for n in lengths))
    assert generate.main(pair.flags("--prompt-file", file, "--jsonl")) == 0
    told = lines_of(capsys.readouterr().out)
    assert [len(line["token_ids"]) for line in told] == lengths
    assert running == [1, 1, 1, 0], "the long one still runs while the first three are written"


# What runs at once


@pytest.mark.parametrize(
    ("flags", "looked", "at_once"),
    [
        ("", "", 3),
        ("--max-seqs 2", "", 2),
        ("--json", "", 3),
        ("--json", "stdout", 3),
        ("--quiet", "stdout", 3),
        ("", "stdout", 1),
        ("--compare", "", 1),
        ("--compare --json", "", 1),
    ],
)
def test_prompts_run_at_once_unless_somebody_watches_or_compares(
    pair, llm, capsys, write, widths, look, flags, looked, at_once
):
    prompts = ["hi", "hello", "there"]
    wanted = [out.text for out in llm.generate(list(map(rendered, prompts)), BASE)]
    widths.clear()
    look(looked)
    file = write(*prompts)
    assert generate.main(pair.flags("--prompt-file", file, *SHORT, *flags.split())) == 0
    assert max(widths) == at_once
    shown = capsys.readouterr()
    if "--json" in flags:
        told = json.loads(shown.out)
        assert [output["text"] for output in told["outputs"]] == wanted
        totals = told["totals"]
        assert ("seconds" in totals) == (at_once > 1)
        if at_once > 1:
            assert totals["tokens_per_second"] == totals["tokens"] / totals["seconds"]
    elif not looked:
        assert shown.out == "".join(text + "\n" for text in wanted)
    notes = [line for line in shown.err.splitlines() if line.startswith("> ")]
    silent = "--json" in flags or "--quiet" in flags
    assert notes == ([] if silent else [f"> {prompt}" for prompt in prompts])


def test_a_prompt_that_is_refused_is_named_by_its_line(pair, capsys, write, look):
    look("stdout")
    file = write("hi", "", "x" * 999)
    told = error_of(generate.main(pair.flags("--prompt-file", file)), capsys)
    assert f"{file}, line 3: the prompt has" in told


def test_logprobs_and_min_new_tokens_in_json(pair, llm, capsys):
    flags = pair.flags("hi", *SHORT, "--json", "--logprobs", "3", "--min-new-tokens", "4")
    assert generate.main(flags) == 0
    told = json.loads(capsys.readouterr().out)
    wanted = llm.generate(rendered("hi"), replace(BASE, logprobs=3, min_new_tokens=4))[0]
    output = told["outputs"][0]
    assert output["token_ids"] == wanted.token_ids
    assert output["logprobs"] == json.loads(json.dumps([asdict(x) for x in wanted.logprobs]))
    assert (told["params"]["logprobs"], told["params"]["min_new_tokens"]) == (3, 4)


def test_a_warm_up_keeps_to_its_few_tokens(pair, capsys):
    flags = pair.flags("hi", *SHORT, "--json", "--compare", "--min-new-tokens", "12")
    assert generate.main(flags) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


# Progress

LINE = r"\d/3 done, \d running, \d waiting, [\d,]+ tokens/s"


@pytest.mark.parametrize("flags", ["--jsonl", "--json", "", "--jsonl --draft none"])
def test_progress_is_rewritten_in_place_and_wiped(pair, capsys, write, look, monkeypatch, flags):
    monkeypatch.setattr(cli, "PROGRESS_EVERY", 0.0)
    look("stderr")
    file = write(*[{"prompt": "hi"}] * 3)
    flags = pair.flags("--prompt-file", file, *SHORT, "--max-seqs", "2", *flags.split())
    assert generate.main(flags) == 0
    err = capsys.readouterr().err
    pieces = re.findall(rf"\r{LINE}(, tau \d\.\d\d)? *", err)
    assert len(pieces) > 3
    assert any(pieces) == ("none" not in flags)
    assert "1 waiting" in err
    assert {len(piece) for piece in re.findall(r"\r([^\r\n>]*/3 done[^\r\n]*)", err)} == {78}
    rest = re.sub(r"\r *\r", "", re.sub(rf"\r{LINE}[^\r]*(?=\r)", "", err))
    assert re.fullmatch(r"(> [^\n]*\n)*(\d+ tokens, tau .*\n)?", rest), "it is wiped"


@pytest.mark.parametrize(("flags", "looked"), [("--quiet", "stderr"), ("", "stdout")])
def test_no_progress_where_nobody_looks_or_wants_it(
    pair, capsys, write, look, monkeypatch, flags, looked
):
    monkeypatch.setattr(cli, "PROGRESS_EVERY", 0.0)
    look(looked)
    file = write(*[{"prompt": "hi"}] * 3)
    assert generate.main(pair.flags("--prompt-file", file, "--jsonl", *flags.split(), *SHORT)) == 0
    assert "\r" not in capsys.readouterr().err


def test_no_progress_on_a_closed_stderr(pair, llm, capsys, write, look, monkeypatch):
    monkeypatch.setattr(cli, "PROGRESS_EVERY", 0.0)
    look("stderr")
    monkeypatch.setattr(sys, "stderr", None)
    file = write(*[{"prompt": "hi"}] * 3)
    assert generate.main(pair.flags("--prompt-file", file, "--jsonl", *SHORT)) == 0
    assert len(lines_of(capsys.readouterr().out)) == 3
    llm.generate([[1], [2]], BASE, progress=True)
    assert capsys.readouterr().out == ""


# Ctrl-C


def test_interrupted_json_lines_tell_what_is_there(pair, llm, capsys, write, interrupt):
    wanted = llm.generate(rendered("hi"), SamplingParams(max_new_tokens=400))[0]
    interrupt(8)
    lengths = [2, 400, 400, 400]
    file = write(*({"prompt": "hi", "max_new_tokens": n, "logprobs": 0} for n in lengths))
    flags = pair.flags("--prompt-file", file, "--jsonl", "--max-seqs", "2")
    assert generate.main(flags) == 130
    shown = capsys.readouterr()
    assert re.fullmatch(r"\d+ tokens, tau \d\.\d\d, [\d.]+ tokens/s\n", shown.err)
    told = lines_of(shown.out)
    assert [line["finish_reason"] for line in told] == ["length", "abort", "abort", "abort"]
    counts = [len(line["token_ids"]) for line in told]
    assert counts[0] == 2
    assert 0 < counts[1] < 400
    assert counts[3] == 0, "it waited for a slot"
    for line, count in zip(told, counts, strict=True):
        assert line["token_ids"] == wanted.token_ids[:count]
        assert len(line["logprobs"]) == count
    assert told[1]["text"] == llm.tokenizer.decode(told[1]["token_ids"])


@pytest.mark.parametrize(("flags", "looked"), [("", ""), ("--quiet", ""), ("--no-color", "stdout")])
def test_interrupted_texts_end_where_they_are(
    pair, llm, capsys, write, look, interrupt, flags, looked
):
    interrupt(30)
    look(looked)
    file = write("hi", "hello", "there", "never")
    flags = [*flags.split(), "--max-new-tokens", "400", "--max-seqs", "1"]
    assert generate.main(pair.flags("--prompt-file", file, *flags)) == 130
    shown = capsys.readouterr()
    full = llm.generate(rendered("hi"), SamplingParams(max_new_tokens=400))[0].text
    if not looked:
        assert shown.out.endswith("\n")
        assert full.startswith(shown.out[:-1].rstrip("\ufffd"))
    assert 0 < len(shown.out) < len(full)
    assert ("never" in shown.err, "> hi" in shown.err) == (False, "--quiet" not in flags)


@pytest.mark.parametrize("file", [True, False], ids=["at once", "one by one"])
def test_interrupted_json_is_whole(pair, capsys, write, interrupt, file):
    interrupt(8)
    flags = ["--max-new-tokens", "200", "--max-seqs", "1", "--json"]
    flags += ["--prompt-file", write("hi", "hello", "there")] if file else []
    assert generate.main(pair.flags(*flags)) == 130
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [output["finish_reason"] for output in outputs] == ["abort"]
    assert 0 < len(outputs[0]["token_ids"]) < 200


@pytest.mark.parametrize(("chunks", "pairs"), [(3, 0), (100, 1), (999, 2)])
def test_interrupted_comparison_leaves_half_a_pair_out(
    pair, capsys, write, interrupt, chunks, pairs
):
    interrupt(chunks)  # in the warm-up; in the second pair, since a pair has about 80; never
    flags = ["--compare", "--json", "--prompt-file", write("hi", "hello")]
    assert generate.main(pair.flags(*flags, "--max-new-tokens", "40")) == (pairs < 2) * 130
    told = json.loads(capsys.readouterr().out)
    assert [len(output["token_ids"]) for output in told["outputs"]] == [40] * pairs
    assert told.get("identical") == (True if pairs else None)


def test_a_second_interrupt_does_not_wait(pair, capsys, write, interrupt):
    interrupt(4, 4)
    file = write(*[{"prompt": "hi", "max_new_tokens": 400}] * 2)
    assert generate.main(pair.flags("--prompt-file", file, "--jsonl")) == 130
    assert capsys.readouterr() == ("", "")


def test_who_ignores_interrupts_is_not_interrupted(pair, capsys, write, interrupt):
    interrupt(2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = write(*[{"prompt": "hi"}] * 2)
    assert generate.main(pair.flags("--prompt-file", file, "--jsonl", *SHORT)) == 0
    assert {line["finish_reason"] for line in lines_of(capsys.readouterr().out)} == {"length"}


def test_interrupted_answer_ends_the_conversation(pair, capsys, monkeypatch, interrupt):
    interrupt(5)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nmore\n"))
    assert generate.main(pair.flags("--chat", "--quiet", "--max-new-tokens", "200")) == 130
    shown = capsys.readouterr()
    assert shown.out.endswith("\n")
    assert shown.err == ""


def test_a_failure_ends_all_in_one_line(pair, capsys, write, look, monkeypatch):
    original = ModelSteps.run

    def run(self, plan, *others):
        if plan.number > 5:
            raise RuntimeError("out of memory")
        return original(self, plan, *others)

    monkeypatch.setattr(ModelSteps, "run", run)
    monkeypatch.setattr(cli, "PROGRESS_EVERY", 0.0)
    look("stderr")
    file = write(*({"prompt": "hi", "max_new_tokens": n} for n in (1, 200)))
    assert generate.main(pair.flags("--prompt-file", file, "--jsonl")) == 1
    shown = capsys.readouterr()
    assert [line["index"] for line in lines_of(shown.out)] == [0]
    assert re.search(r"\r *\rerror: out of memory\n$", shown.err)
