"""Results as text: what `bench.py` prints, and the README's table, both import math
import math
from the JSON alone."""

import math
import statistics
from pathlib import Path
from typing import Any

SPREADS = ("first_ms", "token_ms")
GPU_PARTS = ("tests", "errors", "ahead", "same", "kernels", "cycles")
PUBLISHED = 0.33  # lmsys.org, DFlash with overlap against without, Qwen3-8B on a B200


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


def concurrency(result: dict[str, Any]) -> str:
    """A Markdown table of a run with many requests at once."""
    run = result["run"]
    lines = [
        "| requests at once | drafter | tokens/s | first token ms (p99) | a token ms (p99) "
        "| pages | outside steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["concurrency"]:
        first, token = (f"{row[k]['median']:.1f} ({row[k]['p99']:.1f})" for k in SPREADS)
        lines.append(
            f"| {row['clients']} | {'yes' if row['speculate'] else 'no'} "
            f"| {row['tokens_per_second']:.0f} | {first} | {token} | {row['most_pages']} "
            f"| {row['outside_steps']:.1%} |"
        )
    prefix = result["prefix"]
    lines += [
        "",
        f"A prompt of {prefix['tokens']} tokens: first token after {prefix['cold_ms']:.0f} ms "
        f"cold, {prefix['cached_ms']:.1f} ms with its prefix cached, {prefix['ratio']:.1f}x.",
    ]
    if "peer" in result:
        lines.append(
            f"The reference package at 1 in the same run: {result['peer']['peer']['total']:.0f} "
            "tokens/s."
        )
    lines += ["", f"Machine as above, commit {run['commit']}: `{run['command']}`"]
    return "\n".join(lines)


def simulated(result: dict[str, Any]) -> str:
    """A Markdown table of the device's idle share, overlap off and on."""
    run = result["run"]
    lines = [
        "| step ms | requests | idle, no overlap | idle, overlap | tokens/s gained "
        "| host us a request and step | without text |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["simulated"]:
        on = row["on"]
        waits = {name: _waits(row, name) for name in ("off", "on")}
        lines.append(
            f"| {row['step_ms']:g} | {row['clients']} | {waits['off']:.1%} "
            f"| {waits['on']:.2%} | {row['gain'] - 1:+.0%} | {on['host_us']:.1f} "
            f"| {_silent(row)} |"
        )
    runs = [one for row in result["simulated"] for some in row["samples"].values() for one in some]
    lines += [
        "",
        f"The published gain of overlap, on another engine and a real GPU, is +{PUBLISHED:.0%}. "
        f"Medians of {len(result['simulated'][0]['samples']['on'])} runs of at least "
        f"{min(one['steps'] for one in runs)} steps, machine as above, commit "
        f"{run['commit']}: `{run['command']}`",
    ]
    return "\n".join(lines)


def queues(result: dict[str, Any]) -> str:
    """A Markdown table of the same runs with overlap: what waits for what, means a step."""
    lines = [
        "| step ms | requests | slack ms | surplus rows | steps launched | waiting | running |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["simulated"]:
        runs = row["samples"]["on"]
        slack, waiting, running = (
            statistics.median(run[key] for run in runs)
            for key in ("slack_ms", "waiting", "running")
        )
        surplus = statistics.median(run["surplus_rows"] / run["rows"] for run in runs)
        launched = statistics.median(_mean(run["launched"]) for run in runs)
        lines.append(
            f"| {row['step_ms']:g} | {row['clients']} | {slack:.2f} | {surplus:.2%} "
            f"| {launched:.2f} | {waiting:.1f} | {running:.1f} |"
        )
    return "\n".join(lines)


def _mean(counts: dict[str, int]) -> float:
    return sum(int(n) * count for n, count in counts.items()) / sum(counts.values())


def _waits(row: dict[str, Any], name: str) -> float:
    """Share of the time that is no step: also what a late host makes of a copy's time."""
    shares = [
        1 - row["step_ms"] * (1 - run["idle_share"]) / run["step_ms"]
        for run in row["samples"][name]
    ]
    return statistics.median(shares)


def _silent(row: dict[str, Any]) -> str:
    return f"{row['silent']['host_us']:.1f}" if "silent" in row else ""


def overlapped(result: dict[str, Any]) -> str:
    """A Markdown table of overlap on a CPU, where host and device share the cores."""
    run = result["run"]
    lines = [
        "| requests at once | tokens/s, no overlap | tokens/s, overlap | ratio | surplus rows |",
        "|---|---|---|---|---|",
    ]
    for row in result["overlap"]:
        lines.append(
            f"| {row['clients']} | {row['off']:.0f} | {row['on']:.0f} | {row['ratio']:.2f} "
            f"| {row['surplus_rows']} of {row['requests']} requests ({row['surplus_share']:.1%}) |"
        )
    lines += [
        "",
        "A surplus row is a cycle launched before the host knew that its request had ended.",
        "",
        f"Machine as above, commit {run['commit']}: `{run['command']}`",
    ]
    return "\n".join(lines)


def gpu(result: dict[str, Any]) -> str:
    """Markdown tables of a GPU check: cycles against the floor, kernels, what is equal."""
    arithmetic = f", {result['tflops']} TFLOP/s" if result["tflops"] else ""
    lines = [f"{result['device']}, {result['tb_per_second']:.2f} TB/s{arithmetic}", ""]
    failed = {part: result[part] for part in GPU_PARTS if "error" in result[part]}
    lines += [f"{part} failed: {told['error']}" for part, told in failed.items()]
    if "cycles" not in failed:
        lines += [
            "| requests | context | | step ms | floor | ratio | idle | beside | tau | tokens/s |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in result["cycles"]:
            if "error" in row:
                lines.append(
                    f"| {row['batch']} | {row['context']} | {row['kind']}: {row['error']} |"
                )
                continue
            spent = row["step_ms"] / (1 - row["idle_share"])
            lines.append(
                f"| {row['batch']} | {row['context']} | {row['kind']} | {row['step_ms']:.2f} "
                f"| {row['floor_ms']:.2f} | {row['step_ms'] / row['floor_ms']:.2f} "
                f"| {row['idle_share']:.2%} | {row['beside_ms']:.2f} ms | {row['tau']:.2f} "
                f"| {1e3 * row['batch'] * row['tau'] / spent:.0f} |"
            )
    if "kernels" not in failed:
        lines += ["", "| kernel | requests | context | us | of peak |", "|---|---|---|---|---|"]
        lines += [
            f"| {row['kernel']} | {row['batch']} | {row['context']} | {1e3 * row['ms']:.1f} | "
            + ("cached |" if row["share"] is None else f"{row['share']:.0%} |")
            for row in result["kernels"]
        ]
    if "errors" not in failed:
        lines += [
            "",
            "| kernel, worst case | error | the definition's own | at |",
            "|---|---|---|---|",
        ]
        worst = {row["kernel"]: row for row in sorted(result["errors"], key=_badness)}
        lines += [
            f"| {kernel} | {_share(row['error'])} | {_share(row['rounding'])} | {row['case']} |"
            for kernel, row in worst.items()
        ]
    if "same" not in failed:
        same = result["same"]
        lines += [
            "",
            f"Graphs are what eager steps are: {same['graphs_are_eager']}. Tokens are the same "
            f"whatever is proposed: {same['whatever_is_proposed']}. Plain decoding has the same "
            f"first {same['plain_same_until']} of {same['new_tokens']} tokens, the definitions "
            f"{same['definitions_same_until']}; different ids in a text: {same['different_ids']}.",
        ]
    if "ahead" not in failed:
        made = result["ahead"]
        lines += [
            "",
            f"Before it serves: {made['cycles']} cycles captured in {made['seconds']:.1f} s, "
            f"{made['gib']:.2f} GiB; {made['in_service']} more for a request.",
        ]
    last = result["tests"].get("last", result["tests"].get("error", "no checkout"))
    return "\n".join([*lines, "", f"Kernel tests: {last}. {result['seconds']:.0f} s."])


def update_readme(path: Path, part: str, text: str) -> None:
    """Put `text` between the README's markers of a part."""
    begin, end = f"<!-- bench: {part} -->", f"<!-- /bench: {part} -->"
    before, rest = path.read_text().split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def _badness(row: dict[str, Any]) -> float:
    """Of an error, beside what rounding alone makes."""
    if row["error"] is None:
        return math.inf
    return row["error"] / max(row["rounding"] or 0, 1e-9)


def _share(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def _rate(median: dict[str, float]) -> str:
    return f"{median['decode']:.0f} ({median['total']:.0f})"
