"""A run that is killed at any line is continued, and ends as if nothing had happened."""

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kill_rig import ARMS, ITEMS, MACHINE, arm, identity, opened, row, work

from harness.records import Run
from harness.records.read import read, read_all
from harness.records.run import Busy, CannotContinue, complete, unfinished
from harness.records.schema import Verdict

HERE = Path(__file__).parent


def lives(*points: tuple[Path, int]) -> list[tuple[int, str]]:
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    argv = [sys.executable, "-m", "kill_rig", *(str(each) for point in points for each in point)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [(int(count), end) for count, end in map(str.split, done.stdout.splitlines())]


def content(run) -> dict:
    """A record without times, names and segments, and its rows in the order of the items."""
    record = msgspec.to_builtins(run.record)
    for name in ("id", "created", "finished", "segments", "seal", "requests_sha256"):
        del record[name]
    for each in record["arms"].values():
        before, after = each.pop("counters_before"), each.pop("counters_after")
        each["moved"] = after["requests"] - before["requests"]
    rows = [msgspec.to_builtins(each) | {"segment": 0} for each in run.rows]
    return record | {"rows_": sorted(rows, key=lambda each: (each["order"], each["arm"]))}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[dict, int]:
    """What an uninterrupted run leaves, and how many lines it is long."""
    results = tmp_path_factory.mktemp("undisturbed")
    ((lines, end),) = lives((results, 10**9))
    assert end == "done"
    (run,) = read_all(results)
    assert run.problems == []
    return content(run), lines


@pytest.mark.parametrize("seed", range(4))
def test_lives_of_any_length_make_one_run(undisturbed, tmp_path, seed):
    """Up to eight kills, then a life to the end; more kills than the run has units must not lose the early ones."""
    expected, lines = undisturbed
    draw = random.Random(seed)
    killed = [draw.randrange(1, lines) for _ in range(8)]
    ends = [end for _, end in lives(*((tmp_path, line) for line in (*killed, 10**9)))]
    runs = [run for run in read_all(tmp_path) if run.record.status == "complete"]
    assert [run.problems for run in read_all(tmp_path)] == [[]] * len(read_all(tmp_path))
    assert len(runs) == ends.count("done")
    for run in runs:
        assert content(run) == expected
        assert sum(segment.rows for segment in run.record.segments) == ITEMS * len(ARMS)
    assert [name for name in os.listdir(tmp_path / "runs") if name.startswith(".")] == []


def test_killed_at_every_part(undisturbed, tmp_path):
    """Whatever a kill leaves is sound, nothing proven is asked again, and the next life ends the run."""
    expected, lines = undisturbed
    folders = {line: tmp_path / str(line) for line in range(1, lines, 17)}
    ends = lives(*((folder, most) for line, folder in folders.items() for most in (line, 10**9)))
    assert [end for _, end in ends] == ["killed", "done"] * len(folders)
    segments = []
    for folder in folders.values():
        first, *more = read_all(folder)
        for run in (first, *more):
            assert run.problems == []
            assert content(run) == expected
        assert len(more) <= (len(first.record.segments) == 1)  # killed when its record was complete: another begins
        segments.append([(segment.end, segment.rows) for segment in first.record.segments])
    assert {len(each) for each in segments} == {1, 2}  # 1: killed before there was a run
    assert {each[0] for each in segments if len(each) == 2} >= {("killed", rows) for rows in (0, 2, 4, 6, 8)}


def test_answers_after_the_last_checkpoint_are_set_aside(tmp_path):
    run = opened(tmp_path)
    run.record.arms = {name: arm(name) for name in ARMS}
    run.save()
    run.append(row("strict", 0))
    run.append(row("asd", 0))
    run.checkpoint({"strict": (None, {"requests": 1}), "asd": ({"requests": 2}, {"requests": 3})})
    run.append(row("asd", 1))
    run.close()
    with (run.folder / "requests.jsonl").open("ab") as stream:
        stream.write(b'{"arm":"stri')  # the kernel had half of it
    again = opened(tmp_path)
    assert again.folder == run.folder
    assert again.done == {("strict", "i0", None), ("asd", "i0", None)}
    assert [segment.unproven for segment in again.record.segments] == [1, 0]
    assert [segment.end for segment in again.record.segments] == ["killed", "open"]
    assert again.continued == "killed after 2 answers"
    aside = (again.folder / "unproven.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["item"] for line in aside] == ["i1"]
    again.append(row("strict", 1))
    again.checkpoint({"strict": ({"requests": 5}, {"requests": 6, "fallbacks": {"x": 1}})})
    strict = again.record.arms["strict"]
    assert (strict.counters_before, strict.counters_after) == ({"requests": 5}, {"requests": 7, "fallbacks": {"x": 1}})
    assert again.rows[-1].segment == 1
    again.finish("complete", Verdict("pass", []))


def test_a_stopped_run_is_continued_from_its_checkpoint(tmp_path):
    run = opened(tmp_path)
    run.record.arms = {name: arm(name) for name in ARMS}
    run.append(row("strict", 0))
    run.finish("incomplete", None, "interrupted by SIGINT")
    assert len(read(run.folder).rows) == 1
    assert read(run.folder).problems == []
    again = opened(tmp_path)
    assert again.rows == []
    assert again.record.segments[0].end == "interrupted by SIGINT"
    assert again.record.error is None
    assert read(run.folder).problems == []


def test_a_run_in_the_making_is_left_alone(tmp_path):
    run = opened(tmp_path)
    with pytest.raises(Busy, match="is being made by another process"):
        opened(tmp_path)
    run.close()
    assert opened(tmp_path).folder == run.folder


def test_a_failed_run_is_continued_only_when_asked(tmp_path):
    run = opened(tmp_path)
    run.record.arms = {name: arm(name) for name in ARMS}
    run.append(row("strict", 0))
    run.checkpoint({"strict": (None, {"requests": 1})})
    run.finish("failed", None, "engine: exited")
    other = opened(tmp_path)
    assert other.folder != run.folder
    other.finish("complete", Verdict("pass", []))
    again = opened(tmp_path, failed=True)
    assert again.folder == run.folder
    assert again.record.segments[0].end == "engine: exited"
    assert len(again.rows) == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("cpu", "y", "cpu: it has 'x', found 'y'"),
        ("packages", {"a": "2"}, "packages: it has"),
        ("boot", "another", None),  # a machine that was started again is the same machine
        ("load_average", [3.0], None),
    ],
)
def test_a_run_stays_on_its_machine(tmp_path, name, value, words):
    opened(tmp_path).close()
    run, left = Run.open(tmp_path, "bench", identity(), MACHINE | {name: value}, {"items": ["i0", "i1", "i2", "i3"]})
    assert len(read_all(tmp_path)) == (2 if words else 1)
    assert words is None or words in left[0]
    run.close()


def test_other_code_is_another_run(tmp_path):
    opened(tmp_path).close()
    run, left = Run.open(tmp_path, "bench", identity("d"), MACHINE, {"items": []})
    assert len(read_all(tmp_path)) == 2
    assert left == []
    run.close()


def test_an_edited_record_is_not_continued(tmp_path):
    run = opened(tmp_path)
    run.close()
    path = run.folder / "record.json"
    path.write_text(path.read_text().replace('"cpu": "x"', '"cpu": "z"'))
    assert opened(tmp_path).folder != run.folder


def test_a_journal_with_fewer_rows_than_were_proven_is_not_continued(tmp_path):
    run = opened(tmp_path)
    run.append(row("strict", 0))
    run.checkpoint({})
    run.close()
    (run.folder / "requests.jsonl").write_bytes(b"")
    again, left = Run.open(tmp_path, "bench", identity(), MACHINE, {"items": ["i0", "i1", "i2", "i3"]})
    assert again.folder != run.folder
    assert "requests.jsonl: expected 1 rows, found 0" in left[0]


def test_another_engine_does_not_continue_a_run(tmp_path):
    run = opened(tmp_path)
    run.observe({"a.py": "0"}, {"name": "fake"}, None)
    run.close()
    again = opened(tmp_path)
    with pytest.raises(CannotContinue, match=r"engine: it was begun with .*fake.*, found .*other"):
        again.observe({"a.py": "0"}, {"name": "other"}, None)
    again.observe({"a.py": "0"}, {"name": "fake"}, None)


def test_complete_and_unfinished_runs_are_found_by_what_was_asked(tmp_path):
    plan = identity().plan
    assert (complete(tmp_path / "runs", plan), unfinished(tmp_path / "runs", plan)) == (None, [])
    run = work(tmp_path)
    assert complete(tmp_path / "runs", plan) == run.folder
    assert complete(tmp_path / "runs", identity("d").plan) is None


@pytest.mark.parametrize("name", ["rows", "counters"])
def test_segments_that_do_not_make_the_whole_are_unsound(tmp_path, name):
    run = work(tmp_path)
    segment = run.record.segments[0]
    if name == "rows":
        segment.rows += 1
    else:
        segment.counters["asd"] = ({"requests": 7}, {"requests": 99})
    run.save()
    problems = read(run.folder).problems
    assert any(word in problem for problem in problems for word in ("segments[0].rows", "arms.asd: counters"))
