"""Results of one bench and one gate on the fake engine."""

import os
import shutil
from pathlib import Path

import pytest

from harness.tasks import find


@pytest.fixture(scope="session")
def measured(pair, tmp_path_factory):
    """Results of one bench and one gate; tests copy them."""
    from harness import __main__ as cli
    from harness import interrupt

    root = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        patch.setattr(interrupt, "install", lambda: None)
        own = [f"model.target={pair['target']}", f"model.draft={pair['draft']}", "model.calibration=null"]
        common = ["traffic=generated-math", "limit=6", f"out={root}", "engine.module=fake_engine"]
        for task in ("bench", "gate"):
            assert cli.main([f"task={task}", *own, *common]) == 0
    return root


@pytest.fixture
def results(measured, tmp_path):
    shutil.copytree(measured, tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def check(results, capfd):
    """Run tables-check: (status, stderr)."""
    from harness.config import load

    def run() -> tuple[int, str]:
        status = find("tables-check")(load(["task=tables-check", f"out={results}"]))
        return status, capfd.readouterr().err

    return run
