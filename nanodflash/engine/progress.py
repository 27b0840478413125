"""A line for people who wait for many requests."""

import sys
import time
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

from nanodflash.engine.sequence import Phase, Sequence

if TYPE_CHECKING:
    from nanodflash.engine.engine import RequestHandle


def progress_line(sequences: Ids[Sequence], seconds: float) -> str:
    """What becomes of some requests, for people to watch; safe beside the engine's thread.

    tau is taken from the counts of tokens and cycles, both of which may lag by a step.
    """
    ended = sum(s.phase is Phase.FINISHED for s in sequences)
    running = sum(s.phase in (Phase.PREFILL, Phase.DECODE) for s in sequences)
    tokens = sum(len(s.token_ids) for s in sequences)
    cycles = sum(s.metrics.cycles for s in sequences)
    first = sum(bool(s.token_ids) for s in sequences)
    line = (
        f"{ended}/{len(sequences)} done, {running} running, "
        f"{len(sequences) - ended - running} waiting, {tokens / seconds:,.0f} tokens/s"
    )
    if cycles and any(s.speculate for s in sequences):
        line += f", tau {(tokens - first) / cycles:.2f}"
    return line


def show_progress(
    sequences: Ids[Sequence], handles: "Ids[RequestHandle]", every: float = 0.5
) -> None:
    """Watch requests until all have ended: a line on stderr, rewritten in place."""
    began, last = time.perf_counter(), False
    while not last:
        last = all(handle.wait(every) for handle in handles[-1:]) and all(h.done for h in handles)
        line = progress_line(sequences, time.perf_counter() - began)
        print(f"\r{line:78s}", end="\n" if last else "", file=sys.stderr, flush=True)
        if not last and handles[-1].done:
            time.sleep(every)
