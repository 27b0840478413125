"""Rows of a batch, each with its own text, budget, stops and acceptance, by the oracle in fp64."""

import random
from collections.abc import Sequence as Ids
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kit
from decoding.test_cycle import (
    LIMIT,
    NEW,
    PROMPTS,
    SAMPLINGS,
    changed,
    check_pools,
    draft,
    fill,
    simulate,
    target,
    text,
)
from kit import Script
from nanodflash import SamplingParams
from nanodflash.config import ACTIVE, BUDGET, FINISHED, RUNNING, STOP, EngineConfig
from nanodflash.decoding.cycle import (
    Decoder,
    commit_step,
    draft_step,
    verify_step,
)
from nanodflash.decoding.kv_cache import row_index
from nanodflash.decoding.plan import (
    ACCEPTED,
    EMITTED,
    EPOCH,
    FINISH,
    LENGTH,
    RAW_ACCEPTED,
    RECORD,
    Facts,
    Span,
)


class Row(NamedTuple):
    """One request of a batch: what it asks for and what its proposals are made of."""

    sampling: str
    budget: int
    stop_ids: Ids[int] = ()

    @property
    def prompt(self) -> list[int]:
        return PROMPTS[self.sampling]

    def expected(self) -> tuple[list[int], int]:
        """New ids and FINISH, by the oracle's text."""
        ids = text(self.sampling)[: self.budget]
        for place, token in enumerate(ids):
            if token in self.stop_ids:
                return ids[: place + 1], STOP
        return ids, BUDGET


class Scripts:
    """A `Script` a row of the batch; padding rows get anything."""

    def __init__(self, rows: Ids[Row], size: int, pattern: str) -> None:
        self.size = size
        self.each = [Script(row.prompt + text(row.sampling), size, pattern) for row in rows]

    def __call__(self, tokens: Tensor, length: Tensor) -> Tensor:
        made = [script(tokens, length[i : i + 1]) for i, script in enumerate(self.each)]
        padding = torch.full((len(length) - len(made), self.size - 1), 5)
        return torch.cat([*made, padding])


class Batch:
    """Drives the step functions for several requests, on scattered slots and pages."""

    def __init__(
        self, rows: Ids[Row], size: int, page: int, pattern: str | None, padding: int = 2
    ) -> None:
        self.rows, self.size = rows, size
        pages = -(-(LIMIT + size) // page) * len(rows) + 9
        config = EngineConfig(
            max_model_len=LIMIT,
            block_size=size,
            page_size=page,
            num_pages=pages,
            max_seqs=len(rows) + 2,
        )
        proposer = Scripts(rows, size, pattern) if pattern else None
        self.decoder = Decoder(target(), draft(), config, proposer)
        fill(self.decoder)
        self.slots = random.Random(4).sample(range(config.max_seqs), len(rows))
        self.padding = [config.max_seqs] * padding
        free = random.Random(5).sample(range(1, pages), pages - 1)
        for number, (slot, row) in enumerate(zip(self.slots, rows, strict=True)):
            params = SamplingParams(**SAMPLINGS[row.sampling])
            state = self.decoder.state
            count = -(-(len(row.prompt) + row.budget + size) // page)
            kit.admit(
                state,
                slot,
                row.prompt,
                params,
                budget=row.budget,
                seed=params.seed or 0,
                stop_ids=row.stop_ids,
                epoch=100 + number,
                draft_limit=LIMIT,
                pages=[free.pop() for _ in range(count)],
            )
        self.records: list[list[list[int]]] = [[] for _ in rows]

    def facts(self, width: int, speculate: bool = True) -> Facts:
        greedy = all(row.sampling == "greedy" for row in self.rows)
        bound = int(self.decoder.state.len[self.slots].max()) + self.size
        return Facts(width, "greedy" if greedy else "sampled", speculate, bound)

    def prefill(self, chunk: int, together: bool = True, speculate: bool = True) -> None:
        """All prompts in chunks: one step takes a chunk of each, or of one alone."""
        spans = [
            (start, number, Span(slot, start, min(start + chunk, size), start + chunk >= size))
            for number, (slot, row) in enumerate(zip(self.slots, self.rows, strict=True))
            for size in [len(row.prompt)]
            for start in range(0, size, chunk)
        ]
        steps: dict[Any, list[tuple[int, Span]]] = {}
        for start, number, span in sorted(spans):
            steps.setdefault(start if together else (number, start), []).append((number, span))
        for step in steps.values():
            ending = [number for number, span in step if span.last]
            facts = self.facts(1, speculate)
            result = kit.prefill(self.decoder, [span for _, span in step], facts)
            assert (result is None) == (not ending)
            lines = [] if result is None else result.record.tolist()
            for number, line in zip(ending, lines, strict=True):
                self.records[number].append(line)

    def cycle(self, width: int, speculate: bool = True) -> None:
        """One cycle of all rows, finished ones and padding included."""
        slots = torch.tensor([*self.slots, *self.padding])
        facts = self.facts(width, speculate)
        proposals = draft_step(self.decoder, slots, facts) if width > 1 else None
        verified = verify_step(self.decoder, slots, proposals, facts)
        lines = commit_step(self.decoder, slots, verified).record.tolist()
        for records, line in zip(self.records, lines, strict=False):
            records.append(line)
        for line in lines[len(self.rows) :]:
            assert line[:EPOCH] == [0] * EPOCH, "a padding row emitted or moved"

    def ids(self, number: int) -> list[int]:
        return [
            token
            for line in self.records[number]
            for token in line[RECORD : RECORD + line[EMITTED]]
        ]

    def running(self) -> bool:
        return any(
            records[-1][FINISH] == RUNNING for records in self.records if records[-1][EMITTED]
        )

    def check(self) -> None:
        """Ids, reasons, lengths, epochs and states of all rows, by the oracle."""
        for number, (slot, row) in enumerate(zip(self.slots, self.rows, strict=True)):
            ids, reason = row.expected()
            lines = [line for line in self.records[number] if line[EMITTED]]
            assert self.ids(number) == ids
            assert [line[FINISH] for line in lines] == [RUNNING] * (len(lines) - 1) + [reason]
            assert {line[EPOCH] for line in self.records[number]} == {100 + number}
            end, state = len(row.prompt) + len(ids) - 1, self.decoder.state
            assert self.records[number][-1][LENGTH] == state.len[slot] == end
            assert state.state[slot] == FINISHED
            assert state.tokens[slot, : end + 1].tolist() == row.prompt + ids
            assert state.anchor[slot] == ids[-1]
            # a finished row goes on in the batch: nothing of it may move
            for line in self.records[number][len(lines) :]:
                assert line[:LENGTH] == [0] * LENGTH


def places(batch: Batch, width: int) -> set[int]:
    """Where the active rows of a batch may write: width positions from `len` on, and page 0."""
    state, page = batch.decoder.state, batch.decoder.target_pool.page_size
    allowed = set(range(page))
    for slot in batch.slots:
        if state.state[slot] == ACTIVE:
            positions = state.len[slot] + torch.arange(width)
            allowed |= set(
                row_index(state.page_table[slot][None], positions[None], page)[0].tolist()
            )
    return allowed


ROWS = (
    Row("greedy", 9),
    Row("plain", NEW),
    Row("top_k", NEW - 3, (-1,)),  # a stop id that no token has
)


def rows_with_stop() -> list[Row]:
    """One row stops after a few tokens, one at its first, one never; budgets and prompts differ."""
    return [*ROWS, Row("top_p", NEW, (text("top_p")[5],)), Row("all", NEW, (text("all")[0], 4000))]


@pytest.mark.parametrize(
    ("pattern", "size", "page", "chunk"),
    [
        ("right", 8, 4, 512),
        ("wrong", 4, 1, 3),
        ("third wrong", 16, 64, 5),
        ("alternating", 8, 3, 1),
        ("random", 2, 4, 7),
        (None, 8, 5, 4),
    ],
)
def test_rows_of_a_batch(pattern: str | None, size: int, page: int, chunk: int) -> None:
    """Each row is what it is alone, and writes only where it may."""
    batch = Batch(rows_with_stop(), size, page, pattern)
    decoder = batch.decoder
    assert decoder.draft_pool is not None
    batch.prefill(chunk)
    for _ in range(NEW):
        pools = (decoder.target_pool, decoder.draft_pool)
        before, allowed = [pool.rows.clone() for pool in pools], places(batch, size)
        batch.cycle(size)
        for old, pool in zip(before, pools, strict=True):
            assert changed(old, pool) <= allowed
        if not batch.running():
            break
    batch.cycle(size)  # all rows finished
    batch.check()
    for number, row in enumerate(batch.rows):
        ids = batch.ids(number)
        check_pools(decoder, batch.slots[number], (row.prompt + ids)[:-1])
        lines = [line for line in batch.records[number][1:] if line[EMITTED]]
        if pattern is not None:
            counts = [(line[EMITTED], line[ACCEPTED]) for line in lines]
            cycles = simulate(len(row.prompt), len(ids) - 1, size, pattern)
            assert counts == [(emitted, accepted) for emitted, accepted, _ in cycles]
        for line in lines:
            assert line[RAW_ACCEPTED] >= line[ACCEPTED]
            assert line[EMITTED] in (line[ACCEPTED], line[ACCEPTED] + 1)


@pytest.mark.parametrize("speculate", [True, False])
def test_rows_of_width_one(speculate: bool) -> None:
    """Nothing drafted: taps and injection still fill the draft pool, unless switched off."""
    batch = Batch(ROWS, 8, 4, None)
    assert batch.decoder.draft_pool is not None
    batch.prefill(5, speculate=speculate)
    while batch.running():
        batch.cycle(1, speculate)
    batch.check()
    for number, row in enumerate(batch.rows):
        ids = (row.prompt + batch.ids(number))[:-1]
        check_pools(batch.decoder, batch.slots[number], ids, tapped=speculate)
    assert speculate or batch.decoder.draft_pool.rows[:, :-1].isnan().all()


def test_widths_may_alternate() -> None:
    """The host may verify a block in one step and a single token in the next."""
    batch = Batch(ROWS, 8, 4, "alternating")
    batch.prefill(512)
    for width in [8, 1, 1, 4, 8, 3] * NEW:
        if not batch.running():
            break
        batch.cycle(width)
    batch.check()


@pytest.mark.parametrize("chunk", [1, 4, 512])
@pytest.mark.parametrize("together", [True, False])
def test_ragged_prefill(chunk: int, together: bool) -> None:
    """Chunks of several prompts in one step leave what separate steps leave."""
    batch = Batch(rows_with_stop(), 8, 4, None)
    before = batch.decoder.target_pool.rows.clone()
    batch.prefill(chunk, together)
    owned = {0}
    for number, (slot, row) in enumerate(zip(batch.slots, batch.rows, strict=True)):
        assert batch.ids(number) == text(row.sampling)[:1]
        check_pools(batch.decoder, slot, row.prompt)
        positions = torch.arange(len(row.prompt))[None]
        owned |= set(
            row_index(batch.decoder.state.page_table[slot][None], positions, 4)[0].tolist()
        )
    assert changed(before, batch.decoder.target_pool) <= owned


@pytest.mark.parametrize("pattern", ["right", "alternating", "wrong"])
def test_budgets_and_stops_in_one_batch(pattern: str) -> None:
    """Every budget in 1 .. 3S with every stop place in 0 .. 3S: the earliest terminator wins."""
    size, ids = 4, text("greedy")
    assert len(set(ids[: 3 * size + 1])) == 3 * size + 1, "a stop place is not a first occurrence"
    rows = [
        Row("greedy", budget, (ids[stop],))
        for budget in range(1, 3 * size + 1)
        for stop in range(3 * size + 1)
    ]
    batch = Batch(rows, size, 8, pattern)
    batch.prefill(512)
    while batch.running():
        batch.cycle(size)
    batch.check()
