"""Command line: `python -m nanodflash.train target|draft|score`."""

import argparse
import sys
from pathlib import Path

import torch


def main(argv: list[str] | None = None) -> int:
    """Parse, run one of the commands, and turn what a user can cause into one line."""
    parser = argparse.ArgumentParser(prog="python -m nanodflash.train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    target = commands.add_parser("target", help="train a small Qwen3 target")
    target.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    target.add_argument("--minutes", type=float, default=75.0)
    target.add_argument("--seed", type=int, default=0)
    target.add_argument("--text", type=Path, help="a text file instead of the corpus generator")
    target.add_argument("--vocab-size", type=int, default=2048)
    target.add_argument("--tokens", type=int, default=2304, help="ids a step")

    arguments = parser.parse_args(argv)
    torch.set_flush_denormal(True)
    try:
        from nanodflash.train.target import train_target

        train_target(
            arguments.out,
            arguments.minutes,
            arguments.seed,
            arguments.text,
            arguments.vocab_size,
            arguments.tokens,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
