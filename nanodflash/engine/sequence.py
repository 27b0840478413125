"""One request on the host: what it asked for, where it stands, what came of it."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from enum import Enum, auto

from nanodflash.config import SamplingParams
from nanodflash.engine.metrics import Metrics
from nanodflash.tokenizer import StreamDecoder


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-softmax of the raw target logits where one token was chosen.

    Attributes:
        chosen: of the token that was emitted.
        top:    the asked-for number of likeliest ids with theirs, best first.
    """

    chosen: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Chunk:
    """What one step added to a request.

    Attributes:
        text:          what is now safe to show; may lag behind the ids.
        token_ids:     the ids.
        accepted:      per id, whether the drafter proposed it.
        finish_reason: "stop", "length" or "abort" on the last chunk, else None.
        metrics:       of the whole request, on the last chunk.
        logprobs:      per id, where the request asked for them.
    """

    text: str
    token_ids: list[int]
    accepted: list[bool]
    finish_reason: str | None = None
    metrics: Metrics | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class GenerationOutput:
    """What came of one prompt.

    Attributes:
        text:          of `token_ids`, without special tokens and without what stopped it; empty
                       where the model brings no tokenizer.
        token_ids:     new ids; ends with the stop id where one ended it.
        finish_reason: "stop", "length" or "abort".
        logprobs:      per id, where the parameters asked for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    metrics: Metrics
    logprobs: list[TokenLogprobs] | None = None


class Phase(Enum):
    """Where a request stands. Explicit: never inferred from counts."""

    WAITING = auto()  # no slot, no pages
    PREFILL = auto()  # has a slot; its prompt is not wholly planned
    DECODE = auto()  # all of its prompt is planned; takes part in cycles
    DRAINING = auto()  # to be preempted once its launched steps are committed
    FINISHED = auto()  # nothing more is planned; holds slot and pages while steps name them


@dataclass(eq=False)  # a request is itself, whatever it holds
class Sequence:
    """A request and its progress. Owned by the bookkeeping side alone.

    Attributes:
        prompt:     ids, at least one.
        budget:     new tokens allowed, within `max_model_len`.
        stop_ids:   ids that end it; the last id of a sequence that stopped at one is that id, and
                    its text is not shown.
        decoder:    None without a tokenizer: then the text stays empty.
        arrival:    its place in the line.
        epoch:      of its present stay in a slot.
        pages:      in order of position; the first `published` of them are in the prefix cache.
        planned:    prompt tokens (after a preemption: all but the anchor) that are in plans.
        inflight:   launched steps that name it and are not committed.
    """

    prompt: list[int]
    params: SamplingParams
    budget: int
    seed: int
    stop_ids: list[int]
    speculate: bool
    decoder: StreamDecoder | None
    arrival: int = -1
    phase: Phase = Phase.WAITING
    slot: int = -1
    epoch: int = -1
    pages: list[int] = field(default_factory=list)
    published: int = 0
    may_publish: bool = True
    planned: int = 0
    inflight: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    started: float = 0.0  # host clock when it was submitted, and of its latest step
    latest: float = 0.0

    def __post_init__(self) -> None:
        self.sampler = self.params.sampler

    def __len__(self) -> int:
        """Tokens whose K/V is in the cache once the prompt is: all but the anchor."""
        count = len(self.token_ids)
        return len(self.prompt) + (count - 1 if count else 0)

    def commit(self, ids: Ids[int]) -> None:
        """Take a step's tokens: lengths follow at once, `show` makes the text of them later."""
        self.token_ids += ids

    def show(
        self,
        ids: Ids[int],
        num_accepted: int,
        finish_reason: str | None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> Chunk:
        """What the tokens of the latest commit say.

        A stop string cuts them: text, ids, logprobs and counts alike.

        Args:
            ids:           as committed; the first `num_accepted` were proposed.
            finish_reason: what the device says; a stop string overrules it.
        """
        kept, text = list(ids), ""
        if self.decoder is not None:
            shown = kept[:-1] if finish_reason == "stop" else kept
            before = self.decoder.num_tokens
            text = self.decoder.push(shown)
            if self.decoder.stopped is not None:
                kept, finish_reason = kept[: self.decoder.num_tokens - before], "stop"
                del self.token_ids[len(self.token_ids) - len(ids) + len(kept) :]
            if finish_reason is not None:
                text += self.decoder.finish()
        self.text += text
        self.finish_reason = finish_reason
        if logprobs is not None:
            logprobs = logprobs[: len(kept)]
            self.logprobs += logprobs
        count = min(num_accepted, len(kept))
        accepted = [True] * count + [False] * (len(kept) - count)
        metrics = self.metrics if finish_reason else None
        return Chunk(text, kept, accepted, finish_reason, metrics, logprobs)

    def output(self) -> GenerationOutput:
        """All of it, once it has ended."""
        assert self.finish_reason is not None
        logprobs = self.logprobs if self.params.logprobs is not None else None
        return GenerationOutput(
            self.text, self.token_ids, self.finish_reason, self.metrics, logprobs
        )
