"""Configurations: how the engine runs, what a request asks for.

Frozen and validated when made; no torch. What a checkpoint is stands in `models/config.py`.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Columns of per-slot tables on the device.
MAX_STOP_IDS, MAX_BIASES, MAX_LOGPROBS = 16, 64, 20
FREE, ACTIVE, FINISHED = range(3)  # values of a slot's state; only ACTIVE rows emit or write
RUNNING, STOP, BUDGET = range(3)  # why a row of a result record has ended


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine; every one is fixed for its life.

    Args:
        max_model_len: prompt and new tokens of one request, at most.
        block_size:    S, anchor and proposals; 1 without a drafter.
        page_size:     P, tokens a page.
        num_pages:     N, pages of each pool, the dummy page included.
        max_seqs:      requests that can hold a slot at once.
        max_prefill:   T, tokens a step: what its rows leave is for prompts.
        prefix_cache:  keep full pages for prompts that start alike.
    """

    max_model_len: int
    block_size: int = 1
    page_size: int = 64
    num_pages: int | None = None
    max_seqs: int = 8
    max_prefill: int = 512
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for key, smallest in (
            ("max_model_len", 2),
            ("block_size", 1),
            ("page_size", 1),
            ("max_seqs", 1),
            ("max_prefill", 1),
        ):
            check_int(key, getattr(self, key), smallest)
        if self.num_pages is not None:
            check_int("num_pages", self.num_pages, 2)

    @property
    def pages_per_seq(self) -> int:
        """Width of the page table: a full sequence and the block that runs past its end."""
        return math.ceil((self.max_model_len + self.block_size) / self.page_size)

    @property
    def total_pages(self) -> int:
        """N: `num_pages`, or what `max_seqs` full sequences and the dummy page take."""
        return self.num_pages or self.max_seqs * self.pages_per_seq + 1


def check_int(key: str, value: Any, smallest: int, largest: float = math.inf) -> None:
    """ValueError unless `value` is a whole number in `smallest..largest`."""
    if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
        upto = "" if largest == math.inf else f" and at most {largest}"
        wanted = f"a whole number of at least {smallest}{upto}"
        raise ValueError(f"{key} is {short(value)}, wanted {wanted}")


def check_number(key: str, value: Any, accepts: Callable[[float], bool], wanted: str) -> None:
    """ValueError unless `value` is a finite number that `accepts` takes."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not -math.inf < value < math.inf or not accepts(value):
        raise ValueError(f"{key} is {short(value)}, wanted {wanted}")


def short(value: Any, most: int = 80) -> str:
    """What an error shows of a value, whatever it is: its `repr` on one line, cut."""
    form = reprlib.Repr()
    form.maxstring = form.maxlong = form.maxother = most
    try:
        text = " ".join(form.repr(value).splitlines())
    except ValueError:  # a number of thousands of digits
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def listed(value: Any) -> Any:
    """An array or a tensor as lists, a number of theirs as ours; all else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for.

    Args:
        max_new_tokens: budget, at least 1.
        temperature:    0 is greedy: the argmax, lowest id on ties.
        top_k:          keep the k largest; 0 keeps all.
        top_p:          keep tokens while the mass before them is below this.
        min_p:          keep tokens whose probability is at least this share of the largest.
        seed:           any 64-bit whole number; None draws a fresh one for this request. Two
                        requests with the same seed share their noise.
        stop:           strings that end the text; they are not part of it.
        stop_token_ids: ids that end the request, besides the model's own.
        ignore_eos:     do not stop at the model's own end-of-sequence ids.
        repetition_penalty: divides positive and multiplies negative logits of what prompt and
                        output hold; 1 = off.
        presence_penalty, frequency_penalty: subtracted for what the output holds, once or for
                        each time; 0 = off.
        logit_bias:     id -> number added to its logit, at most 64.
        min_new_tokens: stop ids cannot be chosen before so many tokens.
        logprobs:       give the log-probability of each chosen token, and of so many of the
                        likeliest (0 to 20), from the raw logits; None = none.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1, 2**31 - 1)
        check_int("top_k", self.top_k, 0, 2**31 - 1)
        # Beyond these bounds logits / temperature leaves what fp32 can tell apart.
        warm = "0 (greedy) or a number in 0.0001..10000"
        check_number("temperature", self.temperature, lambda x: x == 0 or 1e-4 <= x <= 1e4, warm)
        check_number("top_p", self.top_p, lambda x: 0 < x <= 1, "a number above 0, at most 1")
        check_number("min_p", self.min_p, lambda x: 0 <= x <= 1, "a number in 0..1")
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop is {short(self.stop)}, wanted non-empty strings")
        if not isinstance(self.stop_token_ids, (tuple, list)):
            ids = short(self.stop_token_ids)
            raise ValueError(f"stop_token_ids is {ids}, wanted a tuple of ids")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0, 2**31 - 1)
        share = "a number in 0.01..100"
        check_number(
            "repetition_penalty", self.repetition_penalty, lambda x: 0.01 <= x <= 100, share
        )
        for key in ("presence_penalty", "frequency_penalty"):
            check_number(key, getattr(self, key), lambda x: abs(x) <= 100, "a number in -100..100")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {short(self.ignore_eos)}, wanted True or False")
        check_int("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        try:  # kept as pairs, so that parameters stay hashable
            pairs = tuple(dict(self.logit_bias).items())
        except (TypeError, ValueError):
            pairs = ()
        if len(pairs) > MAX_BIASES or (self.logit_bias and not pairs):
            raise ValueError(
                f"logit_bias is {short(self.logit_bias)}, "
                f"wanted at most {MAX_BIASES} pairs id: number"
            )
        object.__setattr__(self, "logit_bias", pairs)
        for token, bias in pairs:
            check_int("an id of logit_bias", token, 0, 2**31 - 1)
            check_number("logit_bias", bias, lambda x: abs(x) <= 1e4, "numbers in -10000..10000")

    @property
    def sampler(self) -> Literal["greedy", "sampled", "full"]:
        """The least sampler that serves this request."""
        plain = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        if (
            plain != (1, 0, 0)
            or self.logit_bias
            or self.min_new_tokens
            or self.logprobs is not None
        ):
            return "full"
        return "sampled" if self.temperature > 0 else "greedy"
