"""Peak memory of a whole run, against what weights and pools must take."""

import subprocess
import sys
from typing import Any

IMPORT_ONLY = "import torch"
RUN = """
from nanodflash import LLM, SamplingParams
llm = LLM(model={model!r}, draft={draft!r}, device="cpu")
llm.generate([[5] * 200], SamplingParams(max_new_tokens=64, ignore_eos=True))
decoder = llm.engine.runner.steps.decoder
tensors = [*decoder.target.parameters(), *decoder.draft.parameters()]
tensors += [decoder.target_pool.rows, decoder.draft_pool.rows]
print(sum(t.numel() * t.element_size() for t in tensors))
"""
# VmHWM begins anew with a program; ru_maxrss would start at the size of the process that forked it.
PEAK = """
from pathlib import Path
import resource, sys
status = Path("/proc/self/status")
if status.exists():
    (line,) = (l for l in status.read_text().splitlines() if l.startswith("VmHWM"))
    print(int(line.split()[1]) * 1024)
else:
    unit = 1 if sys.platform == "darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
"""


def run_memory(model: str, draft: str) -> dict[str, Any]:
    """Mebibytes: a bare import of torch, weights and pools, the peak, and what is beyond both."""
    (bare,) = _numbers(IMPORT_ONLY + PEAK)
    needed, peak = _numbers(RUN.format(model=model, draft=draft) + PEAK)
    mib = 2**20
    return {
        "torch_mib": bare / mib,
        "weights_and_pools_mib": needed / mib,
        "peak_mib": peak / mib,
        "beyond_mib": (peak - bare - needed) / mib,
    }


def _numbers(code: str) -> list[int]:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(line) for line in run.stdout.split()]
