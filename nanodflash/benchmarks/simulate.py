"""The real scheduler, pages, threads and detokenizer on a device that only takes time.

A step of the simulated device takes a fixed time, whatever is in it, and emits scripted
acceptances. What is left to measure is the host: its own cost, and whether the device waits.
"""

import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanodflash.config import BUDGET, RUNNING, EngineConfig, SamplingParams
from nanodflash.decoding.plan import StepPlan
from nanodflash.engine import sequence as host
from nanodflash.engine.engine import Engine, RequestHandle
from nanodflash.engine.streams import SimulatedStream
from nanodflash.engine.trace import Trace
from nanodflash.llm import BUNDLED
from nanodflash.tokenizer import StreamDecoder, Tokenizer

BLOCK, MEAN = 16, 6.4  # emitted a cycle: what the public 8B drafter reaches on GSM8K
ACCEPT = 0.857  # chance that a proposal is right; E[emitted] of a block is then the mean above
PROMPT = 48  # tokens


class SimulatedSteps:
    """Takes `seconds` a step, and emits as a drafter would. A `Steps`.

    Args:
        texts: ids that are emitted over and over.
    """

    def __init__(self, stream: Any, config: EngineConfig, seconds: float, texts: list[int]) -> None:
        self.device = torch.device("cpu")
        self._stream, self._seconds = stream, seconds
        # Per slot, as on a device: len, budget, epoch, state (1 = alive).
        self._len, self._budget, self._epoch, self._alive = (
            np.zeros(config.max_seqs, np.int64) for _ in range(4)
        )
        right = np.random.default_rng(0).random((4096, BLOCK - 1)) < ACCEPT
        self._accepted = right.cumprod(1).sum(1)
        self._tokens = np.resize(np.array(texts, np.int64), 4096 + BLOCK)
        self._turn = 0

    def run(
        self,
        plan: StepPlan,
        sections: Sequence[Tensor],
        result: Tensor,
        mark: Callable[[str], None],
    ) -> None:
        """Let the time pass on the timeline, and make the records."""
        self._stream.spend(self._seconds)
        mark("step")
        for given in plan.admissions:
            self._len[given.slot], self._budget[given.slot] = len(given.ids) - 1, given.budget
            self._epoch[given.slot], self._alive[given.slot] = given.epoch, 0
        rows, ready, finals = (section.numpy() for section in sections[:3])
        self._alive[ready] = 1
        self._turn += 1
        first = self._records(finals, np.zeros(len(finals), np.int64), 1)
        drawn = (self._turn * 257 + np.arange(len(rows)) * 31) % len(self._accepted)
        width = plan.facts.width
        cycle = self._records(rows, np.minimum(self._accepted[drawn], width - 1), width)
        result.numpy()[:] = np.concatenate([first.ravel(), cycle.ravel()])

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is shared."""
        self._alive[list(slots)] = 0

    def _records(self, slots: np.ndarray, accepted: np.ndarray, width: int) -> np.ndarray:
        """Records [n, RECORD + width] of slots that accept so many, and what it does to them."""
        alive = self._alive[slots]
        emitted = np.minimum(accepted + 1, self._budget[slots]) * alive
        self._len[slots] += emitted
        self._budget[slots] -= emitted
        ends = (self._budget[slots] == 0) & (alive == 1)
        self._alive[slots] = alive & ~ends
        head = (
            emitted,
            np.minimum(accepted, emitted),
            accepted,
            np.where(ends, BUDGET, RUNNING),
            self._len[slots],
            self._epoch[slots],
        )
        starts = (slots * 97 + self._turn * 13) % 4096
        tokens = self._tokens[starts[:, None] + np.arange(width)]
        return np.concatenate([np.stack(head, 1), tokens], 1)


class Simulation:
    """An engine on the simulated device.

    Args:
        clients:  requests that run at once.
        seconds:  of a step.
        streamed: make texts, as for readers that stream.
    """

    def __init__(
        self,
        clients: int,
        seconds: float,
        overlap: bool,
        streamed: bool = True,
        trace: Trace | None = None,
        num_pages: int | None = None,
    ) -> None:
        self.config = EngineConfig(
            max_model_len=1024,
            block_size=BLOCK,
            max_seqs=clients,
            max_prefill=clients * BLOCK + 512,
            num_pages=num_pages,
        )
        self._tokenizer = Tokenizer.from_folder(BUNDLED / "target")
        self._ids = self._tokenizer.encode("Gina buys 3 flowers at 8 dollars each. 3 * 8 = 24. ")
        self._streamed, self._rng = streamed, random.Random(clients)
        self.engine = Engine(
            lambda stream: SimulatedSteps(stream, self.config, seconds, self._ids),
            SimulatedStream,
            self.config,
            draft_limit=self.config.max_model_len,
            drafts=True,
            overlap=overlap,
            trace=trace,
        )

    def request(self, new_tokens: int) -> host.Sequence:
        """A request with a prompt of its own, that ends with its budget."""
        prompt = [self._rng.randrange(5, 2000) for _ in range(PROMPT)]
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        decoder = StreamDecoder(self._tokenizer, ()) if self._streamed else None
        return host.Sequence(prompt, params, new_tokens, 0, [], True, decoder)

    def run(self, steps: int) -> dict[str, Any]:
        """Keep all clients busy for at least so many steps, requests ending and coming.

        Returns:
            The engine's metrics, tokens/s on the device's clock, microseconds of the bookkeeping
            thread a request and step.
        """
        clients, each = self.config.max_seqs, 50
        tokens, handles = 0, deque[RequestHandle]()
        while self.engine.metrics.steps < steps:
            size = round(MEAN * self._rng.uniform(0.5, 1.5) * each)
            handles.append(self.engine.submit(self.request(size)))
            if len(handles) == 2 * clients:
                tokens += _read(handles.popleft())
        tokens += sum(map(_read, handles))
        metrics = self.engine.metrics.copy()
        return metrics.as_dict() | {
            "tokens_per_second": tokens / (metrics.busy_seconds + metrics.idle_seconds),
            "host_us": 1e6 * metrics.host_seconds / metrics.rows,
        }


def _read(handle: RequestHandle) -> int:
    return sum(len(chunk.token_ids) for chunk in handle)


def run_simulated(
    step_ms: float, clients: int, steps: int, rounds: int, silent: bool
) -> dict[str, Any]:
    """Idle share of the device, overlap off and on in turns; medians of `rounds` runs.

    Args:
        silent: run without texts too.

    Returns:
        A JSON object: samples of both, medians, gain in tokens/s; host microseconds a request and
        step with text and without.
    """
    kinds = {"off": (False, True), "on": (True, True)} | (
        {"silent": (True, False)} if silent else {}
    )
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, (overlap, streamed) in kinds.items():
            simulation = Simulation(clients, 1e-3 * step_ms, overlap, streamed)
            samples[name].append(simulation.run(steps))
            simulation.engine.close()
    median = {
        name: {
            key: statistics.median(run[key] for run in runs)
            for key in ("idle_share", "tokens_per_second", "host_us", "slack_ms", "steps")
        }
        for name, runs in samples.items()
    }
    return {
        "step_ms": step_ms,
        "clients": clients,
        "samples": samples,
        **median,
        "gain": statistics.median(
            on["tokens_per_second"] / off["tokens_per_second"]
            for on, off in zip(samples["on"], samples["off"], strict=True)
        ),
    }


def traced(clients: int, step_ms: float, overlap: bool, steps: int) -> Trace:
    """What happens when, for a picture."""
    trace = Trace()
    simulation = Simulation(clients, 1e-3 * step_ms, overlap, True, trace)
    simulation.run(steps)
    simulation.engine.close()
    return trace
