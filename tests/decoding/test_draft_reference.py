"""The drafter equals the reference implementation (PyPI package dflash), cycle after cycle.

There a cache is cropped back to the anchor and fed with the features of what was committed; here
blocks and refused rows stay in the pages and are overwritten. A third formulation keeps nothing:
it makes all context rows anew each cycle and masks by a rule written out here.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import combinations
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kit import DRAFT, make_draft
from nanodflash.decoding.kv_cache import KVPool, RowWriter, paged_memory, row_index
from nanodflash.models.dflash import DFlash
from nanodflash.ops import REFERENCE

BLOCK, MASK, LENGTH = 8, 319, 48
PROMPTS = (11, 4)
ACCEPTED = ((0, 7, 3, 7, 0, 1, 5), (7, 7, 0, 2, 6, 0, 0))


def sliding(window: int, *kinds: str, **more: Any) -> dict[str, Any]:
    """Config keys of a drafter whose first layer slides, or as `kinds` says."""
    return {
        "layer_types": [f"{kind}_attention" for kind in kinds or ("sliding", "full")],
        "sliding_window": window,
        "use_sliding_window": True,
    } | more


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, causal": {"is_causal": True},
    "full, not causal": {"is_causal": False},
    "window 5": sliding(5),
    "window 5, causal": sliding(5, is_causal=True),
    "window 5, not causal": sliding(5, is_causal=False),
    "window 16": sliding(16),
    "window 16, causal": sliding(16, is_causal=True),
    "window 16, not causal": sliding(16, is_causal=False),
    "window 1000": sliding(1000),
    "window 1000, not causal": sliding(1000, is_causal=False),
    "full, then sliding": sliding(9, "full", "sliding"),
    "all sliding": sliding(12, "sliding", "sliding", is_causal=False),
    "rope of its own": {"rope_theta": 5e5, "max_position_embeddings": 300},
    "taps of its own": {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [3, 0, 2]}},
    "shape of its own": sliding(7, num_attention_heads=6, num_key_value_heads=3, head_dim=16),
}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The package's module; the import takes seconds."""
    import dflash.model

    return dflash.model


@contextmanager
def widened(on: bool) -> Iterator[None]:
    """Let transformers' fp32 norms and rotary be fp64: the dtype is named when the code runs."""
    with pytest.MonkeyPatch.context() as patch:
        if on:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch, "float", torch.float64)
        yield


class Text:
    """Two texts, the target's features of them, and how much of each block is accepted."""

    def __init__(self, draft: DFlash, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(11)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        hidden = draft.config.hidden_size
        self.features = 2 * noise(2, LENGTH, draft.fc.shape[1])
        self.embedding, self.head = 0.3 * noise(320, hidden), noise(320, hidden)
        self.ids = torch.randint(0, 319, (2, LENGTH), generator=generator)

    def blocks(self, row: int) -> Iterator[tuple[int, int, Tensor]]:
        """Every cycle of a row: anchor position, proposals accepted, the embedded block [S, C]."""
        start = PROMPTS[row]
        for accepted in ACCEPTED[row]:
            block = torch.full((BLOCK,), MASK)
            block[0] = self.ids[row, start]
            yield start, accepted, self.embedding[block]
            start += accepted + 1


# ---------------------------------------------------------------------- the formulations


def theirs(
    reference: ModuleType, draft: DFlash, changes: dict[str, Any], text: Text, widen: bool
) -> list[list[Tensor]]:
    """Hidden states [S, C] of every cycle of both rows, as the package's generate loop runs."""
    with widened(widen), torch.no_grad():
        config = reference.Qwen3Config(**deepcopy(DRAFT | changes))
        model = reference.DFlashDraftModel(config).to(draft.fc.dtype).eval()
        model.load_state_dict({name: part.view() for name, part in draft.parts().items()})
        rows = []
        for row in range(2):
            cache, injected, made = reference._make_cache(config), 0, []
            for start, _, embedded in text.blocks(row):
                made.append(
                    model(
                        target_hidden=text.features[row : row + 1, injected:start],
                        noise_embedding=embedded[None],
                        position_ids=torch.arange(injected, start + BLOCK)[None],
                        past_key_values=cache,
                        use_cache=True,
                    )[0]
                )
                reference._crop_to(cache, start)
                injected = start
            rows.append(made)
        return rows


def ours(
    draft: DFlash, text: Text, page_size: int = 3, leftovers: bool = True
) -> list[list[Tensor]]:
    """The same by injection into NaN-filled pages and one paged forward for both rows.

    Args:
        leftovers: inject the refused rows too, as the commit step does; their features are NaN.
    """
    columns = LENGTH // page_size
    pool = KVPool(draft.config, 4 + 2 * columns, page_size, draft.fc)
    pool.rows[:, :-1].fill_(float("nan"))
    pages = torch.randperm(3 + 2 * columns, generator=torch.Generator().manual_seed(2)) + 1
    table = torch.zeros(3, columns, dtype=torch.int64)  # the last row is inert
    table[:2] = pages[: 2 * columns].view(2, columns)
    keys = torch.arange(columns * page_size)
    draft.prepare(len(keys))

    def inject(row: int, features: Tensor, start: int) -> None:
        where = keys[start : start + len(features)]
        index = row_index(table[row : row + 1], where[None], page_size)[0]
        draft.inject(features, where, RowWriter(pool.rows, index, REFERENCE))

    for row, prompt in enumerate(PROMPTS):  # in two chunks
        inject(row, text.features[row, :3], 0)
        inject(row, text.features[row, 3:prompt], 3)
    made: list[list[Tensor]] = [[], []]
    for cycle in zip(text.blocks(0), text.blocks(1), strict=True):
        start = torch.tensor([*(s for s, _, _ in cycle), 0])
        embedded = torch.stack([*(e for _, _, e in cycle), torch.zeros_like(cycle[0][2])])
        positions, bound = start[:, None] + keys[:BLOCK], int(start.max()) + BLOCK
        memory = paged_memory(pool, table, start, positions, bound, REFERENCE)
        hidden = draft(embedded, positions, memory)
        for row, (begin, accepted, _) in enumerate(cycle):
            made[row].append(hidden[row])
            run = text.features[row, begin : begin + BLOCK].clone()
            run[accepted + 1 :] = float("nan")
            inject(row, run if leftovers else run[: accepted + 1], begin)
    return made


def sees(changes: dict[str, Any], layer: int, query: int, key: int) -> bool:
    """The visibility rule by absolute positions (dflash.md 1.6)."""
    slides = changes.get("layer_types", ["full_attention"] * 2)[layer] == "sliding_attention"
    if slides and abs(query - key) >= changes["sliding_window"]:
        return False
    return key <= query or not changes.get("is_causal", slides)


def naive(draft: DFlash, changes: dict[str, Any], text: Text) -> list[list[Tensor]]:
    """The same with nothing kept: one key list a query, one head at a time."""
    weights = {name: part.view() for name, part in draft.parts().items()}
    config, dim = draft.config, draft.config.head_dim
    frequencies = config.rope.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def norm(x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def heads(x: Tensor, layer: str, name: str) -> Tensor:
        return (x @ weights[f"{layer}.{name}_proj.weight"].T).unflatten(-1, (-1, dim))

    def turn(x: Tensor, first: int) -> Tensor:
        angles = torch.arange(first, first + len(x))[:, None, None] * frequencies
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def forward(context: Tensor, h: Tensor) -> Tensor:
        c = norm(context @ weights["fc.weight"].T, "hidden_norm")
        for i in range(config.num_hidden_layers):
            name = f"layers.{i}.self_attn"
            x = norm(h, f"layers.{i}.input_layernorm")
            rows = torch.cat([c, x])
            q = turn(norm(heads(x, name, "q"), f"{name}.q_norm"), len(c))
            k = turn(norm(heads(rows, name, "k"), f"{name}.k_norm"), 0)
            v = heads(rows, name, "v")
            seen = torch.empty_like(q)
            for j in range(len(q)):
                keys = [p for p in range(len(rows)) if sees(changes, i, len(c) + j, p)]
                for head in range(q.shape[1]):
                    kv = head * k.shape[1] // q.shape[1]
                    scores = k[keys, kv] @ q[j, head] / math.sqrt(dim)
                    seen[j, head] = scores.softmax(0) @ v[keys, kv]
            h = h + seen.flatten(1) @ weights[f"{name}.o_proj.weight"].T
            name = f"layers.{i}.mlp"
            x = norm(h, f"layers.{i}.post_attention_layernorm")
            gate, up = (x @ weights[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
            h = h + (gate * gate.sigmoid() * up) @ weights[f"{name}.down_proj.weight"].T
        return norm(h, "norm")

    return [
        [forward(text.features[row, :start], block) for start, _, block in text.blocks(row)]
        for row in range(2)
    ]


def check(mine: list[list[Tensor]], other: list[list[Tensor]], tolerance: float) -> None:
    for row in range(2):
        assert len(mine[row]) == len(other[row]) == len(ACCEPTED[row])
        for a, b in zip(mine[row], other[row], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item())


def proposals(text: Text, made: list[list[Tensor]]) -> Tensor:
    """Ids [2, cycles, S-1] under the shared head; row 0 of a block is the anchor's."""
    return torch.stack([torch.stack(row) for row in made])[:, :, 1:].matmul(text.head.T).argmax(-1)


# ---------------------------------------------------------------------- tests


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
class TestEveryCase:
    """All ways to make the same hidden states, for each configuration."""

    def test_reference(self, reference: ModuleType, changes: dict[str, Any]) -> None:
        draft = make_draft(**changes)
        text = Text(draft)
        other = theirs(reference, draft, changes, text, widen=True)
        mine = ours(draft, text)
        check(mine, other, 1e-9)
        assert torch.equal(proposals(text, mine), proposals(text, other))
        assert proposals(text, mine).unique().numel() > 5

    def test_naive(self, changes: dict[str, Any]) -> None:
        draft = make_draft(**changes)
        text = Text(draft)
        wanted = naive(draft, changes, text)
        for page_size in (1, 3, 16):
            for leftovers in (False, True):
                check(ours(draft, text, page_size, leftovers), wanted, 1e-9)

    def test_unpatched(self, reference: ModuleType, changes: dict[str, Any]) -> None:
        """The reference as it is: fp32 norms and rotary even in an fp64 model."""
        draft = make_draft(**changes)
        text = Text(draft)
        check(ours(draft, text), theirs(reference, draft, changes, text, widen=False), 2e-5)

    def test_fp32(self, reference: ModuleType, changes: dict[str, Any]) -> None:
        draft = make_draft(torch.float32, **changes)
        text = Text(draft, torch.float32)
        check(ours(draft, text), theirs(reference, draft, changes, text, widen=False), 2e-5)


def test_scaled_rope(reference: ModuleType) -> None:
    """The drafter's own scaling, by its own keys."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    changes = sliding(16, rope_theta=1000.0, rope_scaling=scaling)
    draft = make_draft(**changes)
    text = Text(draft)
    check(ours(draft, text), theirs(reference, draft, changes, text, widen=True), 1e-9)


def test_cases_differ() -> None:
    """Every window, causality and rope above changes the proposals: the comparisons have power."""
    made = {}
    for name, changes in CASES.items():
        draft = make_draft(**changes)
        if draft.fc.shape == (64, 128) and draft.config.head_dim == 32:
            text = Text(draft)
            made[name] = proposals(text, ours(draft, text))
    # the same rules by other words
    del made["full, not causal"], made["window 5, causal"], made["window 16, causal"]
    del made["window 1000, not causal"]
    for one, other in combinations(made, 2):
        assert not torch.equal(made[one], made[other]), (one, other)


def test_past_the_limit_of_the_drafter() -> None:
    """Positions are clamped there: nothing breaks, and what lies before is not disturbed."""
    limit = 24
    free, bound = make_draft(), make_draft(max_position_embeddings=limit)
    text = Text(free)
    wanted, got = ours(free, text), ours(bound, text)
    past = 0
    for row in range(2):
        for (start, _, _), a, b in zip(text.blocks(row), got[row], wanted[row], strict=True):
            assert a.isfinite().all()
            if start + BLOCK <= limit:
                torch.testing.assert_close(a, b, rtol=0, atol=0)
            else:
                past += 1
                assert not torch.equal(a, b)
    assert past > 5
