"""Small random models and scripted proposals for the tests.

Weights have standard deviation 0.3: at 0.02 greedy text repeats one or two tokens, and identity
tests have no power.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import oracle
from nanodflash.checkpoint import save_model
from nanodflash.config import EngineConfig, SamplingParams
from nanodflash.decoding.cycle import Decoder, Result, prefill_step
from nanodflash.decoding.packet import apply, pack
from nanodflash.decoding.plan import Admission, Facts, Span, StepPlan
from nanodflash.decoding.state import DeviceState
from nanodflash.engine.runner import Results, Runner
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.sequence import Sequence as HostSequence
from nanodflash.engine.steps import ModelSteps
from nanodflash.engine.streams import InlineStream
from nanodflash.models.config import DraftConfig, TargetConfig
from nanodflash.models.dflash import DFlash
from nanodflash.models.layers import Heads
from nanodflash.models.qwen3 import Qwen3
from nanodflash.ops import Rotary, split_heads

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
DRAFT: dict[str, Any] = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 2]},
}


def randomise(model: torch.nn.Module, seed: int, std: float = 0.3) -> None:
    """Matrices of standard deviation `std`, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(noise * std if parameter.dim() == 2 else 1 + 0.1 * noise)
        parameter.requires_grad_(False)


def make_target(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Qwen3:
    """The tiny target, with changed config keys."""
    model = Qwen3(TargetConfig.from_dict(TARGET | changes)).to(dtype)
    randomise(model, seed)
    return model


def make_draft(dtype: torch.dtype = torch.float64, seed: int = 1, **changes: Any) -> DFlash:
    """The tiny drafter: random, so nearly every proposal is refused."""
    model = DFlash(DraftConfig.from_dict(DRAFT | changes)).to(dtype)
    randomise(model, seed)
    return model


def save_pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Tiny target and drafter as checkpoint folders without a tokenizer."""
    target, draft = folder / "target", folder / "draft"
    save_model(target, make_target(**changes), TARGET | changes)
    save_model(draft, make_draft(), DRAFT)
    return target, draft


PATTERNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # (position [B, S-1], block position [S-1]) -> which proposals are spoiled
    "right": lambda position, place: torch.zeros_like(position, dtype=torch.bool),
    "wrong": lambda position, place: torch.ones_like(position, dtype=torch.bool),
    "third wrong": lambda position, place: (place == 3).expand_as(position),
    "alternating": lambda position, place: position % 2 == 0,
    "random": lambda position, place: (position * 2654435761 >> 7) % 5 == 0,
}


class Script:
    """Proposes a known text, spoiled where the pattern says so: any acceptance on any model."""

    def __init__(self, text: list[int], block_size: int, pattern: str, vocab: int = 320) -> None:
        self.text = torch.tensor(text + [0] * (block_size + 1))
        self.places = torch.arange(1, block_size)
        self.spoil, self.vocab = PATTERNS[pattern], vocab

    def __call__(self, tokens: Tensor, length: Tensor) -> Tensor:
        position = length[:, None] + self.places
        right = self.text[position.clamp(max=len(self.text) - 1)]
        spoiled = self.spoil(position, self.places)
        return torch.where(spoiled, (right + 1).remainder(self.vocab), right)


def admit(
    state: DeviceState,
    slot: int,
    ids: Sequence[int],
    params: SamplingParams,
    *,
    budget: int,
    draft_limit: int,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    epoch: int = 1,
    pages: Sequence[int] = (),
) -> None:
    """A fresh request into a slot."""
    admission = Admission(
        slot=slot,
        epoch=epoch,
        ids=ids,
        prompt_len=len(ids),
        params=params,
        budget=budget,
        seed=seed,
        stop_ids=stop_ids,
        draft_limit=draft_limit,
        pages=pages,
    )
    plan = StepPlan(1, Facts(1, "full", True, 1), [admission])
    sections = pack(plan, state.page_table.shape[1])
    apply(plan, [torch.from_numpy(section) for section in sections], state)


def prefill(decoder: Decoder, spans: Sequence[Span], facts: Facts) -> Result | None:
    """`prefill_step` with the slots that its spans name."""
    ready = [span for span in spans if span.last]
    slots = (torch.tensor([s.slot for s in some], dtype=torch.int64) for some in (ready, ready))
    return prefill_step(decoder, spans, *slots, facts)


class Kept(oracle.Causal):
    """The oracle's attention, keeping K and V; also takes what the drafter injects."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def inject(self, kv: Tensor, k_norms: Tensor, eps: float, rotary: Rotary) -> None:
        for layer, k_norm in enumerate(k_norms):
            own = kv[:, layer]
            parts = split_heads(own, k_norm, k_norm, eps, rotary, own.shape[1] // 2)
            self.rows[layer] = torch.stack(parts[1:], 1)

    def attend(self, layer: int, heads: Heads) -> Tensor:
        self.rows[layer] = torch.stack(heads.split()[1:], 1)
        return super().attend(layer, heads)


def run_plan(runner: Runner, plan: StepPlan) -> Results:
    """Launch a plan and wait for it."""
    return runner.results(runner.launch(plan))


class Alone:
    """Scheduler and runner in the caller's thread, one request at a time."""

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        draft, self.config = decoder.draft, config
        limit = draft.config.max_position_embeddings if draft else config.max_model_len
        self.runner = Runner(lambda _: ModelSteps(decoder), InlineStream(), config)
        self.chunks: list[Any] = []
        self.scheduler = Scheduler(
            config,
            min(limit, config.max_model_len),
            draft is not None,
            lambda _, chunk: self.chunks.append(chunk),
        )

    def run(self, engine_sequence: HostSequence) -> Iterator[Any]:
        """Chunks of a request; at the last one its slot and pages are given back already."""
        self.scheduler.add(engine_sequence)
        while engine_sequence.finish_reason is None:
            plan = self.scheduler.plan()
            assert plan is not None
            results = run_plan(self.runner, plan)
            self.scheduler.commit(results.finals, results.rows, results.logprobs)
            self.scheduler.deliver()
            self.scheduler.check()
            yield from self.chunks
            self.chunks.clear()

    def reserve(self, sequence: HostSequence, tokens: int) -> None:
        """Hold pages for `tokens` tokens now, as the next plan would."""
        missing = -(-tokens // self.config.page_size) - len(sequence.pages)
        if missing > 0:
            fresh = self.scheduler.pages.allocate(missing)
            table = self.runner.steps.decoder.state.page_table
            held = len(sequence.pages)
            table[sequence.slot, held : held + missing] = torch.tensor(fresh)
            sequence.pages += fresh
