"""Block verification of sampled requests through the real accept, against the oracle with the same coins."""

from __future__ import annotations

import os

import pytest
import sglang
import torch
from toy_engine import decode, prefilled, request

from adapters.policy import Policy
from adapters.rules.block import naive
from adapters.sglang import seams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK, CHAIN, ENGINE = Policy("block"), Policy("chain"), Policy("block-engine")
K, V = 5, 24


def filtered(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """softmax, the top_k largest, then the smallest set that holds top_p of what is left. logits [..., V]."""
    p = torch.softmax(logits / temperature, -1)
    order = p.argsort(dim=-1, descending=True, stable=True)
    p = p.gather(-1, order)
    p[..., top_k if top_k > 0 else p.shape[-1] :] = 0
    p /= p.sum(-1, keepdim=True)
    before = p.cumsum(-1) - p
    p = torch.where(before < top_p, p, 0.0)
    return torch.zeros_like(p).scatter(-1, order, p / p.sum(-1, keepdim=True))


def drafted(seed: int, rows: int):
    """Target and draft logits that resemble each other, and drafts really drawn from the draft's distribution."""
    g = torch.Generator().manual_seed(seed)
    draft_logits = 2 * torch.randn(rows, K, V, generator=g)
    logits = 2 * torch.randn(rows, K + 1, V, generator=g)
    logits[:, :K] = 0.7 * draft_logits + 0.3 * logits[:, :K]
    return logits, draft_logits, g


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "capped"),
    [(1.0, -1, 1.0, False), (0.7, -1, 1.0, True), (1.0, 6, 1.0, False), (0.9, 8, 0.9, True)],
)
def test_block_rows_answer_as_the_oracle_does(worker, temperature, top_k, top_p, capped):
    from sglang.srt.speculative import dflash_utils

    fallback = hasattr(dflash_utils, "_dflash_top_p_renorm_prob")
    if top_p < 1 and not fallback and dflash_utils.top_p_renorm_prob is None:
        pytest.skip("this release renormalises top-p in a compiled kernel that needs a GPU")
    rows = 12
    reqs = [request(f"r{i}", temperature, BLOCK, top_p=top_p, top_k=top_k) for i in range(rows)]
    slots = list(range(1, rows + 1))
    prefilled(worker, reqs, slots)
    for seed in range(2 if INTERPRETED else 6):
        logits, draft_logits, g = drafted(seed, rows)
        q = torch.softmax(draft_logits / temperature, -1)
        drafts = torch.multinomial(q.view(-1, V), 1, generator=g).view(rows, K)
        lens = torch.randint(1, K + 2, (rows,), generator=g) if capped else None
        torch.manual_seed(seed)
        eta = torch.rand(rows, K)
        torch.rand(rows)  # the engine's coin for its own bonus
        noise = torch.empty(rows, V).exponential_()
        live = torch.full((rows,), K, dtype=torch.int32) if lens is None else (lens - 1).int()
        wanted = naive.accept(drafts, filtered(logits, temperature, top_k, top_p), q, eta, noise, live)
        torch.manual_seed(seed)
        outs = worker.forward_batch_generation(decode(reqs, slots, drafts, logits, lens, draft_logits)).outs
        assert outs.correct_len.tolist() == wanted.length.tolist()
        assert outs.bonus.tolist() == wanted.bonus.tolist()
        assert outs.cap_trim_lens.tolist() == [0] * rows  # a rule that follows the cap leaves nothing to cut


@pytest.mark.skipif(not INTERPRETED, reason="the engine's chain kernel needs TRITON_INTERPRET=1 on a CPU")
def test_each_sampled_row_follows_its_own_rule(worker):
    """Chain rows of a mixed batch answer as the engine alone would, block rows as in a batch of their own."""
    rows = 12
    engine = ENGINE if seams.since(sglang.__version__, seams.NATIVE_BLOCK_SINCE) else CHAIN
    rules = [(BLOCK, 1.0), (CHAIN, 1.0), (None, 1.0), (Policy("strict"), 0.0), (engine, 1.0), (BLOCK, 1.0)] * 2
    reqs = [request(f"r{i}", t, policy) for i, (policy, t) in enumerate(rules)]
    alone = [request(f"b{i}", t, BLOCK if t else None) for i, (_, t) in enumerate(rules)]
    theirs = [request(f"e{i}", t, engine if t else None) for i, (_, t) in enumerate(rules)]
    plain = [request(f"p{i}", t) for i, (_, t) in enumerate(rules)]
    slots = list(range(1, rows + 1))
    differs = False
    for batch in (reqs, alone, theirs, plain):
        prefilled(worker, batch, slots)
    for seed in range(3):
        logits, draft_logits, g = drafted(seed, rows)
        drafts = torch.multinomial(torch.softmax(draft_logits, -1).view(-1, V), 1, generator=g).view(rows, K)
        found = []
        for batch in (reqs, alone, theirs, plain):
            torch.manual_seed(seed)
            outs = worker.forward_batch_generation(decode(batch, slots, drafts, logits, None, draft_logits)).outs
            found.append(list(zip(outs.correct_len.tolist(), outs.bonus.tolist(), strict=True)))
        mixed, block, own, native = found
        for i, (policy, _) in enumerate(rules):
            assert mixed[i] == (block[i] if policy == BLOCK else own[i] if policy == engine else native[i])
            differs |= policy == BLOCK and block[i] != native[i]
    assert differs


@pytest.mark.skipif(INTERPRETED, reason="thousands of rows: minutes in the interpreter, a second in the oracle")
def test_the_accept_length_is_block_verifications_and_the_output_the_targets(adapter):
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 11/9 drafts a block by the block rule, 10/9 by the token rule."""
    from toy_engine import ToyWorker, server_args

    rows, batches = 1024, 4
    two = ToyWorker(2)
    adapter.arm(two, server_args())
    reqs = [request(f"r{i}", 1.0, BLOCK) for i in range(rows)]
    slots = torch.arange(1, rows + 1) % 60 + 1
    prefilled(two, reqs, slots)
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    g = torch.Generator().manual_seed(5)
    torch.manual_seed(6)
    lengths, first = [], []
    for _ in range(batches):
        drafts = torch.multinomial(q.expand(rows * 2, 2), 1, generator=g).view(rows, 2)
        logits, draft_logits = p.log().expand(rows, 3, 2), q.log().expand(rows, 2, 2)
        outs = two.forward_batch_generation(decode(reqs, slots, drafts, logits, None, draft_logits)).outs
        lengths.append(outs.correct_len.float())
        first.append(outs.out_tokens[:, 0].float())
    n = rows * batches
    mean, deviation = torch.cat(lengths).mean(), torch.cat(lengths).std() / n**0.5
    assert abs(mean - 11 / 9) < 4 * deviation
    assert mean - 10 / 9 > 3 * deviation
    assert abs(torch.cat(first).mean() - 2 / 3) < 4 * (2 / 9 / n) ** 0.5
