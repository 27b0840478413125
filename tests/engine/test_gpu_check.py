"""What `bench.py --gpu-check` measures, on a CPU at a small size: that it measures what it says."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import kit
from nanodflash import ops
from nanodflash.benchmarks import gpu, random_pair, report
from nanodflash.benchmarks.kernel_errors import kernel_errors
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
    assert told["plain_same_until"] == told["definitions_same_until"] == [20, 20]


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


def test_the_floor_knows_what_is_not_done() -> None:
    target, draft = (
        TargetConfig.from_dict(random_pair.TARGET),
        DraftConfig.from_dict(random_pair.DRAFT),
    )
    full, half = (gpu.floors(target, draft, 32, 512, 2, width) for width in (None, 8))
    assert half["bytes"] == full["bytes"]
    assert 0.5 < half["flops"] / full["flops"] < 0.6  # the drafter fills whole blocks
    # plain decoding reads no K/V of the drafter, nor the head twice
    one, more = (gpu.floors(target, draft, 1, context, 2)["plain_bytes"] for context in (0, 1000))
    assert more - one == 1000 * 2 * 36 * 8 * 128 * 2


class Errors:
    """Rows by kernel, of a table that is the definitions but for what is given."""

    def __init__(self, **changes: Any) -> None:
        table, config = replace(ops.REFERENCE, **changes), TargetConfig.from_dict(kit.TARGET)
        sizes = {"contexts": (0, 63, 64, 200), "batches": (1, 3), "widths": (4, 1)}
        like = torch.zeros(1)
        self.rows = kernel_errors(table, config, like, **sizes, prompts=(33, 130))

    def worst(self, kernel: str) -> float:
        errors = [row["error"] for row in self.rows if row["kernel"].startswith(kernel)]
        return math.inf if None in errors else max(errors)


def test_a_kernel_that_is_wrong_is_seen() -> None:
    """Each in its own way; of the definitions themselves nothing."""
    right = Errors()
    assert {row["error"] for row in right.rows} == {0.0}

    def short_sighted(pages: Any, start: Any, size: int, *rest: Any) -> Any:
        return ops.attention(pages, start, size, rest[0], 40, rest[2])

    wrong = Errors(
        attention=short_sighted,
        inject_rows=lambda kv, norms, *rest: ops.inject_rows(kv, norms.flip(0), *rest),
        silu_mul=lambda x: ops.silu_mul(x.flip(-1)),
        argmax=lambda x: ops.argmax(-x),
        rms_norm=lambda *given: ops.rms_norm(*given) * math.nan,
    )
    assert wrong.worst("rms_norm") == math.inf
    assert None in [row["error"] for row in json.loads(json.dumps(wrong.rows, allow_nan=False))]
    for kernel in ("attention", "inject_rows", "silu_mul", "argmax"):
        assert wrong.worst(kernel) > 0.1
    assert wrong.worst("choose") == wrong.worst("add_rms_norm") == 0


def test_what_is_measured_is_told_row_by_row(
    bench: random_pair.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails is a row too, and the others are measured."""
    measure, told = gpu.run_steps, list[dict[str, Any]]()

    def fails(engine: Any, requests: Any, steps: int) -> dict[str, Any]:
        if len(requests) == 4 and not told[1:]:
            raise RuntimeError("no more memory")
        return measure(engine, requests, steps)

    monkeypatch.setattr(gpu, "run_steps", fails)
    rows = gpu.run_cycles(bench, (1, 4), (20,), 3, (4,), told.append)
    assert rows == told
    assert ["error" in row for row in rows] == [False, True] + [False] * 5
    target, draft = (model.config for model in bench.models)
    gpu.add_floors(rows, target, draft, 4.8, 790)
    assert all(row["floor_ms"] > 0 for row in rows if "error" not in row)
    kernel = {"kernel": "attention", "batch": 1, "context": 20, "ms": 0.1}
    same = {"graphs_are_eager": True, "whatever_is_proposed": True, "new_tokens": 20}
    same |= {"plain_same_until": [20], "definitions_same_until": [7], "different_ids": [9]}
    text = report.gpu(
        {
            "device": "none",
            "tb_per_second": 4.8,
            "tflops": None,
            "tests": {"ran": True, "ok": False, "last": "1 failed"},
            "errors": Errors(rms_norm=lambda *given: ops.rms_norm(*given) * math.nan).rows,
            "ahead": {"seconds": 3.0, "cycles": 21, "gib": 0.5, "in_service": 0},
            "same": same,
            "kernels": [kernel | {"share": None}, kernel | {"share": 0.5}],
            "cycles": json.loads(json.dumps(rows)),
            "seconds": 1.0,
        }
    )
    for wanted in ("| 4 | 20 | DFlash: RuntimeError: no more memory |", "cached |", "50% |", "[7]"):
        assert wanted in text
    assert "| rms_norm | not finite | 0.0e+00 |" in text
    assert "| attention | 0.0e+00 | 0.0e+00 |" in text


def test_nothing_is_measured_behind_the_end(bench: random_pair.Bench) -> None:
    rows = gpu.run_cycles(bench, (1,), (20,), 3, (), end=0.0)
    assert [row["error"] for row in rows] == ["TimeoutError: no time left"] * 3


def test_a_wait_has_an_end(bench: random_pair.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PATIENCE", 0.0)
    with pytest.raises(TimeoutError, match="nothing was measured"):
        gpu._wait([], lambda: False)


def test_steps_are_measured_while_all_decode(bench: random_pair.Bench) -> None:
    rows = gpu.run_cycles(bench, (1, 4), (20,), 5, (4, None))
    kinds = {(row["batch"], row["kind"]) for row in rows}
    assert len(kinds) == len(rows) == 8
    assert all((row["tau"] == 1) == (row["kind"] == "plain") for row in rows)
    for row in rows:
        assert row["steps"] >= 5
        assert row["rows"] == row["batch"] * row["steps"]
        assert row["step_ms"] > 0
        assert 0 < row["beside_ms"] < row["step_ms"]
        assert row["mean_context"] > 20 + 64
