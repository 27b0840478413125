"""CUDA graphs: a cycle is two replays, draft, and verify with commit.

A graph holds what was true when it was captured: shapes, addresses, every fact of the step. So one
belongs to a key (rows and facts; all are dropped when ids begin to be counted). What changes from
step to step is read from buffers that stay: the slots, kept here, and what the decoder knows of a
slot. The rows that a step lacks are padding rows: they name the spare slot, which is never active
and whose page table is the dummy page.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanodflash.decoding.cycle import Decoder, Result
from nanodflash.decoding.plan import Facts
from nanodflash.engine.closures import EagerCycle

WARM_UP = 2  # runs before a capture: kernels are compiled, libraries make their workspaces
Capture = Callable[[Callable[[], Any]], tuple[Callable[[], object], Any]]


class CapturedCycle(EagerCycle):
    """The cycle of one key: warmed up when it is made, then captured.

    Args:
        rows: B of the graphs.
    """

    _finish: Callable[[], object]
    _result: Result

    def __init__(self, decoder: Decoder, facts: Facts, rows: int) -> None:
        super().__init__(decoder, facts)
        state = decoder.state.len
        self._spare = len(state) - 1
        self._slots = torch.full((rows,), self._spare, device=state.device)
        self._proposals: Tensor | None = None
        self._draft: Callable[[], object] | None = None
        if facts.width > 1:
            size = (rows, decoder.block_size - 1)
            self._proposals = torch.zeros(size, dtype=torch.int64, device=state.device)
        # A caller's proposer is run, not captured.
        self._drafts = facts.width > 1 and decoder.proposer is None
        for _ in range(WARM_UP):  # of padding rows alone, which change nothing
            if self._drafts:
                self._proposals = self.draft(self._slots)
            self._verify_and_commit()

    def capture(self, capture: Capture) -> None:
        """Make the graphs, with `Stream.capture`."""
        if self._drafts:
            self._draft, self._proposals = capture(lambda: self.draft(self._slots))
        self._finish, self._result = capture(self._verify_and_commit)

    def _verify_and_commit(self) -> Result:
        return self.commit(self._slots, self.verify(self._slots, self._proposals))

    @torch.inference_mode()
    def run(self, slots: Tensor, mark: Callable[[str], None]) -> Result:
        """Replay for `slots`. The result is the graph's own: read it before the next replay."""
        count = len(slots)
        self._slots[:count].copy_(slots)
        self._slots[count:].fill_(self._spare)
        if self._proposals is not None:
            if self._draft is not None:
                self._draft()
            else:
                self._proposals[:count].copy_(self.draft(slots))
            mark("draft")
        self._finish()
        mark("verify")
        record, logprobs = self._result
        if logprobs is not None:
            chosen, values, ids = logprobs
            logprobs = (chosen[:count], values[:count], ids[:count])
        return Result(record[:count], logprobs)
