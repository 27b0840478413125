"""The races of the checklist that only a GPU would show, R3, R10, R13, R14, and what else is
held by structure: each rule by a test that fails when it is taken out.
"""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kit
from engine.test_races import Patch
from manual import ManualStream
from nanodflash import LLM, SamplingParams, ops
from nanodflash.config import ACTIVE, FREE, EngineConfig
from nanodflash.decoding import packet
from nanodflash.decoding.cycle import Decoder
from nanodflash.decoding.plan import EMITTED, EPOCH, FINISH, Admission, Facts, Span, StepPlan
from nanodflash.engine import closures, engine
from nanodflash.engine.runner import DEPTH, RingSlot, Runner
from nanodflash.engine.scheduler import Scheduler
from nanodflash.engine.sequence import Sequence as HostSequence
from nanodflash.engine.steps import ModelSteps
from nanodflash.engine.streams import CpuStream, InlineStream

SIZE, LONGEST = 4, 40
TARGET = {"num_hidden_layers": 2, "intermediate_size": 64}
DRAFT = {
    "num_target_layers": 2,
    "intermediate_size": 64,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 1]},
}


class Bench:
    """A decoder and plans by hand, in slots 0 and 1 of 3; the spare slot is 3."""

    spare = 3

    def __init__(self, stream: Any = None, graphs: bool = False, proposer: Any = None) -> None:
        self.config = EngineConfig(
            max_model_len=LONGEST, block_size=SIZE, page_size=4, num_pages=24, max_seqs=3
        )
        target, draft = kit.make_target(**TARGET), kit.make_draft(**DRAFT)
        self.decoder = Decoder(target, draft, self.config, proposer)
        self.steps = ModelSteps(self.decoder, graphs)
        self.runner = Runner(lambda _: self.steps, stream or InlineStream(), self.config)
        self.number, self.text = 0, []

    def run(self, plan: StepPlan) -> Any:
        return kit.run_plan(self.runner, plan)

    def start(
        self, slot: int, first_page: int, stops: tuple[int, ...] = (), budget: int = 20
    ) -> list[int]:
        """A prompt of 5 in pages of its own; its first record."""
        prompt, self.number = [7 * slot + i for i in range(5)], self.number + 1
        pages = [*range(first_page, first_page + 8)]
        given = Admission(
            slot, self.number, prompt, 5, SamplingParams(), budget, 0, stops, LONGEST, pages
        )
        spans = [Span(slot, 0, 5, last=True)]
        results = self.run(StepPlan(self.number, self.facts(1), [given], [], spans))
        self.text = [*prompt, *results.finals[0][-1:]]
        return results.finals[0]

    def cycle(self, *rows: int) -> list[list[int]]:
        """The records of one cycle."""
        self.number += 1
        return self.run(StepPlan(self.number, self.facts(SIZE), rows=list(rows))).rows

    def facts(self, width: int) -> Facts:
        return Facts(width, "greedy", True, 32)

    def pages(self, first: int) -> list[Tensor]:
        """Both pools, from a page on."""
        pools = (self.decoder.target_pool, self.decoder.draft_pool)
        return [pool.rows[:, first:].clone() for pool in pools if pool is not None]

    def standing(self, slot: int) -> tuple[Any, ...]:
        """What a slot is; its budget, and ids behind its length, mean nothing once it is inert."""
        state = self.decoder.state
        length = int(state.len[slot])
        numbers = [int(t[slot]) for t in (state.anchor, state.state, state.epoch)]
        ids = state.tokens[slot, : length + 1].tolist()
        return length, numbers, ids, state.page_table[slot].tolist()


def leaves_no_trace(bench: Bench, pad: int) -> bool:
    """Whether row 0, which has pages 1 to 8, and a padding row that names `pad` do as 0 alone."""
    alone = Bench()
    alone.start(0, 1)
    (wanted,) = alone.cycle(0)
    before = bench.standing(pad), bench.pages(9)
    record, padding = bench.cycle(0, pad)
    assert record == wanted
    same = bench.standing(pad) == before[0] and padding[EMITTED] == 0
    return same and all(map(torch.equal, bench.pages(9), before[1]))


def test_r11_padding_rows_name_the_spare_slot() -> None:
    """It is never active, and its page table is the dummy page: whatever was there before."""
    bench = Bench()
    bench.start(0, 1)
    assert leaves_no_trace(bench, bench.spare)
    assert bench.decoder.state.state[bench.spare] == FREE
    assert not bench.decoder.state.page_table[bench.spare].any()


def test_r11_a_stale_row_would_leave_one() -> None:
    """A slot with the length, pages and state of who was there before: what padding must not be."""
    bench = Bench()
    bench.start(0, 1)
    state = bench.decoder.state
    state.page_table[2, :8], state.len[2] = torch.arange(9, 17), 6
    assert leaves_no_trace(bench, 2)
    bench = Bench()
    bench.start(0, 1)
    state = bench.decoder.state
    state.page_table[2, :8], state.len[2], state.state[2] = torch.arange(9, 17), 6, ACTIVE
    assert not leaves_no_trace(bench, 2)


def test_r12_a_live_slot_for_padding_would_leave_one() -> None:
    bench = Bench()
    bench.start(0, 1)
    bench.start(1, 9)
    assert not leaves_no_trace(bench, 1)


def test_r12_the_scheduler_knows_neither_page_0_nor_the_spare_slot() -> None:
    config = EngineConfig(max_model_len=8, page_size=4, num_pages=9, max_seqs=3)
    made = Scheduler(config, 8, True, lambda *_: None)
    assert sorted(made.pages.allocate(made.pages.available)) == [*range(1, 9)]
    assert sorted(made._slots) == [0, 1, 2]
    assert len(Bench().decoder.state.len) == Bench().config.max_seqs + 1


def surplus_is_inert() -> bool:
    """Whether a row that has stopped, in the step launched behind, leaves everything as it was."""
    bench, known = Bench(), Bench()
    known.start(0, 1)
    token = known.cycle(0)[0][EPOCH + 1]
    bench.start(0, 1, stops=(token,))
    (record,) = bench.cycle(0)
    assert (record[EMITTED], record[FINISH]) == (1, 1)
    before = bench.standing(0), bench.pages(1)
    (surplus,) = bench.cycle(0)
    same = bench.standing(0) == before[0] and surplus[EMITTED] == 0
    return same and all(map(torch.equal, bench.pages(1), before[1]))


def test_r5_a_row_that_has_stopped_is_frozen_on_the_device(monkeypatch: Patch) -> None:
    """Nothing is written to its pages, in either pool, whoever has them by then."""
    assert surplus_is_inert()
    monkeypatch.setattr("nanodflash.ops.tokens.FINISHED", ACTIVE)
    assert not surplus_is_inert()


def emitted_past_a_stop() -> int:
    """Tokens that a device emits behind a stop id in the middle of an accepted block."""
    known, text = Bench(), []
    known.start(0, 1)
    while len(text) < 12:
        (record,) = known.cycle(0)
        text += record[EPOCH + 1 : EPOCH + 1 + record[EMITTED]]
    text = [*known.text, *text]
    place = next(i for i in range(8, 12) if text[i] not in text[5:i])
    bench = Bench(proposer=kit.Script(text, SIZE, "right"))
    seen = [bench.start(0, 1, stops=(text[place],))[EPOCH + 1]]
    for _ in range(4):
        (record,) = bench.cycle(0)
        seen += record[EPOCH + 1 : EPOCH + 1 + record[EMITTED]]
    assert seen[: place - 4] == text[5 : place + 1]
    return len(seen) - (place - 4)


def test_r16_the_device_cuts_at_a_stop_id(monkeypatch: Patch) -> None:
    assert emitted_past_a_stop() == 0
    cut = ops.cut_run

    def uncut(tokens: Tensor, accepted: Tensor, budget: Tensor, stops: Tensor, offsets: Any) -> Any:
        return cut(tokens, accepted, budget, torch.full_like(stops, -1), offsets)

    monkeypatch.setattr("nanodflash.ops.tokens.cut_run", uncut)
    assert emitted_past_a_stop() > 0


def late_record() -> list[int]:
    """The ids of a request after a record that carries another stay's epoch."""
    config = EngineConfig(max_model_len=20, block_size=4, page_size=4, max_seqs=1)
    made = Scheduler(config, 20, True, lambda *_: None)
    sequence = HostSequence([1, 2, 3], SamplingParams(), 10, 0, [], True, None)
    made.add(sequence)
    assert made.plan() is not None
    made.commit([[1, 0, 0, 0, 3, sequence.epoch, 7]], [])
    assert made.plan() is not None
    made.commit([], [[2, 1, 1, 0, 5, sequence.epoch - 1, 8, 9, 0, 0]])
    return sequence.token_ids


def test_r9_a_record_of_another_stay_is_dropped(monkeypatch: Patch) -> None:
    assert late_record() == [7]
    take = Scheduler._take

    def any_epoch(self: Scheduler, sequence: HostSequence, record: Any, *given: Any) -> None:
        take(self, sequence, [*record[:EPOCH], sequence.epoch, *record[EPOCH + 1 :]], *given)

    monkeypatch.setattr(Scheduler, "_take", any_epoch)
    assert late_record() == [7, 8, 9]


# ---------------------------------------------------------------------- R3: one writer

VIEWS = {"aten.slice.Tensor", "aten.split_with_sizes.default", "aten.detach.default"}


class Recorded(TorchDispatchMode):
    """The names of all operations that its thread does."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.add(str(function))
        return function(*args, **(kwargs or {}))


def operations(pair: Any, patch: Patch) -> dict[str, set[str]]:
    """What each thread of an engine with overlap asks of torch."""
    seen: dict[str, set[str]] = {"_launch": set(), "_commit": set(), "_hand_over": set()}

    def record(name: str) -> None:
        method = getattr(engine.Engine, name)

        def recorded(self: Any, *given: Any) -> Any:
            with Recorded(seen[name]):
                return method(self, *given)

        patch.setattr(engine.Engine, name, recorded)

    for name in seen:
        record(name)
    with LLM(pair.target, pair.draft, dtype="fp64", overlap=True, page_size=8) as llm:
        params = [SamplingParams(max_new_tokens=9, logprobs=2 * (i % 2) or None) for i in range(4)]
        llm.generate([[5, 6, 7 + i] for i in range(4)], params)
    return seen


def test_r3_only_the_streams_work_touches_the_device(pair: Any, monkeypatch: Patch) -> None:
    """Beside it there are views of buffers: what may change the device has one writer."""
    seen = operations(pair, monkeypatch)
    assert all(names <= VIEWS for names in seen.values()), seen


def test_r3_a_second_writer_would_be_seen(pair: Any, monkeypatch: Patch) -> None:
    copy_in = Runner._copy_in

    def direct(self: Runner, slot: RingSlot, values: Any, *given: Any) -> Any:
        # It writes nothing: a real writer may lose an admission, and the run would not end.
        self._packet[:0].copy_(torch.from_numpy(values)[:0])
        return copy_in(self, slot, values, *given)

    monkeypatch.setattr(Runner, "_copy_in", direct)
    seen = operations(pair, monkeypatch)
    assert "aten.copy_.default" in seen["_launch"]


# ---------------------------------------------------------------------- R10, R14: static buffers


class Watched(CpuStream):
    """Notes what is copied where, and the tensors that are alive at every copy."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []
        self.alive: list[int] = []
        self.counted = 0
        super().__init__()

    def copy(self, into: Tensor, source: Tensor) -> Any:
        self.copies.append((into.data_ptr(), source.data_ptr()))
        event = super().copy(into, source)
        self.submit(self._count)
        return event

    def _count(self) -> None:
        self.counted += 1
        if self.counted % 20 == 0:
            gc.collect()
            self.alive.append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))


def buffers(make: type[Runner]) -> tuple[set[int], set[int], list[int]]:
    """Where 60 steps were copied to and from, and how many tensors were alive meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Runner", make)
        stream = Watched()
        bench = Bench(stream)
    tickets = []
    try:
        bench.start(0, 1, budget=2)
        for number in range(60):
            plan = StepPlan(2 + number, bench.facts(SIZE), rows=[0])
            tickets.append(bench.runner.launch(plan))
            if len(tickets) == DEPTH:
                bench.runner.results(tickets.pop(0))
    finally:
        stream.close()
    into, source = (set(places) for places in zip(*stream.copies, strict=True))
    return into, source, stream.alive[1:]


class Fresh(Runner):
    """Keeps the results of every step in a tensor of its own."""

    def launch(self, plan: StepPlan) -> Any:
        self.kept = [*getattr(self, "kept", []), self._result]
        self._result = torch.zeros_like(self._result)
        return super().launch(plan)


def test_r14_no_tensor_is_made_for_a_step_and_kept() -> None:
    """One device buffer, as many host buffers as the ring has, and nothing that piles up."""
    into, source, alive = buffers(Runner)
    assert (len(into), len(source)) == (DEPTH + 1, 1)
    assert alive[-1] - alive[0] <= 5
    into, source, alive = buffers(Fresh)
    assert len(source) > 1
    assert alive[-1] - alive[0] >= 15


def test_r10_a_step_is_packet_work_and_results_in_one_stream() -> None:
    """One launch submits all three, so the next step's work is behind the copy of this one's."""
    order = []

    class Ordered(ManualStream):
        def submit(self, work: Any, into: Tensor | None = None) -> Any:
            order.append("work" if into is None else "copy")
            return super().submit(work, into)

    bench = Bench(Ordered())
    bench.start(0, 1)
    tickets = []
    for number in range(6):
        plan = StepPlan(2 + number, bench.facts(SIZE), rows=[0])
        tickets.append(bench.runner.launch(plan))
        if len(tickets) == DEPTH:
            bench.runner.results(tickets.pop(0))
    assert order == ["work", "work", "copy"] * 7


# ---------------------------------------------------------------------- R13: what is baked in


class Unreadable:
    """There are rows; which ones, only the packet says."""

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a cycle asked the plan's rows for {name}")


def test_r13_a_cycle_reads_the_facts_and_the_packet() -> None:
    """Not the slots that the plan holds as Python numbers: they would be baked into a graph."""
    records = []
    for hidden in (False, True):
        bench = Bench()
        bench.start(0, 1)
        bench.start(1, 9)
        plan = StepPlan(3, bench.facts(SIZE), rows=[1, 0])
        sections = [torch.from_numpy(s) for s in packet.pack(plan, bench.config.pages_per_seq)]
        result = torch.zeros(2 * (EPOCH + 1 + SIZE), dtype=torch.int64)
        seen: Any = replace(plan, rows=Unreadable()) if hidden else plan
        bench.steps.run(seen, sections, result, lambda name: None)
        records.append(result)
    assert torch.equal(*records)


LENGTHS = (5, 30, 2, 60, 12)


def replayed(pair: Any, patch: Patch) -> list[list[int]]:
    """The ids of prompts of many lengths, replayed from traces as soon as possible."""
    patch.setattr(closures, "AFTER", 1)
    with LLM(pair.target, pair.draft, dtype="fp64", overlap=True, page_size=8) as llm:
        prompts = [[(7 * i * i + n) % 300 for i in range(n)] for n in LENGTHS]
        return [llm.generate(p, SamplingParams(max_new_tokens=24))[0].token_ids for p in prompts]


def test_r13_facts_are_the_key_of_what_is_replayed(
    pair: Any, expect: Any, monkeypatch: Patch
) -> None:
    """Replays at lengths other than the traced ones; a key without the bound is found."""
    prompts = [[(7 * i * i + n) % 300 for i in range(n)] for n in LENGTHS]
    wanted = [expect(prompt, SamplingParams(max_new_tokens=24))[0] for prompt in prompts]
    assert replayed(pair, monkeypatch) == wanted
    cycle_of, first = ModelSteps.cycle_of, {}

    def baked(self: ModelSteps, rows: int, facts: Facts) -> Any:
        facts = replace(facts, kv_bound=first.setdefault(facts.width, facts.kv_bound))
        return cycle_of(self, rows, facts)

    monkeypatch.setattr(ModelSteps, "cycle_of", baked)
    assert replayed(pair, monkeypatch) != wanted
