"""The command line: what it shows, where, and what becomes of every kind of bad input."""

import functools
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import tty
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import generate
import kit
from nanodflash import llm as library
from nanodflash.cli import ACCEPTED, OWN, RESET, Screen
from nanodflash.config import SamplingParams
from nanodflash.engine.metrics import Metrics
from nanodflash.engine.sequence import Chunk, GenerationOutput
from nanodflash.llm import LLM
from nanodflash.requests import Outcome

ROOT = Path(generate.__file__).parent
SHORT = ("--max-new-tokens", "24")
COLOUR = re.compile(r"\x1b\[\d+m")
# In the background of a script SIGINT is ignored, and so it is by the children.
INTERRUPTIBLE = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "sys.argv[0] = 'generate.py'; runpy.run_path('generate.py', run_name='__main__')"
)


def rendered(prompt: str) -> str:
    return f"[user]{prompt}\n[assistant]"


def text_of(llm: LLM, prompt: str, **changes) -> str:
    return llm.generate(prompt, SamplingParams(max_new_tokens=24, **changes))[0].text


@contextmanager
def terminal(monkeypatch):
    """A terminal as stdout; what it was sent is in `.text` afterwards."""
    leader, follower = pty.openpty()
    tty.setraw(follower)  # or it would turn \n into \r\n
    seen = SimpleNamespace(data=b"", text="")

    def read() -> None:
        while True:
            try:
                data = os.read(leader, 4096)
            except OSError:  # nobody holds the other end any more
                return
            if not data:
                return
            seen.data += data

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patch:
        with open(follower, "w", encoding="utf-8") as out:
            patch.setattr(sys, "stdout", out)
            yield seen
        reader.join(timeout=20)
    os.close(leader)
    seen.text = seen.data.decode()


def start(pair, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-c", INTERRUPTIBLE, *pair.flags(*flags)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe)


# What is shown


def test_text_on_stdout_is_the_librarys_and_figures_are_beside_it(pair, llm, capsys):
    assert generate.main(pair.flags("hi", *SHORT)) == 0
    shown = capsys.readouterr()
    assert shown.out == text_of(llm, rendered("hi")) + "\n"
    assert re.fullmatch(r"24 tokens, tau \d+\.\d\d, [\d.]+ tokens/s\n", shown.err)


def test_without_a_drafter_there_is_no_tau(pair, llm, capsys):
    flags = ["--model", str(pair.target), "--dtype", "fp64", "hi", *SHORT]
    for more in ([], ["--draft", "none"]):
        assert generate.main(flags + more) == 0
        shown = capsys.readouterr()
        assert shown.out == text_of(llm, rendered("hi")) + "\n"
        assert shown.err.startswith("24 tokens, tau -, ")
    assert generate.main([*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["draft"], told["tau"], told["block_size"]) == (None, None, 1)


def test_quiet_leaves_the_text_alone(pair, llm, capsys):
    assert generate.main(pair.flags("hi", *SHORT, "--quiet", "--thinking")) == 0
    shown = capsys.readouterr()
    assert shown.out == text_of(llm, "[user]hi\n[think][assistant]") + "\n"
    assert shown.err == ""


def test_default_prompts_are_streamed_one_after_the_other(pair, capsys):
    assert generate.main(pair.flags("--max-new-tokens", "4")) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[:-1] == [f"> {prompt}" for prompt in generate.PROMPTS]
    assert told[-1].startswith("16 tokens, ")


def test_layouts_of_the_prompt(pair, llm, capsys):
    for flags, wanted in (
        (["--raw"], "hi"),
        (["--system", "be"], "[system]be\n[user]hi\n[assistant]"),
        (["--thinking"], "[user]hi\n[think][assistant]"),
        (["--no-thinking"], "[user]hi\n[assistant]"),
    ):
        assert generate.main(pair.flags("hi", *SHORT, *flags)) == 0
        shown = capsys.readouterr()
        assert shown.out == text_of(llm, wanted) + "\n"
        assert ("trained without thinking" in shown.err) == ("--thinking" in flags)


def test_model_without_template_is_prompted_raw_with_a_hint(pair, llm, capsys):
    flags = ["--model", str(pair.untemplated), "--dtype", "fp64", *SHORT]
    assert generate.main([*flags, "hi"]) == 0
    shown = capsys.readouterr()
    assert shown.out == text_of(llm, "hi") + "\n"
    assert shown.err.splitlines()[0].startswith("this model has no chat template")
    assert generate.main([*flags, "hi", "--raw"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    for wrong in (["hi", "--system", "be"], ["hi", "--thinking"], ["--chat"]):
        assert generate.main([*flags, *wrong]) == 2
        assert "no chat template" in capsys.readouterr().err


def test_sampling_flags_reach_the_library(pair, llm, capsys):
    text = text_of(llm, "hi")
    wanted = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "seed": 2**64 - 1}
    wanted |= {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    flags = [x for k, v in wanted.items() for x in ("--" + k.replace("_", "-"), str(v))]
    assert generate.main(pair.flags("hi", "--raw", *SHORT, *flags)) == 0
    assert capsys.readouterr().out == text_of(llm, "hi", **wanted) + "\n" != text + "\n"
    stop = text[4:6]
    assert generate.main(pair.flags("hi", "--raw", *SHORT, "--stop", "never", "--stop", stop)) == 0
    assert capsys.readouterr().out == text[: text.index(stop)] + "\n"
    assert generate.main(pair.flags("hi", "--raw", *SHORT, "--block-size", "4", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["block_size"] == 4


def test_prompt_file(pair, llm, capsys, monkeypatch, tmp_path):
    data = "\ufeffhi\r\n\n  \n\u2028two\x0b\n".encode()
    prompts = ["hi", "\u2028two\x0b"]
    (tmp_path / "prompts.txt").write_bytes(data)
    for name in (str(tmp_path / "prompts.txt"), "-"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))
        assert generate.main(pair.flags("--prompt-file", name, *SHORT, "--json")) == 0
        told = json.loads(capsys.readouterr().out)
        assert [output["prompt"] for output in told["outputs"]] == prompts
        assert [o["text"] for o in told["outputs"]] == [text_of(llm, rendered(p)) for p in prompts]


def test_ignore_eos_and_the_end_that_is_not_shown(pair, llm, capsys, tmp_path):
    ids = llm.generate(rendered("hi"), SamplingParams(max_new_tokens=24))[0].token_ids
    end = next(i for i in range(5, 24) if ids[i] not in ids[:i])
    for file in pair.target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[end]}))
    flags = ["--model", str(tmp_path), "--dtype", "fp64", "--json", "hi", *SHORT]
    assert generate.main(flags) == 0
    output = json.loads(capsys.readouterr().out)["outputs"][0]
    assert output["token_ids"] == ids[: end + 1]
    assert output["text"] == llm.tokenizer.decode(ids[:end])
    assert generate.main([*flags, "--ignore-eos"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"] == ids


# --json, --compare


def test_json_is_one_line_that_says_what_the_library_says(pair, llm, capsys):
    assert generate.main(pair.flags("hi", *SHORT, "--json", "--stop", "\u2028")) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.endswith("}\n")
    assert len(shown.out.splitlines()) == 1
    told = json.loads(shown.out)
    wanted = llm.generate(rendered("hi"), SamplingParams(max_new_tokens=24))[0]
    output, metrics = told["outputs"][0], wanted.metrics.as_dict()
    assert (output["prompt"], output["text"]) == ("hi", wanted.text)
    assert output["token_ids"] == wanted.token_ids
    assert output["finish_reason"] == wanted.finish_reason == "length"
    timed = {"prefill_seconds", "decode_seconds", "tokens_per_second"}
    for got in (output["metrics"], told["totals"]):
        assert {k: got[k] for k in metrics.keys() - timed} == {
            k: v for k, v in metrics.items() if k not in timed
        }
        assert all(got[k] > 0 for k in timed)
    assert told["totals"]["tokens"] == 24
    assert told["tau"] == wanted.metrics.tau
    assert (told["model"], told["draft"]) == (str(pair.target), str(pair.draft))
    assert (told["device"], told["dtype"], told["block_size"]) == (str(llm.device), "fp64", 8)
    assert told["params"]["max_new_tokens"] == 24
    assert told["params"]["stop"] == ["\u2028"]
    assert not {"speedup", "identical", "baseline"} & told.keys()


@pytest.mark.parametrize("more", [[], ["--temperature", "1"]])
def test_compare_finds_the_same_tokens(pair, capsys, tmp_path, more):
    (tmp_path / "prompts").write_text("hi\nhello there\n")
    flags = pair.flags("--prompt-file", str(tmp_path / "prompts"), *SHORT, "--compare", *more)
    assert generate.main([*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"] is True
    baseline, totals = told["baseline"], told["totals"]
    assert told["speedup"] == totals["tokens_per_second"] / baseline["tokens_per_second"]
    assert (baseline["tokens"], baseline["cycles"], baseline["proposed"]) == (48, 46, 0)
    assert told["tau"] == totals["tau"] == 46 / totals["cycles"]
    seeds = [output["seed"] for output in told["outputs"]]
    assert (None not in seeds and seeds[0] != seeds[1]) if more else seeds == [None, None]
    assert generate.main(flags) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"plain \d+ tokens/s, speed-up \d+\.\dx, tokens identical", last)


def test_sampled_prompts_can_be_repeated_by_their_seeds(pair, capsys):
    flags = pair.flags("hi", *SHORT, "--temperature", "1", "--json")
    assert generate.main(flags) == 0
    first = json.loads(capsys.readouterr().out)["outputs"][0]
    assert generate.main([*flags, "--seed", str(first["seed"])]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"] == first["token_ids"]


def test_one_token_gives_no_speeds(pair, capsys):
    flags = pair.flags("hi", "--max-new-tokens", "1", "--compare")
    assert generate.main([*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tau"], told["speedup"], told["identical"]) == (None, None, True)
    assert generate.main(flags) == 0
    assert capsys.readouterr().err.splitlines() == [
        "1 tokens, tau -, 0 tokens/s",
        "plain 0 tokens/s, speed-up -, tokens identical",
    ]


def test_closing_lines_add_up_all_prompts():
    def output(ids, emitted, seconds):
        metrics = Metrics(prompt_tokens=3, emitted=Counter(emitted), decode_seconds=seconds)
        return GenerationOutput("", ids, "length", metrics)

    runs = [output([1] * 11, {5: 2}, 0.1), output([2] * 21, {10: 2}, 0.1)]
    plain = [output([1] * 11, {1: 10}, 0.5), output([3] * 21, {1: 20}, 3.5)]
    assert list(Outcome([], True, runs, plain).lines()) == [
        "32 tokens, tau 7.50, 150 tokens/s",
        "plain 7.5 tokens/s, speed-up 20.0x, tokens differ in 1 of 2 prompts",
    ]
    assert list(Outcome([], False, runs).lines()) == ["32 tokens, tau -, 150 tokens/s"]
    at_once = Outcome([], True, runs, seconds=0.1)
    assert list(at_once.lines()) == ["32 tokens, tau 7.50, 320 tokens/s"]


@pytest.mark.parametrize(("seconds", "speed"), [(None, 10.0), (0.5, 320.0), (32.0, 5.0)])
def test_totals_of_prompts_that_ran_at_once_go_by_the_wall_clock(seconds, speed):
    """16 at once decode for 0.9 s each: to add these up would tell a 16th of the speed."""
    metrics = Metrics(emitted=Counter({9: 1}), decode_seconds=0.9)
    runs = [GenerationOutput("", [1] * 10, "length", metrics) for _ in range(16)]
    requests = [generate.Request({"prompt": "hi"}, SamplingParams())] * 16
    told = Outcome(requests, True, runs, seconds=seconds).as_dict()
    assert told["totals"]["tokens_per_second"] == pytest.approx(speed)
    assert told["outputs"][0]["metrics"]["tokens_per_second"] == pytest.approx(10.0)


# The drafter's reach


@pytest.fixture(scope="module")
def short(pair, tmp_path_factory):
    """The pair with a drafter of 40 positions."""
    folder = tmp_path_factory.mktemp("short")
    for file in pair.draft.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    return pair._replace(draft=folder)


PAST = "past position 40 the drafter was not trained: no proposals are counted there"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--max-new-tokens {}", 0),
        ("--max-new-tokens {more}", 1),
        ("--max-new-tokens {more} --json", 1),
        ("--max-new-tokens {more} --compare", 1),
        ("--max-new-tokens {more} --quiet", 0),
        ("--max-new-tokens {more} --draft none", 0),
        ("--max-new-tokens {more} --max-model-len 40", 0),
        ("--max-new-tokens {more} --prompt-file", 1),
        ("--max-new-tokens {more} --prompt-file --jsonl", 1),
        ("--max-new-tokens {more} --chat", 1),
    ],
)
def test_an_answer_past_the_drafters_reach_is_told_once(
    short, llm, capsys, monkeypatch, tmp_path, flags, told
):
    room = 40 - len(llm.tokenizer.encode(rendered("hi")))
    flags = flags.format(room, more=room + 1).split()
    if "--prompt-file" in flags:
        line = '{"prompt": "hi"}\n' if "--jsonl" in flags else "hi\n"
        (tmp_path / "prompts").write_text(line * 3)
        flags.insert(flags.index("--prompt-file") + 1, str(tmp_path / "prompts"))
    elif "--chat" in flags:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nhi\n"))
    else:
        flags.append("hi")
    assert generate.main(short.flags(*flags)) == 0
    assert capsys.readouterr().err.splitlines().count(PAST) == told


# On a terminal


def proposing(monkeypatch, llm: LLM, prompt: str) -> None:
    """Let the command line's model be drafted for by a script that is right but at one place."""
    ids = llm.tokenizer.encode(prompt)
    ids += llm.generate(ids, SamplingParams(max_new_tokens=40), speculate=False)[0].token_ids
    script = kit.Script(ids, 8, "third wrong")
    monkeypatch.setattr(library, "LLM", functools.partial(LLM, proposer=script))


def test_colours_tell_accepted_tokens_apart(pair, llm, monkeypatch, capsys):
    text = text_of(llm, "hi")
    proposing(monkeypatch, llm, "hi")
    flags = pair.flags("hi", "--raw", *SHORT)
    for more, kept in ((), text), (("--stop", text[9:12]), text[: text.index(text[9:12])]):
        with terminal(monkeypatch) as seen:
            assert generate.main([*flags, *more]) == 0
        assert ACCEPTED in seen.text
        assert OWN in seen.text
        assert seen.text.endswith(RESET + "\n")
        assert COLOUR.sub("", seen.text) == visible(kept) + "\n"
    assert "\x1b" not in capsys.readouterr().err, "a legend is for terminals"


def visible(text: str) -> str:
    shown = "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else c for c in text)
    return shown.replace("\x7f", "\u2421")


def test_colours_follow_the_tokens(llm, monkeypatch):
    """Also where text is held back for a stop string, or a character takes many tokens."""
    tokens = [llm.tokenizer.encode(char) for char in "ab\u20acc"]
    assert [len(ids) for ids in tokens] == [1, 1, 3, 1]
    a, b, euro, c = tokens
    chunks = [
        Chunk("", a, [False]),
        Chunk("a", b + euro[:2], [True, True, True]),
        Chunk("b\u20ac", euro[2:], [False]),
        Chunk("c", c, [True]),
        Chunk("", [], [], "abort", Metrics()),
    ]
    with terminal(monkeypatch) as seen:
        Screen(llm.tokenizer, colour=True, muted=False, quiet=True).show(iter(chunks))
    pieces = [(OWN, "a"), (ACCEPTED, "b"), (OWN, "\u20ac"), (ACCEPTED, "c")]
    assert seen.text == "".join(colour + text + RESET for colour, text in pieces) + "\n"


@pytest.mark.parametrize("how", ["--no-color", "NO_COLOR", "TERM", "--draft"])
def test_no_colours(pair, llm, monkeypatch, how):
    if how.isupper():
        monkeypatch.setenv(how, {"NO_COLOR": "1", "TERM": "dumb"}[how])
    more = {"--no-color": ["--no-color"], "--draft": ["--draft", "none"]}.get(how, [])
    with terminal(monkeypatch) as seen:
        assert generate.main(pair.flags("hi", *SHORT, *more)) == 0
    assert seen.text == visible(text_of(llm, rendered("hi"))) + "\n"


def test_a_text_cannot_drive_the_terminal_but_is_verbatim_in_a_pipe(llm, monkeypatch, capsys):
    text = "\x1b[2J\x1b]0;mine\x07 \x9b31m \r\x08\x7f\ttab\nline"
    chunk = Chunk(text, [1], [True], "stop", Metrics())
    for colour in (True, False):
        with terminal(monkeypatch) as seen:
            Screen(llm.tokenizer, colour, muted=False, quiet=True).show(iter([chunk]))
        shown = COLOUR.sub("", seen.text)
        assert shown == "␛[2J␛]0;mine␇ \ufffd31m ␍␈␡\ttab\nline\n"
    Screen(llm.tokenizer, colour=True, muted=False, quiet=True).show(iter([chunk]))
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("flags", ["", "--thinking", "--json", "--compare"])
def test_a_closed_stderr_leaves_stdout_to_the_texts(pair, llm, monkeypatch, capsys, flags):
    """Then `sys.stderr` is None, which `print` takes for stdout."""
    monkeypatch.setattr(sys, "stderr", None)
    assert generate.main(pair.flags("hi", *SHORT, *flags.split())) == 0
    shown = capsys.readouterr().out
    if flags == "--json":
        assert json.loads(shown)["outputs"]
    else:
        wanted = rendered("hi").replace("[ass", "[think][ass") if flags == "--thinking" else None
        assert shown == text_of(llm, wanted or rendered("hi")) + "\n"


@pytest.mark.parametrize("typed", [True, False])
def test_a_closed_stderr_takes_no_complaint(pair, monkeypatch, capsys, typed):
    monkeypatch.setattr(sys, "stderr", None)
    assert generate.main(["--no-such-flag"]) == 2
    assert generate.main(pair.flags("hi", "--max-model-len", "1")) == 2
    stdin = io.StringIO("x" * 999 + "\n")
    stdin.isatty = lambda: typed  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr("builtins.input", lambda _: stdin.readline() or exec("raise EOFError"))
    assert generate.main(pair.flags("--chat", *SHORT)) == 0
    assert capsys.readouterr().out == ""


def test_stderr_closed_by_the_shell(pair):
    code = "import generate, sys; sys.exit(generate.main(sys.argv[1:]))"
    for flags, wanted in ((["hi", *SHORT, "--max-model-len", "1"], 2), (["--no-such-flag"], 2)):
        command = [sys.executable, "-c", code, *pair.flags(*flags)]
        shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
        done = subprocess.run(shell, cwd=ROOT, stdout=subprocess.PIPE)
        assert (done.returncode, done.stdout) == (wanted, b"")


def test_stdout_that_cannot_show_every_character(pair, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert generate.main(pair.flags("hi", *SHORT, "--quiet")) == 0
    assert b"\\ufffd" in written.getvalue()


# --chat


def chat(pair, monkeypatch, typed: str, *flags: str) -> list[list[tuple[str, str]]]:
    """Type lines; returns the conversations that were rendered."""
    asked, original = [], LLM.render

    def render(self, messages, enable_thinking=False):
        asked.append([(message["role"], message["content"]) for message in messages])
        return original(self, messages, enable_thinking)

    monkeypatch.setattr(LLM, "render", render)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert generate.main(pair.flags("--chat", *SHORT, *flags)) == 0
    return asked


def test_chat_keeps_the_history(pair, llm, monkeypatch, capsys):
    first = text_of(llm, rendered("hi"))
    second = text_of(llm, f"[user]hi\n[assistant]{first}\n[user]more\n[assistant]")
    asked = chat(pair, monkeypatch, "hi\n\n  \nmore\n/reset\nhi\n/exit\nunread\n")
    shown = capsys.readouterr()
    assert shown.out == f"{first}\n{second}\n{first}\n"
    assert [len(messages) for messages in asked] == [1, 3, 1]
    assert asked[1] == [("user", "hi"), ("assistant", first), ("user", "more")]
    assert len(re.findall(r"^24 tokens, tau ", shown.err, re.MULTILINE)) == 3


def test_chat_survives_a_turn_that_fails(pair, monkeypatch, capsys):
    asked = chat(pair, monkeypatch, "hi\n" + "x" * 999 + "\nmore", "--system", "be", "--quiet")
    shown = capsys.readouterr()
    assert len(re.findall("^error: the prompt has .*", shown.err, re.MULTILINE)) == 1
    assert shown.err.count("\n") == 1
    assert len(asked) == 3
    assert [role for role, _ in asked[2]] == ["system", "user", "assistant", "user"]
    assert asked[2][-1] == ("user", "more")


def test_chat_at_a_terminal_asks_and_ends_the_line(pair, monkeypatch, capsys):
    prompts = []

    def ask(prompt):
        prompts.append(prompt)
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with terminal(monkeypatch):
        assert generate.main(pair.flags("--chat", "--quiet")) == 0
    assert prompts == ["> "]
    assert capsys.readouterr().err == "\n"
    assert generate.main(pair.flags("--chat", "--quiet")) == 0
    shown = capsys.readouterr()
    assert (prompts, shown.out, shown.err) == (["> ", ""], "", "> \n")


# Bad input, failures, interruptions

BAD = [
    "--max-new-tokens 0",
    "--max-new-tokens x",
    "--block-size 0",
    "--block-size 1",
    "--block-size 9",
    "--max-model-len 1",
    "--max-model-len 10 --raw --system be",
    "--temperature nan",
    "--temperature inf",
    "--temperature=-1",
    "--top-p 0",
    "--top-k=-1",
    "--min-p 2",
    "--seed 99999999999999999999",
    "--repetition-penalty 0",
    "--presence-penalty nan",
    "--frequency-penalty x",
    "--min-new-tokens 257",
    "--logprobs 1",
    "--logprobs 21 --json",
    "--max-seqs 0",
    "--jsonl",
    "--stop=",
    "--stop",
    "--device tpu",
    "--dtype int8",
    "--revision main",
    "--draft-revision main",
    "--model /no/such/folder",
    "--model a/b/c",
    "--draft /no/such/folder",
    "--draft none --block-size 4",
    "--draft none --compare",
    "--chat",
    "--raw --thinking",
    "--quiet --compare",
    "--prompt-file other",
    "--no-such-flag",
    "--temp 1",
    "more words",
]


def check_refused(code: int, capsys, what: str = "") -> None:
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert what in shown.err


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line(pair, capsys, flags):
    check_refused(generate.main(pair.flags("hi", *flags.split())), capsys)


@pytest.mark.parametrize("more", ["--json", "--compare", "--raw", "--prompt-file x", "--jsonl"])
def test_chat_goes_with_nothing_else(pair, capsys, more):
    check_refused(generate.main(pair.flags("--chat", *more.split())), capsys, "--chat")


def test_bad_prompts(pair, capsys, monkeypatch, tmp_path):
    check_refused(generate.main(pair.flags("--raw", "")), capsys, "empty")
    check_refused(generate.main(pair.flags("x" * 999)), capsys, "leaves no room")
    check_refused(generate.main(pair.flags("\udcff")), capsys, r"Unicode, got '\udcff'")
    two = tmp_path / "two"
    two.write_text("hi\n" + "x" * 999)
    check_refused(generate.main(pair.flags("--prompt-file", str(two))), capsys, "leaves no room")
    check_refused(generate.main(["--prompt-file", str(tmp_path)]), capsys, "directory")
    check_refused(generate.main(["--prompt-file", str(tmp_path / "no")]), capsys, "No such file")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    check_refused(generate.main(["--prompt-file", str(tmp_path / "latin")]), capsys, "not UTF-8")
    (tmp_path / "empty").write_text("\n \n")
    check_refused(generate.main(["--prompt-file", str(tmp_path / "empty")]), capsys, "no prompt")
    monkeypatch.setattr(sys, "stdin", None)
    check_refused(generate.main(["--prompt-file", "-"]), capsys, "stdin is closed")


def test_bad_models(pair, capsys, tmp_path):
    check_refused(generate.main(["hi", "--model", str(pair.mute)]), capsys, "no tokenizer")
    flags = ["hi", "--model", str(pair.draft), "--draft", str(pair.target)]
    check_refused(generate.main(flags), capsys, "architectures")
    check_refused(generate.main(["hi", "--model", f"{tmp_path}/a\nb"]), capsys)


@pytest.mark.parametrize(
    "error", [RuntimeError("no\n room\x1b"), MemoryError(), OSError(5, "disk"), ImportError("lib")]
)
def test_failures_are_one_line(capsys, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(library, "LLM", fail)
    assert generate.main(["hi"]) == 1
    shown = capsys.readouterr()
    assert re.fullmatch(r"error: [^\x1b\n]+\n", shown.err)
    assert shown.out == ""


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("ours")

    monkeypatch.setattr(library, "LLM", fail)
    with pytest.raises(AssertionError, match="ours"):
        generate.main(["hi"])


def test_help_and_bad_flags_do_without_torch():
    code = (
        "import sys, generate\n"
        "assert generate.main(['--max-new-tokens', '0']) == 2\n"
        "try:\n    generate.main(['--help'])\n"
        "finally:\n    assert not {'torch', 'tokenizers'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--prompt-file" in done.stdout
    assert done.stderr.startswith("error: max_new_tokens")


def test_interrupted_while_it_decodes(pair):
    process = start(pair, "hi", "--max-new-tokens", "450")
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + rest).endswith(b"\n")
    assert re.fullmatch(rb"\d+ tokens, tau \d\.\d\d, [\d.]+ tokens/s\n", err)


def test_interrupted_while_it_loads(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "LLM", interrupt)
    assert generate.main(["hi", "--json"]) == 130
    assert capsys.readouterr() == ("", "")


def test_reader_who_has_had_enough(pair):
    process = start(pair, "hi", "--max-new-tokens", "450")
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert err == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk(pair, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert generate.main(pair.flags("hi", "--max-new-tokens", "4")) == 1
        generate.drop_unwritten()  # or closing it would complain, as the interpreter does at exit
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
