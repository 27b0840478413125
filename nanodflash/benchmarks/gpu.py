"""What `bench.py --gpu-check` runs: are kernels and graphs right, how far is the floor.

Needs one GPU and no download: weights are random, in the shape of Qwen3-8B and its drafter. What
is accepted is scripted, on the device, since a random drafter is never right.
"""

import gc
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodflash import ops
from nanodflash.benchmarks.kernel_errors import kernel_errors
from nanodflash.benchmarks.kernel_times import kernel_times
from nanodflash.benchmarks.random_pair import DRAFT, TARGET, Bench
from nanodflash.decoding.cycle import Decoder
from nanodflash.engine import sequence as host
from nanodflash.engine.engine import Engine, RequestHandle
from nanodflash.engine.memory import page_bytes, weight_count
from nanodflash.models.config import DraftConfig, TargetConfig

# TB/s and dense bf16 TFLOP/s that a device can be expected to reach (B200: an assumption).
PEAKS = {"B200": (8.0, 1600), "H200": (4.8, 790), "H100": (3.35, 790), "A100": (2.0, 280)}
CYCLE = ("draft", "verify")  # the parts of a step that are graphs
# Seconds: for one measurement, for the kernels' own tests, until the last measurement begins.
PATIENCE, TESTS, MOST = 60, 150, 340
CASES = Path(__file__).parents[2] / "tests" / "kernels" / "cases"


def run_tokens(engine: Engine, requests: Sequence[host.Sequence]) -> list[list[int]]:
    """The ids of requests that run together."""
    handles = [engine.submit(request, streams=False) for request in requests]
    return [handle.result().token_ids for handle in handles]


def run_steps(engine: Engine, requests: Sequence[host.Sequence], steps: int) -> dict[str, Any]:
    """Metrics of `steps` steps while all requests decode; they are ended then."""
    handles = [engine.submit(request, streams=False) for request in requests]
    try:
        started = lambda r: len(r.token_ids) > 64  # noqa: E731 (warm: captured, compiled)
        _wait(handles, lambda: all(map(started, requests)))
        before, first = engine.metrics.copy(), sum(len(r.token_ids) for r in requests)
        _wait(handles, lambda: engine.metrics.steps >= before.steps + steps)
        spent, last = engine.metrics - before, sum(len(r.token_ids) for r in requests)
        told: dict[str, Any] = spent.as_dict()
        # A step that waits for the host within itself is not idle: it shows here.
        told["beside_ms"] = told["step_ms"] - sum(told["part_ms"].get(part, 0) for part in CYCLE)
        prompts = sum(len(r.prompt) for r in requests)
        held = (prompts + (first + last) / 2) / len(requests)
        return told | {"tau": (last - first) / spent.rows, "mean_context": held}
    finally:
        for handle in handles:
            handle.abort()
        end = time.perf_counter() + PATIENCE
        for handle in handles:
            handle.wait(max(0.0, end - time.perf_counter()))


def _wait(handles: list[RequestHandle], there: Callable[[], bool]) -> None:
    end = time.perf_counter() + PATIENCE
    while not there():
        if time.perf_counter() > end:
            raise TimeoutError(f"nothing was measured within {PATIENCE} s")
        if any(handle.done for handle in handles):
            handles[0].result()  # raises what went wrong
            raise RuntimeError("a request ended before it was measured")
        time.sleep(0.002)


def floors(
    target: TargetConfig,
    draft: DraftConfig,
    batch: int,
    context: float,
    itemsize: int,
    width: float | None = None,
) -> dict[str, float]:
    """Bytes and operations of a cycle that nothing can avoid: weights, K/V, products.

    Args:
        width: rows of a block that are verified, on the mean; None is all of them.
    """
    size, head = draft.block_size, target.vocab_size * target.hidden_size
    width = size if width is None else width
    body = weight_count(target) - 2 * head  # the embedding is read by row
    drafter = weight_count(draft)
    looks = [c.num_hidden_layers * c.num_attention_heads * c.head_dim for c in (target, draft)]
    attention = 4 * context * (width * looks[0] + size * looks[1])
    products = 2.0 * (width * (body + 2 * head) + size * drafter)
    kv = batch * context * page_bytes([target, draft], 1, itemsize)
    return {
        "bytes": itemsize * (body + 2 * head + drafter) + kv,
        "flops": batch * (products + attention),
        "plain_bytes": itemsize * (body + head)
        + batch * context * page_bytes([target], 1, itemsize),
    }


def add_floors(
    rows: list[dict[str, Any]],
    target: TargetConfig,
    draft: DraftConfig,
    bandwidth: float,
    arithmetic: float | None,
) -> None:
    """Add `floor_ms` to rows of `run_cycles`, for TB/s and TFLOP/s of a device."""
    for row in rows:
        if "error" in row:
            continue
        widths = {int(width): steps for width, steps in row["verify_widths"].items()}
        width = sum(w * steps for w, steps in widths.items()) / max(sum(widths.values()), 1)
        floor = floors(target, draft, row["batch"], row["mean_context"], 2, width or None)
        plain = row["kind"] == "plain"
        seconds = floor["plain_bytes" if plain else "bytes"] / bandwidth / 1e12
        if arithmetic and not plain:
            seconds = max(seconds, floor["flops"] / arithmetic / 1e12)
        row["floor_ms"] = 1e3 * seconds


def peaks() -> tuple[float, float | None]:
    """TB/s and TFLOP/s of this device; of an unknown one the first is that of a copy."""
    name = torch.cuda.get_device_name()
    for known, peak in PEAKS.items():
        if known in name:
            return peak
    from triton.testing import do_bench

    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    into = torch.empty_like(source)
    return 2 * source.numel() / (do_bench(lambda: into.copy_(source)) * 1e-3) / 1e12, None


def kernel_tests(seconds: float) -> dict[str, Any]:
    """The kernels' own tests, on the device, for at most so long; nothing where this is no
    checkout.
    """
    if not CASES.is_dir():
        return {"ran": False}
    root = CASES.parents[2]
    # Without the project's own settings: they name plugins that may not be here.
    flags = ["-q", "--maxfail=30", "-p", "no:cacheprovider", "-c", os.devnull]
    flags += ["-m", "not slow", "--import-mode=importlib", f"--rootdir={root}"]
    flags += ["-o", f"pythonpath={root} {root / 'tests'}"]
    if importlib.util.find_spec("xdist"):  # compiling is most of it
        flags += ["-n", str(min(os.cpu_count() or 1, 12))]
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", *flags, str(CASES)],
        cwd=root,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    late = ""
    try:
        text, _ = tests.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)  # its workers too: they would disturb what follows
        text, _ = tests.communicate()
        late = f"not done in {seconds:.0f} s: "
    lines = text.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith("FAILED")]
    return {"ran": True, "ok": tests.returncode == 0, "last": late + lines[-1], "failed": failed}


def ahead(bench: Bench) -> dict[str, Any]:
    """What an engine compiles and captures before it serves: seconds, graphs, GiB; and how many
    graphs a greedy request asks for beside them (none).
    """
    decoder = bench.decoder(bench.table)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    began, (free, _) = time.perf_counter(), torch.cuda.mem_get_info()
    size = bench.config.block_size
    engine = bench.engine(decoder, width=None, ahead=(size, -(-size // 2), 1))
    try:
        graphs = len(engine.runner.steps.cycles)
        torch.cuda.empty_cache()
        told = {
            "seconds": time.perf_counter() - began,
            "cycles": graphs,
            "gib": (free - torch.cuda.mem_get_info()[0]) / 2**30,
        }
        run_tokens(engine, [bench.request(100, 64)])
        return told | {"in_service": len(engine.runner.steps.cycles) - graphs}
    finally:
        engine.close()


def same_tokens(bench: Bench, lengths: Sequence[int], new: int) -> dict[str, Any]:
    """Are replays what steps from Python are; is a text the same whatever was proposed; how far is
    it that of plain decoding, where a product of matrices has another number of rows, and that of
    the definitions, which round elsewhere.
    """
    asked = lambda speculate=True: [  # noqa: E731
        bench.request(length, new, speculate, seed=length) for length in lengths
    ]
    texts: dict[str, list[list[int]]] = {}

    def run(name: str, decoder: Decoder, graphs: bool, speculate: bool = True) -> None:
        engine = bench.engine(decoder, graphs)
        try:  # one at a time: equal numbers of rows
            texts[name] = [run_tokens(engine, [one])[0] for one in asked(speculate)]
        finally:
            engine.close()

    decoder = bench.decoder(bench.table)
    run("graphs", decoder, True)
    run("eager", decoder, False)
    run("plain", decoder, True, speculate=False)
    del decoder  # before the next one is made: there is room for one
    run("definitions", bench.decoder(ops.REFERENCE), False)
    known = [torch.tensor(text) for text in texts["graphs"]]
    prompts = [request.prompt for request in asked()]

    def right(tokens: Tensor, length: Tensor) -> Tensor:
        """Proposes what was emitted before, and zeros where it does not know the prompt."""
        made = torch.zeros(len(tokens), bench.config.block_size - 1, dtype=torch.int64)
        for row, ids, at in zip(made, tokens.cpu(), length.tolist(), strict=True):
            for prompt, text in zip(prompts, known, strict=True):
                if at >= len(prompt) and ids[: len(prompt)].tolist() == prompt:
                    rest = text[at - len(prompt) + 1 :][: len(row)]
                    row[: len(rest)] = rest
        return made.to(tokens.device)

    run("all right", bench.decoder(bench.table, right), True)
    return {
        "lengths": list(lengths),
        "graphs_are_eager": texts["graphs"] == texts["eager"],
        "whatever_is_proposed": texts["graphs"] == texts["all right"],
        **{
            f"{other}_same_until": [
                _same_until(a, b) for a, b in zip(texts["graphs"], texts[other], strict=True)
            ]
            for other in ("plain", "definitions")
        },
        "new_tokens": new,
        "different_ids": [len(set(text)) for text in texts["graphs"]],
    }


def _same_until(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def run_cycles(
    bench: Bench,
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int,
    widths: Sequence[int | None],
    told: Callable[[dict[str, Any]], None] = lambda row: None,
    end: float = math.inf,
) -> list[dict[str, Any]]:
    """Milliseconds of a step, idle share and tokens a cycle: plain decoding, overlap on and off,
    and other widths of verification at the largest batch.

    Args:
        told: called with each row when it is there.
        end:  of `time.perf_counter`, from which on nothing is measured any more.
    """
    found = []
    decoder = bench.decoder(bench.scripted())

    def run(kind: str, batch: int, context: int, engine: Engine, speculate: bool = True) -> None:
        requests = [
            bench.request(context, bench.new_tokens, speculate, seed=i) for i in range(batch)
        ]
        row: dict[str, Any] = {"kind": kind, "batch": batch, "context": context}
        try:
            if time.perf_counter() > end:
                raise TimeoutError("no time left")
            row |= run_steps(engine, requests, steps)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        found.append(row)
        told(row)

    for kind, overlap, width, speculate in (
        ("DFlash", True, 0, True),
        ("DFlash, no overlap", False, 0, True),
        ("plain", True, 0, False),
        *((f"DFlash, width {width or 'measured'}", True, width, True) for width in widths),
    ):
        engine = bench.engine(decoder, overlap=overlap, width=width)
        try:
            for batch in batches if width == 0 else batches[-1:]:
                for context in contexts:
                    run(kind, batch, context, engine, speculate)
        finally:
            engine.close()
            del engine
            gc.collect()
    return found


def gpu_check(told: Callable[[str], None]) -> dict[str, Any]:
    """Everything, on the current CUDA device. A part that fails is a line of the result.

    Args:
        told: called with each part's result as JSON when it is there: what has run is not lost.
    Raises:
        ValueError: there is no such device.
    """
    if not torch.cuda.is_available():
        raise ValueError("--gpu-check needs a CUDA device, and torch sees none here")
    began = time.perf_counter()
    bandwidth, arithmetic = peaks()
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device, torch.bfloat16, TARGET, DRAFT, batch=32, context=4096)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "tb_per_second": bandwidth,
        "tflops": arithmetic,
        "reduced_bf16_sums": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    }
    target, draft = bench.models[0].config, bench.models[1].config
    tell = lambda **part: told(json.dumps(part))  # noqa: E731
    shapes = ((1, 512), (32, 512), (32, 4096))
    parts: dict[str, Callable[[], Any]] = {
        "tests": lambda: kernel_tests(TESTS),
        "errors": lambda: kernel_errors(bench.table, target, bench.models[0].norm),
        "ahead": lambda: ahead(bench),
        "same": lambda: same_tokens(bench, (5, 64, 300, 1000), new=48),
        "kernels": lambda: [
            row
            for shape in shapes
            for row in kernel_times(bench.models[0], bench.table, 16, *shape, bandwidth)
        ],
        "cycles": lambda: run_cycles(
            bench,
            (1, 8, 32),
            (512, 4096),
            40,
            (8, None),
            lambda row: tell(cycle=row),
            began + MOST,
        ),
    }
    for name, part in parts.items():
        try:
            result[name] = part()
        except Exception as error:
            traceback.print_exc()
            result[name] = {"error": f"{type(error).__name__}: {error}"}
        tell(**{name: result[name], "seconds": time.perf_counter() - began})
    if isinstance(result["cycles"], list):
        add_floors(result["cycles"], target, draft, bandwidth, arithmetic)
    return result | {"seconds": time.perf_counter() - began}
