"""Sweeps as a user starts them, in a process of their own, on a fake engine of the tests' process."""

import os
import subprocess
import sys
import tempfile

import pytest
from fake_server import FakeServer


@pytest.fixture
def engine(pair):
    found = FakeServer(pair)
    yield found
    found.stop()


@pytest.fixture
def scratch():
    """Where the sweep's temporary files go; short, since Ray has sockets there."""
    with tempfile.TemporaryDirectory(prefix="sw") as found:
        yield found


@pytest.fixture
def sweep(overrides, engine, tmp_path, scratch):
    """Start `python -m harness task=sweep ...` in an empty folder."""
    here = tmp_path / "here"
    here.mkdir()

    def start(*more: str) -> subprocess.Popen:
        argv = [sys.executable, "-m", "harness", "task=sweep", *overrides, "launch=attach", f"url={engine.url}"]
        environment = os.environ | {"PYTHONPATH": os.getcwd(), "TMPDIR": scratch, "RAY_AUTH_MODE": "disabled"}
        return subprocess.Popen(
            [*argv, "limit=2", *more],
            env=environment,
            cwd=here,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start
