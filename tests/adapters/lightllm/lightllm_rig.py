"""Runs LightLLM's own decode step on the CPU around a toy model, armed by the adapter; and the same by brute force.

The tree is the contract double, or a real checkout: LIGHTLLM_SRC names folders that hold lightllm/. Of a real one
everything between the forward pass and the finished request is its own code: sample, verify, scatter, copies, post
handling. The forward pass is a table of bigram logits, the proposer a fixed function of the last committed token.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch

from adapters.lightllm import hook, seams
from adapters.policy import ENVIRONMENT, Policy

DOUBLE = Path(__file__).parent / "double"
REAL = [Path(name) for name in os.environ.get("LIGHTLLM_SRC", "").split(os.pathsep) if name]
TREES = [DOUBLE, *REAL]
V, W, EOS = 48, 8, 1
START = {"sampling_backend": "triton", "mtp_step": 4, "dp": 1, "diverse_mode": False}
f32 = np.float32


def name_of(tree: Path) -> str:
    return "double" if tree == DOUBLE else f"real-{seams.layout_of(tree)}"


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages of multimodal serving that the MTP path never calls: present as names only."""

    ROOTS = ("torchvision", "librosa", "soxr")

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.ROOTS else None

    def create_module(self, spec):
        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = attribute
        return module

    def exec_module(self, module):
        pass


def forget():
    """No LightLLM module, no adapter state, no hook: a new process as far as imports go."""
    for name in [n for n in sys.modules if n.split(".")[0] == "lightllm"]:
        del sys.modules[name]
    if "adapters.lightllm.patch" in sys.modules:
        sys.modules["adapters.lightllm.patch"]._engine = None
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, hook.PostImport)]


@contextlib.contextmanager
def armed(tree: Path, policy: Policy | None, monkeypatch):
    """The tree's modules, imported under SPECACCEPT_POLICY; None: unarmed."""
    forget()
    if policy is None:
        monkeypatch.delenv(ENVIRONMENT, raising=False)
    else:
        monkeypatch.setenv(ENVIRONMENT, json.dumps(policy.to_json()))
    monkeypatch.setenv("LIGHTLLM_START_ARGS", json.dumps(START))
    monkeypatch.syspath_prepend(str(tree))
    absent = _Absent()
    sys.meta_path.append(absent)
    try:
        hook.install()
        importlib.import_module("lightllm.common.basemodel.triton_kernel.mtp_utils")
        yield SimpleNamespace(
            normal=importlib.import_module(seams.NORMAL),
            parallel=importlib.import_module(seams.PARALLEL),
            backend=importlib.import_module(seams.BACKEND),
            batch=importlib.import_module(seams.BATCH),
            kernels=importlib.import_module(seams.KERNELS),
            patch=sys.modules.get("adapters.lightllm.patch"),
            real=tree != DOUBLE,
        )
    finally:
        sys.meta_path.remove(absent)
        forget()


def on_cpu(modules, monkeypatch) -> None:
    """What the engine asks of CUDA on this path, without one."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", MagicMock)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self)
    if not modules.real:
        return
    pinned = importlib.import_module("lightllm.server.router.model_infer.pin_mem_manager").PinMemTensorManager

    def constant(self, key, shape, fill_value, dtype):
        return torch.full(tuple(shape), fill_value, dtype=dtype)

    monkeypatch.setattr(pinned, "alloc_pin_tensor", lambda self, key, size, dtype: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(pinned, "get_const_cpu_tensor", constant)
    monkeypatch.setattr(pinned, "get_const_gpu_tensor", constant)
    sampler = importlib.import_module(seams.SAMPLER)
    monkeypatch.setattr(sampler, "apply_penalty_gpu_cache", lambda **named: None)
    arange = torch.arange
    monkeypatch.setattr(
        torch, "arange", lambda *a, **k: arange(*a, **{n: v for n, v in k.items() if n != "device" or v != "cuda"})
    )


@dataclass
class Toy:
    """Bigram logits of bf16 precision, so that ties and near-ties happen; drafts that are often right."""

    seed: int
    ties: bool = True
    logits: torch.Tensor = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        z = rng.normal(size=(V, V)) * 2 + 20
        z[:, EOS] -= 3
        if self.ties:
            for t in range(0, V, 5):
                top = np.argsort(-z[t])
                z[t, top[1]] = z[t, top[0]]
        self.logits = torch.tensor(z).bfloat16().float() if self.ties else torch.tensor(z).float()
        self.order = torch.argsort(self.logits, descending=True, stable=True).tolist()
        self.skill = rng.choice([0, 0, 0, 0, 1, 1, 2, 6], size=V).tolist()

    def draft(self, token: int, step: int) -> list[int]:
        """The proposal after `token`: each the next by rank `skill`."""
        drafts = []
        for _ in range(step):
            token = self.order[token][self.skill[token]]
            drafts.append(token)
        return drafts

    def junk(self, token: int) -> list[int]:
        """What a stale row may hold at worst: drafts only just wrong at their rows."""
        drafts = []
        for _ in range(W - 1):
            token = self.order[token][1]
            drafts.append(token)
        return drafts


@dataclass
class Item:
    """One request. prefill: its first id comes from a prefill; otherwise from a step without one (prompt cached).

    resume_at: blocks after which the request is prefilled again (a pause, or a decode row mixed into a prefill).
    widths: rows verified in block n (dynamic verify); empty: all. stop: ids that end it. abort_at: blocks after which
    its client is gone (Loop). pause_at: blocks after which it waits a while, and goes on from the prompt cache (Loop).
    """

    prompt: list[int]
    max_new_tokens: int = 24
    top_k: int = 1
    temperature: float = 1.0
    prefill: bool = True
    resume_at: int = -1
    widths: list[int] = field(default_factory=list)
    tag: int = -1
    stop: list[int] = field(default_factory=list)
    abort_at: int = -1
    pause_at: int = -1


@dataclass
class Outcome:
    ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass
class Totals:
    requests: int = 0
    blocks: int = 0
    drafts_verified: int = 0
    strict_accepted: int = 0
    relaxed: int = 0
    regret_charged: float = 0.0
    budget_exhausted: int = 0
    committed_tokens: int = 0


def by_hand(
    toy: Toy, item: Item, policy: Policy, step: int, junk_is_valid: bool = False, prefills: dict[int, int] | None = None
) -> tuple[Outcome, Totals]:
    """The whole request in plain Python and numpy float32, written from the rule and from what the columns hold.

    prefills: how often it was prefilled again after so many blocks; default: once, after item.resume_at.
    """
    prefills = {item.resume_at: 1} if prefills is None else prefills
    z = toy.logits.numpy() / f32(item.temperature)
    budget, gate = f32(policy.budget / item.temperature), f32(policy.gate / item.temperature)
    cap = 10**9 if policy.max_mismatches is None else policy.max_mismatches
    ids: list[int] = []
    rows: list[int] = []  # the token each id was predicted from
    totals, spent, blocks = Totals(requests=1), f32(0), 0
    last = item.prompt[-1]

    def done(ids=ids):
        stopped = bool(item.stop) and ids[-len(item.stop) :] == item.stop
        return len(ids) >= item.max_new_tokens or (bool(ids) and ids[-1] == EOS) or stopped

    def prefilled():
        rows.append(last)
        ids.append(int(np.argmax(z[last])))
        return ids[-1]

    columns, valid = toy.junk(last), False
    if item.prefill:
        columns = toy.junk(int(np.argmax(z[last])))
        last = prefilled()
    while not done():
        if blocks == item.abort_at:
            totals.requests = 0
            break
        for _ in range(prefills.get(blocks, 0)):
            if not done():
                last, valid = prefilled(), False
        if done():
            break
        width = (item.widths[blocks] if blocks < len(item.widths) else step + 1) - 1
        live = width if valid or junk_is_valid else 0
        fed = [last, *columns[:width]]
        targets = [int(np.argmax(z[token])) for token in fed]
        committed, charged, why = [], [], None
        for i in range(width):
            x, t = columns[i], targets[i]
            if x != t:
                r = f32(z[fed[i]][t] - z[fed[i]][x])
                q = f32(live - i) if policy.suffix_value == "suffix" else f32(f32(live - i) / f32(max(live, 1)))
                if live == 0 or not (spent < budget and f32(spent + r) <= budget):
                    why = "budget"
                elif not (r <= f32(gate * q)):
                    why = "gate"
                elif len(charged) + 1 > cap:
                    why = "cap"
                if why is not None:
                    break
                spent = f32(spent + r)
                charged.append((i, r))
            committed.append(x)
        committed.append(targets[len(committed)])
        kept = next((committed[:n] for n in range(1, len(committed)) if done(ids + committed[:n])), committed)
        drafts = min(len(kept), len(committed) - 1, width if valid else 0)
        relaxed = [float(r) for i, r in charged if i < drafts]
        totals.blocks += 1
        totals.drafts_verified += width if valid else 0
        totals.relaxed += len(relaxed)
        totals.strict_accepted += drafts - len(relaxed)
        totals.regret_charged += sum(relaxed) * item.temperature
        totals.committed_tokens += len(kept)
        totals.budget_exhausted += why == "budget" and valid and width > 0 and len(kept) == len(committed)
        rows += fed[: len(kept)]
        ids += kept
        last, blocks = committed[-1], blocks + 1
        columns, valid = [*toy.draft(last, step), *([1] * (W - 1 - step))], True
    chosen = [z[row] for row in rows]
    logprobs = [float(torch.log_softmax(torch.tensor(c), -1)[i]) for c, i in zip(chosen, ids, strict=True)]
    ranks = [int((c > c[i]).sum()) + 1 for c, i in zip(chosen, ids, strict=True)]
    return Outcome(ids, logprobs, ranks), totals


class Server:
    """A backend of the tree with a toy model: admits requests to slots, steps them, and frees a slot one step late."""

    def __init__(
        self, modules, toy: Toy, step: int = 4, slots: int = 3, overlap: bool = False, ranks: bool = False, draft=None
    ):
        """draft: the backend's method that proposes, in the layout before LightSpec."""
        self.modules, self.toy, self.step, self.slots, self.overlap = modules, toy, step, slots, overlap
        self.table = torch.zeros(slots + 1, W, dtype=torch.int64)
        self.counted: list[tuple[int, int]] = []
        sampling = SimpleNamespace(
            req_to_next_token_ids=self.table,
            req_to_next_token_scores=None,
            penalty_counter_mode="gpu_counter",
            update_reqs_token_counter=lambda req_objs, next_token_ids: None,
            update_reqs_out_token_counter_gpu=self._count,
        )
        memory = SimpleNamespace(alloc=lambda n: torch.zeros(n, dtype=torch.int32), free=lambda indexes: None)
        manager = SimpleNamespace(req_sampling_params_manager=sampling, mem_manager=memory)
        context = modules.batch.g_infer_context
        context.req_manager, context.req_sampling_manager = manager, sampling
        context.radix_cache, context.overlap_stream = None, object()
        kind = modules.parallel.DPChunkedPrefillBackend if overlap else modules.normal.ChunkedPrefillBackend
        self.backend = kind.__new__(kind)
        engine = SimpleNamespace(
            plan_decode=lambda **named: SimpleNamespace(draft_step=step, skip_verify_sync=False),
            prepare_decode_model_input=self._compact,
            prepare_decode_model_inputs=lambda **n: (n["model_input0"], None, n["model_input1"], None),
            propose_next=self._propose,
            propose_next_overlap=self._propose_overlap,
            update_planner_statics=lambda **named: None,
        )
        for name, value in {
            "args": SimpleNamespace(enable_rl=ranks),
            "eos_id": [EOS],
            "is_linear_att_mixed_model": False,
            "is_master_in_dp": True,
            "max_draft_step": step,
            "spec_engine": engine,
            "decode_draft_engine": engine,
            "extra_post_req_handle_func": None,
            "model": SimpleNamespace(
                forward=self._forward,
                req_manager=manager,
                microbatch_overlap_decode=lambda a, b: (self._forward(a), self._forward(b)),
            ),
        }.items():
            setattr(self.backend, name, value)
        if draft is not None:
            self.backend.mtp_step, self.backend._draft_decode_func = step, types.MethodType(draft, self.backend)
        self.events = MagicMock()

    def _count(self, b_req_idx, next_token_ids, mask):
        if mask is not None:
            self.counted += list(zip(b_req_idx[mask].tolist(), next_token_ids[mask].tolist(), strict=True))

    def _forward(self, model_input):
        tokens = self.table[model_input.b_req_idx.long(), model_input.b_mtp_index.long()]
        return SimpleNamespace(logits=self.toy.logits[tokens].clone())

    def _compact(self, model_input, req_num, plan):
        keep, first = [], 0
        for req in self.active:
            item = req.item
            width = item.widths[req.blocks] if req.blocks < len(item.widths) else self.step + 1
            keep += [j < width for j in range(self.step + 1)]
            first += self.step + 1
        if all(keep):
            return model_input, None
        mask = torch.tensor(keep)
        model_input.b_req_idx, model_input.b_mtp_index = model_input.b_req_idx[mask], model_input.b_mtp_index[mask]
        model_input.batch_size = int(mask.sum())
        if getattr(model_input, "mem_indexes_cpu", None) is not None:
            model_input.mem_indexes_cpu = model_input.mem_indexes_cpu[mask]
        return model_input, SimpleNamespace(tensor=mask, wait=lambda: None)

    def _proposal(self, tails):
        token_ids = torch.tensor([self.toy.draft(t, self.step) for t in tails], dtype=torch.int64)
        return SimpleNamespace(token_ids=token_ids, extra_mem_indexes_cpu=[], schedule_scores=None)

    def _propose(self, target_next_token_ids, b_req_mtp_start_loc, accept_len, **named):
        return self._proposal(target_next_token_ids[(b_req_mtp_start_loc + accept_len - 1).long()].tolist())

    def _propose_overlap(self, target_next_token_ids0, target_next_token_ids1, accept_len, **named):
        starts = torch.arange(len(accept_len)) * (self.step + 1)
        return self._proposal(
            torch.cat((target_next_token_ids0, target_next_token_ids1))[starts + accept_len - 1].tolist()
        )

    def _request(self, item: Item, slot: int):
        req = self.modules.batch.InferReq.__new__(self.modules.batch.InferReq)
        size = len(item.prompt) + item.max_new_tokens + 4 * W
        prompt = np.zeros(size, dtype=np.int64)
        prompt[: len(item.prompt)] = item.prompt
        param = SimpleNamespace(
            top_k=item.top_k,
            top_p=1.0,
            temperature=item.temperature,
            max_new_tokens=item.max_new_tokens,
            seed=item.tag,
            min_new_tokens=1,
            ignore_eos=False,
            exponential_decay_length_penalty=SimpleNamespace(to_tuple=lambda: (1, 1.0)),
        )
        shared = SimpleNamespace(
            input_len=len(item.prompt),
            shm_prompt_ids=SimpleNamespace(arr=prompt),
            shm_logprobs=SimpleNamespace(arr=np.zeros(size, dtype=[("logprob", "f4"), ("rank", "i4")])),
            finish_token_index=-1,
            mtp_accepted_token_num=0,
            mtp_verify_token_num=0,
            mtp_verify_step_num=0,
        )
        for name, value in {
            "item": item,
            "blocks": 0,
            "req_idx": slot,
            "req_id": slot,
            "vocab_size": V,
            "mtp_step": self.step,
            "multimodal_params": {"images": [], "audios": []},
            "sampling_param": SimpleNamespace(shm_param=param, invalid_token_ids=[]),
            "shm_req": shared,
            "finish_status": self.modules.batch.FinishStatus(),
            "stop_sequences": [item.stop] if item.stop else [],
            "generator": None,
            "shared_kv_node": None,
            "cur_output_len": 0,
            "cur_kv_len": len(item.prompt) - 1,
            "ending": False,
        }.items():
            setattr(req, name, value)
        self.table[slot, 0] = item.prompt[-1]
        return req

    def _prefill(self, req) -> None:
        """One prefill of one request, from end to end."""
        self.prefill(MagicMock(), [req])

    def prefill(self, event_pack, reqs) -> None:
        """The engine's own prefill tail: one id, column 0 moves on, the draft columns stay as they are."""
        backend, slots = self.backend, [req.req_idx for req in reqs]
        _ids, *host = backend._sample_and_scatter_token(
            logits=self.toy.logits[self.table[slots, 0]].clone(),
            b_req_idx=torch.tensor(slots, dtype=torch.int32),
            b_mtp_index=torch.zeros(len(reqs), dtype=torch.int32),
            run_reqs=reqs,
            is_prefill=True,
            b_prefill_has_output_cpu=[True] * len(reqs),
        )
        event_pack.notify_post_handle_and_wait_pre_post_handle()
        packs = backend._pre_post_handle(reqs, is_chuncked_mode=False)
        event_pack.notify_forward_and_wait_post_handle()
        backend._post_handle(
            run_reqs=reqs,
            next_token_ids=host[0],
            next_token_logprobs=host[1],
            next_token_ranks=host[2],
            run_reqs_update_packs=packs,
        )
        event_pack.notify_pre_post_handle()

    def run(self, items: list[Item]) -> list[Outcome]:
        """Every item to its end, at most `slots` at a time."""
        waiting, requests = list(items), []
        self.active = []
        free = list(range(self.slots))
        while waiting or self.active:
            while waiting and free:
                req = self._request(waiting.pop(0), free.pop(0))
                requests.append(req)
                if req.item.prefill:
                    self._prefill(req)
                self.table[req.req_idx, 1:] = torch.tensor(self.toy.junk(int(self.table[req.req_idx, 0])))
                self.active.append(req)
            for req in self.active:
                if req.blocks == req.item.resume_at and not req.finish_status.is_finished():
                    self._prefill(req)
            for req in [r for r in self.active if r.finish_status.is_finished() and r.blocks == 0]:
                req.ending = True
            decode = self.backend.decode_overlap_mtp if self.overlap else self.backend.decode_mtp
            decode(self.events, self.active)
            for req in list(self.active):
                req.blocks += 1
                if req.ending:  # the step in flight when the end was seen has passed
                    self.active.remove(req)
                    free.append(req.req_idx)
                req.ending = req.finish_status.is_finished()
        return [self._outcome(req) for req in requests]

    @staticmethod
    def _outcome(req) -> Outcome:
        shared = req.shm_req
        aborted = shared.input_len + req.cur_output_len
        span = slice(shared.input_len, shared.finish_token_index + 1 if req.finish_status.is_finished() else aborted)
        logs = shared.shm_logprobs.arr[span]
        return Outcome(
            shared.shm_prompt_ids.arr[span].tolist(), logs["logprob"].tolist(), logs["rank"].astype(int).tolist()
        )


class Loop(Server):
    """The same behind the engine's two infer threads: one launches a step while the other's is still to be reported.

    Scheduling as the engine's `_get_classed_reqs`: a request that ended or was aborted is left out of a turn and freed
    in the one after, its slot given away at once; one that waits goes on from the prompt cache, without a prefill;
    mixed: requests that decode join a prefill. prefills: what each request was prefilled again, by blocks before it.
    """

    def loop(self, items: list[Item], mixed: bool = False) -> list[Outcome]:
        self.waiting, self.requests, self.mixed = list(items), [], mixed
        self.alive, self.free, self.failed = [], list(range(self.slots)), []
        self.prefills: list[dict[int, int]] = []
        if self.modules.real:
            overlap = importlib.import_module("lightllm.server.router.model_infer.mode_backend.overlap_events")
            self.packs = overlap.OverlapEventManager()
        else:
            self.packs = _Turns()
        threads = [threading.Thread(target=self._infer, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while any(thread.is_alive() for thread in threads) and not self.failed and time.monotonic() < deadline:
            for thread in threads:
                thread.join(0.05)
        assert not self.failed, self.failed[0]
        assert not any(thread.is_alive() for thread in threads)
        return [self._outcome(req) for req in self.requests]

    def _infer(self) -> None:
        try:
            while self._turn(self._pack()):
                pass
        except BaseException as error:
            self.failed.append(error)
            raise

    def _pack(self):
        pack = self.packs.get_overlap_event_pack()
        if self.modules.real:  # of the last turn, which has no next one to wait for
            names = ("notify_post_handle_event", "notify_forward_event", "notify_pre_post_handle_event")
            pack.leave = lambda: [getattr(pack, name).set() for name in names]
        return pack

    def _turn(self, pack) -> bool:
        pack.wait_to_forward()
        prefill, decode = self._classed()
        if not self.alive:
            pack.leave()
            return False
        if prefill:
            self.prefill(pack, prefill)
        elif decode:
            self.active = decode
            (self.backend.decode_overlap_mtp if self.overlap else self.backend.decode_mtp)(pack, decode)
            if not self.modules.real:
                pack.notify_pre_post_handle()
        else:
            pack.notify_post_handle_and_wait_pre_post_handle()
            pack.notify_forward_and_wait_post_handle()
            pack.notify_pre_post_handle()
        return True

    def _classed(self) -> tuple[list, list]:
        prefill, decode = [], []
        for req in list(self.alive):
            if req.leaving:
                self.alive.remove(req)
                self.free.append(req.req_idx)
            elif req.finish_status.is_finished() or req.blocks == req.item.abort_at:
                req.leaving = True
            elif req.blocks == req.item.pause_at and req.paused < 3:
                req.paused += 1
            elif req.blocks == req.item.resume_at and not req.prefills:
                prefill.append(req)
            else:
                decode.append(req)
        for req in prefill:
            req.prefills[req.blocks] = 1
        while self.waiting and self.free:
            item = self.waiting.pop(0)
            req = self._request(item, self.free.pop(0))
            req.leaving, req.paused, req.prefills = False, 0, {}
            first = int(np.argmax(self.toy.logits[item.prompt[-1]])) if item.prefill else item.prompt[-1]
            self.table[req.req_idx, 1:] = torch.tensor(self.toy.junk(first))
            (prefill if item.prefill else decode).append(req)
            self.requests.append(req)
            self.prefills.append(req.prefills)
            self.alive.append(req)
        if prefill and self.mixed:
            for req in decode:
                req.prefills[req.blocks] = req.prefills.get(req.blocks, 0) + 1
            return prefill + decode, []
        if not prefill:
            for req in decode:
                req.blocks += 1
        return prefill, decode


class _Turns:
    """For a tree whose step is one piece: the threads take turns."""

    def __init__(self):
        self.turn = threading.Lock()

    def get_overlap_event_pack(self):
        return SimpleNamespace(
            wait_to_forward=self.turn.acquire,
            notify_post_handle_and_wait_pre_post_handle=lambda: None,
            notify_forward_and_wait_post_handle=lambda: None,
            notify_pre_post_handle=self.turn.release,
            leave=self.turn.release,
        )
