"""This project's client against a URL, as the timed part of a bench asks: `python -m harness.load.client URL ...`.

Prints one JSON object: when it began and ended (CLOCK_MONOTONIC), what it saw, what it cost. Its own process, so that
the cost is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence

from harness.drive import drive
from harness.engines.base import Generation, Request
from harness.engines.native import NativeClient


def measure(url: str, requests: int, concurrency: int, prompt: int, tokens: Sequence[int]) -> dict[str, float | int]:
    """tokens: lengths asked for, in turn. wall_s: summed over the answers, each on the client's clock."""
    client = NativeClient(url)

    def ask(number: int) -> Generation:
        count = tokens[number % len(tokens)]
        return client.generate(Request(f"load-{number}", range(prompt), count, None, deadline_s=300.0))

    drive(ask, range(concurrency), concurrency)  # connections and threads
    client.flush()  # a mark for the mock: what came before is no part of it
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    answers = drive(ask, range(requests), concurrency)
    ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "started": started,
        "ended": ended,
        "tokens": sum(len(answer.output_ids) for answer in answers),
        "answers": len(answers),
        "wall_s": sum(answer.wall_s for answer in answers),
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    for name in ("requests", "concurrency", "prompt"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tokens", type=lambda text: [int(each) for each in text.split(",")], required=True)
    given = parser.parse_args()
    print(json.dumps(measure(given.url, given.requests, given.concurrency, given.prompt, given.tokens)))


if __name__ == "__main__":
    main()
