"""python -m harness.replay --benchmark | --overhead | --export DIR: the rate of replay, the cost of capture; Parquet.

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
        "--overhead", action="store_true", help="tokens/s of the embedded engine with and without capture, recorded"
    )
    what.add_argument("--export", type=Path, metavar="DIR", help="scalars of a capture as Parquet, beside its shards")
    parser.add_argument("--positions", type=int, default=10_000_000, help="of --benchmark (default 10 million)")
    parser.add_argument("--prompts", type=int, default=24, help="of --overhead: generated problems (default 24)")
    parser.add_argument("--rounds", type=int, default=5, help="of --overhead: times through them (default 5)")
    parser.add_argument("--rows", type=float, default=0.0, help="of --overhead: share of requests with full rows")
    parser.add_argument(
        "--out", type=Path, help="of --overhead: file of the record (default results/captures/<UTC>.json)"
    )
    args = parser.parse_args()
    try:
        if args.export is not None:
            from harness.replay import parquet, reader

            for folder in reader.find(args.export):
                print(*parquet.export(folder), sep="\n")
            return 0
        if args.benchmark:
            from harness.replay import benchmark

            benchmark.rates(args.positions)
            return 0
        from harness.config import ROOT
        from harness.records.run import now
        from harness.replay import cost

        stem = now().replace("-", "").replace(":", "")
        out = args.out or ROOT / "results" / cost.FOLDER / f"{stem}.json"
        if out.exists():
            raise cost.CostError(f"{out}: expected no file, found one")
        found = cost.measure(args.prompts, args.rounds, args.rows, ["python -m harness.replay", *sys.argv[1:]])
        cost.write(out, found)
        cost.show(found)
        print(f"record: {out}")
    except (CaptureError, ValueError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
