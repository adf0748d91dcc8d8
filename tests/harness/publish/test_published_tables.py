"""Tables as functions of records: what an edit, a stale file or a bad run does to them."""

import io
import json
import re
import shutil
from dataclasses import asdict

import msgspec
import pytest
from publish_rig import again, bench, config_of, edit

from harness.config import ROOT, ConfigError, member, plain
from harness.publish import cells, console
from harness.publish.labels import title
from harness.publish.sections import PUBLISHED, published
from harness.publish.selection import choose, is_small, select
from harness.publish.tables import markdown, render, write
from harness.records.read import read_all
from harness.records.run import read_rows, sha256, write_rows
from harness.records.schema import Record, seal


def test_sound_results_pass(check):
    assert check() == (0, "")


def test_nothing_to_check_is_not_a_pass(results, check):
    shutil.rmtree(results)
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
        (lambda record: record["arms"]["asd"]["counters_after"].update(relaxed=0), "counters: expected the sums"),
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
    path = later / "record.json"
    record = json.loads(path.read_text()) | {"id": later.name}
    record["verdict"] = {"outcome": "fail", "reasons": ["x"]}
    record["seal"] = seal(msgspec.convert(record, Record))
    path.write_text(json.dumps(record))
    shown = [each.record.id for each in choose(read_all(results)).values()]
    assert good.folder.name in shown
    assert later.name not in shown


def test_runs_stand_by_the_weight_of_their_evidence(results):
    """Served engine first, then the GPU, then items; a run of few items apart, wherever it was made."""

    def grown(items, **engine):
        def change(record):
            config_of(record)["engine"] |= engine
            record["workload"]["items"] = [f"item-{n}" for n in range(items)]

        return change

    served = {"name": "sglang", "cuda": True}
    made = {  # a later folder is heavier nowhere
        "cpu-200": again(results, grown(200), "99991231T000001Z-00000000").id,
        "cpu-400": again(results, grown(400), "99991231T000002Z-00000000").id,
        "gpu-150": again(results, grown(150, device="cuda"), "99991231T000003Z-00000000").id,
        "served-120": again(results, grown(120, **served), "99991231T000004Z-00000000").id,
        "served-99": again(results, grown(99, **served), "99991231T000005Z-00000000").id,
    }
    names = {folder: name for name, folder in made.items()}
    chosen = select(read_all(results)).benches
    order = [names.get(each.record.id, "fixture") for each in chosen]
    assert order == ["served-120", "served-99", "gpu-150", "cpu-400", "cpu-200", "fixture"]
    assert [names.get(each.record.id, "fixture") for each in chosen if is_small(each.record)] == [
        "served-99",
        "fixture",
    ]


def test_small_runs_stand_apart_and_after_the_others(results):
    text = render(results)["README.md"].decode()
    measured, _, small = text.partition("## Small runs")
    assert "No bench outside a sweep has passed on 100 items or more." in measured
    assert f"runs/{bench(results).record.id}/record.json" in small


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
    ("value", "low", "high", "text", "range_"),
    [
        (0.0453, 0.0413, 0.0492, "+4.5 %", "[+4.1, +4.9]"),
        (-0.0023, -0.01, 0.005, "\N{MINUS SIGN}0.2 %", "[\N{MINUS SIGN}1.0, +0.5]"),
        (0.0, -0.0001, 0.0, "0.0 %", "[0.0, 0.0]"),
        (0.01, None, None, "+1.0 %", "no interval"),
        (None, None, None, "n/a", "n/a"),
    ],
)
def test_change_cells(value, low, high, text, range_):
    estimate = {"value": value, "low": low, "high": high}
    assert (cells.change(estimate), cells.interval(estimate)) == (text, range_)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["identity"]["target"].update(sha256="0" * 64),
        lambda record: record["identity"]["draft"].update(sha256="0" * 64),
        lambda record: config_of(record)["model"].update(dtype="float32"),
        lambda record: config_of(record)["traffic"].update(max_new_tokens=8),
        lambda record: config_of(record)["traffic"].update(suffix="Be brief."),
        lambda record: config_of(record).update(seed=7),
        lambda record: record["identity"]["data"].update(content_sha256={"test": "0"}),
        lambda record: record["workload"]["items"].pop(),
        lambda record: record["workload"].update(concurrency=4),
        lambda record: record["arms"]["asd"].update(temperature=0.5),
        lambda record: record["arms"]["asd"]["policy"].update(budget=99.0),
        lambda record: record["identity"]["engine"].update(version="9"),
        lambda record: config_of(record)["engine"].update(device="cuda"),
        lambda record: config_of(record)["engine"].update(threads=1),
        lambda record: record["environment"].update(cpu="another"),
        lambda record: record["environment"].update(gpus=[{"name": "H200", "memory_gib": 139.0}]),
    ],
)
def test_a_run_of_anything_else_is_a_row_of_its_own(results, change):
    good = bench(results).record
    other = again(results, change)
    shown = [each.record.id for each in choose(read_all(results)).values()]
    assert {good.id, other.id} <= set(shown)


def test_a_second_pass_of_the_same_question_takes_the_row_and_says_so(results):
    good = bench(results).record

    def change(record):  # neither the load nor how a limit is said makes it another question
        record["environment"].update(load_average=[9.0, 9.0, 9.0])
        config_of(record)["traffic"].update(limit=None)

    other = again(results, change)
    text = render(results)["README.md"].decode()
    measured, _, others = text.partition("## Other runs")
    assert f"runs/{other.id}/" in measured
    assert good.id not in measured
    assert "1 other complete of the same question" in measured
    assert good.id in others


@pytest.mark.parametrize("status", ["complete", "failed"])
def test_a_newer_run_that_did_not_pass_is_told_beside_the_pass(results, status):
    good = bench(results).record

    def change(record):
        if status == "complete":
            record["verdict"] = {"outcome": "fail", "reasons": ["asd-b0: 6 of 6 outputs differ"]}
        else:  # its engine never answered
            record.update(
                status="failed", verdict=None, error="LaunchError: asd-b0: 6 of 6 outputs differ", server=None
            )
            record["identity"].update(engine=None, adapter_files=None)

    other = again(results, change)
    text = render(results)["README.md"].decode()
    measured, _, _ = text.partition("## Identity gates")
    assert f"runs/{good.id}/" in measured
    (line,) = [line for line in measured.splitlines() if line.startswith("**Newer and no pass**")]
    assert other.id in line
    assert "6 of 6 outputs differ" in line


def test_an_older_failure_is_not_told_again(results):
    again(results, lambda record: record["verdict"].update(outcome="fail", reasons=["x"]), "19990101T000000Z-00000000")
    assert b"Newer and no pass" not in render(results)["README.md"]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: config_of(record)["model"].update(name="qwen3-14b"),  # as a hand-made configuration could
        lambda record: config_of(record)["model"].update(name="gpt-5"),
        lambda record: config_of(record)["model"].update(name="qwen3-14b", target="Qwen/Qwen3-14B"),
        lambda record: None,  # the pair of this test is the recipe's in nothing but its name
    ],
)
def test_a_model_is_called_what_it_is(results, change):
    record = again(results, change)
    digest = record.identity.target["sha256"][:12]
    assert title(record).startswith(f"custom: target (draft, {digest}) on reference, generated-math, 6 items")
    text = render(results)["README.md"].decode()
    measured = text.partition("## Measured")[2].partition("## Calibrations")[0]
    assert "qwen3-14b" not in measured
    coverage = text.partition("## What runs where")[2].partition("## Rules by engine")[0]
    assert "runs/" not in coverage


def test_a_recipe_s_own_model_has_its_name(results):
    def change(record):
        recipe = plain(asdict(member("model", "tiny-qwen3")))
        config_of(record)["model"] = recipe
        for side in ("target", "draft"):
            record["identity"][side]["path"] = recipe[side]

    record = again(results, change)
    assert title(record) == "tiny-qwen3 on reference, generated-math, 6 items"
    row = f"| tiny-qwen3 | not run | [{record.id}](runs/{record.id}/record.json)"
    assert f"{row} |" in render(results)["README.md"].decode()
    path = results / "runs" / record.id / "record.json"
    record.verdict.outcome = "fail"
    record.seal = seal(record)
    path.write_bytes(msgspec.json.encode(record))
    assert f"{row}, verdict fail |" in render(results)["README.md"].decode()

    record.identity.config["model"].update(plain(asdict(member("model", "qwen3-14b"))))
    record.identity.target["revision"] = None  # a folder with the path of the hub id
    assert title(record).startswith("custom: ")
    record.identity.target["revision"] = record.identity.draft["revision"] = "0" * 40
    assert title(record).startswith("qwen3-14b on")
    for side in (record.identity.target, record.identity.draft):  # of an attached server: its word, and no content
        side.update(revision=None, reported="Qwen/Qwen3-14B")
    assert title(record).startswith("qwen3-14b (as the server reports) on")


def test_cap_seed_and_temperature_are_in_the_title_and_every_change_in_the_caption(results):
    def change(record):
        config_of(record)["traffic"]["max_new_tokens"] = 8
        config_of(record)["seed"] = 7
        record["arms"]["asd"]["temperature"] = 0.5
        config_of(record)["engine"]["threads"] = 1

    record = again(results, change)
    assert title(record).endswith("6 items, at most 8 tokens, seed 7, temperature 0.5")
    text = render(results)["README.md"].decode()
    (asked,) = [line for line in text.splitlines() if line.startswith("- Asked:") and "seed 7" in line]
    for words in (
        "at most 8 tokens",
        "concurrency 1",
        "temperature 0, 0.5",
        "traffic.max_new_tokens=8",
        "limit=6",
        "seed=7",
    ):
        assert words in asked
    for words in ("engine.threads=1", "engine.module=fake_engine", "model.target=target"):
        assert words in asked


def test_tables_without_records_are_a_failure(results, check):
    shutil.rmtree(results / "runs")
    status, err = check()
    assert status == 1
    assert "README.md: line" in err


def test_a_changed_log_is_found(results, check):
    log = bench(results).folder / "engine.log"
    log.write_text(log.read_text() + "and one more line\n")
    status, err = check()
    assert status == 1
    assert "engine.log: expected" in err


def test_a_broken_list_of_published_figures_is_one_line(results, check):
    (results / PUBLISHED).write_bytes(b"- model: \xff" + b"secret" * 100)
    with pytest.raises(ConfigError, match=r"^published\.yaml: [^\n]+$") as caught:
        check()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("arms", [3, 4])
def test_a_table_fits_eighty_columns(results, monkeypatch, arms):
    record = bench(results).record
    for name in list(record.arms):
        found = record.summary["arms"][name]
        found["outcomes"] = {"correct": 1051, "wrong": 200, "unparsed": 60, "truncated": 8}
        for estimate in (found.get("change", {}).get("tps"), found.get("change", {}).get("wall_per_item")):
            if estimate:
                estimate.update(value=-0.1234, low=-0.2345, high=0.3456)
        if "change" in found:
            found["change"].update(outputs_changed=1308, items=1319)
    record.gates["identity"].update(compared=1319, expected=1319, mismatches=0)
    if arms == 4:
        record.arms["strict-again"] = record.arms["asd"]
        record.summary["arms"]["strict-again"] = record.summary["arms"]["asd"]
    columns, rows = cells.bench_table(record)
    assert not any("GPU" in row[0] for row in rows)  # there is none
    buffer = io.StringIO()
    buffer.isatty = lambda: True
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", buffer)
    console.table(columns, rows, "title")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in buffer.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    words = {word for row in (columns, *rows) for cell in row for word in cell.split()}
    assert words <= set(text.split())


def test_a_row_per_gpu_where_there_is_one(results):
    record = bench(results).record
    for found in record.summary["arms"].values():
        found["tps_per_gpu"] = {"value": 12.25}
    rows = cells.bench_table(record)[1]
    assert ["TPS per GPU", "12.2", "12.2", "12.2"] in rows
    assert cells.footnote(rows).endswith("Per GPU: over the GPUs of one replica.")


@pytest.mark.parametrize(("terminal", "tables"), [(True, 2), (False, 1)])
def test_many_arms_are_printed_three_at_a_time_on_a_terminal(monkeypatch, terminal, tables):
    buffer = io.StringIO()
    buffer.isatty = lambda: terminal
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", buffer)
    console.print_parts(["metric", "a", "b", "c", "d"], [["TPS", "1", "2", "3", "4"]], "title")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in buffer.getvalue().splitlines()]
    heads = [line for line in lines if line[:1] == ["metric"]]
    assert len(heads) == tables
    assert [name for line in heads for name in line[1:]] == ["a", "b", "c", "d"]
    assert [cell for line in lines if line[:1] == ["TPS"] for cell in line[1:]] == ["1", "2", "3", "4"]
