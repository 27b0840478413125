"""The target equals transformers' Qwen3, logits and taps, however its rows reach it."""

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kit import TARGET, make_target
from nanodflash.decoding.kv_cache import KVPool, RaggedMemory, paged_memory, row_index, sees
from nanodflash.models.config import TargetConfig
from nanodflash.models.layers import inverse_frequencies
from nanodflash.models.qwen3 import Qwen3
from nanodflash.ops import REFERENCE
from nanodflash.train.target import DenseMemory
from oracle import Causal

BATCH, LENGTH, TAPS = 2, 37, (0, 1, 2, 3)


def heads(query: int, kv: int, head_dim: int, hidden: int, **more: Any) -> dict[str, Any]:
    """Config keys of a shape."""
    return {
        "num_attention_heads": query,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "hidden_size": hidden,
    } | more


def old(rope_type: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """The older spelling of the rotary keys."""
    return {"rope_theta": theta, "rope_scaling": {"type": rope_type} | more}


def new(rope_type: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """The newer one; `rope_theta` is not at top level."""
    return {
        "rope_theta": None,
        "rope_parameters": {"rope_type": rope_type, "rope_theta": theta} | more,
    }


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES: dict[str, dict[str, Any]] = {
    "4 of 2": {},
    "6 of 3, tied": heads(6, 3, 16, 40, tie_word_embeddings=True),
    "5 of 1": heads(5, 1, 8, 24, rms_norm_eps=1e-5),
    "8 of 8, tied": heads(8, 8, 16, 48, tie_word_embeddings=True),
    "default": new("default", 1e6),
    "null scaling": {"rope_theta": 500.0, "rope_scaling": None},
    "linear": old("linear", factor=3.0),
    "linear, new": new("linear", factor=2.5),
    "yarn": old("yarn", **YARN),
    "yarn, new": new("yarn", 1000.0, **YARN),
    "yarn, no original length": new("yarn", factor=2.0),
    "yarn, attention factor": old("yarn", attention_factor=0.8, **YARN),
    "yarn, betas": new("yarn", beta_fast=8, beta_slow=2, **YARN),
    "yarn, truncate": old("yarn", truncate=False, **YARN),
    "yarn, mscale": new("yarn", mscale=0.7, mscale_all_dim=1.3, **YARN),
    "yarn, mscale alone": new("yarn", mscale=0.7, **YARN),
    "llama3": old("llama3", **LLAMA3),
    "llama3, new": new("llama3", 1000.0, **LLAMA3),
    "dynamic": old("dynamic", factor=2.0) | {"max_position_embeddings": 128},
    "dynamic, new": new("dynamic", 1e6, factor=4.0),
}


@pytest.fixture(scope="module")
def qwen3() -> ModuleType:
    """transformers' own model; the import takes seconds."""
    from transformers.models.qwen3 import modeling_qwen3

    return modeling_qwen3


@dataclass
class Theirs:
    """What transformers makes of `ids` [B, T]."""

    logits: Tensor
    outputs: list[Tensor]  # of every decoder layer, by hooks
    hidden_states: tuple[Tensor, ...]


def run_theirs(
    qwen3: ModuleType, ours: Qwen3, changes: dict[str, Any], ids: Tensor, widened: bool
) -> Theirs:
    """Run the same weights there. `widened`: its fp32 norms, softmax and rotary become fp64.

    Their code names the dtype as `torch.float32` or `torch.float` when it runs.
    """
    keys = {key: value for key, value in (TARGET | changes).items() if value is not None}
    outputs: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        if widened:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch, "float", torch.float64)
        made = qwen3.Qwen3Config(**deepcopy(keys), attn_implementation="eager")  # it fills in keys
        model = qwen3.Qwen3ForCausalLM(made).to(ours.norm.dtype).eval()
        weights = {name: part.view() for name, part in ours.parts().items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert missing == (["lm_head.weight"] if ours.config.tie_word_embeddings else [])
        assert unexpected == []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, output: outputs.append(output))
        with torch.no_grad():
            result = model(ids, output_hidden_states=True, use_cache=False)
    return Theirs(result.logits, outputs, result.hidden_states)


@dataclass
class Case:
    """One configuration: our target, the ids, and the exact answers."""

    changes: dict[str, Any]  # of `TARGET`
    target: Qwen3
    ids: Tensor
    theirs: Theirs

    def check(self, logits: Tensor, features: Tensor | None, tolerance: float = 1e-9) -> None:
        """Logits and the taps of all layers, [B, T, ..], against transformers'."""
        assert features is not None
        close(logits, self.theirs.logits, tolerance)
        for mine, other in zip(features.chunk(len(TAPS), -1), self.theirs.outputs, strict=True):
            close(mine, other, tolerance)


def close(mine: Tensor, other: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest entry, everywhere."""
    torch.testing.assert_close(mine, other, rtol=0, atol=tolerance * other.abs().max().item())


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, qwen3: ModuleType) -> Case:
    changes = request.param
    target = make_target(**changes)
    target.prepare(64)
    ids = torch.randint(0, 320, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    return Case(changes, target, ids, run_theirs(qwen3, target, changes, ids, widened=True))


# ---------------------------------------------------------------------- one forward


def test_one_sequence(case: Case) -> None:
    for row, ids in enumerate(case.ids):
        hidden, features = case.target(ids, torch.arange(LENGTH), Causal(), TAPS)
        assert features is not None
        close(case.target.logits(hidden), case.theirs.logits[row], 1e-9)
        close(features, torch.cat(case.theirs.outputs, -1)[row], 1e-9)


def dense(case: Case, target: Qwen3) -> tuple[Tensor, Tensor | None]:
    """Logits and taps of the whole batch in one forward, as in training."""
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    hidden, features = target(case.ids, positions, DenseMemory(), TAPS)
    return target.logits(hidden), features


def test_batch(case: Case) -> None:
    case.check(*dense(case, case.target))


def test_unpatched(case: Case, qwen3: ModuleType) -> None:
    """transformers as it is: fp32 norms and rotary even in an fp64 model."""
    theirs = run_theirs(qwen3, case.target, case.changes, case.ids, widened=False)
    logits, features = dense(case, case.target)
    Case(case.changes, case.target, case.ids, theirs).check(logits, features, 2e-5)


def test_fp32(case: Case, qwen3: ModuleType) -> None:
    target = make_target(torch.float32, **case.changes)
    target.prepare(64)
    theirs = run_theirs(qwen3, target, case.changes, case.ids, widened=False)
    logits, features = dense(case, target)
    assert logits.dtype == torch.float32
    Case(case.changes, target, case.ids, theirs).check(logits, features, 2e-5)


# ---------------------------------------------------------------------- pages


class Paged:
    """A pool of NaN and shuffled page tables wider than needed; what is left out is page 0."""

    def __init__(self, target: Qwen3, page_size: int) -> None:
        self.target, used = target, -(-LENGTH // page_size)
        self.pool = KVPool(target.config, 3 + BATCH * used, page_size, target.embed_tokens)
        self.pool.rows[:, :-1].fill_(float("nan"))
        shuffled = torch.randperm(2 + BATCH * used, generator=torch.Generator().manual_seed(3)) + 1
        self.table = torch.zeros(BATCH + 1, used + 2, dtype=torch.int64)  # the last row is inert
        self.table[:BATCH, :used] = shuffled[: BATCH * used].view(BATCH, used)
        self.keys = torch.arange((used + 2) * page_size)

    def chunks(self, ids: Tensor, spans: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """Flattened prompt chunks `(row, start, stop)`, as `prefill_step` runs them."""
        seen, index, done = [], [], 0
        for row, start, stop in spans:
            table, begin = self.table[row : row + 1], self.keys[start : start + 1]
            sights = sees(self.pool, table, begin, stop - start, stop, REFERENCE)
            seen.append((done, done + stop - start, sights))
            index.append(row_index(table, self.keys[None, start:stop], self.pool.page_size)[0])
            done += stop - start
        memory = RaggedMemory(self.pool.rows, torch.cat(index), REFERENCE, seen)
        flat = torch.cat([ids[row, start:stop] for row, start, stop in spans])
        where = torch.cat([self.keys[start:stop] for _, start, stop in spans])
        hidden, features = self.target(flat, where, memory, TAPS)
        assert features is not None
        return self.target.logits(hidden), features

    def block(self, ids: Tensor, start: Tensor, slack: int = 0) -> tuple[Tensor, Tensor]:
        """Rows [B+1, W] at `start` [B+1], as `verify_step` runs them; one row is inert."""
        positions = start[:, None] + self.keys[: ids.shape[1]]
        bound = int(start.max()) + ids.shape[1] + slack
        memory = paged_memory(self.pool, self.table, start, positions, bound, REFERENCE)
        hidden, features = self.target(ids, positions, memory, TAPS)
        assert features is not None
        return self.target.logits(hidden)[:BATCH], features[:BATCH]


def empty(case: Case) -> tuple[Tensor, Tensor]:
    nan = float("nan")
    features = torch.cat(case.theirs.outputs, -1)
    return torch.full_like(case.theirs.logits, nan), torch.full_like(features, nan)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_chunks(case: Case, page_size: int) -> None:
    """Both prompts in chunks of their own sizes, several chunks a forward."""
    rng, paged = random.Random(page_size), Paged(case.target, page_size)
    logits, features = empty(case)
    done = [0] * BATCH
    while min(done) < LENGTH:
        rows = [row for row in range(BATCH) if done[row] < LENGTH]
        rng.shuffle(rows)
        spans = [(row, done[row], min(LENGTH, done[row] + rng.randint(1, 17))) for row in rows]
        got, first = paged.chunks(case.ids, spans), 0
        for row, start, stop in spans:
            logits[row, start:stop] = got[0][first : first + stop - start]
            features[row, start:stop] = got[1][first : first + stop - start]
            first, done[row] = first + stop - start, stop
    case.check(logits, features)


def blocks(case: Case, page_size: int, widths: Callable[[int], tuple[int, int]]) -> None:
    """Decode both rows from different lengths on, W rows at a time, of which some are right."""
    paged = Paged(case.target, page_size)
    logits, features = empty(case)
    start = torch.tensor([1, 6, 0])
    got = paged.chunks(case.ids, [(0, 0, 1), (1, 0, 6)])
    for row, first, count in ((0, 0, 1), (1, 1, 6)):
        logits[row, :count], features[row, :count] = (x[first : first + count] for x in got)
    turn = 0
    while int(start.max()) < LENGTH:
        width, right = widths(turn)
        width = min(width, LENGTH - int(start.max()))
        right = min(right, width)
        columns = start[:BATCH, None] + torch.arange(width)
        ids = torch.zeros(BATCH + 1, width, dtype=torch.int64)
        ids[:BATCH] = case.ids.gather(1, columns)
        ids[:, right:] = (ids[:, right:] + 1) % 320  # refused; what they leave is overwritten
        got = paged.block(ids, start, slack=turn % 3 * page_size)
        for row in range(BATCH):
            logits[row, columns[row, :right]] = got[0][row, :right]
            features[row, columns[row, :right]] = got[1][row, :right]
        start[:BATCH] += right
        turn += 1
    for row in range(BATCH):  # rows end at different lengths
        logits[row, start[row] :] = case.theirs.logits[row, start[row] :]
        features[row, start[row] :] = torch.cat(case.theirs.outputs, -1)[row, start[row] :]
    case.check(logits, features)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_token_by_token(case: Case, page_size: int) -> None:
    blocks(case, page_size, lambda turn: (1, 1))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_verified_blocks(case: Case, page_size: int) -> None:
    blocks(case, page_size, lambda turn: (5, (1, 5, 3, 2, 4)[turn % 5]))


# ---------------------------------------------------------------------- taps


def test_tap_is_the_layer_itself(case: Case) -> None:
    """Index l + 1 of transformers' list, except that its last entry is normed already."""
    states, outputs = case.theirs.hidden_states, case.theirs.outputs
    _, features = dense(case, case.target)
    assert features is not None
    for layer, mine in enumerate(features.chunk(len(TAPS), -1)):
        close(mine, outputs[layer], 1e-9)
        assert (mine - states[layer]).abs().max() > 0.1
        if layer < len(TAPS) - 1:
            close(mine, states[layer + 1], 1e-9)
    assert (outputs[-1] - states[-1]).abs().max() > 0.1
    assert (features.chunk(len(TAPS), -1)[-1] - states[-1]).abs().max() > 0.1


@pytest.mark.parametrize("taps", [(2,), (3,), (0, 3), (3, 0, 2), (2, 1)])
def test_taps_in_listed_order(case: Case, taps: tuple[int, ...]) -> None:
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    _, features = case.target(case.ids, positions, DenseMemory(), taps)
    assert features is not None
    assert features.shape[-1] == len(taps) * case.target.config.hidden_size
    close(features, torch.cat([case.theirs.outputs[layer] for layer in taps], -1), 1e-9)


def test_no_taps(case: Case) -> None:
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    hidden, features = case.target(case.ids, positions, DenseMemory())
    assert features is None
    close(case.target.logits(hidden), case.theirs.logits, 1e-9)


# ---------------------------------------------------------------------- rotary


def test_every_rope_case_is_another_rope() -> None:
    """The cases above have power: no parameter set gives the frequencies of another."""
    made = {
        name: inverse_frequencies(TargetConfig.from_dict(TARGET | changes))
        for name, changes in CASES.items()
        if "head_dim" not in changes and name not in ("dynamic", "dynamic, new")
    }
    del made["yarn, mscale alone"]  # without mscale_all_dim it counts for nothing
    for (one, (a, scale_a)), (other, (b, scale_b)) in combinations(made.items(), 2):
        same = torch.allclose(a, b, rtol=1e-3) and abs(scale_a - scale_b) < 1e-3
        assert not same, (one, other)
