"""Command line: `python -m nanodflash.train target|draft|score`.

Both trainings run for a number of minutes, save a resumable state every two, and go on where
they were when the same command is given again.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from nanodflash.config import check_int, check_number

# Least and most of the whole numbers among the flags.
BOUNDS = {
    "seed": (0, 2**32 - 1),
    "vocab_size": (260, 2**20),  # all bytes and the special tokens
    "tokens": (1, 2**24),
    "answers": (1, 10**6),
    "layers": (1, 64),
    "taps": (1, 64),
    "block_size": (2, 256),
    "problems": (1, 10**5),
    "max_new_tokens": (1, 2**24),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nanodflash.train",
        description="Train a small Qwen3 target, a DFlash drafter for a target, or score a pair.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    target = commands.add_parser("target", help="train a small Qwen3 target")
    target.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    target.add_argument("--minutes", type=float, default=62.0)
    target.add_argument("--seed", type=int, default=0)
    target.add_argument("--text", type=Path, help="a text file instead of the corpus generator")
    target.add_argument("--vocab-size", type=int, default=2048)
    target.add_argument("--tokens", type=int, default=2304, help="ids a step")

    draft = commands.add_parser("draft", help="train a DFlash drafter for a target folder")
    draft.add_argument("--target", required=True, help="folder or hub id of the target")
    draft.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    draft.add_argument("--minutes", type=float, default=30.0)
    draft.add_argument("--answers", type=int, default=8000, help="training prompts to answer")
    draft.add_argument("--seed", type=int, default=0)
    draft.add_argument("--layers", type=int, default=2)
    draft.add_argument("--taps", type=int, default=3, help="tapped target layers")
    draft.add_argument("--block-size", type=int, default=16)
    draft.add_argument("--prompts", type=Path, help="a prompt a line, instead of the corpus")

    score = commands.add_parser("score", help="score a pair on held-out problems")
    score.add_argument("--model", default="bundled")
    score.add_argument("--draft", default="auto", help="'none' decodes without one")
    score.add_argument("--problems", type=int, default=200)
    score.add_argument("--seed", type=int, default=7)
    score.add_argument("--kind", choices=["maths", "code"], default="maths")
    score.add_argument("--max-new-tokens", type=int, default=300)
    return parser


def _check(options: dict[str, object]) -> None:
    """ValueError for a number that no run can do with."""
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        if key in BOUNDS:
            check_int(flag, value, *BOUNDS[key])
        elif key == "minutes":
            check_number(flag, value, lambda x: 0 < x <= 1e6, "a number above 0, at most 1000000")


def _run(command: str, **options: object) -> None:
    _check(options)
    if command == "target":
        from nanodflash.train.target import train_target

        train_target(**options)  # type: ignore[arg-type]
    elif command == "draft":
        from nanodflash.train.draft import train_draft

        train_draft(**options)  # type: ignore[arg-type]
    else:
        from nanodflash import LLM
        from nanodflash.train.score import score_pair

        draft = None if options["draft"] == "none" else options["draft"]
        with LLM(options["model"], draft) as llm:
            keys = ("problems", "seed", "kind", "max_new_tokens")
            result = score_pair(llm, *(options[key] for key in keys))  # type: ignore[arg-type]
        print(json.dumps(result))


def main(argv: list[str] | None = None) -> int:
    """Run one command; what a user can cause is one line and exit code 2."""
    torch.set_flush_denormal(True)
    args = _parser().parse_args(argv)
    try:
        _run(**vars(args))
    except (ValueError, OSError) as error:
        _say("error: " + " ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:
        _say("interrupted" + "; the same command resumes" * (args.command != "score"))
        return 130
    return 0


def _say(line: str) -> None:
    if sys.stderr is not None:  # closed: `print` would take stdout
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
