"""Whole runs against the fake engine: verdicts and exit statuses, refusals, and what is kept."""

import re

import pytest

from harness.records.read import read_all
from harness.records.run import read_rows


def only(tmp_path):
    (run,) = read_all(tmp_path / "results")
    return run


def test_a_bench_that_passes(harness, tmp_path):
    status, out, err = harness()
    run = only(tmp_path)
    assert status == 0, err
    assert run.problems == []
    assert (run.record.status, run.record.verdict.outcome, run.record.error) == ("complete", "pass", None)
    assert list(run.record.arms) == ["strict", "asd-b0", "asd"]
    assert run.record.launch["attached"] is False
    for words in ("6/6 equal", "differ", "verdict: pass", "tokens per step *", "unparsed", "truncated"):
        assert words in out
    assert "tokens/s" in err  # the bars
    assert (tmp_path / "results" / "README.md").read_text().count(run.record.id) >= 2


def test_arms_are_interleaved_and_their_order_rotates(harness, tmp_path):
    harness()
    rows = sorted(only(tmp_path).rows, key=lambda row: row.started_s)
    orders = [tuple(row.arm for row in rows[start : start + 3]) for start in range(0, 18, 3)]
    assert orders[:3] == [("strict", "asd-b0", "asd"), ("asd-b0", "asd", "strict"), ("asd", "strict", "asd-b0")]
    assert [row.order for row in rows] == [item for item in range(6) for _ in range(3)]
    assert len({(row.item, row.prompt_sha256) for row in rows}) == 6


def test_measured_items_are_not_warmed_up(harness, tmp_path):
    harness()
    workload = only(tmp_path).record.workload
    assert len(workload["warmup"]) == 2
    assert not set(workload["warmup"]) & set(workload["items"])


def test_numbers_are_those_of_the_rows(harness, tmp_path):
    harness()
    run = only(tmp_path)
    rows = [row for row in run.rows if row.arm == "asd"]
    found = run.record.summary["arms"]["asd"]
    tokens, wall = sum(len(row.output_ids) for row in rows), sum(row.wall_s for row in rows)
    assert found["tokens"] == tokens
    assert found["tps"]["value"] == pytest.approx(tokens / wall)
    assert found["wall_per_item"]["value"] == pytest.approx(wall / 6)
    assert found["tokens_per_step"]["value"] == pytest.approx(tokens / sum(row.steps for row in rows))
    base = [row for row in run.rows if row.arm == "strict"]
    ratio = (tokens / wall) / (sum(len(row.output_ids) for row in base) / sum(row.wall_s for row in base))
    assert found["change"]["tps"]["value"] == pytest.approx(ratio - 1)


def test_sampled_policies_have_chain_as_their_baseline(harness, tmp_path):
    status, out, err = harness("policy=block")
    run = only(tmp_path)
    assert status == 0, err
    assert list(run.record.arms) == ["chain", "block"]
    assert "identity" not in run.record.gates
    seeds = {row.item: row.seed for row in run.rows}
    assert all(row.seed == seeds[row.item] for row in run.rows)
    assert "sampled" in out


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("b0", 1, "asd-b0: 6 of 6 outputs differ from strict"),
        ("lenient", 1, "strict: relaxed: expected 0"),
        ("overcount", 1, "blocks: the answers say"),
        ("fallback", 1, "served by another rule (sampled request: 6)"),
        ("silent", 1, "answers relaxed drafts and equal strict's"),
        ("unasked", 1, "answers differ from strict's and relaxed nothing"),
        ("greedy", 1, "relaxed: expected 0 to"),
        ("overspent", 1, "spent: expected 0 to"),
        ("uncharged", 1, "regret_charged: the answers say"),
        ("wide", 1, "histogram: expected at most 7 accepted drafts in a step"),
        ("clock", 1, "that the client waited, found 1000"),
        ("frozen", 2, "the policy never ran"),
        ("drafts", 2, "no drafts were verified"),
        ("inert", 2, "asd: no mismatch was relaxed"),
        ("cached", 2, "the prefix cache is on"),
    ],
)
def test_a_verdict_that_is_no_pass(harness, tmp_path, fault, status, words):
    found, out, _ = harness(fault=fault)
    assert found == status
    assert words in out
    run = only(tmp_path)
    assert run.problems == []
    assert run.record.status == "complete"
    assert run.record.verdict.outcome == {1: "fail", 2: "inconclusive"}[status]


@pytest.mark.parametrize(
    ("fault", "after", "kept", "words"),
    [
        ("nonce", 0, 0, "specaccept.nonce"),
        ("files", 0, 0, "adapter file adapters/policy.py differs"),
        ("unarmed", 0, 0, "not armed"),
        ("refuse", 0, 0, "draft: expected a folder"),
        ("http", 3, 0, "no memory left"),  # the warm-up fails
        ("usage", 12, 5, "5 requests failed in a row, the last one with count"),
        ("garbled", 12, 5, "5 requests failed in a row, the last one with garbled"),
        ("stray-id", 12, 5, "output_ids: expected ids up to 257 (vocabulary), found 100000"),
        ("huge-id", 12, 5, "output_ids[0]: expected an integer from 0 to"),
        ("late", 12, 5, "e2e_latency: expected a finite number >= 0, found 'soon'"),
        ("die", 12, 5, "exited with status -9"),
    ],
)
def test_a_run_that_fails_keeps_what_it_has_and_is_no_result(harness, tmp_path, fault, after, kept, words):
    """2 probes and 6 warm-up answers come before the first measured one: 12 is the fifth."""
    status, out, err = harness(fault=fault, after=after)
    assert status == 2
    assert words in err
    assert err.strip().splitlines()[-1].startswith("specaccept: ")
    assert "verdict" not in out
    run = only(tmp_path)
    assert run.problems == []
    assert run.record.status == "failed"
    assert words in run.record.error
    answered = [row for row in run.rows if row.error is None]
    assert len(answered) == (4 if kept else 0)
    assert len(run.rows) - len(answered) == kept


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("swap", "the server changed under the run"),
        ("swap-draft", "the server changed under the run"),
        ("text-counter", ".blocks: expected an integer from 0 to"),
    ],
)
def test_a_server_that_changes_ends_the_run(harness, tmp_path, fault, words):
    status, out, err = harness(fault=fault, after=12)
    assert status == 2
    assert words in err
    assert "verdict" not in out
    assert only(tmp_path).record.status == "failed"


def test_one_item_gives_no_interval(harness, tmp_path):
    status, out, _ = harness("limit=1")
    assert status == 2
    assert "asd-b0: tokens/s: expected an interval around the change, found none on 1 items" in out
    assert only(tmp_path).record.verdict.outcome == "inconclusive"


def test_few_items_give_an_interval(harness):
    status, _, err = harness("limit=4")
    assert status == 0, err


def test_one_failed_request_is_shown_and_excluded(harness, tmp_path):
    status, out, _ = harness(fault="flaky", after=12)
    run = only(tmp_path)
    assert status == 2
    assert re.search(r"left out .*\b1 http\b", out)
    failed = [row for row in run.rows if row.error]
    assert [row.error for row in failed] == ["http"]
    assert failed[0].outcome is None
    name = failed[0].arm
    assert run.record.summary["arms"][name]["answered"] == 5
    assert sum(run.record.summary["arms"][name]["outcomes"].values()) == 5
    assert f"{name}: answers: expected 6, found 5, 1 failed (http)" in out


def test_a_request_past_its_deadline_is_an_error(harness, tmp_path):
    status, _, err = harness("engine.request_timeout_s=0.4", "launch.stop_timeout_s=0.2", fault="hang", after=12)
    assert status == 2
    assert "timeout" in err
    assert {row.error for row in only(tmp_path).rows} == {None, "timeout"}


def test_one_policy_per_server_means_a_server_per_arm_and_the_baseline_twice(harness, tmp_path):
    status, _, err = harness("engine.per_request_policy=false", "limit=3")
    run = only(tmp_path)
    assert status in (0, 2), err
    # Servers one after another on a machine that others use: the baseline may not meet itself again.
    assert all(reason.startswith("strict-again: tokens/s") for reason in run.record.verdict.reasons)
    assert run.problems == []
    assert list(run.record.arms) == ["strict", "asd-b0", "asd", "strict-again"]
    assert [row.arm for row in run.rows] == [arm for arm in run.record.arms for _ in range(3)]
    assert (run.folder / "engine.log").read_text().count("ready on") == 4
    assert run.record.summary["arms"]["strict-again"]["change"]["outputs_changed"] == 0


def test_attach_measures_a_server_and_leaves_it(harness, server, tmp_path):
    url = server()
    for _ in range(2):
        status, _, err = harness("launch=attach", f"url={url}")
        assert status == 0, err
    records = [run.record for run in read_all(tmp_path / "results")]
    assert [record.launch["attached"] for record in records] == [True, True]
    assert records[0].server["adapter"]["nonce"] is None
    assert records[0].identity.target["sha256"]  # the server's path is this machine's folder


def test_attach_to_another_adapter_is_asked_for_and_marked(harness, server, tmp_path):
    url = server("files")
    status, _, err = harness("launch=attach", f"url={url}")
    assert status == 2
    assert "adapter file adapters/policy.py differs from this checkout's (launch.foreign_adapter=true" in err
    status, _, err = harness("launch=attach", f"url={url}", "launch.foreign_adapter=true")
    assert status == 0, err
    (run,) = [each for each in read_all(tmp_path / "results") if each.complete]
    assert run.record.launch["foreign_adapter"] == ["adapters/policy.py"]
    assert "adapter differs from this checkout" in (tmp_path / "results" / "README.md").read_text()


def test_a_launched_engine_with_another_adapter_is_refused_all_the_same(harness):
    status, _, err = harness("launch.foreign_adapter=true", fault="files")
    assert status == 2
    assert "adapters/policy.py differs" in err


def test_attach_records_what_the_server_says(harness, server, tmp_path):
    """A folder of the same name that is not this machine's folder: its content is not known here."""
    other = tmp_path / "elsewhere" / "target"
    status, _, err = harness("launch=attach", f"url={server(model=str(other))}")
    assert status == 0, err
    run = only(tmp_path)
    assert run.problems == []
    assert run.record.identity.target == {"path": "target", "revision": None, "sha256": None, "reported": str(other)}
    assert run.record.identity.draft["sha256"]


def test_attach_to_nobody_is_one_line(harness, tmp_path):
    status, _, err = harness("launch=attach", "url=http://127.0.0.1:1")
    assert status == 2
    assert "http://127.0.0.1:1: connection" in err
    assert only(tmp_path).record.status == "failed"


def test_interrupted_rows_are_in_the_table_file(harness, tmp_path):
    harness(fault="die", after=12)
    run = only(tmp_path)
    assert read_rows(run.folder / "requests.parquet") == run.rows


def test_a_defect_is_no_verdict(harness, monkeypatch):
    def broken(config):
        raise ZeroDivisionError("by design")

    monkeypatch.setattr("harness.tasks.doctor.run", broken)
    status, _, err = harness("task=doctor")
    assert status == 2
    assert "ZeroDivisionError: by design (a defect, see above)" in err


@pytest.mark.parametrize(
    ("overrides_", "words"),
    [
        (["model=gpt-5"], "model: expected one of"),
        (["launch=docker", "image=mia-tp4", "engine=reference"], "engine: image mia-tp4 has sglang"),
        (["traffic=gsm8k", "data=/nonexistent"], "expected test.jsonl in /nonexistent"),
        (["limit=100000"], "traffic.limit: expected 1 to"),
        (["data=/tmp"], "data: belongs to traffic=gsm8k or humaneval"),
        (["policy=asd-b0", "policy.budget=4", "policy.name=strict"], "policy.name: a member keeps its name"),
        (["policy=asd-b0", "policy.budget=4"], "policy: asd-b0 is an arm of its own"),
        (["model.name=qwen3-14b"], "model.name: a member keeps its name"),
        (["model.target=/nonexistent"], "missing the target /nonexistent"),
        (["engine.requires=[no_such_package]"], "missing the Python package no_such_package"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_no_record(harness, tmp_path, overrides_, words):
    status, out, err = harness(*overrides_)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert read_all(tmp_path / "results") == []


@pytest.mark.parametrize("task", ["bench", "gate", "calibrate", "tables"])
@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nobody/writes/here", "taken", "read"])
def test_an_output_folder_that_takes_no_files_is_refused_first(harness, tmp_path, monkeypatch, task, out):
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "runs").touch()
    (tmp_path / "read" / "README.md").mkdir(parents=True)
    monkeypatch.setattr("harness.launch.process.launch", None)
    path = tmp_path / out  # an absolute one stays itself
    status, printed, err = harness(f"task={task}", f"out={path}")
    assert (status, printed) == (2, "")
    assert re.fullmatch(rf"specaccept: out: expected a folder that can be written, found {path}: [\w. ]+\n", err)


def test_help_lists_every_task_and_member(harness):
    from harness.config import GROUPS, choices

    status, out, _ = harness("--help")
    assert status == 0
    for group in GROUPS:
        for name in choices(group):
            assert name in out


def test_doctor_has_a_row_per_pair(harness):
    from harness.config import choices

    status, out, _ = harness("task=doctor")
    assert status == 0
    for model in choices("model"):
        rows = [line for line in out.splitlines() if line.split()[:1] == [model]]
        assert [row.split()[1] for row in rows] == choices("engine")
