"""The library's front door: models in, texts out."""

import math
import random
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from nanodflash.checkpoint import Checkpoint, load_model, open_checkpoint
from nanodflash.config import (
    MAX_STOP_IDS,
    EngineConfig,
    SamplingParams,
    check_int,
    listed,
    short,
)
from nanodflash.decoding.cycle import Decoder, Proposer
from nanodflash.engine import sequence as host
from nanodflash.engine.engine import Engine, RequestHandle
from nanodflash.engine.metrics import EngineMetrics
from nanodflash.engine.paging import PageStats
from nanodflash.engine.progress import show_progress
from nanodflash.engine.sequence import Chunk, GenerationOutput
from nanodflash.engine.steps import ModelSteps
from nanodflash.engine.streams import Stream, open_stream
from nanodflash.engine.trace import Trace
from nanodflash.engine.width import VerifyWidth
from nanodflash.models.config import DraftConfig, TargetConfig, check_pair
from nanodflash.models.dflash import DFlash
from nanodflash.models.qwen3 import Qwen3
from nanodflash.options import (
    block_size_of,
    choose_ops,
    device_of,
    dtype_of,
    model_len,
    num_pages_of,
    overlaps,
    verify_width_of,
)
from nanodflash.tokenizer import StreamDecoder, Tokenizer

BUNDLED = Path(__file__).parent / "assets"

Prompt = str | Sequence[int]


class LLM:
    """A target, its drafter and an engine for them.

    Args:
        model:         folder or hub id of a Qwen3 target; "bundled" is the small pair of this
                       package.
        draft:         folder or hub id of its DFlash drafter; None never drafts; "auto" is the
                       bundled drafter for the bundled model and none else.
        device:        "auto" is CUDA where there is one, else the CPU.
        dtype:         "auto" (fp32 on a CPU, bf16 on CUDA), "bf16", "fp32" or "fp64".
        block_size:    S, at most what the drafter was trained with; None takes that. Without a
                       drafter it is the proposer's block, or 1.
        max_model_len: prompt and new tokens of a request; None is the target's limit, at most
                       4096 on a CPU.
        page_size:     tokens a page.
        num_pages:     pages of each pool, the dummy page included; None holds `max_seqs` full
                       sequences, on a GPU as far as there is room.
        max_seqs:      requests that run at once; more wait their turn.
        max_prefill:   tokens a step, blocks and prompt chunks together; None is 512 beside a block
                       of every request. More finish prompts sooner, and stall blocks for longer.
        prefix_cache:  keep full pages of ended requests for prompts that start alike.
        graphs:        replay captured steps (CUDA graphs, traces on a CPU) where that is possible;
                       False runs all from Python.
        overlap:       plan and book beside the running step, in a thread of its own; "auto" does on
                       CUDA. On a CPU both would share its cores.
        verify_width:  rows of a block that the target verifies; "measure" finds what pays at each
                       batch size; "auto" does so on CUDA, and is the whole block on a CPU.
        reference_ops: operations of `nanodflash.ops.NAMES` that run as they are defined, not as
                       kernels.
        gpu_memory_utilization: share of a GPU's memory that may be in use.
        trace:         file that a Chrome trace of the engine is written to when it closes.
        proposer:      (tokens [B, Lmax], len [B]) -> ids [B, S-1], instead of the drafter's ids;
                       tokens[b, len[b]] is the last emitted one.
        seed:          seeds the seeds of requests that bring none.
        revision, draft_revision: of hub ids.
    Raises:
        ValueError: anything a caller can mend, in one line.
    """

    def __init__(
        self,
        model: str | Path = "bundled",
        draft: str | Path | None = "auto",
        *,
        device: str = "auto",
        dtype: str = "auto",
        block_size: int | None = None,
        max_model_len: int | None = None,
        page_size: int = 64,
        num_pages: int | None = None,
        max_seqs: int = 8,
        max_prefill: int | None = None,
        prefix_cache: bool = True,
        graphs: bool = True,
        overlap: bool | str = "auto",
        verify_width: int | str = "auto",
        reference_ops: Sequence[str] = (),
        gpu_memory_utilization: float = 0.9,
        trace: str | Path | None = None,
        proposer: Proposer | None = None,
        seed: int | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
    ) -> None:
        if draft == "auto":
            draft = "bundled" if model == "bundled" else None
        self._trace_file = Path(trace) if trace is not None else None
        if self._trace_file is not None:
            self._trace_file.write_text("")  # what cannot be written is known before any work
        self.device = device_of(device)
        self.dtype = dtype_of(dtype, self.device)
        checkpoint = _open(model, "target", revision)
        target_config = TargetConfig.from_dict(checkpoint.config, str(model))
        draft_checkpoint = draft_config = None
        if draft is not None:
            draft_checkpoint = _open(draft, "draft", draft_revision)
            draft_config = DraftConfig.from_dict(draft_checkpoint.config, str(draft))
            check_pair(target_config, draft_config)
        size = block_size_of(block_size, draft_config, proposer)
        place = (self.device, self.dtype)
        table = choose_ops(reference_ops, *place, target_config, draft_config)
        width = VerifyWidth(size, verify_width_of(verify_width, size, self.device))
        check_int("max_seqs", max_seqs, 1)
        config = EngineConfig(
            max_model_len=model_len(max_model_len, target_config, self.device),
            block_size=size,
            page_size=page_size,
            max_seqs=max_seqs,
            max_prefill=512 + max_seqs * size if max_prefill is None else max_prefill,
            prefix_cache=prefix_cache,
        )
        pages = num_pages_of(
            num_pages, gpu_memory_utilization, target_config, draft_config, config, *place
        )
        self.config = config = replace(config, num_pages=pages)
        self.vocab_size = target_config.vocab_size
        self.eos_token_ids = checkpoint.eos_token_ids
        has_tokenizer = (checkpoint.folder / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.from_folder(checkpoint.folder) if has_tokenizer else None
        # First position at which proposals are not counted: the drafter was not made for it.
        limits = [c.max_position_embeddings for c in (draft_config,) if c is not None]
        self.draft_limit = min([self.config.max_model_len, *limits])

        def load(stream: Stream) -> ModelSteps:  # without `self`, which would never be collected
            target = load_model(Qwen3, target_config, checkpoint, *place)
            drafter = None
            if draft_config is not None and draft_checkpoint is not None:
                drafter = load_model(DFlash, draft_config, draft_checkpoint, *place)
            decoder = Decoder(target, drafter, config, proposer, table)
            if place[0].type != "cuda" or not graphs:
                return ModelSteps(decoder, graphs)
            steps = ModelSteps(decoder, graphs, stream.capture)
            steps.prepare(max_seqs, config.max_prefill, width.widths)
            return steps

        ahead = overlaps(overlap, self.device)
        self._trace = Trace(enabled=trace is not None)
        try:
            self.engine = Engine(
                load,
                lambda: open_stream(place[0], ahead),
                config,
                self.draft_limit,
                draft is not None,
                ahead,
                self._trace,
                width,
            )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"{self.device} has no room for models and pages: lower gpu_memory_utilization "
                f"({gpu_memory_utilization}), num_pages or max_seqs, or free it of other work"
            ) from error
        # A thread must not outlive the interpreter.
        self._finalizer = weakref.finalize(self, self.engine.close)
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculate: bool = True,
        progress: bool = False,
    ) -> list[GenerationOutput]:
        """Decode every prompt, many at once; outputs in the order of the prompts.

        Args:
            prompts:   strings (raw: no chat template) or lists of token ids; one or many. An array
                       or a tensor is as good as a list.
            params:    for all, or one for each.
            speculate: False decodes with the target alone, on the same engine.
            progress:  show a line on stderr while it runs.
        """
        given: Any = listed(prompts)
        one = (str, bytes, bytearray, Mapping, Set)  # the last four are refused
        several = isinstance(given, Iterable) and not isinstance(given, one)
        many = [listed(prompt) for prompt in given] if several else [given]
        if several and many and not isinstance(many[0], Sequence):
            many = [many]  # one prompt, of token ids
        asked: Any = params
        if params is None or isinstance(params, SamplingParams):
            asked = [_given(params)] * len(many)
        elif not isinstance(params, (list, tuple)):
            raise ValueError(f"params is {short(params)}, wanted SamplingParams or a list of them")
        if len(asked) != len(many):
            raise ValueError(f"got {len(asked)} params for {len(many)} prompts, wanted one each")
        sequences = [self.prepare(p, q, speculate) for p, q in zip(many, asked, strict=True)]
        handles: list[RequestHandle] = []
        try:
            for sequence in sequences:
                handles.append(self.engine.submit(sequence, streams=False))
            if progress and sys.stderr is not None:
                show_progress(sequences, handles)
            return [handle.result() for handle in handles]
        finally:  # interrupted, or one of them failed
            for handle in handles:
                handle.abort()

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, speculate: bool = True
    ) -> RequestHandle:
        """Start decoding a prompt and return at once, from any thread."""
        return self.engine.submit(self.prepare(prompt, _given(params), speculate))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, speculate: bool = True
    ) -> Iterator[Chunk]:
        """Decode one prompt, a chunk a step; the last one carries reason and metrics."""
        sequence = self.prepare(prompt, _given(params), speculate)
        return self._stream(sequence)

    def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        speculate: bool = True,
        enable_thinking: bool = False,
    ) -> GenerationOutput:
        """Answer a conversation, laid out by the model's own chat template."""
        prompt = self.render(messages, enable_thinking)
        return self.generate([prompt], params, speculate)[0]

    def render(self, messages: list[dict[str, Any]], enable_thinking: bool = False) -> str:
        """The prompt of a conversation: what `chat` decodes, for `stream`."""
        if self.tokenizer is None:
            raise ValueError("this model brings no tokenizer: give token ids")
        return self.tokenizer.chat(messages, enable_thinking)

    def page_stats(self) -> PageStats:
        """Pages by use: free, cached, live, total."""
        return self.engine.page_stats()

    @property
    def metrics(self) -> EngineMetrics:
        """Of the engine: steps, idle share of the device, slack of the host, surplus rows."""
        return self.engine.metrics

    def close(self) -> None:
        """End all requests and the engine's threads, and write the trace. Twice is fine."""
        self.engine.close()
        self._finalizer.detach()  # it keeps the engine
        if self._trace_file is not None:
            self._trace.write(self._trace_file)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self, sequence: host.Sequence) -> Iterator[Chunk]:
        """Chunks of a request, started when the first is asked for; a reader that goes ends it."""
        handle = self.engine.submit(sequence)
        try:
            yield from handle
        finally:
            handle.abort()

    def prepare(self, prompt: Prompt, params: SamplingParams, speculate: bool) -> host.Sequence:
        """Check a request, before anything is run for it; `engine.submit` takes it."""
        self.engine.require_open()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {short(params)}, wanted SamplingParams")
        ids = self._ids(prompt)
        room = self.config.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; max_model_len {self.config.max_model_len} "
                "leaves no room for a new one"
            )
        budget = min(params.max_new_tokens, room)
        places = len(ids) + budget + self.config.block_size
        wanted = math.ceil(places / self.config.page_size)
        total = self.config.total_pages - 1
        if wanted > total:
            raise ValueError(
                f"the request needs {wanted} pages (prompt {len(ids)}, new tokens {budget}), the "
                f"pool has {total}: raise num_pages or lower max_new_tokens"
            )
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_ids = sorted({*eos, *params.stop_token_ids})
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(stop_ids)} stop ids, at most {MAX_STOP_IDS} are supported")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model brings none")
        for token in dict(params.logit_bias):
            check_int("an id of logit_bias", token, 0, self.vocab_size - 1)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        return host.Sequence(
            prompt=ids,
            params=params,
            budget=budget,
            seed=seed - 2**64 if seed >= 2**63 else seed,  # the device keeps it as int64
            stop_ids=stop_ids,
            speculate=speculate and self.config.block_size > 1,
            decoder=StreamDecoder(self.tokenizer, tuple(params.stop)) if self.tokenizer else None,
        )

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model brings no tokenizer: give token ids, not text")
            prompt = self.tokenizer.encode(prompt)
        prompt = listed(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise ValueError(f"a prompt is {short(prompt)}, wanted a text or a list of token ids")
        ids = [listed(token) for token in prompt]
        if not ids:
            raise ValueError("the prompt is empty: it has no tokens")
        for token in ids:
            check_int("a token id of the prompt", token, 0, self.vocab_size - 1)
        return ids


def _given(params: SamplingParams | None) -> SamplingParams:
    return SamplingParams() if params is None else params


def _open(name: str | Path, role: str, revision: str | None) -> Checkpoint:
    return open_checkpoint(str(BUNDLED / role if name == "bundled" else name), revision)
