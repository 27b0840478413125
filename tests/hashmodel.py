"""A device without tensors: K/V rows hold token ids, the next token is a hash of what is read.

It executes a `StepPlan` as runner and cycle do, and trusts nothing: every id is read through the
page table, and a page that is read too early, too late or by the wrong row gives other ids than
the slot's own. `HashPool` is the real `PagePool` with the rows of both pools in it; a page holds
poison from the moment it is handed out or freed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanodflash.config import ACTIVE, BUDGET, FINISHED, FREE, RUNNING, STOP, EngineConfig
from nanodflash.decoding.plan import Admission, StepPlan
from nanodflash.engine.paging import PagePool

POISON, MASK = -7, -5  # of a page that nobody wrote; of a drafted place
# A step can fail before, between and after its parts.
STAGES = ("start", "admitted", "prefilled", "drafted", "verified", "done")


def next_token(ids: Sequence[int], seed: int, vocab: int) -> int:
    """The token at position `len(ids)`: a function of the ids, the seed and the position."""
    return hash((seed, len(ids), *ids)) % vocab


def reference(
    prompt: Sequence[int], budget: int, stop_ids: Sequence[int], seed: int, vocab: int
) -> tuple[list[int], str]:
    """What a request must give: its new ids and the finish reason."""
    ids = list(prompt)
    for _ in range(budget):
        ids.append(next_token(ids, seed, vocab))
        if ids[-1] in stop_ids:
            return ids[len(prompt) :], "stop"
    return ids[len(prompt) :], "length"


class StepFailed(Exception):
    """What a step raises when it is told to fail."""


class HashPool(PagePool):
    """The real pool, with the ids that its pages hold."""

    def __init__(self, num_pages: int, page_size: int, drafts: bool) -> None:
        super().__init__(num_pages, page_size)
        self.target = [[POISON] * page_size for _ in range(num_pages)]
        self.draft = [[POISON] * page_size for _ in range(num_pages)] if drafts else None
        self.pools = [pool for pool in (self.target, self.draft) if pool is not None]
        self.published: set[int] = set()

    def _poison(self, page: int) -> None:
        for pool in self.pools:
            pool[page] = [POISON] * self.page_size

    def allocate(self, count: int) -> list[int]:
        pages = super().allocate(count)
        assert 0 not in pages, "the dummy page was handed out"
        for page in pages:
            self._poison(page)
            self.published.discard(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        for page in pages:
            if not self.owners(page) and page not in self.published:
                self._poison(page)

    def match(self, ids: Sequence[int]) -> list[int]:
        taken = super().match(ids)
        for place, page in enumerate(taken):
            self._holds(page, ids[place * self.page_size : (place + 1) * self.page_size])
        return taken

    def publish(self, before: int, ids: Sequence[int], page: int) -> bool:
        assert page not in self.published, "a page was published twice"
        assert before == 0 or before in self.published, "published behind a page that is not"
        new = super().publish(before, ids, page)
        if new:
            assert self.owners(page) == 1, "published by a sequence that shares it"
            self._holds(page, ids)
            self.published.add(page)
        return new

    def _holds(self, page: int, ids: Sequence[int]) -> None:
        for pool in self.pools:
            assert pool[page] == list(ids), f"page {page} holds {pool[page]}, wanted {list(ids)}"


@dataclass
class Slot:
    """Per-slot state, with the names of `DeviceState`."""

    table: list[int]
    tokens: list[int]
    len: int = 0
    anchor: int = 0
    budget: int = 0
    state: int = FREE
    epoch: int = 0
    seed: int = 0
    draft_limit: int = 0
    stop_ids: Sequence[int] = ()
    doomed: bool = False  # a step that named it failed: what it computes is nobody's


@dataclass
class Device:
    """Runs plans.

    Attributes:
        skill: share of the proposals that are right.
    """

    config: EngineConfig
    pool: HashPool
    vocab: int
    skill: float
    rng: random.Random
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        places = self.config.max_model_len + self.config.block_size
        for _ in range(self.config.max_seqs):
            self.slots.append(Slot([0] * self.config.pages_per_seq, [POISON] * places))

    def run(self, plan: StepPlan, fails: str | None = None) -> tuple[list, list]:
        """The records of its finals and of its rows; or `StepFailed`, at one of `STAGES`."""
        named = [span.slot for span in plan.spans] + plan.rows
        assert len(set(named)) == len(named), "a step names a slot twice"
        try:
            self._stage("start", fails)
            for admission in plan.admissions:
                self._admit(admission)
            for slot, first, pages in plan.deltas:
                assert first + len(pages) <= self.config.pages_per_seq
                self.slots[slot].table[first : first + len(pages)] = pages
            self._stage("admitted", fails)
            finals = self._prefill(plan)
            self._stage("prefilled", fails)
            rows = self._cycle(plan, fails)
            self._stage("done", fails)
        except StepFailed:
            for slot in named:
                self.slots[slot].doomed = True
            raise
        return finals, rows

    def _stage(self, stage: str, fails: str | None) -> None:
        if stage == fails:
            raise StepFailed(stage)

    def _admit(self, given: Admission) -> None:
        places, columns = len(self.slots[0].tokens), self.config.pages_per_seq
        ids, pages = list(given.ids), list(given.pages)
        table = pages + [0] * (columns - len(pages))
        tokens = ids + [POISON] * (places - len(ids))
        assert (len(table), len(tokens)) == (columns, places), "more than a slot can hold"
        self.slots[given.slot] = Slot(
            table, tokens, len(ids) - 1, ids[-1], given.budget, FREE, given.epoch, given.seed,
            given.draft_limit, given.stop_ids,
        )  # fmt: skip

    def _prefill(self, plan: StepPlan) -> list[list[int]]:
        pools = self.pool.pools if plan.facts.speculate else [self.pool.target]
        chunks = [(self.slots[span.slot], span) for span in plan.spans]
        for slot, span in chunks:  # nothing may be read that this very step writes for another
            assert 0 <= span.start < span.stop, "an empty chunk"
            assert slot.state == FREE or slot.doomed, "a prompt for a row that is alive"
            self._sees(slot, slot.tokens[: span.start], pools)
        for slot, span in chunks:
            self._write(slot, span.start, slot.tokens[span.start : span.stop], pools)
        records = []
        for slot, span in chunks:
            ids = self._sees(slot, slot.tokens[: span.stop], pools)
            if not span.last:
                continue
            slot.state = ACTIVE
            assert span.stop == slot.len + (not span.resumed) or slot.doomed, "a wrong last chunk"
            if not span.resumed:
                records.append(self._commit(slot, [next_token(ids, slot.seed, self.vocab)], 0))
        return records

    def _cycle(self, plan: StepPlan, fails: str | None) -> list[list[int]]:
        width, speculate = plan.facts.width, plan.facts.speculate
        pools = self.pool.pools if speculate else [self.pool.target]
        blocks = []
        for slot in map(self.slots.__getitem__, plan.rows):
            end = slot.len + width
            assert end < len(slot.tokens) or slot.doomed, "a row leaves its slot"
            if slot.state == ACTIVE:
                assert end <= plan.facts.kv_bound or slot.doomed, "kv_bound is too low"
                self._sees(slot, slot.tokens[: slot.len], pools)
                blocks.append((slot, self._propose(slot, width)))
        if speculate and self.pool.draft is not None:
            for slot, block in blocks:
                drafted = [slot.anchor] + [MASK] * (len(block) - 1)
                self._write(slot, slot.len, drafted, [self.pool.draft])
        self._stage("drafted", fails)
        for slot, block in blocks:
            self._write(slot, slot.len, block, pools)
        verified = {id(slot): self._verify(slot, block) for slot, block in blocks}
        self._stage("verified", fails)
        nothing: tuple[list[int], int] = ([0] * width, 0)
        rows = [self.slots[slot] for slot in plan.rows]
        return [self._commit(slot, *verified.get(id(slot), nothing)) for slot in rows]

    def _propose(self, slot: Slot, width: int) -> list[int]:
        """Anchor and proposals; nothing behind a wrong one matters."""
        ids = [*slot.tokens[: slot.len], slot.anchor]
        while len(ids) < slot.len + width and self.rng.random() < self.skill:
            ids.append(next_token(ids, slot.seed, self.vocab))
        while len(ids) < slot.len + width:
            ids.append(self.rng.randrange(self.vocab))
        return ids[slot.len :]

    def _verify(self, slot: Slot, block: list[int]) -> tuple[list[int], int]:
        """The target's tokens, and how many proposals it agrees with."""
        ids = self._sees(slot, slot.tokens[: slot.len] + block, [self.pool.target])
        limit = max(slot.draft_limit - slot.len - 1, 0)
        tokens: list[int] = []
        for place in range(1, len(block) + 1):
            tokens.append(next_token(ids[: slot.len + place], slot.seed, self.vocab))
            if place > limit or block[place : place + 1] != tokens[-1:]:
                break
        return tokens + [0] * (len(block) - len(tokens)), len(tokens) - 1

    def _commit(self, slot: Slot, tokens: list[int], accepted: int) -> list[int]:
        """Cut the run at a stop id or the budget, move the slot, and make its record."""
        emitted, finish = 0, RUNNING
        if slot.state == ACTIVE:
            emitted = min(accepted + 1, slot.budget)
            finish = BUDGET if emitted == slot.budget else RUNNING
            stops = [i for i in range(emitted) if tokens[i] in slot.stop_ids]
            if stops:
                emitted, finish = stops[0] + 1, STOP
            slot.tokens[slot.len + 1 : slot.len + 1 + len(tokens)] = tokens
            slot.anchor = tokens[emitted - 1] if emitted else slot.anchor
            slot.len, slot.budget = slot.len + emitted, slot.budget - emitted
            slot.state = ACTIVE if finish == RUNNING else FINISHED
        head = [emitted, min(accepted, emitted), accepted, finish, slot.len, slot.epoch]
        return head + tokens

    def _write(self, slot: Slot, start: int, ids: list[int], pools: list) -> None:
        size = self.config.page_size
        for position, token in enumerate(ids, start):
            page = slot.table[position // size]
            assert page != 0, f"position {position} has no page"
            assert self.pool.owners(page) == 1, f"page {page} is not this row's alone"
            assert page not in self.pool.published, f"page {page} is in the prefix cache"
            for pool in pools:
                pool[page][position % size] = token

    def _sees(self, slot: Slot, wanted: list[int], pools: list) -> list[int]:
        """Read `wanted` through the page table; all pools must hold exactly that."""
        seen: list[int] = []
        pages = slot.table[: -(-len(wanted) // self.config.page_size)]
        for pool in reversed(pools):
            seen = [token for page in pages for token in pool[page]][: len(wanted)]
            assert seen == wanted or slot.doomed, f"a row reads {seen}, wanted {wanted}"
        return seen
