"""What `generate.py` is asked and what came of it: prompts read, laid out, outcomes told.

No torch before a model is there.
"""

import json
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanodflash.config import SamplingParams, short
from nanodflash.engine.metrics import Metrics

if TYPE_CHECKING:
    from nanodflash.engine.sequence import GenerationOutput
    from nanodflash.llm import LLM

FIELDS = frozenset(each.name for each in fields(SamplingParams))


class Request(NamedTuple):
    """A prompt and its parameters.

    Attributes:
        asked: {"prompt": text} or {"messages": conversation}, as the user wrote it.
        where: what a complaint about it begins with.
        text:  what the model reads, once `lay_out` has made it.
    """

    asked: dict[str, Any]
    params: SamplingParams
    where: str = ""
    text: str = ""


def read_requests(file: str, params: SamplingParams, jsonl: bool) -> list[Request]:
    """The requests of a file, or of stdin if it is "-". Blank lines are none.

    Args:
        jsonl: a line is an object with "prompt" or "messages", and sampling parameters that stand
               above `params`; else it is a prompt.
    """
    name = "stdin" if file == "-" else file
    if file == "-" and sys.stdin is None:
        raise ValueError("stdin is closed: give --prompt-file a file")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        lines = data.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{name}, line {number}: "
            asked: dict[str, Any] = {"prompt": line.removesuffix("\r")}
            request = Request(asked, params, where)
            requests.append(_read_object(line, params, where) if jsonl else request)
    if not requests:
        raise ValueError(f"{name} holds no prompt, wanted one a line")
    return requests


def _read_object(line: str, params: SamplingParams, where: str) -> Request:
    """One line of JSON."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}not JSON: {error}") from error
    if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
        raise ValueError(f'{where}wanted an object with either "prompt" or "messages"')
    key, kind = ("prompt", str) if "prompt" in given else ("messages", list)
    asked = {key: given.pop(key)}
    if not isinstance(asked[key], kind):
        wanted = "a string" if kind is str else "a list of messages"
        raise ValueError(f"{where}{key} is {short(asked[key])}, wanted {wanted}")
    if unknown := sorted(given.keys() - FIELDS):
        raise ValueError(f"{where}unknown key {short(unknown[0])}")
    try:
        if isinstance(bias := given.get("logit_bias"), dict):  # keys of JSON are strings
            given["logit_bias"] = {int(token): number for token, number in bias.items()}
        return Request(asked, replace(params, **given), where)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error


def lay_out(
    llm: "LLM",
    note: Callable[[str], None],
    requests: list[Request],
    *,
    raw: bool,
    system: str | None,
    thinking: bool,
) -> list[Request]:
    """Make the texts. What is sampled gets a seed, so that it can be decoded again."""
    assert llm.tokenizer is not None, "texts need a tokenizer"
    templated = llm.tokenizer.chat_template is not None
    if not (templated or raw or system is not None or thinking):
        raw = all("prompt" in request.asked for request in requests)
        if raw:
            note("this model has no chat template: prompts are decoded raw")
    laid_out = []
    for request in requests:
        if raw and "messages" in request.asked:
            raise ValueError(f"{request.where}--raw and messages do not go together")
        try:
            messages = conversation(request.asked, system)
            text = request.asked["prompt"] if raw else llm.render(messages, thinking)
        except ValueError as error:
            raise ValueError(f"{request.where}{error}") from error
        params = request.params
        if params.seed is None and params.temperature > 0:
            params = replace(params, seed=secrets.randbits(32))
        laid_out.append(request._replace(params=params, text=text))
    return laid_out


def conversation(asked: dict[str, Any], system: str | None) -> list[dict[str, Any]]:
    """The messages of a prompt; the system message comes first, unless they bring their own."""
    messages = asked.get("messages", [{"role": "user", "content": asked.get("prompt")}])
    first = messages[0] if messages else None
    own = isinstance(first, dict) and first.get("role") == "system"
    opening = [] if own or system is None else [{"role": "system", "content": system}]
    return [*opening, *messages]


@dataclass
class Outcome:
    """What came of requests: their outputs, with --compare also those without the drafter.

    Attributes:
        seconds:     from the first request to the last output, where they ran at once.
        interrupted: Ctrl-C came; `outputs` are of the first requests only.
    """

    requests: list[Request]
    speculated: bool
    outputs: "list[GenerationOutput]" = field(default_factory=list)
    plain: "list[GenerationOutput]" = field(default_factory=list)
    seconds: float | None = None
    interrupted: bool = False

    @property
    def tau(self) -> float | None:
        """Of the speculative runs; None if there was no cycle of that kind."""
        metrics = _total(self.outputs)
        return metrics.tau if self.speculated and metrics.cycles else None

    @property
    def reach(self) -> int:
        """Positions that the longest prompt and its answer take."""
        ends = (o.metrics.prompt_tokens + len(o.token_ids) for o in self.outputs)
        return max(ends, default=0)

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
        tokens = _count(self.outputs)
        speed = _speed(self.outputs) if self.seconds is None else _figure(tokens / self.seconds)
        yield f"{tokens} tokens, tau {tau}, {speed} tokens/s"
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
        if self.seconds is not None:
            told["totals"]["seconds"] = self.seconds
            # All tokens by the wall clock, prefill included: the prompts' `decode_seconds` overlap.
            told["totals"]["tokens_per_second"] = _count(self.outputs) / self.seconds
        told["outputs"] = list(map(tell, self.requests, self.outputs))
        return told


def tell(request: Request, output: "GenerationOutput") -> dict[str, Any]:
    """A request and its output, for JSON."""
    told = request.asked | {
        "seed": request.params.seed,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "metrics": output.metrics.as_dict(),
    }
    if request.params.logprobs is not None:
        told["logprobs"] = [asdict(logprobs) for logprobs in output.logprobs or ()]
    return told


def _total(outputs: "list[GenerationOutput]") -> Metrics:
    return sum((output.metrics for output in outputs), Metrics())


def _count(outputs: "list[GenerationOutput]") -> int:
    return sum(len(output.token_ids) for output in outputs)


def _totals(outputs: "list[GenerationOutput]") -> dict[str, Any]:
    return {"tokens": _count(outputs)} | _total(outputs).as_dict()


def _speed(outputs: "list[GenerationOutput]") -> str:
    return _figure(_total(outputs).tokens_per_second)


def _figure(speed: float) -> str:
    return f"{speed:.1f}" if 0 < speed < 10 else f"{speed:.0f}"
