"""Tables as functions of records: what an edit, a stale file or a bad run does to them."""

import json
import shutil
from pathlib import Path

import pytest

from harness.config import ROOT
from harness.publish import cells
from harness.publish.tables import PUBLISHED, choose, markdown, published, render, write
from harness.records.read import read_all
from harness.records.run import read_rows, sha256, write_rows
from harness.records.schema import Record, seal
from harness.tasks import find


@pytest.fixture(scope="module")
def measured(pair, tmp_path_factory):
    """Results of one bench and one gate; tests copy them."""
    from harness import __main__ as cli
    from harness import interrupt

    root = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
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


def edit(results, task: str, change, resealed: bool = True):
    """Change a record, and seal it again as a careful forger would."""
    import msgspec

    (run,) = [run for run in read_all(results) if run.record.task == task]
    path = run.folder / "record.json"
    record = json.loads(path.read_text())
    change(record)
    if resealed:
        record["seal"] = seal(msgspec.convert(record, Record))
    path.write_text(json.dumps(record))
    return run


def test_sound_results_pass(check):
    assert check() == (0, "")


def test_nothing_to_check_is_not_a_pass(results, check):
    shutil.rmtree(results / "runs")
    status, err = check()
    assert status == 2
    assert "nothing to check" in err


def test_an_edited_cell_is_found(results, check):
    path = results / "README.md"
    text = path.read_text()
    assert "6/6 equal" in text
    path.write_text(text.replace("6/6 equal", "7/7 equal"))
    status, err = check()
    assert status == 1
    assert "README.md: line" in err
    write(results)
    assert check()[0] == 0


@pytest.mark.parametrize("name", ["README.md", "plot"])
def test_a_missing_file_is_found(results, check, name):
    path = results / name if name != "plot" else next((results / "plots").glob("*.svg"))
    path.unlink()
    assert check()[0] == 1


def test_a_left_over_plot_is_found_and_removed(results, check):
    extra = results / "plots" / "old.svg"
    extra.write_text("<svg/>")
    assert check()[0] == 1
    write(results)
    assert not extra.exists()
    assert check()[0] == 0


def test_an_edited_record_is_found(results, check):
    edit(results, "bench", lambda record: record["environment"].update(cpu="faster"), resealed=False)
    status, err = check()
    assert status == 1
    assert "seal" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record["summary"]["arms"]["asd"]["tps"].update(value=9999.0), "summary: differs"),
        (lambda record: record["gates"]["identity"].update(compared=1319), "gates: differs"),
        (lambda record: record["verdict"].update(reasons=["none"]), "verdict: differs"),
        (lambda record: record["arms"]["asd"]["counters_after"].update(relaxed=0), "verdict: differs"),
        (lambda record: record["identity"].update(engine={"name": "other"}), "identity.digest"),
        (lambda record: record["identity"].update(adapter_files=None), "identity.adapter_files: expected a value"),
        (lambda record: record["environment"].pop("cpu"), "environment.cpu: expected a value"),
        (lambda record: record.update(launch=None), "launch: expected a value"),
    ],
)
def test_a_forged_record_is_found_by_its_rows_and_its_provenance(results, check, change, words):
    edit(results, "bench", change)
    write(results)  # tables made again from the forged record
    status, err = check()
    assert status == 1
    assert words in err


def test_forged_rows_are_found(results, check):
    (run,) = [run for run in read_all(results) if run.record.task == "bench"]
    rows = read_rows(run.folder / "requests.parquet")
    for row in rows:
        row.wall_s /= 2
    write_rows(run.folder / "requests.parquet", rows)
    edit(results, "bench", lambda record: record.update(requests_sha256=sha256(run.folder / "requests.parquet")))
    status, err = check()
    assert status == 1
    assert "summary: differs" in err


def test_an_incomplete_run_is_listed_and_replaces_nothing(results, check):
    (good,) = [run for run in read_all(results) if run.record.task == "bench"]
    later = good.folder.with_name("99991231T000000Z-00000000")
    shutil.copytree(good.folder, later)
    path = later / "record.json"
    record = json.loads(path.read_text()) | {"id": later.name, "status": "incomplete", "error": "interrupted by SIGINT"}
    record["verdict"] = None
    import msgspec

    record["seal"] = seal(msgspec.convert(record, Record))
    path.write_text(json.dumps(record))
    write(results)
    text = (results / "README.md").read_text()
    measured, _, others = text.partition("## Other runs")
    assert good.record.id in measured
    assert later.name not in measured
    assert "interrupted by SIGINT" in others
    assert check()[0] == 0


def test_a_failed_verdict_does_not_replace_a_pass(results):
    (good,) = [run for run in read_all(results) if run.record.task == "bench"]
    later = good.folder.with_name("99991231T000000Z-00000000")
    shutil.copytree(good.folder, later)
    import msgspec

    path = later / "record.json"
    record = json.loads(path.read_text()) | {"id": later.name}
    record["verdict"] = {"outcome": "fail", "reasons": ["x"]}
    record["seal"] = seal(msgspec.convert(record, Record))
    path.write_text(json.dumps(record))
    shown = [run.folder.name for run in choose(read_all(results)).values()]
    assert good.folder.name in shown
    assert later.name not in shown


def test_rendering_is_a_function_of_the_records(results):
    assert render(results) == render(results)
    files = render(results)
    assert sorted(files)[0] == "README.md"
    assert all(b"<svg" in content for name, content in files.items() if name.endswith(".svg"))


def test_no_cell_is_blank(results):
    for line in (results / "README.md").read_text().splitlines():
        if line.startswith("|"):
            assert all(cell.strip() for cell in line.strip("|").split("|")), line
    text = (results / "README.md").read_text()
    assert "not run" in text
    assert "unsupported (deepseek-v4-flash runs on sglang only)" in text
    with pytest.raises(ValueError, match="filled cells"):
        markdown(["a", "b"], [["1", ""]])


def test_published_figures_name_their_source():
    figures = published(ROOT / "results")
    assert {figure.kind for figure in figures} == {"evaluator", "engine", "replay"}
    assert all(figure.source for figure in figures)
    stated = {(figure.tps, figure.tps_change) for figure in figures}
    assert {("66.21", "baseline"), ("75.04", "+13.34 %"), ("31.765", "baseline"), ("33.493", "+5.44 %")} <= stated


def test_a_figure_without_a_source_is_an_error(tmp_path):
    text = (ROOT / "results" / PUBLISHED).read_text()
    first = next(line for line in text.splitlines() if line.strip().startswith("source:"))
    (tmp_path / PUBLISHED).write_text(text.replace(first, '  source: ""', 1))
    with pytest.raises(ValueError, match="source"):
        published(tmp_path)


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.0453, 0.0413, 0.0492, "+4.5 % [+4.1, +4.9]"),
        (-0.0023, -0.01, 0.005, "\N{MINUS SIGN}0.2 % [\N{MINUS SIGN}1.0, +0.5]"),
        (0.0, -0.0001, 0.0, "0.0 % [0.0, 0.0]"),
        (0.01, None, None, "+1.0 % [no interval]"),
        (None, None, None, "n/a"),
    ],
)
def test_change_cells(value, low, high, text):
    assert cells.change({"value": value, "low": low, "high": high}) == text
