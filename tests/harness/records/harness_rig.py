"""Runs the harness again and again, and is killed: `python -m harness_rig '[[ROWS, LINES], ...]' ARGUMENTS`.

Each [ROWS, LINES] is a life of its own, forked: SIGKILL ends it LINES executed lines of the harness after its ROWS-th
answer is in the journal, with the next answer at the latest; 0 rows: after it began to finish the run; null: it lives
to its end. Prints the exit status of each life.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from harness import __main__ as cli
from harness.records import Run

HARNESS = str(Path(cli.__file__).parent)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(rows: int, lines: int) -> None:
    appended, finished = Run.append, Run.finish
    left = [rows, lines]

    def trace(frame: FrameType, event: str, argument: object):
        if not frame.f_code.co_filename.startswith(HARNESS):
            return None
        if event == "line":
            left[1] -= 1
            if left[1] <= 0:
                kill()
        return trace

    def start() -> None:
        frame = sys._getframe(2)
        while frame is not None:
            frame.f_trace = trace
            frame = frame.f_back
        sys.settrace(trace)

    def append(run: Run, row) -> None:
        appended(run, row)
        left[0] -= 1
        if left[0] == 0:
            start()
        elif left[0] < 0:
            kill()  # the thread that was traced had nothing more to do

    def finish(run: Run, *arguments) -> None:
        start()
        finished(run, *arguments)

    if rows:
        Run.append = append
    else:
        Run.finish = finish


def main() -> None:
    for life in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            if life is not None:
                kill_after(*life)
            status = 70
            try:
                status = cli.main(sys.argv[2:])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(f"life: {-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)}", flush=True)


if __name__ == "__main__":
    main()
