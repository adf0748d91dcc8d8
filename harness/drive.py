"""Requests in flight: as many as asked for, no more, the next as soon as one is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def drive(ask: Callable[[Job], Result], jobs: Iterable[Job], concurrency: int) -> list[Result]:
    """`ask` of every job, started in order, at most `concurrency` at once; the results in the order of the jobs.

    What an `ask` raises is raised here, the first in time: no further job starts, and those in flight are left to end.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency: expected an integer >= 1, found {concurrency!r}")
    if concurrency == 1:
        return [ask(job) for job in jobs]
    pool = ThreadPoolExecutor(concurrency)
    try:
        waiting = [pool.submit(ask, job) for job in jobs]
        for done in as_completed(waiting):
            done.result()
        return [done.result() for done in waiting]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
