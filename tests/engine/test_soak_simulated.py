"""Many requests through threads, scheduler, pages and texts, on a device that only takes time."""

import gc
import random
import threading
from pathlib import Path

import pytest

from nanodflash.benchmarks.simulate import Simulation


def resident_mib() -> float:
    """Resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.parametrize(
    "count", [pytest.param(20_000, marks=pytest.mark.slow, id="20,000"), 600], ids=str
)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one thread"])
def test_nothing_is_lost(count: int, overlap: bool) -> None:
    """Random lengths, aborts and page pressure: all end, pages and threads come back."""
    threads = threading.active_count()
    simulation = Simulation(32, 0.0, overlap, num_pages=40)
    engine, rng = simulation.engine, random.Random(count)
    reasons: dict[str, int] = {}
    preempted, grown = 0, 0.0
    for round_ in range(20):
        handles = []
        for _ in range(count // 20):
            budget = rng.choice([1, rng.randint(1, 40), rng.randint(40, 600)])
            handle = engine.submit(simulation.request(budget), streams=rng.random() < 0.5)
            handles.append((budget, handle))
            if rng.random() < 0.1:
                rng.choice(handles)[1].abort()
        for budget, handle in handles:
            assert handle.wait(120), "a request was lost"
            output = handle.result()
            reasons[output.finish_reason] = reasons.get(output.finish_reason, 0) + 1
            assert len(output.token_ids) == budget or output.finish_reason == "abort"
            preempted += output.metrics.preemptions
        del handle, handles, output
        gc.collect()
        if round_ == 4:
            grown = -resident_mib()
    grown += resident_mib()
    engine.close()
    assert set(reasons) == {"length", "abort"}
    assert sum(reasons.values()) == count // 20 * 20
    assert preempted > 0
    engine.scheduler.check()
    stats = engine.scheduler.pages.stats()
    assert (stats.live, stats.free + stats.cached) == (0, stats.total)
    assert grown < 16, "memory grows"
    assert threading.active_count() == threads
