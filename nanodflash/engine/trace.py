"""What happened when, for chrome://tracing and https://ui.perfetto.dev.

Source: the Chrome trace event format ("X" events, microseconds).
"""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

TRACKS = ("bookkeeping", "device thread", "device")


class Trace:
    """Spans of named tracks. `list.append` is atomic, so that several threads may add."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.spans: list[tuple[str, str, float, float]] = []  # track, name, begin, end in seconds

    def span(self, track: str, name: str) -> AbstractContextManager[None]:
        """What the body takes, on the host's clock."""
        return self._span(track, name) if self.enabled else nullcontext()

    @contextmanager
    def _span(self, track: str, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((track, name, began, time.perf_counter()))

    def step(self, times: list[tuple[str, float]]) -> None:
        """The parts of a step, on the device's track: name and end of each, behind its begin."""
        if not self.enabled:
            return
        for (_, begin), (name, end) in pairwise(times):
            self.spans.append(("device", name, begin, end))

    def with_idle(self) -> list[tuple[str, str, float, float]]:
        """All spans, and the gaps of the device as spans named idle."""
        device = sorted(span[2:] for span in self.spans if span[0] == "device")
        gaps = [(end, begin) for (_, end), (begin, _) in pairwise(device) if begin > end]
        return self.spans + [("device", "idle", *gap) for gap in gaps]

    def write(self, path: Path) -> None:
        """Write a JSON object of trace events."""
        write_traces({"nanodflash": self}, path)

    def events(self, pid: int, process: str) -> list[dict[str, Any]]:
        """Trace events of a process with a number and a name; the first span begins at 0."""
        spans = self.with_idle()
        origin = min((span[2] for span in spans), default=0.0)
        names = [("process_name", 0, process)]
        names += [("thread_name", i, track) for i, track in enumerate(TRACKS)]
        return [
            {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
            for kind, tid, name in names
        ] + [
            {
                "ph": "X",
                "pid": pid,
                "tid": TRACKS.index(track),
                "name": name,
                "ts": 1e6 * (begin - origin),
                "dur": 1e6 * (end - begin),
            }
            for track, name, begin, end in sorted(spans, key=lambda span: span[2])
        ]


def write_traces(traces: dict[str, Trace], path: Path) -> None:
    """Write traces into one file, each a process of that name."""
    events = [
        event
        for pid, (name, trace) in enumerate(traces.items())
        for event in trace.events(pid, name)
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
