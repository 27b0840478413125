"""Every kernel against its definition, in Triton's interpreter: one process a file of cases.

The interpreter is chosen when a kernel is imported, so this process stays without it. The larger
grids by hand: `TRITON_INTERPRET=1 pytest tests/kernels/cases -m slow`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = sorted((Path(__file__).parent / "cases").glob("test_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_in_the_interpreter(path: Path) -> None:
    chosen = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "--no-header"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path)],
        cwd=ROOT,
        env=os.environ | chosen,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
