"""The layout before LightSpec: the same adapter at `base_backend.mtp_verify` and `impl.mtp_scatter_next_token_ids`."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import lightllm_rig as rig
import pytest
import torch
from test_lightllm_decode import ASD
from test_lightllm_loop import check, crowd, run

from adapters.lightllm import seams
from adapters.policy import Policy

HUGE = Policy("asd", 1e6)
EARLIER = [tree for tree in rig.REAL if seams.layout_of(tree) == "earlier"]


@pytest.fixture(params=["double", *EARLIER], ids=str)
def tree(request, tmp_path):
    """The double without mtp_speculative: the two functions are imported where they were called then."""
    if request.param != "double":
        return request.param
    made = tmp_path / "tree"
    shutil.copytree(rig.DOUBLE, made)
    shutil.rmtree(seams.file_of(made, seams.SPECULATIVE).parent)
    kernels = seams.file_of(made, seams.KERNELS)
    text = kernels.read_text()
    for old, new in (
        ("target_next_token_ids, draft_token_ids, b_req_idx", "all_next_token_ids, b_req_idx"),
        (
            "    step = draft",
            "    draft_token_ids = all_next_token_ids[b_req_mtp_start_loc.long() + mtp_accept_len - 1, 1:]\n"
            "    target_next_token_ids = all_next_token_ids[:, 0]\n"
            "    step = draft",
        ),
    ):
        assert old in text
        text = text.replace(old, new)
    kernels.write_text(text)
    for module, names in (
        (seams.BACKEND, "mtp_verify"),
        (seams.NORMAL, "mtp_scatter_next_token_ids"),
        (seams.PARALLEL, "mtp_scatter_next_token_ids"),
    ):
        path = seams.file_of(made, module)
        text = path.read_text().replace(
            "from lightllm.server.router.model_infer.mtp_speculative import utils as mtp_utils\n", ""
        )
        path.write_text(f"from {seams.KERNELS} import {names}\n{text}")
    return made


def test_the_earlier_layout_is_known(tree):
    assert seams.layout_of(tree) == "earlier"
    assert seams.drift(tree) == []


def test_a_proposal_is_relaxed_and_junk_is_not(tree, monkeypatch):
    with rig.armed(tree, HUGE, monkeypatch) as modules, monkeypatch.context() as patched:
        modules.real = tree in EARLIER
        rig.on_cpu(modules, patched)
        engine = modules.patch.engine()
        toy = rig.Toy(0)
        table = torch.zeros(3, rig.W, dtype=torch.int64)
        table[1, 0], table[1, 1:] = 7, torch.tensor(toy.junk(7))
        param = SimpleNamespace(
            top_k=1,
            top_p=1.0,
            temperature=1.0,
            seed=-1,
            min_new_tokens=1,
            exponential_decay_length_penalty=SimpleNamespace(to_tuple=lambda: (1, 1.0)),
        )
        req = SimpleNamespace(
            req_idx=1,
            vocab_size=rig.V,
            generator=None,
            get_cur_total_len=lambda: 9,
            shm_req=SimpleNamespace(input_len=4),
            sampling_param=SimpleNamespace(shm_param=param, invalid_token_ids=[]),
        )
        sampling = SimpleNamespace(penalty_counter_mode="gpu_counter", req_to_next_token_ids=table)
        modules.batch.g_infer_context.req_manager = SimpleNamespace(req_sampling_params_manager=sampling)
        starts, slots = torch.tensor([0], dtype=torch.int32), torch.ones(5, dtype=torch.int32)

        def step():
            z = toy.logits[table[1, :5]].clone()
            ids, _ = modules.normal.sample(z, [req] * 5, [rig.EOS])
            own = ids.clone()
            lengths, accepted = modules.backend.mtp_verify(
                req_to_next_token_ids=table, b_req_mtp_start_loc=starts, new_next_token_ids=ids, b_req_idx=slots
            )
            candidates = torch.stack([ids] + [torch.full_like(ids, n) for n in (3, 4, 5, 6)], dim=1)
            modules.normal.mtp_scatter_next_token_ids(
                req_to_next_token_ids=table,
                b_req_mtp_start_loc=starts,
                all_next_token_ids=candidates,
                b_req_idx=slots,
                mtp_accept_len=lengths,
            )
            return own.tolist(), ids.tolist(), int(lengths[0]), accepted.tolist()

        own, ids, length, _ = step()
        assert ids == own  # junk columns: strict
        assert length == 1 + next((i for i in range(4) if toy.junk(7)[i] != own[i]), 4)
        own, ids, length, accepted = step()
        assert (ids[:4], length, accepted) == ([3, 4, 5, 6], 5, [1] * 5)  # the proposal: everything is cheap enough
        assert ids != own
        assert not engine.lost


@pytest.mark.parametrize("source", EARLIER or [None], ids=str)
@pytest.mark.skipif(not EARLIER, reason="LIGHTLLM_SRC names no checkout of the earlier layout")
@pytest.mark.parametrize("policy", [Policy("asd", 0.0), ASD, HUGE], ids=lambda policy: policy.key)
def test_a_crowd_on_two_threads(source, policy, monkeypatch):
    """The real decode step of that layout; its drafter is the toy's."""

    def draft(self, main_model_input, main_model_output, next_token_ids, mtp_accept_len, b_req_mtp_start_loc):
        tails = (b_req_mtp_start_loc + mtp_accept_len - 1).tolist()
        every = torch.zeros(len(next_token_ids), self.mtp_step + 1, dtype=torch.int64)
        every[:, 0] = next_token_ids
        for tail in tails:
            every[tail, 1:] = torch.tensor(toy.draft(int(next_token_ids[tail]), self.mtp_step))
        sys.modules[seams.NORMAL].mtp_scatter_next_token_ids(
            req_to_next_token_ids=self.model.req_manager.req_sampling_params_manager.req_to_next_token_ids,
            b_req_mtp_start_loc=b_req_mtp_start_loc,
            all_next_token_ids=every,
            b_req_idx=main_model_input.b_req_idx,
            mtp_accept_len=mtp_accept_len,
        )

    toy, items = rig.Toy(31), crowd(31)
    found = run(source, policy, toy, items, monkeypatch, slots=3, draft=draft)
    check(*found, toy, items, policy)
