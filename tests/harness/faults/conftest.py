"""A bench on an engine with a fault."""

import sys
from pathlib import Path

import pytest
from fake_server import FakeServer

from harness.records.read import read_all

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def engine(pair):
    found = FakeServer(pair)
    yield found
    found.stop()


@pytest.fixture
def measure(harness, engine, tmp_path):
    """(exit status, what was said, the runs)."""

    def run(fault) -> tuple[int, str, list]:
        if fault.launched:
            more = ["engine.ready_timeout_s=3", "launch.stop_timeout_s=0.3"]
            status, out, err = harness(*more, fault=fault.name, after=fault.after)
        else:
            engine.become(fault.name, fault.after)
            status, out, err = harness("launch=attach", f"url={engine.url}", "engine.request_timeout_s=0.5")
        return status, out + err, read_all(Path(tmp_path) / "results")

    return run
