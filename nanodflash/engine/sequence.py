"""One request on the host: what it asked for, what came of it."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from nanodflash.config import SamplingParams
from nanodflash.engine.metrics import Metrics
from nanodflash.tokenizer import StreamDecoder


@dataclass(frozen=True)
class Chunk:
    """What one step added to a request.

    Attributes:
        text:          what is now safe to show; may lag behind the ids.
        token_ids:     the ids.
        accepted:      per id, whether the drafter proposed it.
        finish_reason: "stop" or "length" on the last chunk, else None.
        metrics:       of the whole request, on the last chunk.
    """

    text: str
    token_ids: list[int]
    accepted: list[bool]
    finish_reason: str | None = None
    metrics: Metrics | None = None


@dataclass
class Sequence:
    """A request and its progress. Owned by the bookkeeping side alone.

    Attributes:
        prompt:    ids, at least one.
        budget:    new tokens allowed, within `max_model_len`.
        stop_ids:  ids that end it; the last id of a sequence that stopped at one is that id, and
                   its text is not shown.
        decoder:   None without a tokenizer: then the text stays empty.
    """

    prompt: list[int]
    params: SamplingParams
    budget: int
    seed: int
    stop_ids: list[int]
    speculate: bool
    decoder: StreamDecoder | None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    metrics: Metrics = field(default_factory=Metrics)

    def __len__(self) -> int:
        """Tokens whose K/V is in the cache once the prompt is: all but the anchor."""
        return len(self.prompt) + len(self.token_ids) - 1

    def append(self, ids: Ids[int], num_accepted: int, finish_reason: str | None) -> Chunk:
        """Take a step's tokens; a stop string cuts them, text, ids and counts alike.

        Args:
            ids:           emitted tokens; the first `num_accepted` were proposed.
            finish_reason: what the device says; a stop string overrules it.
        """
        ids, text = list(ids), ""
        if self.decoder is not None:
            shown = ids[:-1] if finish_reason == "stop" else ids
            before = self.decoder.num_tokens
            text = self.decoder.push(shown)
            if self.decoder.stopped is not None:
                ids, finish_reason = ids[: self.decoder.num_tokens - before], "stop"
            if finish_reason is not None:
                text += self.decoder.finish()
        self.token_ids += ids
        self.text += text
        self.finish_reason = finish_reason
        accepted = [place < num_accepted for place in range(len(ids))]
        return Chunk(text, ids, accepted, finish_reason, self.metrics if finish_reason else None)
