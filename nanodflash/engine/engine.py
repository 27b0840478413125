"""Takes a sequence through its life: admit, prefill in chunks, cycles, release."""

import time
from collections.abc import Iterator

from nanodflash.config import EngineConfig
from nanodflash.decoding.cycle import (
    ACCEPTED,
    BUDGET,
    EMITTED,
    FINISH,
    LENGTH,
    RECORD,
    RUNNING,
    STOP,
    Decoder,
    Facts,
    Span,
)
from nanodflash.decoding.sampling import Sampler
from nanodflash.engine.paging import PagePool
from nanodflash.engine.runner import Runner
from nanodflash.engine.sequence import Chunk, Sequence

FINISH_REASON = {RUNNING: None, STOP: "stop", BUDGET: "length"}


class Engine:
    """Slots, pages and steps. One request at a time holds a slot here."""

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self.config = config
        self.runner = Runner(decoder)
        self.pages = PagePool(config.total_pages)
        self._free_slots = list(range(config.max_seqs))
        self._epoch = 0
        draft = decoder.draft
        limit = draft.config.max_position_embeddings if draft else config.max_model_len
        self._draft_limit = min(limit, config.max_model_len)

    def run(self, sequence: Sequence) -> Iterator[Chunk]:
        """Decode one sequence, a chunk a step. Slot and pages go back however it ends."""
        state = self.runner.decoder.state
        if not self._free_slots:
            raise RuntimeError(f"{self.config.max_seqs} streams are open: finish or close one")
        sequence.slot = self._free_slots.pop()
        try:
            self._epoch += 1
            state.admit(
                sequence.slot,
                sequence.prompt,
                sequence.params,
                budget=sequence.budget,
                seed=sequence.seed,
                stop_ids=sequence.stop_ids,
                epoch=self._epoch,
                draft_limit=self._draft_limit,
            )
            yield self._prefill(sequence)
            while sequence.finish_reason is None:
                yield self._cycle(sequence)
        finally:
            state.release(sequence.slot)
            self.pages.release(sequence.pages)
            sequence.pages = []
            self._free_slots.append(sequence.slot)

    def _facts(self, sequence: Sequence, prefill: bool = False) -> Facts:
        """The facts of a step that this sequence is alone in."""
        width = self.config.block_size if sequence.speculate and not prefill else 1
        sampler: Sampler = "sampled" if sequence.params.temperature > 0 else "greedy"
        return Facts(width, sampler, sequence.speculate, len(sequence) + self.config.block_size)

    def _reserve(self, sequence: Sequence, tokens: int) -> None:
        """Hold pages for `tokens` tokens of the sequence, and tell the device."""
        wanted = -(-tokens // self.config.page_size) - len(sequence.pages)
        if wanted > 0:
            fresh = self.pages.allocate(wanted)
            state = self.runner.decoder.state
            state.set_pages(sequence.slot, len(sequence.pages), fresh)
            sequence.pages += fresh

    def _prefill(self, sequence: Sequence) -> Chunk:
        began = time.perf_counter()
        total, records = len(sequence.prompt), []
        self._reserve(sequence, total)
        for start in range(0, total, self.config.max_prefill):
            stop = min(start + self.config.max_prefill, total)
            span = Span(sequence.slot, start, stop, last=stop == total)
            records = self.runner.prefill([span], self._facts(sequence, prefill=True))
        sequence.metrics.prompt_tokens = total
        sequence.metrics.prefill_seconds = time.perf_counter() - began
        return self._take(sequence, records[0])

    def _cycle(self, sequence: Sequence) -> Chunk:
        began = time.perf_counter()
        facts = self._facts(sequence)
        start = len(sequence)
        self._reserve(sequence, start + self.config.block_size)
        record = self.runner.cycle([sequence.slot], facts)[0]
        chunk = self._take(sequence, record)
        kept = len(chunk.token_ids)
        proposed = max(0, min(facts.width - 1, self._draft_limit - start - 1))
        sequence.metrics.count_cycle(kept, min(record[ACCEPTED], kept), proposed)
        sequence.metrics.decode_seconds += time.perf_counter() - began
        assert sequence.finish_reason or record[LENGTH] == len(sequence), "host and device differ"
        return chunk

    def _take(self, sequence: Sequence, record: list[int]) -> Chunk:
        ids = record[RECORD : RECORD + record[EMITTED]]
        return sequence.append(ids, record[ACCEPTED], FINISH_REASON[record[FINISH]])
