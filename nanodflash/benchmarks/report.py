"""Results as text: what `bench.py` prints, and the README's table, both from the JSON alone."""

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- bench: rendered by bench.py --readme -->", "<!-- /bench -->"


def table(result: dict[str, Any]) -> str:
    """A Markdown table of one result object, with where it was measured."""
    run, decode = result["run"], result["decode"]
    metrics, speed = decode["metrics"], decode["speedup"]
    rows = [
        ("plain decoding", _rate(decode["plain"]), "1"),
        (
            f"DFlash, block {decode['block_size']}",
            _rate(decode["speculative"]),
            f"{speed['decode']['median']:.2f}x ({speed['total']['median']:.2f}x with prefill)",
        ),
    ]
    lines = ["| batch 1, greedy | tokens/s (with prefill) | against plain |", "|---|---|---|"]
    lines += [f"| {name} | {rate} | {ratio} |" for name, rate, ratio in rows]
    lines += [
        "",
        f"tau {metrics['tau']:.2f}, acceptance_rate {metrics['acceptance_rate']:.2f}, "
        f"{decode['identical']} of {decode['prompts']} outputs identical to plain decoding. "
        + "A cycle: "
        + " + ".join(f"{name} {ms:.2f}" for name, ms in decode["cycle_ms"].items())
        + " ms.",
    ]
    if "peer" in result:
        peer = result["peer"]
        lines.append(
            f"The reference package in the same run, with prefill: {peer['peer']['total']:.0f} "
            f"tokens/s at tau {peer['peer_tau']:.2f}; this engine "
            f"{peer['nanodflash']['total']:.0f}, {peer['ratio']['total']['median']:.2f}x."
        )
    if "memory" in result:
        lines.append(
            f"Peak memory {result['memory']['beyond_mib']:.0f} MiB beyond a bare import of torch, "
            f"weights and pools ({result['memory']['weights_and_pools_mib']:.0f} MiB)."
        )
    lines += [
        "",
        f"Measured on {run['machine']}, {run['threads']} threads, torch {run['torch']}, "
        f"{decode['dtype']}, {decode['prompts']} held-out prompts, medians of "
        f"{len(decode['samples']['plain'])} rounds, commit {run['commit']}: `{run['command']}`",
    ]
    return "\n".join(lines)


def histogram(counts: dict[str, int]) -> str:
    """Cycles by tokens emitted, as bars."""
    total, widest = sum(counts.values()), max(counts.values())
    return "\n".join(
        f"{int(n):4d}  {'#' * round(40 * count / widest):40s} {count / total:6.1%}"
        for n, count in counts.items()
    )


def update_readme(path: Path, text: str) -> None:
    """Put `text` between the README's markers."""
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _rate(median: dict[str, float]) -> str:
    return f"{median['decode']:.0f} ({median['total']:.0f})"
