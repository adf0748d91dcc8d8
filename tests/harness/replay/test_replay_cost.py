"""The cost of a capture: right values from made-up seconds, a verdict by interval, a record that is not overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from harness.replay import cost
from harness.replay.__main__ import main


def made(slower: float, noise: float = 0.0, prompts: int = 12, rounds: int = 4) -> cost.Cost:
    """Pairs under a load that changes from pair to pair by a factor of three; capture takes `slower` more, the writer's
    work half of it."""
    rng = np.random.default_rng(0)
    load = rng.uniform(1, 3, (rounds, prompts, 1))
    jitter = 1 + noise * rng.normal(size=(rounds, prompts, 3))
    seconds = 0.1 * load * jitter * np.array([1, 1 + slower / 2, 1 + slower])
    told = cost.report(seconds, seconds, np.full(prompts, 50), 0.0, False, 700, 0)
    machine = {"cpu": "a CPU", "cores": 2, "load_average": [0.1, 0, 0]}
    return cost.Cost({"date": "2026-01-01T00:00:00Z", "environment": machine}, told)


@pytest.mark.parametrize(("slower", "within"), [(0.02, True), (0.05, False), (0.0, True)])
def test_load_cancels_in_pairs(slower, within):
    told = made(slower).report
    assert told["most"]["value"] == pytest.approx(1 / (1 + slower) - 1)
    assert told["least"]["value"] == pytest.approx(1 / (1 + slower / 2) - 1)
    assert told["median_of_pairs"] == pytest.approx(told["most"]["value"])
    assert told["most"]["n"] == 12  # prompts, however often they were asked
    assert told["tokens"] == 2400
    assert told["tps_with"] / told["tps_without"] - 1 == pytest.approx(told["most"]["value"])
    assert told["within_bar"] is within


def test_an_interval_over_the_bar_decides_nothing():
    told = made(0.02, noise=0.02).report
    assert told["most"]["low"] < -cost.BAR < told["most"]["high"]
    assert told["within_bar"] is None
    assert cost.within_bar({"low": None, "high": None, "value": 0.0}) is None


def test_a_record_is_written_once_and_read_as_a_row(tmp_path, capsys):
    found = made(0.02)
    path = tmp_path / cost.FOLDER / "a.json"
    cost.write(path, found)
    with pytest.raises(cost.CostError, match="expected no file"):
        cost.write(path, found)
    ((name, read),) = cost.read_all(tmp_path)
    assert (name, read) == ("captures/a.json", found)
    cells = dict(zip(cost.COLUMNS, cost.row(read), strict=True))
    assert "-2.0 % [-2.0, -2.0] (within the bar of 3%)" in cells.values()
    path.write_text("{}")
    with pytest.raises(cost.CostError, match=r"captures/a\.json"):
        cost.read_all(tmp_path)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_capture_is_measured(sampled, capsys):
    found = cost.measure(2, 2, 0.0, sampled, ["a", "command"])
    told = found.report
    seconds = np.array(told["seconds"])
    assert seconds.shape == (2, 2, 3)
    assert (seconds > 0).all()
    assert (seconds[..., 2] > seconds[..., 1]).all()  # the files took time
    assert told["blocks"] % 3 == 0  # each prompt once to warm up and twice with, in as many steps
    assert 3 * told["tokens"] / 2 / 8 <= told["blocks"] <= 3 * told["tokens"] / 2
    assert (told["dropped"], told["sampled"]) == (0, sampled)
    assert cost.row(found)[1] == ("compact, sampled" if sampled else "compact")
    cost.show(found)
    assert f"{told['blocks']:,} blocks captured, 0 dropped" in capsys.readouterr().out


def test_nothing_is_measured_for_a_file_that_exists(tmp_path, monkeypatch, capsys):
    (tmp_path / "there.json").write_text("{}")
    monkeypatch.setattr(cost, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("sys.argv", ["replay", "--overhead", "--out", str(tmp_path / "there.json")])
    assert main() == 1
    assert "expected no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rounds", "0"], "argument --rounds: expected 1 or more, found '0'"),
        (["--rounds", "x"], "argument --rounds: expected 1 or more, found 'x'"),
        (["--prompts", "-1"], "argument --prompts: expected 1 or more, found '-1'"),
        (["--rows", "2"], "argument --rows: expected a share from 0 to 1, found '2'"),
        (["--rows", "nan"], "argument --rows: expected a share from 0 to 1, found 'nan'"),
        (["--out", "/proc/no/file.json"], "replay: /proc/no: No such file or directory"),
        (["--out", "/proc/file.json"], "replay: /proc: No such file or directory"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_refused_before_it_is_measured(words, told, monkeypatch, capsys):
    def measure(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(cost, "measure", measure)
    monkeypatch.setattr("sys.argv", ["harness.replay", "--overhead", *words])
    try:
        status = main()
    except SystemExit as error:  # argparse
        status = error.code
    assert status in (1, 2)
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith(told)


def test_no_rate_of_no_positions(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["harness.replay", "--benchmark", "--positions", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "argument --positions: expected 1 or more, found '0'" in capsys.readouterr().err
