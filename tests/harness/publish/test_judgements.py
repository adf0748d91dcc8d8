"""A run judged again: what it changes, what it refuses, and that no judgement says more than its rows."""

import json
import shutil

import msgspec
import pyarrow.parquet as pq
import pytest
from publish_rig import edit

from harness import __main__ as cli
from harness import interrupt
from harness.publish.tables import write
from harness.records.judgement import Judged, Judgement, NotJudged, judge_again, read_judgements, seal
from harness.records.read import read
from harness.records.schema import Record
from harness.tasks import rejudge

WHY = "drafts of an unarmed row are running totals"


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    monkeypatch.setattr(interrupt, "install", lambda: None)


def judged_wrongly(results):
    """A gate as code with a defect would have left it: its rows give a pass."""

    def change(record):
        record["verdict"] = {"outcome": "fail", "reasons": ["strict: an old mistake"]}
        record["gates"]["armed"] = False

    return edit(results, "gate", change).folder


def again(folder, results, why=WHY) -> int:
    return cli.main(["task=rejudge", f"run={folder}", f"why={why}", f"out={results}"])


def forge(path, change):
    """Change a judgement, and seal it again."""
    made = json.loads(path.read_text())
    change(made)
    found = msgspec.convert(made, Judgement)
    found.seal = seal(found)
    path.write_bytes(msgspec.json.encode(found))


def test_a_defect_s_verdict_is_computed_again_and_told(results, check, capfd):
    folder = judged_wrongly(results)
    before = (folder / "record.json").read_bytes()
    assert "gates: differs from what its rows give" in check()[1]
    assert again(folder, results) == 0
    assert "verdict: fail -> pass; changed: gates, verdict" in capfd.readouterr().out
    assert (folder / "record.json").read_bytes() == before
    loaded = read(folder)
    assert (loaded.problems, loaded.record.verdict.outcome, loaded.record.first.outcome) == ([], "pass", "fail")
    write(results)
    assert check() == (0, "")
    made = loaded.record.judgement
    for page in ("README.md", "site/index.html"):
        text = (results / page).read_text()
        assert f"judged again at commit {made.code['commit'][:12]}" in text
        assert f": {WHY}; first verdict: fail" in text


def test_nothing_changed_is_refused(results, capfd):
    folder = judged_wrongly(results)
    assert again(folder.name, results) == 0  # by its id
    assert again(folder, results) == 2
    assert "expected another gates, summary or verdict, found the same" in capfd.readouterr().err
    assert sorted(path.name for path in folder.glob("*judgement*")) == ["judgement-1.json"]


def test_a_failure_stays_one_and_no_judgement_says_otherwise(results, check, capfd):
    """Answers of another policy: whoever judges the run again finds it; who forges a pass is found."""
    folder = edit(results, "gate", lambda record: record["arms"]["strict"].update(policy_key="another")).folder
    assert again(folder, results) == 1
    assert "verdict: pass -> fail" in capfd.readouterr().out
    write(results)
    assert check() == (0, "")
    forge(folder / "judgement-1.json", lambda made: made.update(verdict={"outcome": "pass", "reasons": []}))
    write(results)
    status, text = check()
    assert status == 1
    assert "verdict: differs from what its rows give" in text


def _edit_judgement(folder):
    path = folder / "judgement-1.json"
    path.write_text(path.read_text().replace(WHY, "another reason"))


def _cut(folder):
    path = folder / "judgement-1.json"
    path.write_bytes(path.read_bytes()[:100])


def _of_another_run(folder):
    forge(folder / "judgement-1.json", lambda made: made.update(record="0" * 64))


def _gap(folder):
    (folder / "judgement-1.json").rename(folder / "judgement-2.json")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_edit_judgement, "judgement-1.json: seal (it was edited)"),
        (_cut, "judgement-1.json: Input data was truncated"),
        (_of_another_run, "judgement-1.json: record: expected"),
        (_gap, "judgement-2.json: expected judgement-1.json, found none"),
    ],
)
def test_an_edited_judgement_is_found_and_followed_by_none(results, check, capfd, damage, words):
    folder = judged_wrongly(results)
    assert again(folder, results) == 0
    damage(folder)
    assert words in check()[1]
    assert again(folder, results) == 2
    assert words in capfd.readouterr().err


def _reseal(folder):
    path = folder / "record.json"
    path.write_text(path.read_text().replace('"armed"', '"arms"', 1))


def _rows(folder):
    path = folder / "requests.parquet"
    pq.write_table(pq.read_table(path).slice(1), path)


@pytest.mark.parametrize(("damage", "words"), [(_reseal, "record.json was edited"), (_rows, "requests.parquet")])
def test_a_run_that_does_not_verify_is_not_judged(results, capfd, damage, words):
    folder = judged_wrongly(results)
    damage(folder)
    assert again(folder, results) == 2
    assert words in capfd.readouterr().err
    assert not list(folder.glob("*judgement*"))


def test_judgements_are_added_and_never_replaced(results):
    """Two that judge the same run at once: one of them is refused; a later one follows the first."""
    folder = judged_wrongly(results)
    first = read(folder)
    known = {"commit": None, "dirty": None, "sha256": "f" * 64}
    judge_again(folder, first.record, first.rows, rejudge.computed, known, WHY, "t")
    with pytest.raises(NotJudged, match=r"judgement-1\.json: is there already"):
        judge_again(folder, first.record, first.rows, rejudge.computed, known, WHY, "t")

    def other(record, rows):
        gates, summary, verdict = rejudge.computed(record, rows)
        return gates | {"more": 1}, summary, verdict

    second = read(folder)
    made = judge_again(folder, second.record, second.rows, other, known, WHY, "t")
    newest = read(folder).record
    assert (made.number, made.changed, made.follows) == (2, ["gates"], second.record.judgement.seal)
    assert isinstance(newest, Judged)
    assert (newest.gates["more"], newest.first.outcome) == (1, "fail")
    record = msgspec.json.decode((folder / "record.json").read_bytes(), type=Record)
    assert [each.number for each in read_judgements(folder, record)[0]] == [1, 2]
    assert not list(folder.glob(".*.part"))


@pytest.mark.parametrize("why", ["a | b", "two\nlines", "x" * 301, "<b>"])
def test_a_reason_is_a_line_of_plain_words(results, why):
    folder = judged_wrongly(results)
    loaded = read(folder)
    with pytest.raises(NotJudged, match=r"^why: expected"):
        judge_again(folder, loaded.record, loaded.rows, rejudge.computed, {"commit": "c"}, why, "t")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["task=rejudge", "why=x"], "run: task=rejudge expects run=FOLDER"),
        (["task=rejudge", "run=x"], "why: task=rejudge expects why=the reason"),
        (["task=rejudge", "run=x", "why= "], "why: task=rejudge expects"),
        (["task=tables", "why=x"], "why: task=rejudge expects why=the reason, and no other task, found 'x'"),
        (["task=rejudge", "run=/nowhere", "why=x"], "record.json"),
    ],
)
def test_run_and_reason_are_asked_for(results, capfd, arguments, words):
    assert cli.main([*arguments, f"out={results}"]) == 2
    assert words in capfd.readouterr().err


def test_an_unfinished_run_is_not_judged(results, capfd):
    folder = edit(results, "gate", lambda record: record.update(status="failed")).folder
    assert again(folder, results) == 2
    assert "expected a complete bench or gate, found gate, failed" in capfd.readouterr().err
    shutil.rmtree(folder)
