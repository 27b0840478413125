"""Benchmarks: `python bench.py`. Prints a table, then one line of JSON.

Medians over rounds; ratios are taken inside a round. Nothing here is asserted by a test: machines
are shared and noisy.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--draft", default="bundled")
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--peer", choices=["dflash"], help="also run the reference package")
    parser.add_argument(
        "--concurrency", type=_sizes, metavar="1,4,16", help="many requests at once instead"
    )
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
    with LLM(**models, block_size=arguments.block_size, prefix_cache=False) as llm:
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


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)

    from nanodflash.benchmarks import machine, report

    models = {"model": arguments.model, "draft": arguments.draft}
    try:
        run = _concurrent if arguments.concurrency else _single
        result = {"run": machine.provenance(argv)} | run(arguments, models)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = report.concurrency(result) if arguments.concurrency else report.table(result)
    print(text)
    if "decode" in result:
        print("\ntokens a cycle")
        print(report.histogram(result["decode"]["metrics"]["emitted_histogram"]))
        print("\nms of a plain step at 200 tokens, by max_model_len:", result["context_ms"])
    print(json.dumps(result))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.readme:
        part = "concurrency" if arguments.concurrency else "decode"
        report.update_readme(Path(__file__).parent / "README.md", part, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
