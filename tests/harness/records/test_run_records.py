"""Records: exclusive, sealed, complete at any point, and what an edit does."""

import json

import msgspec
import pyarrow.parquet as pq
import pytest

from harness.records import Row, Run
from harness.records.provenance import code, environment
from harness.records.read import read, read_all
from harness.records.run import plan_digest, read_rows, sha256
from harness.records.schema import Arm, Identity, Verdict, digest


def identity() -> Identity:
    found = Identity(
        plan="",
        digest=None,
        config={"model": {"name": "m"}},
        code={"commit": None, "dirty": None, "sha256": "c"},
        target={"sha256": "t"},
        draft={"sha256": "d"},
        data={"rows": 1},
    )
    found.plan = plan_digest(found)
    return found


def row(n: int, **more) -> Row:
    values = {"arm": "strict", "policy_key": "strict", "order": n, "item": f"i{n}", "task": "math"}
    return Row(**values | {"prompt_sha256": "p", "prompt_tokens": 3, "output_ids": [n, n + 1], "wall_s": 0.5} | more)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path, "bench", identity(), {"cpu": "x", "packages": {"a": "1"}}, {"items": ["i0"]})


def complete(run: Run) -> None:
    record = run.record
    record.launch, record.server, record.summary = {"kind": "process"}, {"version": "1"}, {"baseline": "strict"}
    record.arms = {
        "strict": Arm(policy={"rule": "strict"}, policy_key="strict", policy_source="r", temperature=0, expected=1)
    }
    run.observe({"a.py": "0"}, {"name": "fake"}, None)
    run.append(row(0))
    run.finish("complete", Verdict("pass", []))


def test_a_complete_record_reads_back(run, tmp_path):
    complete(run)
    (found,) = read_all(tmp_path)
    assert found.problems == []
    assert found.complete
    assert found.rows == [row(0)]
    assert found.record == run.record
    assert sorted(path.name for path in run.folder.iterdir()) == ["record.json", "requests.parquet"]


def test_two_runs_of_one_second_have_a_directory_each(tmp_path):
    runs = [Run.create(tmp_path, "bench", identity(), {}, {}) for _ in range(3)]
    assert len({run.folder for run in runs}) == 3


def test_rows_of_every_shape_survive(run):
    rows = [
        row(0),
        row(1, error="timeout", detail="late", output_ids=[]),
        row(2, histogram=[0, 2], seed=7, server_s=0.1),
    ]
    for each in rows:
        run.append(each)
    run.finish("incomplete", None, "interrupted by SIGINT")
    assert read_rows(run.folder / "requests.parquet") == rows
    assert read(run.folder).problems == []
    assert not read(run.folder).complete


def test_a_run_that_was_killed_keeps_its_rows(run):
    run.append(row(0))
    run.append(row(1))
    found = read(run.folder)  # nothing was closed or finished
    assert found.problems == []
    assert found.record.status == "incomplete"
    lines = (run.folder / "requests.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Row) for line in lines] == [row(0), row(1)]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda record: record["environment"].update(cpu="faster"), "seal"),
        (lambda record: record["summary"].update(baseline="asd"), "seal"),
        (lambda record: record["verdict"].update(outcome="fail"), "seal"),
        (lambda record: record["identity"]["config"]["model"].update(name="other"), "identity.plan"),
        (lambda record: record.update(id="another"), "id: expected"),
        (lambda record: record.update(metric_version=2), "metric_version"),
        (lambda record: record.update(extra=1), "extra"),
        (lambda record: record.pop("seal"), "seal"),
        (lambda record: record.pop("identity"), "identity"),
    ],
)
def test_an_edited_record_is_unsound(run, edit, words):
    complete(run)
    path = run.folder / "record.json"
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))
    problems = read(run.folder).problems
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize("name", ["launch", "server", "summary", "arms"])
def test_a_complete_record_without_provenance_is_unsound(run, name):
    complete(run)
    setattr(run.record, name, {} if name in ("summary", "arms") else None)
    run.save()  # sealed again: only the missing field speaks
    (problem,) = read(run.folder).problems
    assert problem == f"{run.folder.name}: {name}: expected a value, found none (provenance)"


def test_missing_provenance_in_the_identity(run):
    complete(run)
    run.record.identity.adapter_files = {}
    run.save()
    assert any("identity.adapter_files" in problem for problem in read(run.folder).problems)


def test_other_rows_are_noticed(run):
    complete(run)
    path = run.folder / "requests.parquet"
    path.write_bytes(path.read_bytes() + b"x")
    assert any("requests.parquet" in problem for problem in read(run.folder).problems)
    path.unlink()
    assert any("requests.parquet" in problem for problem in read(run.folder).problems)


def test_the_log_is_part_of_the_record(run):
    run.log.write_text("ready\n")
    complete(run)
    assert run.record.engine_log_sha256 == sha256(run.log)
    assert read(run.folder).problems == []
    run.log.write_text("ready, honestly\n")
    assert any("engine.log: expected" in problem for problem in read(run.folder).problems)
    run.log.unlink()
    assert any("engine.log: expected" in problem for problem in read(run.folder).problems)


def test_a_record_from_before_the_log_was_kept_still_reads(run):
    complete(run)
    path = run.folder / "record.json"
    record = msgspec.to_builtins(run.record)
    assert record.pop("engine_log_sha256") is None
    record["arms"]["strict"]["temperature"] = 0.0
    record["seal"] = digest(record | {"seal": None})  # what such a record was sealed with
    path.write_text(json.dumps(record))
    (run.folder / "engine.log").write_text("kept, not sealed\n")
    assert read(run.folder).problems == []


def test_a_record_that_is_not_text_is_unsound(run):
    complete(run)
    path = run.folder / "record.json"
    path.write_bytes(path.read_bytes().replace(b'"bench"', b'"b\xff"'))
    (problem,) = read(run.folder).problems
    assert "record.json" in problem
    assert "\n" not in problem


def test_rows_of_another_shape_are_unsound(run):
    complete(run)
    path = run.folder / "requests.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["wall_s"]), path)
    run.record.requests_sha256 = sha256(path)
    run.save()
    (problem,) = read(run.folder).problems
    assert "requests.parquet" in problem


def test_a_folder_without_a_record(tmp_path):
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    (found,) = read_all(tmp_path)
    assert "record.json" in found.problems[0]


def test_identity_follows_what_was_asked_and_what_was_seen(run, tmp_path):
    complete(run)
    other = Run.create(tmp_path, "bench", identity(), {}, {})
    other.observe({"a.py": "1"}, {"name": "fake"}, None)
    assert other.record.identity.plan == run.record.identity.plan
    assert other.record.identity.digest != run.record.identity.digest


def test_provenance_of_this_machine():
    found = environment()
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert found["packages"]["torch"]
    assert len(code()["sha256"]) == 64
