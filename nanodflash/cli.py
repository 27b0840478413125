"""What `generate.py` does once its flags are read: texts as they come, conversations, figures.

Texts go to stdout, everything beside them to stderr. No torch before a model is there.
"""

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, TextIO

from nanodflash.config import SamplingParams
from nanodflash.requests import Outcome, Request, conversation, tell

if TYPE_CHECKING:
    from nanodflash.engine.engine import RequestHandle
    from nanodflash.engine.sequence import Chunk, GenerationOutput, Sequence
    from nanodflash.llm import LLM
    from nanodflash.tokenizer import Tokenizer

WARM_UP_TOKENS = 8
PROGRESS_EVERY, PROGRESS_WIDTH = 0.5, 78  # seconds, columns
ACCEPTED, OWN, RESET = "\x1b[32m", "\x1b[33m", "\x1b[0m"
LEGEND = f"{ACCEPTED}proposed by the drafter{RESET}, {OWN}the target's own{RESET}"
PAST_REACH = "past position {} the drafter was not trained: no proposals are counted there"
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
        jsonl:     show a line of JSON for each output.
    """

    def __init__(
        self, tokenizer: "Tokenizer", colour: bool, muted: bool, quiet: bool, jsonl: bool = False
    ) -> None:
        self.tokenizer, self.muted, self.quiet, self.jsonl = tokenizer, muted, quiet, jsonl
        self.terminal = is_terminal(sys.stdout)
        self._drawn = 0.0  # when the progress line was; 0 while there is none
        self._noted: set[str] = set()
        self.colour = colour and self.terminal and not muted
        if self.colour and is_terminal(sys.stderr):
            self.note(LEGEND)

    def note(self, line: str) -> None:
        """Show a line beside the texts."""
        if not self.quiet:
            self._wipe()
            aside(f"{line}\n")

    def note_once(self, line: str) -> None:
        """Show a line the first time that there is reason to."""
        if line not in self._noted:
            self._noted.add(line)
            self.note(line)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *error: object) -> None:
        self._wipe()

    def progress(self, sequences: "list[Sequence]", began: float) -> None:
        """Show how far requests are, on a terminal, in a line that the next one replaces."""
        now = time.perf_counter()
        if self.quiet or not is_terminal(sys.stderr) or now < self._drawn + PROGRESS_EVERY:
            return
        self._drawn = now
        from nanodflash.engine.progress import progress_line

        line = progress_line(sequences, now - began)
        aside(f"\r{line:{PROGRESS_WIDTH}s}")

    def write(self, told: dict[str, Any]) -> None:
        """Show a line of JSON."""
        if self.terminal:
            self._wipe()
        print(json.dumps(told), flush=True)

    def _wipe(self) -> None:
        if self._drawn:
            aside(f"\r{'':{PROGRESS_WIDTH}s}\r")
            self._drawn = 0.0

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
                    text = _paint(text, flags, any(chunk.accepted[-1:]))
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
    from nanodflash.engine.sequence import GenerationOutput

    chunks = list(stream)
    reason, metrics = chunks[-1].finish_reason, chunks[-1].metrics
    assert reason is not None, "the last chunk brings no reason"
    assert metrics is not None, "the last chunk brings no metrics"
    ids = [token for chunk in chunks for token in chunk.token_ids]
    text = "".join(chunk.text for chunk in chunks)
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs or ()]
    return GenerationOutput(text, ids, reason, metrics, logprobs or None)


class Interrupt:
    """Within it, Ctrl-C ends the requests, each with what it has. A second one raises, as ever."""

    def __init__(self) -> None:
        self.came = False
        self._handles: list[RequestHandle] = []
        self._before = signal.getsignal(signal.SIGINT)
        # Who ignores it, in the background of a script, or handles it goes on to do so.
        here = current_thread() is main_thread()
        self._usable = here and self._before is signal.default_int_handler

    def watch(self, handle: "RequestHandle") -> "RequestHandle":
        """Add a request."""
        self._handles.append(handle)
        if self.came:
            handle.abort()
        return handle

    def __enter__(self) -> "Interrupt":
        if self._usable:
            signal.signal(signal.SIGINT, self._end)
        return self

    def __exit__(self, *error: object) -> None:
        if self._usable:
            signal.signal(signal.SIGINT, self._before)
        for handle in self._handles:  # whatever ended it
            handle.abort()

    def _end(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        self.came = True
        for handle in self._handles:
            handle.abort()


def decode(
    llm: "LLM",
    screen: Screen,
    requests: list[Request],
    compare: bool = False,
    together: bool = False,
) -> Outcome:
    """Run the requests, one after the other or all at once; their outputs come in order.

    Args:
        compare: run each again without the drafter, one at a time.
    """
    sequences = [_prepare(llm, request) for request in requests]  # refused before any is run
    outcome, began = Outcome(requests, speculated=_speculates(llm)), time.perf_counter()
    with Interrupt() as interrupt, screen:

        def start(sequence: "Sequence") -> "RequestHandle":
            return interrupt.watch(llm.engine.submit(sequence))

        if compare:  # what only a first run costs is to fall on neither
            params = requests[0].params
            tokens = min(WARM_UP_TOKENS, params.max_new_tokens)
            least = min(tokens, params.min_new_tokens)
            params = replace(params, max_new_tokens=tokens, min_new_tokens=least)
            for speculate in (True, False):
                drain(iter(start(_prepare(llm, requests[0]._replace(params=params), speculate))))
        handles: Iterator[RequestHandle] = map(start, sequences)
        if together:
            handles = iter(list(handles))
        for request, sequence in zip(requests, sequences, strict=True):
            if interrupt.came and not (sequence.token_ids or screen.jsonl):
                break  # nor has any after it begun
            handle = next(handles)
            if len(requests) > 1 and not screen.muted:
                screen.note(f"> {request.asked['prompt'].translate(VISIBLE)}")
            stream = _watched(screen, handle, sequences, began) if together else iter(handle)
            output = screen.show(stream)
            if compare:
                plain = drain(iter(start(_prepare(llm, request, speculate=False))))
                if interrupt.came:
                    break  # half a pair compares nothing
                outcome.plain.append(plain)
            outcome.outputs.append(output)
            if screen.jsonl:
                screen.write({"index": len(outcome.outputs) - 1} | tell(request, output))
    outcome.seconds = time.perf_counter() - began if together else None
    outcome.interrupted = interrupt.came
    limit = llm.draft_limit  # below max_model_len only where a drafter has fewer positions
    if limit < min(llm.config.max_model_len, outcome.reach):
        screen.note_once(PAST_REACH.format(limit))
    return outcome


def _prepare(llm: "LLM", request: Request, speculate: bool = True) -> "Sequence":
    """Check a request; nothing is run for it yet."""
    try:
        return llm.prepare(request.text, request.params, speculate)
    except ValueError as error:
        raise ValueError(f"{request.where}{error}") from error


def _watched(
    screen: Screen, handle: "RequestHandle", sequences: "list[Sequence]", began: float
) -> "Iterator[Chunk]":
    """The chunks of a request; the first in line has one a step, so they beat the time."""
    for chunk in handle:
        screen.progress(sequences, began)
        yield chunk


def converse(
    llm: "LLM", screen: Screen, params: SamplingParams, *, system: str | None, thinking: bool
) -> None:
    """Answer line by line until the input ends; a turn that fails leaves no trace."""
    if screen.tokenizer.chat_template is None:
        raise ValueError("this model has no chat template, and --chat needs one")
    screen.note("/reset forgets the conversation, /exit or Ctrl-D ends it")
    if is_terminal(sys.stdin):
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401 (`input` then edits lines and remembers them)
    history: list[dict[str, Any]] = []
    while (line := _read_line(screen)) not in (None, "/exit"):
        if line == "/reset":
            history = []
        elif line:
            asked = [*history, {"role": "user", "content": line}]
            try:
                text = llm.render(conversation({"messages": asked}, system), thinking)
                request = Request({"prompt": line}, params, text=text)
                outcome = decode(llm, screen, [request])
            except (ValueError, RuntimeError, MemoryError) as error:
                complain(error)
                continue
            if outcome.interrupted:
                raise KeyboardInterrupt
            history = [*asked, {"role": "assistant", "content": outcome.outputs[0].text}]
            for note in outcome.lines():
                screen.note(note)


def _read_line(screen: Screen) -> str | None:
    """The user's next line, None at the end of the input."""
    typed = is_terminal(sys.stdin)
    if typed and not screen.terminal:  # stdout is for texts alone
        aside("> ")
    try:
        return input("> " if typed and screen.terminal else "").strip()
    except (EOFError, KeyboardInterrupt) as end:
        if typed:
            aside("\n")
        if isinstance(end, EOFError):
            return None
        raise


def complain(error: Exception) -> None:
    """Report an error in one line."""
    told = " ".join(str(error).split()) or type(error).__name__
    aside(f"error: {told.translate(VISIBLE)}\n")


def aside(text: str) -> None:
    """Write to stderr. A closed one is None, which `print` would take for stdout."""
    if sys.stderr is not None:
        print(text, end="", file=sys.stderr, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody looks at or types into a stream; a closed one is None."""
    return stream is not None and stream.isatty()


def _speculates(llm: "LLM") -> bool:
    return llm.config.block_size > 1
