"""The fused forward passes against transformers and against the draft's own module."""

from __future__ import annotations

import pytest
import torch
from reference_pair import make_draft

from harness.engines.reference.dspark import DSparkDraft
from harness.engines.reference.model import Target, argmax
from harness.engines.reference.proposer import Proposer, greedy

IDS = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (23, 9, 31)]


def hidden_and_logits(model, ids):
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return torch.cat([out.hidden_states[i + 1][0] for i in (0, 2)], -1), out.logits[0]


@torch.inference_mode()
def test_prefill_equals_transformers(target):
    ours = Target(target, (0, 2), slots=3, positions=64)
    logits, context = ours.prefill(IDS, [2, 0, 1])
    start = 0
    for row, ids in zip(logits, IDS, strict=True):
        hidden, expected = hidden_and_logits(target, ids)
        torch.testing.assert_close(row, expected[-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(context[start : start + len(ids)], hidden, rtol=1e-4, atol=1e-4)
        start += len(ids)


@pytest.mark.parametrize("count", [1, 3])
@torch.inference_mode()
def test_verify_equals_transformers_at_every_row(target, count):
    """Prefill a part, verify eight rows per slot, roll back to three and verify again over the stale entries."""
    ours = Target(target, (0, 2), slots=3, positions=64)
    kept = [len(ids) - 8 for ids in IDS[:count]]
    ours.prefill([ids[:k] for ids, k in zip(IDS, kept, strict=False)], list(range(count)))
    junk = torch.full((count, 8), 5)
    lengths = torch.tensor(kept)
    for tokens in (junk, torch.tensor([ids[-8:] for ids in IDS[:count]])):
        logits, context = ours.verify(tokens, lengths[:, None] + torch.arange(8), max(kept) + 8)
    for row, ids in enumerate(IDS[:count]):
        hidden, expected = hidden_and_logits(target, ids)
        torch.testing.assert_close(logits[row], expected[-8:], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(context.view(count, 8, -1)[row], hidden[-8:], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_bfloat16_stays_near_transformers(target):
    import copy

    model = copy.deepcopy(target).bfloat16()
    ours = Target(model, (0, 2), slots=1, positions=64)
    logits, _ = ours.prefill(IDS[:1], [0])
    exact = hidden_and_logits(target, IDS[0])[1][-1]
    theirs = hidden_and_logits(model, IDS[0])[1][-1].float()
    assert (logits[0] - exact).abs().max() < 2 * (theirs - exact).abs().max() + 0.05


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.inference_mode()
def test_proposer_equals_the_draft_module(target, kind):
    draft = make_draft(target, kind=kind)
    ours = Proposer(draft, draft.borrowed[1].t(), slots=3, positions=64)
    lengths = [len(ids) - 8 for ids in IDS]
    contexts = [hidden_and_logits(target, ids)[0] for ids in IDS]
    ours.commit_prompts(torch.cat([c[:n] for c, n in zip(contexts, lengths, strict=True)]), [0, 1, 2], lengths)
    # Eight more rows, of which the last five are wrong and then rolled back.
    extra = torch.stack([c[n : n + 8] for c, n in zip(contexts, lengths, strict=True)])
    extra[:, 3:] = 7.0
    positions = torch.tensor(lengths)[:, None] + torch.arange(8)
    ours.commit_block(extra.flatten(0, 1), positions)
    starts = torch.tensor(lengths) + 3
    anchors = torch.tensor([ids[s] for ids, s in zip(IDS, starts.tolist(), strict=True)])
    seen: list[torch.Tensor] = []

    def pick(i: int, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return greedy(i, logits)

    for _ in range(2):  # the second block overwrites what the first left in the cache
        seen.clear()
        drafts = ours.propose(anchors, starts[:, None] + torch.arange(7), int(starts.max()) + 7, pick)
    for row, (context, start) in enumerate(zip(contexts, starts.tolist(), strict=True)):
        kv = draft.context_kv(context[None, :start], torch.arange(start)[None])
        hidden = draft.block_hidden(anchors[row : row + 1], starts[row : row + 1], kv)
        ids, logits = draft.propose(anchors[row : row + 1], hidden)
        assert drafts[row].tolist() == ids[0].tolist()
        torch.testing.assert_close(torch.stack(seen, 1)[row], logits[0], rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_one_slot_alone_proposes_as_it_does_in_a_batch(target):
    draft = make_draft(target)
    context, _ = hidden_and_logits(target, IDS[0])
    results = []
    for slots in (1, 3):
        ours = Proposer(draft, draft.borrowed[1].t(), slots=slots, positions=64)
        ours.commit_prompts(context.repeat(slots, 1), list(range(slots)), [len(IDS[0])] * slots)
        positions = torch.full((slots, 1), len(IDS[0])) + torch.arange(7)
        results.append(ours.propose(torch.full((slots,), 11), positions, len(IDS[0]) + 7, greedy))
    assert all(row.tolist() == results[0][0].tolist() for row in results[1])


def test_markov_without_table_equals_table(target, monkeypatch):
    import harness.engines.reference.proposer as module

    draft: DSparkDraft = make_draft(target)
    context, _ = hidden_and_logits(target, IDS[0])
    results = []
    for entries in (1 << 24, 0):
        monkeypatch.setattr(module, "TABLE_ENTRIES", entries)
        with torch.inference_mode():
            ours = Proposer(draft, draft.borrowed[1].t(), slots=1, positions=64)
            assert (ours.table is None) == (entries == 0)
            ours.commit_prompts(context, [0], [len(IDS[0])])
            positions = len(IDS[0]) + torch.arange(7)[None]
            results.append(ours.propose(torch.tensor([11]), positions, len(IDS[0]) + 7, greedy).tolist())
    assert results[0] == results[1]


@torch.inference_mode()
def test_argmax_takes_the_first_of_equals_and_a_nan():
    nan = float("nan")
    x = torch.tensor([[1.0, 3.0, 3.0], [nan, 5.0, nan], [0.0, nan, 9.0]])
    assert argmax(x).tolist() == x.argmax(-1).tolist() == [1, 0, 1]
