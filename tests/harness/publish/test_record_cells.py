"""Cells of what newer records hold: blocks, A/A rows, verdicts of arms, engines whose width follows the load."""

import pytest
from publish_rig import again, bench, config_of

from harness.publish import cells, labels, sections, site
from harness.publish.selection import Shown
from harness.records.read import read_all
from harness.records.schema import Segment, Verdict

GAIN = {"value": 0.05, "low": 0.04, "high": 0.06, "n": 5, "method": "t"}
TRIPLETS = {"gain": GAIN, "gains": [0.05] * 6, "drifts": [0.0] * 6, "rejected": [3], "max_drift": 0.03}


@pytest.fixture
def record(results):
    return bench(results).record


def in_blocks(record):
    for arm, found in record.summary["arms"].items():
        found.update(wall_per_item=None, latency_per_item=dict(GAIN))
        if arm != record.summary["baseline"]:
            found["triplets"] = TRIPLETS
            found["change"].update(wall_per_item=None, block_wall=dict(GAIN))
    return record


def test_blocks_have_no_wall_per_item_and_say_how_many_held(record):
    values = cells.arm_cells(in_blocks(record), "asd")
    assert values["wall per item, s"] == "shared steps"
    assert values["wall change"] == "+5.0 %"  # of the blocks
    assert values["triplets kept"] == "5/6 within 3 %"
    columns, rows = cells.bench_table(record)
    assert ["triplets kept", "baseline", "5/6 within 3 %", "5/6 within 3 %"] in rows
    assert cells.footnote(rows, columns).startswith(
        "TPS: ids the engine returned over the wall time of the arm's own blocks"
    )
    assert "5/6 triplets within 3 %" in str(site.row(record, "asd", [1.0, 1.0]))


def test_without_blocks_there_is_no_such_row(record):
    columns, rows = cells.bench_table(record)
    assert "triplets kept" not in [row[0] for row in rows]
    assert "one at a time on each replica" in cells.footnote(rows, columns)
    assert "Unarmed" not in cells.footnote(rows, columns)
    assert "Unarmed" in cells.footnote(rows, [*columns, "unarmed"])


def test_an_arm_with_the_baseline_s_ids_shows_its_own_gate(record):
    record.arms["strict-again"] = record.arms["strict"]
    record.summary["arms"]["strict-again"] = record.summary["arms"]["asd-b0"]
    record.gates["identities"] = {"strict-again": record.gates["identity"] | {"compared": 5, "expected": 6}}
    assert cells.identity(record, "strict-again") == "5/6 equal"
    record.gates["identities"]["strict-again"] |= {"mismatches": 2}
    assert cells.identity(record, "strict-again") == "differ 2/5"  # of a pass: no more than the baseline from itself
    record.verdict = Verdict("inconclusive", ["strict-again: tps_cost: expected at least -1 %, found -0.2 % [-3, +3]"])
    assert cells.identity(record, "strict-again") == "differ 2/5"  # another reason than its ids
    record.verdict = Verdict("fail", ["strict-again: 2 of 5 outputs differ from strict, first i0 at token 3"])
    assert cells.identity(record, "strict-again") == "FAIL 2/5"
    assert "A/A: the baseline again" in site.row(record, "strict-again", [1.0, 1.0])["key"]


def test_an_engine_whose_width_follows_the_load_has_no_accuracy_and_no_identity(record):
    record.identity.config["engine"]["fixed_width"] = False
    values = cells.arm_cells(record, "asd")
    why = "unsupported (verified width follows the load)"
    assert {values[name] for name in (*cells.ACCURACY, "identity")} == {why}
    assert values["TPS"] != why
    assert values["tokens per step *"] != why


def test_an_arm_s_own_verdict_stands_in_its_row(record):
    own = {"outcome": "inconclusive", "reasons": ["accuracy_drop: wide"], "criteria": {"tps_gain": {"outcome": "pass"}}}
    record.summary["arms"]["asd"]["verdict"] = own
    assert cells.arm_cells(record, "asd")["verdict"] == "inconclusive"
    assert cells.arm_cells(record, "asd-b0")["verdict"] == "pass"
    facts = dict(site.drawer(record, "asd")["facts"]["Policy"])
    assert facts["verdict"] == "inconclusive; tps_gain pass; accuracy_drop: wide"
    assert dict(site.drawer(record, "asd-b0")["facts"]["Policy"])["verdict"] == "pass, of the whole run"


def test_thresholds_are_told(record):
    assert labels.thresholds(record) == "no threshold"
    record.identity.config["verdict"] = {"name": "published", "tps_gain": 0.05, "accuracy_drop": 1.0, "tps_cost": None}
    assert labels.thresholds(record) == "published: tps_gain 0.05, accuracy_drop 1"


def test_a_corrected_test_says_whose_correction(record):
    paired = record.summary["arms"]["asd"]["change"]["accuracy"]
    paired.update(p_value=0.03, p_holm=None)
    assert cells.p_value(paired) == "0.030"
    paired.update(p_holm=0.06)
    assert cells.p_value(paired) == "0.060 (Holm)"


def test_counters_of_a_continued_run_are_summed_over_its_segments(record):
    record.segments = [
        Segment(started="a", counters={"asd": ({"requests": 2, "regret": 0.5}, {"requests": 5, "regret": 1.0})}),
        Segment(started="b", counters={"asd": (None, {"requests": 4, "regret": 0.25})}),
    ]
    facts = site.drawer(record, "asd")["facts"]
    assert dict(facts["Policy"])["counters"] == "requests 7, regret 0.750"
    assert dict(facts["Run"])["continued"] == "1 times"


def test_servers_side_by_side_are_told_apart(record):
    record.launch["servers"] = [
        {"arms": ["strict", "asd"], "armed": True, "version": "1", "command": "a"},
        {"arms": ["unarmed"], "armed": False, "version": "1", "command": "b"},
    ]
    facts = dict(site.drawer(record, "asd")["facts"]["Engine"])
    assert facts["for strict, asd"] == "with the adapter, version 1: a"
    assert facts["for unarmed"] == "without the adapter, version 1: b"


def test_findings_say_where_an_interval_shows_no_change(record):
    found = record.summary["arms"]["asd"]["change"]
    found["tps"].update(value=0.05, low=0.04, high=0.06)
    found["accuracy"]["change"].update(value=0.0, low=-0.1, high=0.1)
    (told,) = site.findings(Shown(record, 0, ()))
    assert (told["arm"], told["speed"], told["speed_word"]) == ("asd", "+5.0 %", "")
    assert told["accuracy_word"] == ", no change shown"


def test_a_field_that_is_younger_than_a_record_makes_no_other_question(record):
    before = labels.asked(record)
    record.identity.config["engine"].update(cards=[], fixed_width=True)
    record.identity.config["task"].update(seconds=None)
    assert labels.asked(record) == before
    record.identity.config["engine"].update(fixed_width=False)
    assert labels.asked(record) != before


def test_rules_by_engine_are_runs_reasons_or_not_run(record):
    rows = {row[0]: row[1:] for row in sections.rules([record], ["lightllm", "reference"])}
    assert rows["asd"][1] == labels.link(record)
    assert rows["block"] == ["unsupported (argmax drafts)", "not run"]


def test_a_gate_says_what_was_in_flight_and_what_was_asked_twice(results):
    record = next(run.record for run in read_all(results) if run.record.task == "gate")
    found = record.gates["identity"]
    assert sections.gate(Shown(record, 0, ()))[2].endswith("16 in flight")  # lists
    record.workload["concurrency"] = 1
    assert "in flight" not in sections.gate(Shown(record, 0, ()))[2]
    record.workload["concurrency"] = 8
    record.gates["repeat"] = found | {"mismatches": 1, "compared": 6}
    record.gates["identity_repeated"] = {"asd-b0": found | {"compared": 5, "expected": 6}}
    cell = sections.gate(Shown(record, 0, ()))[2]
    for words in ("8 in flight", "asked twice: asd-b0 5/6 equal", "the baseline differs from itself on 1/6"):
        assert words in cell
    del record.gates["identity"], record.gates["control"]
    row = sections.gate(Shown(record, 0, ()))
    assert row[3:8] == [*["not compared"] * 4, "none"]


def test_of_flags_only_the_entries_that_differ_are_told(results):
    def ask(record):
        config_of(record)["engine"]["flags"] = {"threads": 3, "deterministic": True}

    record = again(results, ask)
    told = labels.changes(record)
    assert "engine.flags.threads=3" in told
    assert "engine.flags.deterministic=true" in told
    assert not any("{" in text for text in told)
    assert labels.brief(record) == told
    assert labels.brief(record, most=1)[-1] == "2 engine flags of its own"
