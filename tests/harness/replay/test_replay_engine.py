"""Captures of the embedded engine: replay gives the engine's own accept lengths, block for block; and task=replay."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from adapters.capture import CaptureError, Settings
from adapters.capture.layout import DRAWN
from adapters.policy import Policy
from harness.config import ROOT, ConfigError, load
from harness.engines.reference import loading
from harness.engines.reference.benchmark import prompts_of, read_pair
from harness.engines.reference.capture import Capture
from harness.engines.reference.engine import Request
from harness.engines.reference.loading import Options, build
from harness.engines.reference.sampling import Sampling, target_probs
from harness.replay import reader, record, rules
from harness.replay.estimate import reproduced
from harness.replay.table import Table, prompt_sha256, select
from harness.tasks import replay as task
from harness.tasks.errors import TaskError

PAIR = ROOT / "recipes/checkpoints"
FOLDERS = (PAIR / "tiny-qwen3", PAIR / "tiny-qwen3-dspark-block7")
ASD = Policy("asd", 2.0625, 2.0625, 1, "normalized")
GREEDY = (Policy("strict"), ASD, Policy("relaxed-topk", top_n=10, delta=0.6))
SAMPLED = (
    Policy("chain"),
    Policy("block"),
    Policy("thresholds", threshold_single=0.5, threshold_acc=0.8),
    Policy("entropy", alpha=0.4, tau=0.95),
)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Three prompts under every policy, greedy and sampled side by side, on the tiny pair: (folder, requests)."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("capture")
    model, draft = read_pair(*FOLDERS, torch.float32, "cpu")
    prompts = prompts_of(FOLDERS[0], 3)
    options = Options(*map(str, FOLDERS), slots=4, limit=max(map(len, prompts)) + 40)
    engine = build(model, draft, options)
    engine.capture = Capture(Settings(folder, rows=1.0), engine, *map(str, FOLDERS))
    requests = []
    for n, prompt in enumerate(prompts):
        for policy in GREEDY:
            params = Sampling(temperature=0.0, max_new_tokens=40, policy=policy)
            requests.append(Request(f"{policy.rule}-{n}", prompt, params))
        for policy in SAMPLED:
            params = Sampling(0.8, 50, 0.95, max_new_tokens=40, seed=n, policy=policy)
            requests.append(Request(f"{policy.rule}-{n}", prompt, params))
    engine.generate(requests)
    engine.capture.close()
    assert engine.telemetry.snapshot()["capture"] == {"format": 2, "folder": "reference-0", "rate": 1.0, "rows": 1.0}
    return folder, requests


@pytest.mark.parametrize("policy", [*GREEDY, *SAMPLED], ids=lambda policy: policy.rule)
def test_a_replay_of_what_ran_is_what_ran(captured, policy):
    folder, requests = captured
    found = reader.read(folder)
    assert (found.dropped, found.closed, found.notes) == (0, True, [])
    table, notes = select(found, policy.key)
    assert notes == []
    assert reproduced(policy, table) == (len(table), 0, None)
    own = {request.rid: request for request in requests}
    for rid, prompt, first, count in zip(table.rids, table.prompts, table.first, table.count, strict=True):
        request, at = own[rid], slice(first, first + count)
        assert table.length[at].tolist() == request.step_lengths
        assert prompt == request.prompt
        assert table.position[at].tolist()[0] == len(prompt)
        ids = [int(table.anchor[first])]
        for draft, length, bonus, cut in zip(
            table.draft[at], table.length[at], table.bonus[at], table.cut[at], strict=True
        ):
            ids += [*draft[:length].tolist(), int(bonus)][: int(cut)]
        assert ids == request.output
        tokens = np.minimum(table.length[at] + 1, table.cut[at])
        assert tokens.sum() == len(request.output) - 1


def test_strict_tokens_per_step_are_the_engines(captured):
    folder, requests = captured
    table, _ = select(reader.read(folder), "strict")
    mine = [r for r in requests if r.policy.rule == "strict"]
    tokens = rules.tokens(rules.survival(Policy("strict"), table), table).sum()
    assert tokens == sum(len(r.output) - 1 for r in mine)
    assert len(table) == sum(r.steps for r in mine)


def test_no_policy_counts_more_than_the_request_had_room_for(captured):
    """An answer cut at its limit: strict's own blocks, and what a policy that accepts every draft would have had."""
    folder, requests = captured
    table, _ = select(reader.read(folder), "strict")
    assert table.limits.tolist() == [40] * len(table.first)
    every = rules.tokens(np.ones((len(table), table.drafts), bool), table)
    own, cut = {r.rid: r for r in requests}, 0
    for rid, first, count in zip(table.rids, table.first, table.count, strict=True):
        request, output = own[rid], 1
        for step, length in enumerate(request.step_lengths):
            room = 40 - output
            kept = min(length + 1, len(request.output) - output)
            cut += room < table.drafts + 1
            stopped = step + 1 == count and kept < length + 1
            assert every[first + step] == min(table.drafts + 1, room, kept if stopped else room)
            output += kept
        assert output == len(request.output)
    assert cut > 0


def test_the_limit_says_which_applies(captured):
    table, _ = select(reader.read(captured[0]), "strict")
    assert "no block counts more tokens than were left" in task._lengths(table)
    table.limits[:] = 0
    assert "read up to about 1 % high" in task._lengths(table)
    table.limits[0] = 40
    assert f"known of 1 of {len(table.first)} requests" in task._lengths(table)


def test_a_coin_within_rounding_of_its_threshold_is_not_compared(captured):
    policy = SAMPLED[0]
    table, _ = select(reader.read(captured[0]), policy.key)
    table.columns["coin"] = table.coin.copy()
    chance = rules.chain(policy, table)
    block = int(np.flatnonzero((chance[:, 0] > 0) & (chance[:, 0] < 1) & (table.length > 0))[0])
    table.coin[block, 0] = chance[block, 0] * (1 + 1e-6)  # now refused: the engine had it accepted
    assert reproduced(policy, table) == (len(table) - 1, 0, None)
    table.coin[block, 0] = chance[block, 0] * (1 + 1e-4)
    assert reproduced(policy, table) == (len(table), 1, None)


def test_p_of_the_rows_is_the_engines(captured):
    folder, _ = captured
    found = reader.read(folder)
    rows = reader.read_rows(found.folders[0], 0)
    drawn = found.columns["flags"] & DRAWN != 0
    z = torch.from_numpy(rows["target_logits"][drawn])
    p = target_probs(z, [Sampling(0.8, 50, 0.95)] * len(z)).numpy()
    np.testing.assert_allclose(rows["target_probs"], p, atol=1e-6)
    x = found.columns["draft"][drawn][..., None].astype(np.int64)
    with np.errstate(divide="ignore"):
        log_p = np.log(np.take_along_axis(p[:, :-1], x, 2))[..., 0]
        log_q = np.log(np.take_along_axis(rows["draft_probs"], x, 2))[..., 0]
    np.testing.assert_allclose(found.columns["log_p"][drawn], log_p, atol=1e-4)
    np.testing.assert_allclose(found.columns["log_q"][drawn], log_q, atol=1e-4)


def run(folder, out, *more):
    return task.run(load(["task=replay", f"capture={folder}", f"out={out}", *more]))


def test_the_task_leaves_a_sealed_record(captured, tmp_path, capsys):
    assert run(captured[0], tmp_path, "replay.asd_budgets=[2]", "replay.asd_gates=[2]") == 0
    text = capsys.readouterr().out
    assert "verdict: pass" in text
    assert "Accept length, not accuracy" in text
    assert "grid has 2 policies" in " ".join(text.split())
    assert max(len(line.rstrip()) for line in text.splitlines() if not line.startswith("record:")) <= 80
    (found,) = record.read_all(tmp_path)
    assert found.reproduced["different"] == 0
    assert found.capture["policy"] == found.baseline == "strict"
    by_name = {entry.name: entry for entry in found.policies}
    assert {"strict", "asd", "chain", "block", "typical", "relaxed-topk", "relaxed-ratio", "thresholds"} <= set(by_name)
    assert sum(entry.grid for entry in found.policies) == 2
    strict = by_name["strict"].tokens_per_step
    assert by_name["asd-b0"].tokens_per_step == strict
    assert strict["all"]["low"] <= strict["all"]["value"] <= strict["all"]["high"]
    assert by_name["strict"].acceptance == sorted(by_name["strict"].acceptance, reverse=True)
    assert (
        sum(found.pictures["regret"]["blocks"][name] for name in ("think", "answer"))
        == (found.pictures["regret"]["blocks"]["all"])
    )
    path = tmp_path / "replays" / found.id / "replay.json"
    assert b"</svg>" in path.with_name("replay.svg").read_bytes()
    edited = json.loads(path.read_text())
    edited["policies"][0]["acceptance"][0] = 1.0
    path.write_text(json.dumps(edited))
    with pytest.raises(record.ReplayError, match="was edited"):
        record.read_all(tmp_path)


def test_sampled_blocks_compare_with_chain(captured, tmp_path, capsys):
    assert run(captured[0], tmp_path, "replay.policy=block", "replay.asd_budgets=[]") == 0
    (found,) = record.read_all(tmp_path)
    assert (found.baseline, found.capture["temperature"], found.capture["drawn"]) == ("chain", 0.800000011920929, True)
    assert found.reproduced["blocks"] == found.capture["blocks"]
    block = next(entry for entry in found.policies if entry.name == "block")
    assert block.change["all"]["value"] >= 0  # never less than chain, on any block


def test_some_prompts_are_replayed_alone(captured):
    read, every = reader.read(captured[0]), select(reader.read(captured[0]), "strict")[0]
    wanted = frozenset(prompt_sha256(prompt) for prompt in every.prompts[1:])
    table, notes = select(read, "strict", wanted)
    assert (table.prompts, notes) == (every.prompts[1:], [])
    np.testing.assert_array_equal(table.z_x, every.z_x[every.count[0] :])
    with pytest.raises(CaptureError, match=r"replay\.shared: expected .* of the runs, found none of 3"):
        select(read, "strict", frozenset(["0" * 64]))


def test_prompts_are_shared_with_a_run(captured, tmp_path):
    with pytest.raises(ConfigError, match=r"replay\.shared: .*\(replay\.times\), found none"):
        run(captured[0], tmp_path, "replay.shared=true")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["replay.times=[nowhere]"], r"replay\.times: nowhere: record\.json: "),
        (["replay.times=[nowhere]", "replay.costs=[elsewhere]"], r"replay\.times: nowhere: "),
        (["replay.live=[nowhere]"], r"replay\.live: expected replay\.times, whose step times predict, found none"),
        (["replay.costs=[nowhere]"], r"replay\.costs: expected replay\.times, whose step times predict, found none"),
    ],
)
def test_a_run_that_cannot_be_read_is_named_with_its_field(captured, tmp_path, more, words):
    with pytest.raises((ConfigError, TaskError), match=words):
        run(captured[0], tmp_path, *more)


def test_another_length_than_the_engines_fails_the_replay(captured, tmp_path, capsys, monkeypatch):
    original = Table.matched.func
    monkeypatch.setattr(Table, "matched", property(lambda self: original(self) & (np.arange(self.drafts) < 2)))
    assert run(captured[0], tmp_path, "replay.asd_budgets=[]") == 1
    assert "accept another length" in capsys.readouterr().out


def test_another_models_tokenizer_is_refused(captured, tmp_path):
    copied = tmp_path / "capture"
    copied.mkdir()
    for path in (captured[0] / "reference-0").iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = "0" * 64
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(TaskError, match="model: expected that of the capture"):
        run(copied, tmp_path)


def test_another_model_of_the_same_tokenizer_is_refused(captured, tmp_path):
    """Its policies would be settled for the other model."""
    copied = tmp_path / "capture"
    copied.mkdir()
    for path in (captured[0] / "reference-0").iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((copied / "manifest.json").read_text())
    for target in (manifest["target"] | {"config_sha256": "0" * 64}, {"name": "other", "config_sha256": None}):
        (copied / "manifest.json").write_text(json.dumps(manifest | {"target": target}))
        with pytest.raises(TaskError, match="model: expected that of the capture"):
            run(copied, tmp_path)


@pytest.mark.parametrize(
    ("more", "named"),
    [(["replay.asd_budgets=[-1]"], "budget"), (["replay.policies=[]", "replay.asd_budgets=[]"], "least")],
)
def test_a_grid_that_makes_no_sense_is_one_line(captured, tmp_path, more, named):
    with pytest.raises(ConfigError, match=f"replay.*{named}"):
        run(captured[0], tmp_path, *more)


def test_an_engine_captures_only_where_it_is_told_to(monkeypatch, tmp_path):
    options = Options(*map(str, FOLDERS), slots=1, limit=64)
    assert loading.load(options)[0].capture is None
    monkeypatch.setenv("SPECACCEPT_CAPTURE", str(tmp_path))
    monkeypatch.setenv("SPECACCEPT_CAPTURE_RATE", "2")
    with pytest.raises(loading.LoadError, match="SPECACCEPT_CAPTURE_RATE: expected a number in"):
        loading.load(options)
    monkeypatch.delenv("SPECACCEPT_CAPTURE_RATE")
    engine, _ = loading.load(options)
    engine.stop()
    engine.run()  # the end of serving is the end of the capture
    found = reader.read(tmp_path)
    assert (found.closed, found.blocks) == (True, 0)
    assert found.manifest["tokenizer"]["sha256"] is not None
