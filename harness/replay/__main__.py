"""python -m harness.replay --benchmark | --overhead | --export DIR: the rate of replay, the cost of capture; Parquet.

A replay itself is a task: python -m harness task=replay capture=DIR
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from adapters.capture.layout import CaptureError


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text!r}")
    return int(text)


def share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, found {text!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.replay", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--benchmark", action="store_true", help="positions per minute of every policy, made-up blocks")
    what.add_argument(
        "--overhead", action="store_true", help="tokens/s of the embedded engine with and without capture, recorded"
    )
    what.add_argument("--export", type=Path, metavar="DIR", help="scalars of a capture as Parquet, beside its shards")
    parser.add_argument("--positions", type=count, default=10_000_000, help="of --benchmark (default 10 million)")
    parser.add_argument("--prompts", type=count, default=24, help="of --overhead: generated problems (default 24)")
    parser.add_argument("--rounds", type=count, default=5, help="of --overhead: times through them (default 5)")
    parser.add_argument("--rows", type=share, default=0.0, help="of --overhead: share of requests with full rows")
    parser.add_argument(
        "--sampled", action="store_true", help="of --overhead: at temperature 1 under chain (default: greedy, strict)"
    )
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
        _takes_files(out.parent)  # before it is measured
        command = ["python -m harness.replay", *sys.argv[1:]]
        found = cost.measure(args.prompts, args.rounds, args.rows, args.sampled, command)
        cost.write(out, found)
        cost.show(found)
        print(f"record: {out}")
    except (CaptureError, ValueError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    return 0


def _takes_files(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
