"""Requests in flight: bounded, in order, and ended by the first error."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.drive import drive


@given(st.lists(st.integers(), max_size=30), st.integers(1, 8))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_results_are_in_the_order_of_the_jobs(jobs, concurrency):
    assert drive(lambda job: 2 * job, jobs, concurrency) == [2 * job for job in jobs]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_as_many_are_in_flight_as_asked_for(concurrency):
    lock, full = threading.Lock(), threading.Barrier(concurrency, timeout=30)
    now, most = 0, 0

    def ask(job):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        full.wait()  # passes only once all of them are in flight
        with lock:
            now -= 1
        return job

    assert drive(ask, range(4 * concurrency), concurrency) == list(range(4 * concurrency))
    assert most == concurrency


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_first_error_ends_it(concurrency):
    asked = []

    def ask(job):
        asked.append(job)
        if job == 2:
            raise KeyError(job)
        threading.Event().wait(0.01)
        return job

    with pytest.raises(KeyError):
        drive(ask, range(1000), concurrency)
    assert len(asked) < 1000


def test_nobody_asks_with_nothing_in_flight():
    with pytest.raises(ValueError, match="concurrency: expected an integer >= 1, found 0"):
        drive(str, [1], 0)
