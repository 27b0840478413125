"""Benchmarks: `python bench.py`. Prints a table, then one line of JSON.

Medians over rounds; ratios are taken inside a round. Nothing here is asserted by a test: machines
are shared and noisy.
"""

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run the decoding benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--draft", default="bundled")
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--peer", choices=["dflash"], help="also run the reference package")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    arguments = parser.parse_args(argv)
    argv = sys.argv[1:] if argv is None else argv

    from nanodflash import LLM
    from nanodflash.benchmarks import decode, machine, memory, report
    from nanodflash.llm import BUNDLED

    try:
        models = {"model": arguments.model, "draft": arguments.draft}
        result: dict[str, object] = {"run": machine.provenance(argv)}
        with LLM(**models, block_size=arguments.block_size) as llm:
            prompts = decode.prompt_set(llm, arguments.prompts)
            sizes = (arguments.rounds, arguments.max_new_tokens)
            result["decode"] = decode.run_decode(llm, prompts, *sizes)
            if arguments.peer:
                from nanodflash.benchmarks.peer import dflash_generate

                target, draft = (
                    BUNDLED / role if name == "bundled" else Path(name)
                    for role, name in (("target", arguments.model), ("draft", arguments.draft))
                )
                peer = dflash_generate(target, draft, list(llm.eos_token_ids), sizes[1])
                result["peer"] = decode.run_peer(peer, llm, prompts, *sizes)
        result["context_ms"] = decode.run_context(
            lambda length: LLM(**models, max_model_len=length), [512, 2048], steps=64
        )
        result["memory"] = memory.run_memory(**models)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = report.table(result)
    print(text, "\n\ntokens a cycle")
    print(report.histogram(result["decode"]["metrics"]["emitted_histogram"]))  # type: ignore[index]
    print("\nms of a plain step at 200 tokens, by max_model_len:", result["context_ms"])
    line = json.dumps(result)
    print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.readme:
        report.update_readme(Path(__file__).parent / "README.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
