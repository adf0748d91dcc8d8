"""Whole benches against the fake engine: verdicts, refusals, what is kept."""

from harness.records.read import read_all


def only(tmp_path):
    (run,) = read_all(tmp_path / "results")
    return run


def test_bench_that_passes(harness, tmp_path):
    status, out, err = harness()
    run = only(tmp_path)
    assert status == 0, err
    assert run.problems == []
    assert run.record.status == "complete"
    assert list(run.record.arms) == ["strict", "asd-b0", "asd"]
    assert len(run.rows) == 18
    assert "6/6 equal" in out
    assert "verdict: pass" in out
    assert (tmp_path / "results" / "README.md").exists()
