"""Capture through the real accept: a replay of what was captured decides as the engine did, block for block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sglang_account import B0, STRICT, WIDE, K, V, commit, run
from test_sglang_block import BLOCK, CHAIN, INTERPRETED, drafted
from toy_engine import ToyWorker, decode, prefilled, request, server_args

from adapters.capture import CaptureError
from harness.replay import reader, rules, table


@pytest.fixture
def captured(adapter, monkeypatch, tmp_path):
    """An armed worker under SPECACCEPT_CAPTURE, and its folder."""
    monkeypatch.setenv("SPECACCEPT_CAPTURE", str(tmp_path))
    monkeypatch.setenv("SPECACCEPT_CAPTURE_ROWS", "1")
    args = server_args()
    args.model_path, args.speculative_draft_model_path, args.tokenizer_path = "target", "draft", None
    worker = ToyWorker(K)
    adapter.arm(worker, args)
    yield worker, tmp_path
    if adapter.capture is not None:
        adapter.capture.recorder.close()
    adapter.capture = None


def read(adapter, folder):
    adapter.capture.recorder.close()
    assert adapter.capture.recorder.error is None
    return reader.read(folder)


@pytest.mark.parametrize("limit", [4, 17])
def test_greedy_blocks_replay_as_they_ran(adapter, captured, limit):
    worker, folder = captured
    policies = [WIDE] * 4 + [B0, STRICT, None]
    reqs = [request(f"r{i}", policy=p, max_new_tokens=limit, stop=[0, 1]) for i, p in enumerate(policies)]
    seen = run(adapter, worker, reqs)
    capture = read(adapter, folder)
    assert (capture.closed, capture.dropped, capture.manifest["logits"]) == (True, 0, "processed")
    assert table.policies(capture) == {WIDE.key: 4, B0.key: 1, "strict": 2}
    for policy in (WIDE, B0, STRICT):
        found, notes = table.select(capture, policy.key)
        assert not notes
        assert (rules.survival(policy, found).sum(1) == found.length).all()
        wanted = {r.rid: [kept for *_, kept in steps] for r, steps in zip(reqs, seen, strict=True)}
        tokens = np.minimum(found.length + 1, found.cut)
        for rid, first, count in zip(found.rids, found.first, found.count, strict=True):
            assert tokens[first : first + count].tolist() == wanted[rid]
    assert capture.requests[0]["prompt"] == [1, 2, 3]


@pytest.mark.parametrize("policy", [BLOCK, CHAIN], ids=["oracle", "its_own_rule"])
def test_sampled_blocks_replay_with_their_coins(adapter, captured, policy):
    if policy == CHAIN and not INTERPRETED:
        pytest.skip("the engine's sampling kernels need TRITON_INTERPRET=1 on a CPU")
    worker, folder = captured
    rows = 8
    reqs = [request(f"r{i}", 0.7, policy, max_new_tokens=400) for i in range(rows)]
    slots = list(range(1, rows + 1))
    prefilled(worker, reqs, slots)
    lengths = [[] for _ in reqs]
    rows_p, rows_q = [], []
    for seed in range(5):
        logits, draft_logits, g = drafted(seed, rows)
        q = torch.softmax(draft_logits / 0.7, -1)
        drafts = torch.multinomial(q.view(-1, V), 1, generator=g).view(rows, K)
        result = worker.forward_batch_generation(decode(reqs, slots, drafts, logits.clone(), None, draft_logits))
        for row, req in enumerate(reqs):
            lengths[row].append(int(result.outs.correct_len[row]))
            commit(adapter, req, result, row)
        rows_p.append(torch.softmax(logits / 0.7, -1))
        rows_q.append(q)
    capture = read(adapter, folder)
    found, notes = table.select(capture, policy.key)
    assert notes == [f"{rows} requests did not end within the capture"]
    assert found.length.reshape(rows, 5).tolist() == lengths
    assert found.drawn.all()
    assert (rules.survival(policy, found, found.coin.astype(np.float64)).sum(1) == found.length).all()
    full = reader.read_rows(capture.folders[0], 0)
    np.testing.assert_allclose(full["target_probs"], torch.cat(rows_p).numpy(), atol=1e-6)
    np.testing.assert_allclose(full["draft_probs"], torch.cat(rows_q).numpy(), atol=1e-6)


def test_a_step_beyond_the_end_is_void_and_a_retracted_request_ends(adapter, captured):
    worker, folder = captured
    ended, retracted = request("ended", policy=STRICT, max_new_tokens=2), request("back", policy=STRICT)
    prefilled(worker, [ended, retracted], [1, 2])
    drafts, logits = torch.zeros(2, K, dtype=torch.int64), torch.zeros(2, K + 1, V)
    for row_settles in (True, False):  # the second step was in flight when the first one's result arrived
        result = worker.forward_batch_generation(decode([ended, retracted], [1, 2], drafts, logits))
        if row_settles:
            for row, req in enumerate((ended, retracted)):
                commit(adapter, req, result, row)
    prefilled(worker, [retracted], [2])
    worker.forward_batch_generation(decode([retracted], [2], drafts[:1], logits[:1]))
    found, notes = table.select(read(adapter, folder), "strict")
    assert not notes
    assert dict(zip(found.rids, found.count.tolist(), strict=True)) == {"ended": 1, "back": 1}
    assert np.minimum(found.length + 1, found.cut).tolist() == [1, K + 1]


def test_what_the_counters_tell_of_is_on_disk_and_health_checks_are_not_captured(adapter, captured):
    worker, folder = captured
    reqs = [request(rid, policy=STRICT, max_new_tokens=9) for rid in ("HEALTH_CHECK_1", "asked")]
    seen = run(adapter, worker, reqs)
    snapshot = adapter.records(lambda _: {}, worker)["specaccept"]
    assert snapshot["capture"]["folder"] == "sglang-0"
    found = reader.read(folder)  # not closed: an engine is killed
    assert [info["rid"] for info in found.requests.values()] == ["asked"]
    assert (found.closed, found.blocks, found.requests[0]["max_new_tokens"]) == (False, len(seen[1]), 9)
    assert list(found.ends) == [0]


@pytest.mark.parametrize("name", ["_verify_epilogue", "_sampling_accept_graph"])
def test_an_accept_inside_a_graph_cannot_be_captured(adapter, monkeypatch, tmp_path, name):
    monkeypatch.setenv("SPECACCEPT_CAPTURE", str(tmp_path))
    worker = ToyWorker(K)
    setattr(worker, name, object())
    with pytest.raises(CaptureError, match=f"expected an accept outside the CUDA graphs, found {name}"):
        adapter.worker_start(lambda *_: None, worker, server_args())
    assert list(tmp_path.iterdir()) == []


def test_a_capture_that_cannot_be_made_keeps_the_server_from_starting(adapter, monkeypatch):
    monkeypatch.setenv("SPECACCEPT_CAPTURE_RATE", "0.5")  # of nothing
    with pytest.raises(CaptureError, match="SPECACCEPT_CAPTURE_RATE"):
        adapter.worker_start(lambda *_: None, ToyWorker(K), server_args())
