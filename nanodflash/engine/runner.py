"""Runs steps: the only caller of the device.

Plans come as slots and page ids, results go back as records of whole numbers.
"""

import time
from collections.abc import Sequence as Ids

import torch

from nanodflash.decoding.cycle import (
    Decoder,
    Facts,
    Span,
    commit_step,
    draft_step,
    prefill_step,
    verify_step,
)

PHASES = ("draft", "verify", "commit")


class Runner:
    """Owns the decoder and the buffers that carry a plan to it.

    Attributes:
        seconds: host seconds spent in "draft", "verify" and "commit" so far. On a CPU the steps
                 are synchronous, so these are the steps' own.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def prefill(self, spans: Ids[Span], facts: Facts) -> list[list[int]]:
        """Run prompt chunks; records of the requests whose prompt ended, in order."""
        finals = self._slots([span.slot for span in spans if span.last])
        record = prefill_step(self.decoder, spans, finals, facts)
        return [] if record is None else record.tolist()

    def cycle(self, slots: Ids[int], facts: Facts) -> list[list[int]]:
        """Draft, verify and commit for these slots; their records, in order."""
        batch = self._slots(slots)
        clock = [time.perf_counter()]
        proposals = draft_step(self.decoder, batch, facts) if facts.width > 1 else None
        clock.append(time.perf_counter())
        verified = verify_step(self.decoder, batch, proposals, facts)
        clock.append(time.perf_counter())
        record = commit_step(self.decoder, batch, verified).tolist()
        clock.append(time.perf_counter())
        for name, a, b in zip(PHASES, clock, clock[1:], strict=False):
            self.seconds[name] += b - a
        return record

    def _slots(self, slots: Ids[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.decoder.positions.device)
