"""Where and with what a benchmark ran: every result file starts with this."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent


def provenance(argv: list[str]) -> dict[str, Any]:
    """Commit, command, machine and versions."""
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": " ".join(["python", "bench.py", *argv]),
        "machine": _cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git here
        return ""
    return run.stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {len(names) or 1} cores, {platform.system()} ({sys.platform})"
