"""Calibration: the quantile of positive ratios, frozen with its provenance."""

import json

import numpy as np
import pytest

from harness.config import load
from harness.records.read import read_all
from harness.tasks.calibrate import frozen


def test_the_quantile_is_of_positive_ratios():
    rejections = [(1.0, 0, 7), (1.0, 6, 7), (0.0, 3, 7), (0.5, 3, 6)]
    ratios = [1.0, 7.0, 1.0]  # r / ((live - i) / live); a tie of regret 0 does not count
    found = frozen(rejections, 0.25)
    assert found["value"] == pytest.approx(np.quantile(ratios, 0.25))
    assert (found["rejections"], found["ratios"]) == (4, 3)
    assert found["policy"]["budget"] == found["policy"]["gate"] == found["value"]
    assert found["policy"]["suffix_value"] == "normalized"


def test_nothing_to_calibrate_on():
    assert frozen([(0.0, 0, 7)], 0.25)["policy"] is None


def test_calibrate_freezes_a_policy_that_a_model_can_run(harness, tmp_path):
    status, _, err = harness("task=calibrate", "task.items=4")
    assert status == 0, err
    (run,) = read_all(tmp_path / "results")
    assert run.problems == []
    path = run.folder / "calibration.json"
    assert json.loads(path.read_text())["run"] == run.record.id
    policy = load([f"model.calibration={path}"]).policy
    assert policy.budget == run.record.summary["calibration"]["value"] > 0
    assert f"{policy.budget:.4f}" in (tmp_path / "results" / "README.md").read_text()
