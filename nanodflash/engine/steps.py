"""Does the work of a step with the models: the only caller of `decoding.cycle`."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nanodflash.config import MAX_LOGPROBS
from nanodflash.decoding.cycle import Decoder, Result, prefill_step, prompt_step
from nanodflash.decoding.packet import apply
from nanodflash.decoding.plan import Facts, Span, StepPlan
from nanodflash.decoding.sampling import Logprobs
from nanodflash.engine.closures import (
    MAX_PROMPT,
    MAX_ROWS,
    EagerCycle,
    TracedCycle,
    Traces,
    round_pages,
)
from nanodflash.engine.graphs import Capture, CapturedCycle
from nanodflash.engine.width import bucket
from nanodflash.ops import attention


class ModelSteps:
    """Owns the decoder. A `Steps`.

    Args:
        graphs:  replay what is captured, or traces of cycles of few rows and of short prompts; off,
                 every step is run from Python.
        capture: of a stream that can hold a step as a graph.
    Attributes:
        cycles: what is replayed, by rows and facts.
    """

    def __init__(
        self, decoder: Decoder, graphs: bool = True, capture: Capture | None = None
    ) -> None:
        self.decoder, self.graphs, self.capture = decoder, graphs, capture
        self.device = decoder.positions.device
        self.cycles: dict[tuple[int, Facts], EagerCycle] = {}
        self._traces = Traces(decoder)
        self._broken: list[EagerCycle] = []

    def run(
        self,
        plan: StepPlan,
        sections: Sequence[Tensor],
        result: Tensor,
        mark: Callable[[str], None],
    ) -> None:
        """Admissions and page deltas, then prompt chunks, then a cycle."""
        state, facts = self.decoder.state, plan.facts
        if facts.sampler == "full" and state.counts is None:
            state.count_tokens(self.decoder.vocab_size)
            self.cycles.clear()  # they do not count
            self._traces = Traces(self.decoder)
        apply(plan, sections, state)
        mark("plan")
        rows, ready, finals = sections[:3]
        made: list[Result] = []
        if plan.spans:
            first = self._prefill(plan, ready, finals)
            made += [first] if first is not None else []
            mark("prefill")
        if plan.rows:
            known = len(self.cycles)
            cycle = self.cycle_of(len(rows), facts)
            if len(self.cycles) > known:
                mark("capture")
            made.append(cycle.run(rows, mark))
        parts = [one.record.flatten() for one in made]
        if facts.sampler == "full":
            parts += [_bits(one.logprobs) for one in made if one.logprobs is not None]
        if len(parts) == 1:
            result.copy_(parts[0])
        elif parts:
            torch.cat(parts, out=result)
        mark("pack")

    def _prefill(self, plan: StepPlan, ready: Tensor, finals: Tensor) -> Result | None:
        """All chunks. A short prompt alone is padded to a shape that others have too, to be
        replayed: until it is traced that costs up to a seventh more, then a third less.
        """
        facts, grain = plan.facts, 16
        span, *others = plan.spans
        size = -(-(span.stop - span.start) // grain) * grain
        fixed = self.graphs and not self.capture and facts.sampler != "full"
        whole = span.last and not span.resumed and not others and size <= MAX_PROMPT
        # Padding lies on pages of the request, where its first block will: fewer rows than that.
        if not (fixed and whole and grain <= self.decoder.block_size):
            return prefill_step(self.decoder, plan.spans, ready, finals, facts)
        facts = self._rounded(replace(facts, width=1, kv_bound=span.start + size))

        def step(slots: Tensor, start: Tensor) -> tuple[Tensor]:
            return (prompt_step(self.decoder, slots, start, size, facts).record,)

        start = self.decoder.positions[span.start : span.start + 1]
        (record,) = self._traces.run("prefill", (size, facts), step, ready, start)
        return Result(record, None)

    def prepare(self, max_seqs: int, max_prefill: int, widths: Sequence[int]) -> None:
        """Compile and capture what greedy requests will need: in service it would make them wait.

        Prompt chunks of any length are served by a few variants of attention, which follow from
        the length's power of two. The largest graphs first, so that the smaller find room in what
        they have freed.

        Args:
            widths: rows of a block that will be verified.
        """
        size, spare = self.decoder.block_size, len(self.decoder.state.len) - 1
        if self.decoder.ops.attention is attention:  # nothing to compile, a graph for every length
            return
        none, facts = self.decoder.state.len[:0], Facts(1, "greedy", size > 1, 1)
        most = min(max_prefill, self.decoder.state.tokens.shape[1] - size)
        for length in sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}):
            spans = [Span(spare, 0, length, last=False)]
            prefill_step(self.decoder, spans, none, none, facts)
        first = none.new_tensor([spare])  # and a first token, of a row that is not alive
        prefill_step(self.decoder, [Span(spare, 0, 1, last=True)], none, first, facts)
        for rows in sorted({bucket(rows) for rows in range(1, max_seqs + 1)}, reverse=True):
            for width in widths:
                self.cycle_of(rows, Facts(width, "greedy", size > 1, size))

    def forget(self, slots: Sequence[int]) -> None:
        """Make the slots of a step that failed inert."""
        self.decoder.state.forget(slots)

    def cycle_of(self, rows: int, facts: Facts) -> EagerCycle:
        """The cycle for these facts: what is replayed is kept by all that is baked into it."""
        few = rows <= MAX_ROWS and facts.sampler != "full"
        if not self.graphs or not (self.capture or few):
            return EagerCycle(self.decoder, facts)
        facts = self._rounded(facts)
        rows = bucket(rows) if self.capture else rows
        key = (rows, facts)
        if key not in self.cycles:
            if self._broken:
                return EagerCycle(self.decoder, facts)
            self.cycles[key] = (
                self._captured(facts, rows, self.capture)
                if self.capture
                else TracedCycle(self.decoder, facts, self._traces)
            )
        return self.cycles[key]

    def _captured(self, facts: Facts, rows: int, capture: Capture) -> EagerCycle:
        """A cycle as graphs. If that fails there are no more: torch may be in the middle of one."""
        cycle = CapturedCycle(self.decoder, facts, rows)
        try:
            cycle.capture(capture)
        except RuntimeError as error:
            self._broken.append(cycle)  # the end of its first graph could harm the others
            if isinstance(error, torch.OutOfMemoryError):
                raise
            warnings.warn(f"no more graphs, new steps run from Python: {error}", stacklevel=2)
            return EagerCycle(self.decoder, facts)
        return cycle

    def _rounded(self, facts: Facts) -> Facts:
        """The same for every length that can share a graph or a trace."""
        size, pages = self.decoder.target_pool.page_size, self.decoder.state.page_table.shape[1]
        if self.decoder.ops.attention is attention:  # the definition reads as far as it is told
            pages = min(round_pages(-(-facts.kv_bound // size)), pages)
        return replace(facts, kv_bound=pages * size)


def _bits(logprobs: Logprobs) -> Tensor:
    """Logprobs of every token as int64 [tokens * BITS]: fp64 bits of the values, then the ids."""
    chosen, values, ids = logprobs
    missing = MAX_LOGPROBS - values.shape[-1]  # a vocabulary smaller than that
    reals = torch.cat((chosen[..., None], F.pad(values, (0, missing))), -1).to(torch.float64)
    return torch.cat((reals.view(torch.int64), F.pad(ids, (0, missing))), -1).flatten()
