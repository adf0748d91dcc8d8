"""Capture through the engine's own decode step: a replay of what was captured decides as the engine did."""

from __future__ import annotations

import lightllm_rig as rig
import numpy as np
import pytest
import torch
from lightllm_rig import Item, Server, Toy
from test_lightllm_decode import ASD, STABLE, STRICT, TREES, items_of

from harness.replay import reader, rules, table

pytestmark = pytest.mark.parametrize("tree", TREES, ids=rig.name_of)


def capture(tree, policy, items, monkeypatch, folder, toy=None, **options):
    """-> the outputs, and the capture of them."""
    torch.set_num_threads(1)
    monkeypatch.setenv("SPECACCEPT_CAPTURE", str(folder))
    with rig.armed(tree, policy, monkeypatch) as modules, monkeypatch.context() as patched:
        rig.on_cpu(modules, patched)
        server = Server(modules, toy or Toy(3), **options)
        engine = modules.patch.engine()
        args = rig.SimpleNamespace(model_dir="target", mtp_draft_model_dir=["draft"], mtp_step=server.step)
        engine._capture(0, args)
        outcomes = server.run(items)
        engine.capture.recorder.close()
        assert engine.capture.recorder.error is None
        assert engine.telemetry.snapshot()["capture"]["folder"] == "lightllm-0"
    return outcomes, reader.read(folder)


@pytest.mark.parametrize("policy", [STRICT, ASD, STABLE], ids=lambda policy: policy.key)
def test_blocks_replay_as_they_ran(tree, policy, monkeypatch, tmp_path):
    items = items_of(5, 12, resume_at=-1)
    outcomes, found = capture(tree, policy, items, monkeypatch, tmp_path)
    assert found.manifest["temperature_applied"] is True
    blocks, notes = table.select(found, policy.key)
    assert not notes
    assert (rules.survival(policy, blocks).sum(1) == blocks.length).all()
    assert sorted(i["prompt"] for i in found.requests.values()) == sorted(item.prompt for item in items)
    # Blocks whose columns were no proposal have no live draft, whatever of them happened to match.
    assert (blocks.live == 0).any()
    whole = [n for n in range(len(blocks.first)) if (blocks.live[blocks.first[n] :][: blocks.count[n]] > 0).all()]
    assert policy.is_strict or (rules.reached(blocks.length, blocks.drafts) & ~blocks.matched).any()
    outputs = {tuple(o.ids) for o in outcomes}
    for n in whole:
        at = slice(blocks.first[n], blocks.first[n] + blocks.count[n])
        ids = [int(blocks.anchor[at][0])]
        for draft, length, bonus, cut in zip(
            blocks.draft[at], blocks.length[at], blocks.bonus[at], blocks.cut[at], strict=True
        ):
            ids += [*draft[:length].tolist(), int(bonus)][: int(cut)]
        assert tuple(ids) in outputs


def test_ragged_rows_temperatures_and_sampled_requests(tree, monkeypatch, tmp_path):
    greedy = [Item([2, 9], 20, temperature=0.5, widths=[5, 3, 1, 2, 4]), Item([7], 18, widths=[2, 2, 5])]
    sampled = [Item([11, 4], 12, top_k=20)]
    torch.manual_seed(0)
    _, found = capture(tree, ASD, greedy + sampled, monkeypatch, tmp_path)
    assert table.policies(found) == {ASD.key: 2, "sampled match": 1}
    blocks, _ = table.select(found, ASD.key)
    assert (blocks.live < blocks.drafts).any()
    assert (rules.survival(ASD, blocks).sum(1) == blocks.length).all()
    hot = np.repeat(blocks.temperature, 1) != 1
    assert hot.any()
    # Raw logits again: the toy's are of bfloat16 precision, halves and doubles of them too.
    toy = Toy(3).logits
    values = {float(v) for v in toy.flatten()}
    assert all(float(v) in values for v in blocks.z_max[hot][:, 0])
