"""What the engine would launch, compiled ahead of time: no spills, shared memory, matrix dots."""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
SCRIPT = Path(__file__).parent / "aot.py"
ARCHS = (80, 90, 100)
SHARED = {80: 163, 90: 227, 100: 227}  # KiB a program may have
STACK = {80: 128, 90: 0, 100: 0}  # bytes; on sm_80 a few tiles spill a little
DOTS = {80: {"mma.sync"}, 90: {"mma.sync", "wgmma"}, 100: {"mma.sync", "tcgen05.mma"}}
KERNELS = {
    "_attention_kernel",
    "_combine_kernel",
    "_norm_rope_write_kernel",
    "_norm_kernel",
    "_silu_mul_kernel",
    "_best_kernel",
    "_token_kernel",
    "_sample_kernel",
    "_mass_kernel",
    "_propose_kernel",
    "peak_kernel",
    "weigh_kernel",
    "gather_kernel",
    "_threshold_kernel",
    "_commit_kernel",
}


def table(folder: Path, *runs: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of the script for each of the lists of flags, two processes at a time."""
    chosen = {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}

    def run(flags: tuple[str, ...]) -> list[dict[str, Any]]:
        command = [sys.executable, str(SCRIPT), *flags]
        done = subprocess.run(
            command, env=os.environ | chosen, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(2) as pool:
        return [row for rows in pool.map(run, runs) for row in rows]


def check(rows: list[dict[str, Any]]) -> None:
    """The limits of every row, and that the tile of a block takes the large instruction."""
    for row in rows:
        arch = row["arch"]
        assert row["stack"] <= STACK[arch], row
        assert row["shared"] <= SHARED[arch] * 1024, row
        assert row["registers"] <= 255, row
        if row["kernel"] == "_attention_kernel" and "fp32" not in row["variant"]:
            assert row["dots"], row
            assert set(row["dots"]) <= DOTS[arch], row
    for arch in ARCHS:
        mine = [row for row in rows if row["arch"] == arch]
        best = {"mma.sync"} if arch == 80 else DOTS[arch] - {"mma.sync"}
        whole = [row for row in mine if row["variant"] == "8B verify b1 s16" and row["dots"]]
        assert [set(row["dots"]) for row in whole] == [best]  # 64 rows fill the large instruction


def test_every_kernel_compiles_within_its_limits(tmp_path: Path) -> None:
    fewest = ("--few", "--few")
    rows = table(
        tmp_path, ("--arch", "90", "--few"), ("--arch", "80", *fewest), ("--arch", "100", *fewest)
    )
    check(rows)
    assert {row["kernel"] for row in rows if row["arch"] == 90} == KERNELS


@pytest.mark.parametrize(("most", "step"), [(4608, 29), (300, 1)])
def test_no_chunk_is_compiled_in_service(tmp_path: Path, most: int, step: int) -> None:
    """What the powers of two launch is all that any length does."""
    (late,) = table(tmp_path, ("--not-ahead", str(most), str(step)))
    assert not any(late.values()), late
    assert len(late) == 5


@pytest.mark.slow
def test_every_variant_compiles_within_its_limits(tmp_path: Path) -> None:
    rows = table(
        tmp_path,
        *(("--arch", str(arch), "--part", str(part), "2") for arch in ARCHS for part in range(2)),
    )
    check(rows)
    for arch in ARCHS:
        assert {row["kernel"] for row in rows if row["arch"] == arch} == KERNELS
    assert len(rows) > 300


def test_the_table_has_every_kernel_that_there_is() -> None:
    """A kernel that is written and not launched by a variant would never be compiled."""
    sources = [path.read_text() for path in (SCRIPT.parents[2] / "kernels").glob("*.py")]
    names = {
        line.removeprefix("def ").split("(")[0]
        for source in sources
        for line in source.splitlines()
        if line.startswith("def ")
    }
    assert {name for name in names if name.endswith("_kernel")} == KERNELS
