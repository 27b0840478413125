"""What `bench.py --gpu-check` measures, on a CPU at a small size: that it measures what it says."""

import pytest
import torch

import kit
from nanodflash.benchmarks import gpu, random_pair
from nanodflash.engine import closures
from nanodflash.models.config import DraftConfig, TargetConfig


@pytest.fixture(scope="module")
def bench() -> random_pair.Bench:
    given = (torch.device("cpu"), torch.float64, kit.TARGET, kit.DRAFT)
    made = random_pair.Bench(*given, batch=4, context=100, new_tokens=300)
    kit.randomise(made.models[0], 0)  # at 0.02 greedy text repeats itself
    return made


def test_the_floor_is_the_published_one() -> None:
    """Qwen3-8B with its drafter (overlap-and-kernels: E.1, E.2): 18.67 GB and 0.30 T a cycle."""
    target, draft = (
        TargetConfig.from_dict(random_pair.TARGET),
        DraftConfig.from_dict(random_pair.DRAFT),
    )
    floor = gpu.floors(target, draft, 1, 512, 2)
    assert floor["bytes"] / 1e9 == pytest.approx(18.67, rel=2e-3)
    assert floor["flops"] / 1e12 == pytest.approx(0.30, rel=2e-2)
    wide = gpu.floors(target, draft, 32, 4096, 2)
    # published 41.3, with the logits that are written and read
    assert wide["bytes"] / 1e9 == pytest.approx(40.6, rel=2e-3)
    assert wide["flops"] / 1e12 == pytest.approx(10.9, rel=2e-2)


def test_the_same_tokens(bench: random_pair.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 all ways give one text; a proposer that is right is accepted."""
    monkeypatch.setattr(closures, "AFTER", 2)  # graphs are traces here
    told = gpu.same_tokens(bench, (5, 20), new=20)
    assert told["graphs_are_eager"]
    assert told["whatever_is_proposed"]
    assert told["plain_same_until"] == [20, 20]


def test_cycles_accept_as_scripted(bench: random_pair.Bench) -> None:
    engine = bench.engine(bench.decoder(bench.scripted()))
    try:
        requests = [bench.request(9, 200, seed=i) for i in range(4)]
        ids = gpu.run_tokens(engine, requests)
    finally:
        engine.close()
    assert [len(some) for some in ids] == [200] * 4
    size = bench.config.block_size
    wanted = (1 - random_pair.ACCEPT**size) / (1 - random_pair.ACCEPT)
    tau = sum(r.metrics.decoded_tokens for r in requests) / sum(r.metrics.cycles for r in requests)
    assert tau == pytest.approx(wanted, rel=0.15)


def test_steps_are_measured_while_all_decode(bench: random_pair.Bench) -> None:
    rows = gpu.run_cycles(bench, (1, 4), (20,), 5, (4, None))
    kinds = {(row["batch"], row["kind"]) for row in rows}
    assert len(kinds) == len(rows) == 8
    assert all((row["tau"] == 1) == (row["kind"] == "plain") for row in rows)
    for row in rows:
        assert row["steps"] >= 5
        assert row["rows"] == row["batch"] * row["steps"]
        assert row["step_ms"] > 0
