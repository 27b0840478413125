"""Decode prompts, and see which tokens the drafter proposed.

    python generate.py                        the bundled pair, on prompts of its domain
    python generate.py "One cup costs 3 dollars. What do 4 cups cost?"
    python generate.py --model Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --chat
    python generate.py --prompt-file prompts.jsonl --jsonl > outputs.jsonl

Texts go to stdout, everything beside them to stderr. Exit codes: 2 for bad input, 1 for another
failure, 130 when interrupted: what is there by then is shown.
"""

import argparse
import io
import os
import sys
from dataclasses import asdict, fields
from typing import NoReturn

from nanodflash.cli import Screen, complain, converse, decode, is_terminal
from nanodflash.config import EngineConfig, SamplingParams
from nanodflash.requests import Request, lay_out, read_requests

# Problems of nanodflash/train, held out of the bundled pair's training.
PROMPTS = (
    "Gina buys 3 flowers at 8 dollars each and pays with 50 dollars. How much change does Gina get "
    "in dollars?",
    "A tank holds 82 litres and has 28 litres in it. Hugo adds 6 litres a minute. How many minutes "
    "does it take to fill the tank?",
    "At the zoo, adults pay 8 dollars and children pay 6 dollars. How many dollars do 2 adults and "
    "3 children pay?",
    "Write a Python function count_below(items) that returns how many elements of the list are "
    "less than 28.",
)
INTERRUPTED = 130
UNTRAINED = "the public Qwen3-4B/8B drafters were trained without thinking: expect a lower tau"


class Parser(argparse.ArgumentParser):
    """Bad arguments are reported as any other bad input."""

    def error(self, message: str) -> NoReturn:
        """Raise, instead of printing the usage."""
        raise ValueError(message)


def make_parser() -> Parser:
    """All flags."""
    parser = Parser(prog="generate.py", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("prompt", nargs="?", help="default: a few word problems")
    parser.add_argument("--prompt-file", metavar="FILE", help="one prompt a line; - is stdin")
    parser.add_argument(
        "--jsonl",
        action="store_true",
        help='objects a line, in the file and on stdout: {"prompt": TEXT} or {"messages": [...]}, '
        "and any of the library's SamplingParams",
    )
    parser.add_argument("--chat", action="store_true", help="a conversation, line by line")

    models = parser.add_argument_group("models")
    models.add_argument("--model", default="bundled", help="folder or hub id (%(default)s)")
    models.add_argument("--draft", default="auto", help="folder, hub id or none (%(default)s)")
    models.add_argument("--revision", help="branch, tag or commit of the model")
    models.add_argument("--draft-revision", metavar="REVISION", help="the same of the drafter")
    models.add_argument("--block-size", type=int, metavar="S", help="at most the drafter's")
    models.add_argument("--max-model-len", type=int, metavar="N", help="prompt and new tokens")
    models.add_argument(
        "--max-seqs", type=int, default=EngineConfig.max_seqs, metavar="N", help="that run at once"
    )
    models.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="replay captured steps instead of running each from Python",
    )
    models.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default="auto",
        help="book beside the running step (on CUDA)",
    )
    models.add_argument(
        "--verify-width",
        type=lambda text: int(text) if text.isdecimal() else text,
        default="auto",
        metavar="W",
        help="rows of a block that are verified: a number, measure, or auto (measure on CUDA)",
    )
    models.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="X", help="%(default)s"
    )
    models.add_argument("--device", default="auto", help="auto, cpu or cuda")
    models.add_argument("--dtype", default="auto", help="auto, bf16, fp32 or fp64")

    layout = parser.add_argument_group("prompt")
    layout.add_argument("--raw", action="store_true", help="without the chat template")
    layout.add_argument("--system", metavar="TEXT", help="system message")
    layout.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=False)

    sampling = parser.add_argument_group("sampling")
    for name, kind, told in (
        ("max_new_tokens", int, "%(default)s"),
        ("temperature", float, "%(default)s; 0 is greedy"),
        ("top_p", float, "%(default)s"),
        ("top_k", int, "%(default)s; 0 keeps all"),
        ("min_p", float, "%(default)s"),
        ("seed", int, "a fresh one for each prompt"),
        ("repetition_penalty", float, "%(default)s; of prompt and output"),
        ("presence_penalty", float, "%(default)s; of the output"),
        ("frequency_penalty", float, "%(default)s; of the output"),
        ("min_new_tokens", int, "%(default)s"),
        ("logprobs", int, "for --json: of each token, and of X others"),
    ):
        flag, default = "--" + name.replace("_", "-"), getattr(SamplingParams, name)
        sampling.add_argument(flag, type=kind, default=default, metavar="X", help=told)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true")

    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--compare", action="store_true", help="decode without the drafter as well")
    shown.add_argument("--json", action="store_true", help="one line, an object with everything")
    shown.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the engine there")
    shown.add_argument("--no-color", action="store_true", help="the variable NO_COLOR does it too")
    shown.add_argument("--quiet", action="store_true", help="the texts alone")
    return parser


def check(args: argparse.Namespace) -> None:
    """ValueError for flags that do not go together."""
    prompt, file = args.prompt is not None, args.prompt_file is not None
    for wrong, told in (
        (prompt and file, "a prompt and --prompt-file"),
        (args.chat and (prompt or file), "--chat and a prompt"),
        (args.chat and args.json, "--chat and --json"),
        (args.chat and args.compare, "--chat and --compare"),
        (args.jsonl and prompt, "--jsonl and a prompt"),
        (args.jsonl and args.chat, "--jsonl and --chat"),
        (args.jsonl and args.json, "--jsonl and --json"),
        (args.jsonl and args.compare, "--jsonl and --compare"),
        (args.raw and args.chat, "--raw and --chat"),
        (args.raw and args.system is not None, "--raw and --system"),
        (args.raw and args.thinking, "--raw and --thinking"),
        (args.quiet and args.compare and not args.json, "--quiet and --compare"),
    ):
        if wrong:
            raise ValueError(f"{told} do not go together: leave one out")
    if args.jsonl and not file:
        raise ValueError("--jsonl needs --prompt-file: name the file, or - for stdin")
    if args.logprobs is not None and not (args.json or args.jsonl):
        raise ValueError("--logprobs needs --json or --jsonl, which show them")
    if args.compare and drafter(args) is None:
        raise ValueError("--compare needs a drafter: name one with --draft")


def drafter(args: argparse.Namespace) -> str | None:
    """The drafter to load, if any."""
    if args.draft == "auto":
        return "bundled" if args.model == "bundled" else None
    return None if args.draft == "none" else args.draft


def run(argv: list[str] | None) -> int:
    """Read the flags, load the models, decode; returns the exit code."""
    args = make_parser().parse_args(argv)
    check(args)
    names = [field.name for field in fields(SamplingParams) if field.name in args]
    given = {name: getattr(args, name) for name in names}
    params = SamplingParams(**given | {"stop": tuple(args.stop or ())})
    if args.prompt_file is None:
        prompts = PROMPTS if args.prompt is None else (args.prompt,)
        requests = [Request({"prompt": prompt}, params) for prompt in prompts]
    else:
        requests = read_requests(args.prompt_file, params, args.jsonl)
    # Where nobody watches the tokens come, many prompts run at once; a comparison is one by one.
    watched = is_terminal(sys.stdout) and not (args.jsonl or args.json or args.quiet)
    together = args.prompt_file is not None and not (watched or args.compare)
    draft = drafter(args)
    if args.quiet or sys.stderr is None:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    from nanodflash.llm import LLM  # torch: slow to import, and not needed until here
    from nanodflash.options import DTYPES

    with LLM(
        args.model,
        draft,
        device=args.device,
        dtype=args.dtype,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_seqs=args.max_seqs,
        graphs=args.graphs,
        overlap=args.overlap,
        verify_width=args.verify_width,
        gpu_memory_utilization=args.gpu_memory_utilization,
        trace=args.trace,
        revision=args.revision,
        draft_revision=args.draft_revision,
    ) as llm:
        if llm.tokenizer is None:
            raise ValueError("this model brings no tokenizer: only the library takes token ids")
        plain = args.no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        colour = draft is not None and not plain
        muted = args.json or args.jsonl
        screen = Screen(llm.tokenizer, colour, muted, args.quiet, args.jsonl)
        if args.thinking and draft is not None:
            screen.note(UNTRAINED)
        layout = {"system": args.system, "thinking": args.thinking}
        if args.chat:
            converse(llm, screen, params, **layout)
            return 0
        requests = lay_out(llm, screen.note, requests, raw=args.raw, **layout)
        outcome = decode(llm, screen, requests, args.compare, together)
        code = INTERRUPTED if outcome.interrupted else 0
        if not args.json:
            for line in outcome.lines():
                screen.note(line)
            widths = llm.metrics.widths
            if len(widths) > 1:  # measured
                told = ", ".join(f"{width} in {widths[width]}" for width in sorted(widths))
                screen.note(f"rows of a block that were verified: {told} steps")
            return code
        about = {
            "model": args.model,
            "draft": draft,
            "device": str(llm.device),
            "dtype": next(name for name, dtype in DTYPES.items() if dtype == llm.dtype),
            "block_size": llm.config.block_size,
            "params": asdict(params),
        }
        screen.write(about | outcome.as_dict())
        return code


def main(argv: list[str] | None = None) -> int:
    """Run; whatever a user can cause becomes an exit code and, if it is an error, one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack a character
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has had enough, as `head` has
        return 0
    except ValueError as error:
        complain(error)
        return 2
    except (OSError, RuntimeError, MemoryError, ImportError) as error:
        complain(error)
        return 1


def drop_unwritten() -> None:
    """Let what cannot be written go nowhere: the interpreter would complain about it at exit."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        drop_unwritten()
