"""Runs plans: the only caller of the device."""

import time
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace

import torch

from nanodflash.decoding.cycle import Decoder, Result, prefill_step
from nanodflash.decoding.plan import Facts, StepPlan
from nanodflash.engine.closures import MAX_ROWS, EagerCycle, TracedCycle, round_pages
from nanodflash.engine.sequence import TokenLogprobs

PHASES = ("prefill", "draft", "verify", "commit")


@dataclass(frozen=True)
class Results:
    """What a plan gave: records of its final chunks and of its rows, on the host."""

    finals: Ids[Ids[int]]
    rows: Ids[Ids[int]]
    device: dict[str, Result]

    def logprobs(self, part: str, place: int, count: int) -> list[TokenLogprobs]:
        """Of all W tokens of one record, chosen and the `count` likeliest.

        Args:
            part: "finals" or "rows".
        """
        chosen, values, ids = (t[place].tolist() for t in self.device[part].logprobs or ())
        return [
            TokenLogprobs(one, list(zip(i[:count], v[:count], strict=True)))
            for one, v, i in zip(chosen, values, ids, strict=True)
        ]


class Runner:
    """Owns the decoder and the buffers that carry a plan to it.

    Args:
        graphs: replay cycles of few rows from traces; off, every step is run from Python.
    Attributes:
        seconds: host seconds spent in each phase so far. On a CPU the steps are synchronous, so
                 these are the steps' own.
    """

    def __init__(self, decoder: Decoder, graphs: bool = True) -> None:
        self.decoder = decoder
        self.graphs = graphs and decoder.positions.device.type == "cpu"
        self._cycles: dict[tuple[int, Facts, bool], TracedCycle] = {}
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def run(self, plan: StepPlan) -> Results:
        """Admissions and page deltas, then prompt chunks, then a cycle."""
        state = self.decoder.state
        for admission in plan.admissions:
            if admission.params.sampler == "full":
                state.count_tokens(len(self.decoder.vocabulary))
            state.admit(admission)
        for delta in plan.deltas:
            state.set_pages(*delta)
        results = {}
        if plan.spans:
            began = time.perf_counter()
            ready = [span for span in plan.spans if span.last]
            final = prefill_step(
                self.decoder,
                plan.spans,
                self._slots([span.slot for span in ready]),
                self._slots([span.slot for span in ready if not span.resumed]),
                plan.facts,
            )
            if final is not None:
                results["finals"] = final
            self.seconds["prefill"] += time.perf_counter() - began
        if plan.rows:
            results["rows"] = self._cycle(plan)
        records = {part: result.record.tolist() for part, result in results.items()}
        return Results(records.get("finals", []), records.get("rows", []), results)

    def _cycle(self, plan: StepPlan) -> Result:
        batch = self._slots(plan.rows)
        cycle = self._cycle_of(len(batch), plan.facts)
        clock = [time.perf_counter()]
        proposals = cycle.draft(batch) if plan.facts.width > 1 else None
        clock.append(time.perf_counter())
        verified = cycle.verify(batch, proposals)
        clock.append(time.perf_counter())
        result = cycle.commit(batch, verified)
        clock.append(time.perf_counter())
        for name, a, b in zip(PHASES[1:], clock, clock[1:], strict=False):
            self.seconds[name] += b - a
        return result

    def _cycle_of(self, rows: int, facts: Facts) -> EagerCycle:
        """The steps for these facts: traced ones are kept by all that is baked into them."""
        if not self.graphs or rows > MAX_ROWS or facts.sampler == "full":
            return EagerCycle(self.decoder, facts)
        size, table = self.decoder.target_pool.page_size, self.decoder.state.page_table
        pages = min(round_pages(-(-facts.kv_bound // size)), table.shape[1])
        facts = replace(facts, kv_bound=pages * size)
        key = (rows, facts, self.decoder.state.counts is None)
        if key not in self._cycles:
            self._cycles[key] = TracedCycle(self.decoder, facts)
        return self._cycles[key]

    def _slots(self, slots: Ids[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.decoder.positions.device)
