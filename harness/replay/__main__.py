"""python -m harness.replay --benchmark | --overhead | --export DIR: the rates of replay and capture; Parquet alone.

A replay itself is a task: python -m harness task=replay capture=DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from adapters.capture.layout import CaptureError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.replay", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--benchmark", action="store_true", help="positions per minute of every policy, made-up blocks")
    what.add_argument(
        "--overhead", action="store_true", help="tokens/s of the embedded engine with and without capture"
    )
    what.add_argument("--export", type=Path, metavar="DIR", help="scalars of a capture as Parquet, beside its shards")
    parser.add_argument("--positions", type=int, default=10_000_000, help="of --benchmark (default 10 million)")
    parser.add_argument("--prompts", type=int, default=24, help="of --overhead: generated problems (default 24)")
    parser.add_argument("--rounds", type=int, default=5, help="of --overhead: times through them (default 5)")
    parser.add_argument("--rows", action="store_true", help="of --overhead: full rows as well")
    args = parser.parse_args()
    try:
        if args.export is not None:
            from harness.replay import parquet, reader

            for folder in reader.find(args.export):
                print(*parquet.export(folder), sep="\n")
            return 0
        from harness.replay import benchmark

        if args.benchmark:
            benchmark.rates(args.positions)
        else:
            benchmark.overhead(args.prompts, args.rounds, args.rows)
    except CaptureError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
