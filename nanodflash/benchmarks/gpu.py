"""What `bench.py --gpu-check` runs: are kernels and graphs right, how far is the floor.

Needs one GPU and no download: weights are random, in the shape of Qwen3-8B and its drafter. What
is accepted is scripted, on the device, since a random drafter is never right.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodflash import ops
from nanodflash.benchmarks.kernel_times import kernel_times
from nanodflash.config import EngineConfig, SamplingParams
from nanodflash.decoding.cycle import Decoder, Proposer
from nanodflash.engine import sequence as host
from nanodflash.engine.engine import Engine, RequestHandle
from nanodflash.engine.memory import page_bytes, weight_count
from nanodflash.engine.steps import ModelSteps
from nanodflash.engine.streams import Stream, open_stream
from nanodflash.models.config import DraftConfig, TargetConfig
from nanodflash.models.dflash import DFlash
from nanodflash.models.qwen3 import Qwen3

# TB/s and dense bf16 TFLOP/s that a device can be expected to reach (B200: an assumption).
PEAKS = {"B200": (8.0, 1600), "H200": (4.8, 790), "H100": (3.35, 790), "A100": (2.0, 280)}
ACCEPT = 0.857  # chance that a proposal is right: 6.4 tokens a cycle, as published
CASES = Path(__file__).parents[2] / "tests" / "kernels" / "cases"

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
DRAFT: dict[str, Any] = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


@dataclass
class Bench:
    """Random models on a device, and engines for them, one at a time.

    Args:
        batch, context: the most requests and the longest context of any part.
    """

    device: torch.device
    dtype: torch.dtype
    target: dict[str, Any]
    draft: dict[str, Any]
    batch: int
    context: int
    new_tokens: int = 1000

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        target, draft = TargetConfig.from_dict(self.target), DraftConfig.from_dict(self.draft)
        with torch.device(self.device):
            self.models = (Qwen3(target).to(self.dtype), DFlash(draft).to(self.dtype))
        for model in self.models:
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.data.normal_(std=0.02)
                parameter.requires_grad_(False)
        self.config = EngineConfig(
            max_model_len=self.context + self.new_tokens + 64,
            block_size=draft.block_size,
            max_seqs=self.batch,
            max_prefill=4096 + self.batch * draft.block_size,
            prefix_cache=False,
        )
        self.table = ops.kernel_ops() if self.device.type == "cuda" else ops.REFERENCE
        self._decoder: Decoder | None = None

    def decoder(self, table: ops.Ops, proposer: Proposer | None = None) -> Decoder:
        """With these operations; the one before it is gone."""
        self._decoder = None
        self._decoder = Decoder(*self.models, self.config, proposer, table)
        return self._decoder

    def engine(self, decoder: Decoder, graphs: bool = True, overlap: bool = True) -> Engine:
        """An engine of its own on the same decoder."""

        def make(stream: Stream) -> ModelSteps:
            return ModelSteps(
                decoder, graphs, stream.capture if self.device.type == "cuda" else None
            )

        limit = self.config.max_model_len
        stream = lambda: open_stream(self.device, overlap)  # noqa: E731
        return Engine(make, stream, self.config, limit, True, overlap)

    def request(
        self, length: int, new: int, speculate: bool = True, seed: int = 0
    ) -> host.Sequence:
        """A prompt of random ids."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.models[0].config.vocab_size
        prompt = torch.randint(0, vocab, (length,), generator=generator).tolist()
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        return host.Sequence(prompt, params, new, 0, [], speculate, None)

    def scripted(self) -> ops.Ops:
        """Operations that accept as the public drafter does."""
        size, table = self.config.block_size, self.table
        generator = torch.Generator().manual_seed(1)
        right = torch.rand(4096, size - 1, generator=generator) < ACCEPT
        runs = right.long().cumprod(1).sum(1).to(self.device)
        places = torch.arange(size - 1, device=self.device)

        def accept_commit(
            slots: Tensor, proposals: Tensor, tokens: Tensor, length: Tensor, *rest: Any
        ) -> Tensor:
            width = proposals.shape[1]
            if width:
                run = runs[(length[slots] * 31 + slots * 7) % len(runs)]
                head = torch.where(places[:width] < run[:, None], proposals, tokens[:, :width])
                wrong = (proposals == tokens[:, :width]) & (places[:width] >= run[:, None])
                head = torch.where(wrong, (head + 1) % 1000, head)
                tokens = torch.cat((head, tokens[:, width:]), 1)
            return table.accept_commit(slots, proposals, tokens, length, *rest)

        return replace(table, accept_commit=accept_commit)


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
        before = engine.metrics.copy()
        _wait(handles, lambda: engine.metrics.steps >= before.steps + steps)
        return (engine.metrics - before).as_dict()
    finally:
        for handle in handles:
            handle.abort()
        for handle in handles:
            handle.wait(60)


def _wait(handles: list[RequestHandle], there: Callable[[], bool]) -> None:
    while not there():
        if any(handle.done for handle in handles):
            handles[0].result()  # raises what went wrong
            raise RuntimeError("a request ended before it was measured")
        time.sleep(0.002)


def floors(
    target: TargetConfig, draft: DraftConfig, batch: int, context: int, itemsize: int
) -> dict[str, float]:
    """Bytes and operations of a cycle that nothing can avoid: weights, K/V, products."""
    size, head = draft.block_size, target.vocab_size * target.hidden_size
    body = weight_count(target) - 2 * head  # the embedding is read by row
    drafter = weight_count(draft)
    rows = batch * size
    kv = batch * context * page_bytes([target, draft], 1, itemsize)
    attention = (
        4
        * rows
        * context
        * sum(c.num_hidden_layers * c.num_attention_heads * c.head_dim for c in (target, draft))
    )
    return {
        "bytes": itemsize * (body + 2 * head + drafter) + kv,
        "flops": 2.0 * rows * (body + 2 * head + drafter) + attention,
        "plain_bytes": itemsize * (body + head) + kv,
    }


def peaks() -> tuple[float, float]:
    """TB/s and TFLOP/s of this device; an unknown one is measured by a copy, and has no second."""
    name = torch.cuda.get_device_name()
    for known, peak in PEAKS.items():
        if known in name:
            return peak
    from triton.testing import do_bench

    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    into = torch.empty_like(source)
    return 2 * source.numel() / (do_bench(lambda: into.copy_(source)) * 1e-3) / 1e12, float("inf")


def kernel_tests() -> dict[str, Any]:
    """The kernels' own tests, on the device; nothing where this is no checkout."""
    if not CASES.is_dir():
        return {"ran": False}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", str(CASES), "-x"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    root = CASES.parents[2]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    return {
        "ran": True,
        "ok": done.returncode == 0,
        "last": lines[-1] if lines else done.stderr[-300:],
    }


def same_tokens(bench: Bench, lengths: Sequence[int], new: int) -> dict[str, Any]:
    """Are replays what steps from Python are; is a text the same whatever was proposed; is it that
    of plain decoding, where a product of matrices has another number of rows.
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
        "plain_same_until": [
            _same_until(a, b) for a, b in zip(texts["graphs"], texts["plain"], strict=True)
        ],
        "new_tokens": new,
    }


def _same_until(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def run_cycles(
    bench: Bench, batches: Sequence[int], contexts: Sequence[int], steps: int
) -> list[dict[str, Any]]:
    """Milliseconds of a cycle and idle share, overlap on and off, and of a plain step."""
    found = []
    decoder = bench.decoder(bench.scripted())
    for overlap in (True, False):
        engine = bench.engine(decoder, overlap=overlap)
        try:
            for batch in batches:
                for context in contexts:
                    for speculate in (True, False) if overlap else (True,):
                        requests = [
                            bench.request(context, bench.new_tokens, speculate, seed=i)
                            for i in range(batch)
                        ]
                        told = run_steps(engine, requests, steps)
                        head = {"batch": batch, "context": context, "overlap": overlap}
                        found.append(head | {"speculate": speculate} | told)
        finally:
            engine.close()
    return found


def gpu_check() -> dict[str, Any]:
    """Everything, on the current CUDA device.

    Raises:
        ValueError: there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError("--gpu-check needs a CUDA device, and torch sees none here")
    began = time.perf_counter()
    bandwidth, arithmetic = peaks()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "tb_per_second": bandwidth,
        "tflops": arithmetic,
        "tests": kernel_tests(),
    }
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device, torch.bfloat16, TARGET, DRAFT, batch=32, context=4096)
    result["same"] = same_tokens(bench, (5, 64, 300, 1000), new=48)
    result["kernels"] = [
        row
        for shape in ((1, 512), (32, 512), (1, 4096))
        for row in kernel_times(bench.models[0], bench.table, 16, *shape, bandwidth)
    ]
    result["cycles"] = run_cycles(bench, (1, 8, 32), (512, 4096), steps=40)
    target, draft = bench.models[0].config, bench.models[1].config
    for row in result["cycles"]:
        floor = floors(target, draft, row["batch"], row["context"], 2)
        moved = floor["bytes" if row["speculate"] else "plain_bytes"]
        least = max(moved / bandwidth / 1e12, row["speculate"] * floor["flops"] / arithmetic / 1e12)
        row["floor_ms"] = 1e3 * least
    return result | {"seconds": time.perf_counter() - began}
