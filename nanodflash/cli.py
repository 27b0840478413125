"""What `generate.py` does once its flags are read: texts as they come, conversations, figures.

Texts go to stdout, everything beside them to stderr. No torch before a model is there.
"""

import secrets
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from nanodflash.config import SamplingParams
from nanodflash.engine.metrics import Metrics

if TYPE_CHECKING:
    from nanodflash.engine.sequence import Chunk
    from nanodflash.llm import LLM, GenerationOutput
    from nanodflash.tokenizer import Tokenizer

WARM_UP_TOKENS = 8
ACCEPTED, OWN, RESET = "\x1b[32m", "\x1b[33m", "\x1b[0m"
LEGEND = f"{ACCEPTED}proposed by the drafter{RESET}, {OWN}the target's own{RESET}"
# A text must not drive the terminal: control characters but \t and \n become pictures.
VISIBLE = {c: 0x2400 + c for c in range(0x20) if chr(c) not in "\t\n"}
VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Screen:
    """Where texts and notes go.

    Args:
        tokenizer: the model's.
        colour:    tell accepted tokens from the target's own, on a terminal.
        muted:     show no texts.
        quiet:     show no notes.
    """

    def __init__(self, tokenizer: "Tokenizer", colour: bool, muted: bool, quiet: bool) -> None:
        self.tokenizer, self.muted, self.quiet = tokenizer, muted, quiet
        self.terminal = is_terminal(sys.stdout)
        self.colour = colour and self.terminal and not muted
        if self.colour and is_terminal(sys.stderr):
            self.note(LEGEND)

    def note(self, line: str) -> None:
        """Show a line beside the texts."""
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def show(self, stream: "Iterator[Chunk]") -> "GenerationOutput":
        """Run a request and show its text as it comes."""
        return drain(stream if self.muted else self._shown(stream))

    def _shown(self, stream: "Iterator[Chunk]") -> "Iterator[Chunk]":
        from nanodflash.tokenizer import StreamDecoder

        # The text is the library's: this decoder only tells which token a character is from.
        decoder = StreamDecoder(self.tokenizer)
        flags: deque[bool] = deque()
        begun = False
        try:
            for chunk in stream:
                text = chunk.text.translate(VISIBLE) if self.terminal else chunk.text
                if self.colour:
                    for token, accepted in zip(chunk.token_ids, chunk.accepted, strict=True):
                        flags.extend([accepted] * len(decoder.push([token])))
                    text = _paint(text, flags, chunk.accepted[-1])
                begun = True
                print(text, end="", flush=True)
                yield chunk
        finally:
            if begun:  # whatever ended it
                print(flush=True)


def _paint(text: str, flags: deque[bool], last: bool) -> str:
    """Colour a text by the next flags, one a character; `last` is for what the end settles."""
    marked = [(flags.popleft() if flags else last, char) for char in text]
    return "".join(
        (ACCEPTED if accepted else OWN) + "".join(char for _, char in run) + RESET
        for accepted, run in groupby(marked, key=lambda pair: pair[0])
    )


def drain(stream: "Iterator[Chunk]") -> "GenerationOutput":
    """Run a request to its end."""
    from nanodflash.llm import GenerationOutput

    chunks = list(stream)
    reason, metrics = chunks[-1].finish_reason, chunks[-1].metrics
    assert reason is not None, "the last chunk brings no reason"
    assert metrics is not None, "the last chunk brings no metrics"
    ids = [token for chunk in chunks for token in chunk.token_ids]
    return GenerationOutput("".join(chunk.text for chunk in chunks), ids, reason, metrics)


class Request(NamedTuple):
    """A prompt as the user wrote it, as the model reads it, and its parameters."""

    prompt: str
    text: str
    params: SamplingParams


def make_requests(
    llm: "LLM",
    screen: Screen,
    prompts: list[str],
    params: SamplingParams,
    *,
    raw: bool,
    system: str | None,
    thinking: bool,
) -> list[Request]:
    """Lay the prompts out. One that is sampled gets a seed, so that it can be decoded again."""
    if screen.tokenizer.chat_template is None and not (raw or system is not None or thinking):
        screen.note("this model has no chat template: prompts are decoded raw")
        raw = True
    requests = []
    for prompt in prompts:
        messages = [*_opening(system), {"role": "user", "content": prompt}]
        text = prompt if raw else llm.render(messages, thinking)
        fresh = params.seed is None and params.temperature > 0
        seeded = replace(params, seed=secrets.randbits(32)) if fresh else params
        requests.append(Request(prompt, text, seeded))
    return requests


@dataclass
class Outcome:
    """What came of requests: their outputs, with --compare also those without the drafter."""

    requests: list[Request]
    speculated: bool
    outputs: "list[GenerationOutput]" = field(default_factory=list)
    plain: "list[GenerationOutput]" = field(default_factory=list)

    @property
    def tau(self) -> float | None:
        """Of the speculative runs; None if there was no cycle of that kind."""
        metrics = _total(self.outputs)
        return metrics.tau if self.speculated and metrics.cycles else None

    @property
    def speed_up(self) -> float | None:
        """Ratio of the decoding speeds, None where one was not measured."""
        fast, slow = (_total(runs).tokens_per_second for runs in (self.outputs, self.plain))
        return fast / slow if fast and slow else None

    @property
    def num_different(self) -> int:
        """Prompts whose ids depend on the drafter."""
        pairs = zip(self.outputs, self.plain, strict=True)
        return sum(output.token_ids != plain.token_ids for output, plain in pairs)

    def lines(self) -> Iterator[str]:
        """The closing lines."""
        tau = "-" if self.tau is None else f"{self.tau:.2f}"
        yield f"{_count(self.outputs)} tokens, tau {tau}, {_speed(self.outputs)} tokens/s"
        if self.plain:
            ratio = "-" if self.speed_up is None else f"{self.speed_up:.1f}x"
            different = f"differ in {self.num_different} of {len(self.plain)} prompts"
            same = different if self.num_different else "identical"
            yield f"plain {_speed(self.plain)} tokens/s, speed-up {ratio}, tokens {same}"

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        told: dict[str, Any] = {"tau": self.tau}
        if self.plain:
            told["speedup"], told["identical"] = self.speed_up, not self.num_different
            told["baseline"] = _totals(self.plain)
        told["totals"] = _totals(self.outputs)
        told["outputs"] = [
            {
                "prompt": request.prompt,
                "seed": request.params.seed,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "metrics": output.metrics.as_dict(),
            }
            for request, output in zip(self.requests, self.outputs, strict=True)
        ]
        return told


def decode(llm: "LLM", screen: Screen, requests: list[Request], compare: bool = False) -> Outcome:
    """Run the requests, each again without the drafter to compare."""
    streams = [llm.stream(r.text, r.params) for r in requests]  # refused before any is run
    if compare:  # what only a first run costs is to fall on neither
        text, params = requests[0].text, requests[0].params
        short = replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
        for speculate in (True, False):
            drain(llm.stream(text, short, speculate))
    outcome = Outcome(requests, speculated=_speculates(llm))
    for request, stream in zip(requests, streams, strict=True):
        if len(requests) > 1 and not screen.muted:
            screen.note(f"> {request.prompt.translate(VISIBLE)}")
        outcome.outputs.append(screen.show(stream))
        if compare:
            outcome.plain.append(drain(llm.stream(request.text, request.params, False)))
    return outcome


def converse(
    llm: "LLM", screen: Screen, params: SamplingParams, *, system: str | None, thinking: bool
) -> None:
    """Answer line by line until the input ends; a turn that fails leaves no trace."""
    if screen.tokenizer.chat_template is None:
        raise ValueError("this model has no chat template, and --chat needs one")
    screen.note("/reset forgets the conversation, /exit or Ctrl-D ends it")
    if is_terminal(sys.stdin):
        try:
            import readline  # noqa: F401 (`input` then edits lines and remembers them)
        except ImportError:  # Windows has none
            pass
    history = start = _opening(system)
    while (line := _read_line(screen)) not in (None, "/exit"):
        if line == "/reset":
            history = start
        elif line:
            asked = [*history, {"role": "user", "content": line}]
            try:
                request = Request(line, llm.render(asked, thinking), params)
                outcome = decode(llm, screen, [request])
            except (ValueError, RuntimeError, MemoryError) as error:
                complain(error)
                continue
            history = [*asked, {"role": "assistant", "content": outcome.outputs[0].text}]
            for note in outcome.lines():
                screen.note(note)


def _opening(system: str | None) -> list[dict[str, Any]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _read_line(screen: Screen) -> str | None:
    """The user's next line, None at the end of the input."""
    typed = is_terminal(sys.stdin)
    if typed and not screen.terminal:  # stdout is for texts alone
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input("> " if typed and screen.terminal else "").strip()
    except (EOFError, KeyboardInterrupt) as end:
        if typed:
            print(file=sys.stderr)
        if isinstance(end, EOFError):
            return None
        raise


def complain(error: Exception) -> None:
    """Report an error in one line."""
    told = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {told.translate(VISIBLE)}", file=sys.stderr, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody looks at or types into a stream; a closed one is None."""
    return stream is not None and stream.isatty()


def _speculates(llm: "LLM") -> bool:
    return llm.config.block_size > 1


def _total(outputs: "list[GenerationOutput]") -> Metrics:
    return sum((output.metrics for output in outputs), Metrics())


def _count(outputs: "list[GenerationOutput]") -> int:
    return sum(len(output.token_ids) for output in outputs)


def _totals(outputs: "list[GenerationOutput]") -> dict[str, Any]:
    return {"tokens": _count(outputs)} | _total(outputs).as_dict()


def _speed(outputs: "list[GenerationOutput]") -> str:
    speed = _total(outputs).tokens_per_second
    return f"{speed:.1f}" if 0 < speed < 10 else f"{speed:.0f}"
