"""Benchmarks: `python bench.py`. Prints a table, then one line of JSON.

Medians over rounds; ratios are taken inside a round. Nothing here is asserted by a test: machines
are shared and noisy.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _whole(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a whole number of at least {least}")
    return int(text)


def _two(text: str) -> int:
    return _whole(text, 2)  # the first token belongs to no cycle


def _sizes(text: str) -> list[int]:
    return [_whole(part) for part in text.split(",")]


def _milliseconds(text: str) -> list[float]:
    parts = [float(part) for part in text.split(",")]
    if not all(0 < part < 1e6 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted milliseconds above 0")
    return parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--draft", default="bundled")
    parser.add_argument("--prompts", type=_whole, default=40, help="held-out prompts")
    parser.add_argument("--rounds", type=_whole, default=5)
    parser.add_argument("--max-new-tokens", type=_two, default=200)
    parser.add_argument("--block-size", type=_two)
    parser.add_argument("--peer", choices=["dflash"], help="also run the reference package")
    parser.add_argument(
        "--concurrency", type=_sizes, metavar="1,4,16", help="many requests at once instead"
    )
    parser.add_argument(
        "--simulate",
        type=_milliseconds,
        metavar="4,16",
        help="a device that takes so many ms a step",
    )
    parser.add_argument("--steps", type=_whole, default=500, help="of a simulated run, at least")
    parser.add_argument(
        "--overlap", action="store_true", help="with and without overlap, on the real models"
    )
    parser.add_argument(
        "--gpu-check", action="store_true", help="kernels, graphs and cycles on a GPU, no download"
    )
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of the run there")
    parser.add_argument("--picture", type=Path, help="draw simulated steps there (matplotlib)")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    return parser


def _single(arguments: argparse.Namespace, models: dict[str, str]) -> dict[str, Any]:
    """Batch 1, with and without the drafter, and the reference where asked for."""
    from nanodflash import LLM
    from nanodflash.benchmarks import decode, memory
    from nanodflash.benchmarks.peer import Peer

    sizes = (arguments.rounds, arguments.max_new_tokens)
    result: dict[str, Any] = {}
    # No prefix cache: a prompt's second round would be another measurement.
    options = {"block_size": arguments.block_size, "trace": arguments.trace}
    with LLM(**models, **options, prefix_cache=False) as llm:
        prompts = decode.prompt_set(llm, arguments.prompts)
        result["decode"] = decode.run_decode(llm, prompts, *sizes)
        if arguments.peer:
            with Peer(**models, stop_ids=list(llm.eos_token_ids), max_new=sizes[1]) as peer:
                result["peer"] = decode.run_peer(peer, llm, prompts, *sizes)
    result["context_ms"] = decode.run_context(
        lambda length: LLM(**models, max_model_len=length), [512, 2048], steps=64
    )
    return result | {"memory": memory.run_memory(**models)}


def _concurrent(arguments: argparse.Namespace, models: dict[str, str]) -> dict[str, Any]:
    """Many clients, with and without the drafter; the prefix cache; the reference at 1."""
    from nanodflash import LLM
    from nanodflash.benchmarks import decode, serve
    from nanodflash.benchmarks.peer import Peer

    runs = []
    with LLM(**models, max_seqs=max(arguments.concurrency), prefix_cache=False) as llm:
        prompts = decode.prompt_set(llm, arguments.prompts)
        for clients in arguments.concurrency:
            for speculate in (True, False):
                new = (speculate, arguments.max_new_tokens)
                serve.run_concurrency(llm, prompts, clients, *new)  # warm-up
                runs.append(serve.run_concurrency(llm, prompts, clients, *new))
        result: dict[str, Any] = {"concurrency": runs}
        if arguments.peer:
            new_tokens = arguments.max_new_tokens
            with Peer(**models, stop_ids=list(llm.eos_token_ids), max_new=new_tokens) as peer:
                sizes = (prompts[:10], arguments.rounds, new_tokens)
                result["peer"] = decode.run_peer(peer, llm, *sizes)
    with LLM(**models) as llm:
        result["prefix"] = serve.run_prefix(llm, 1500, arguments.rounds)
    return result


def _simulated(arguments: argparse.Namespace, models: dict[str, str]) -> dict[str, Any]:
    """The host's own cost and the device's bubbles; models are not needed."""
    from nanodflash.benchmarks import picture, simulate
    from nanodflash.engine.trace import write_traces

    # What is loaded by now lives on: the garbage collector need not look at it again.
    gc.collect()
    gc.freeze()
    rows = [
        # What texts cost does not depend on the length of a step.
        simulate.run_simulated(ms, clients, arguments.steps, arguments.rounds, silent=place == 0)
        for place, ms in enumerate(arguments.simulate)
        for clients in arguments.concurrency or [32]
    ]
    if arguments.trace or arguments.picture:
        ms, clients = arguments.simulate[0], (arguments.concurrency or [32])[-1]
        traces = {
            name: simulate.traced(clients, ms, name == "overlap", steps=60)
            for name in ("no overlap", "overlap")
        }
        if arguments.trace:
            write_traces(traces, arguments.trace)
        if arguments.picture:
            about = f"{clients} requests, steps of {ms:g} ms"
            titled = {f"{name}: {about}": trace for name, trace in traces.items()}
            picture.draw(titled, arguments.picture, first_step=40, steps=6)
    return {"simulated": rows}


def _overlapped(arguments: argparse.Namespace, models: dict[str, str]) -> dict[str, Any]:
    """Overlap on and off with the real models, 256 tokens an answer."""
    from nanodflash import LLM
    from nanodflash.benchmarks import serve

    rows = []
    for clients in arguments.concurrency or [1, 16]:

        def llm_of(overlap: bool, clients: int = clients) -> LLM:
            return LLM(**models, overlap=overlap, max_seqs=clients, prefix_cache=False)

        count = max(8, clients)
        rows.append(serve.run_overlap(llm_of, count, clients, arguments.rounds, max_new=256))
    return {"overlap": rows}


def _gpu_checked(arguments: argparse.Namespace, models: dict[str, str]) -> dict[str, Any]:
    """Random weights in the public shape, on the GPU that is here."""
    from nanodflash.benchmarks import gpu

    return gpu.gpu_check(lambda line: print(line, flush=True))


def _benchmark(arguments: argparse.Namespace) -> tuple[Any, str, Callable[[Any], str]]:
    """What runs, the README's part for it, and its text."""
    from nanodflash.benchmarks import report

    if arguments.gpu_check:
        return _gpu_checked, "gpu", report.gpu
    if arguments.simulate:
        return _simulated, "simulated", report.simulated
    if arguments.overlap:
        return _overlapped, "overlap", report.overlapped
    if arguments.concurrency:
        return _concurrent, "concurrency", report.concurrency
    return _single, "decode", report.table


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)

    from nanodflash.benchmarks import machine, report

    models = {"model": arguments.model, "draft": arguments.draft}
    try:
        if arguments.picture and not arguments.simulate:
            raise ValueError("--picture draws simulated steps: add --simulate")
        if (
            arguments.trace
            and not arguments.simulate
            and (arguments.gpu_check or arguments.overlap or arguments.concurrency)
        ):
            raise ValueError("--trace goes with --simulate or with the default run")
        if arguments.json:  # what cannot be written is known before the hours of measuring
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.touch()
        run, part, text_of = _benchmark(arguments)
        result = {"run": machine.provenance(argv)} | run(arguments, models)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = text_of(result)
    print(text)
    if "simulated" in result:
        print(f"\n{report.queues(result)}")
    if "decode" in result:
        print("\ntokens a cycle")
        print(report.histogram(result["decode"]["metrics"]["emitted_histogram"]))
        print("\nms of a plain step at 200 tokens, by max_model_len:", result["context_ms"])
    print(json.dumps(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.readme:
        report.update_readme(Path(__file__).parent / "README.md", part, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
