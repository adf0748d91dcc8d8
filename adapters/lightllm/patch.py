"""The wrappers, put in place as LightLLM's modules finish loading.

One decode step, in one thread: `sample` picks an id per row -> (overlap site: ids are queued for the host) ->
`mtp_verify` -> consumers of the ids -> `scatter` writes the next proposal -> ... -> `_post_handle`, ids on the host.
Two threads take steps in turn: what a step leaves for its later seams is thread-local, matched by tensor identity.

Where nothing can be relaxed (strict, B = 0, m = 0) all of these stay the engine's own functions: only `_post_handle` is
wrapped, behind the answer, and what happened is read from the engine's own mtp_* totals of the request.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from adapters.capture import CaptureError, Settings, settings
from adapters.lightllm import accept, account, exchange, seams
from adapters.lightllm.account import Account, Contradiction, Step, marks_of, step_of
from adapters.lightllm.capture import Capture
from adapters.policy import Policy
from adapters.telemetry import Telemetry

LOST = "logits not found"
CONTRADICTED = "totals and tokens differ"
UNWRITTEN = "record not written"


@dataclass(slots=True)
class Sampled:
    """What `sample` saw and chose in this thread's step. ids, logprobs: the engine's own tensors."""

    logits: Tensor
    requests: list[Any]
    ids: Tensor
    logprobs: Tensor
    ranks: Tensor | None = None
    rank: Callable[[Tensor, Tensor], Tensor] | None = None
    host: tuple[Tensor, ...] | None = None  # pinned copies queued before verification


class Local(threading.local):
    sampled: Sampled | None = None
    step: Step | None = None
    copy: Tensor | None = None  # pinned regret and stop of this step
    pinned: Tensor | None = None
    workspace: accept.Workspace | None = None


class Engine:
    """The armed state of one model process."""

    def __init__(self, policy: Policy, root: Path) -> None:
        self.policy, self.root, self.layout = policy, root, seams.layout_of(root)
        self.policy_is_strict = policy.is_strict  # worked out once: this is asked every step
        # Not where its verify calls are captured. What is wrong with that request is `_capture`'s to say.
        captures = bool(os.environ.get(settings.FOLDER, "").strip())
        self.engine_decides = policy.is_strict and not captures and seams.engine_can_tell(self.layout)
        self.telemetry = Telemetry("lightllm", "lightllm", seams.engine_version(root), policy)
        self.account = Account(self.telemetry, policy)
        self.ledger: accept.Ledger | None = None
        self.capture: Capture | None = None
        self.local = Local()
        self.installed: set[str] = set()
        self.making = threading.Lock()
        self.lost = ""  # the reason, once there is one
        # A test turns this off to show that it would notice: every column then counts as a proposal.
        self.check_proposals = True

    def sampled(self, logits: Tensor, requests: list[Any], ids: Tensor, logprobs: Tensor) -> None:
        self.local.sampled = Sampled(logits, requests, ids, logprobs)

    def verify(
        self, strict: Callable[..., tuple[Tensor, Tensor]], table: Tensor, starts: Tensor, ids: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(accept_len [N], accepted_index [R]) of a verify call; relaxed ids and log-probabilities edited in place."""
        local = self.local
        sampled, local.sampled, local.step, local.copy = local.sampled, None, None, None
        if self.lost or sampled is None or sampled.ids is not ids or len(sampled.requests) != ids.shape[0]:
            self._lose(self.lost or LOST)
            return strict(table, starts, ids, slots)
        step = step_of(sampled.requests)
        if len(step.requests) != starts.shape[0]:
            self._lose(LOST)
            local.step = step
            return strict(table, starts, ids, slots)
        local.step = step
        if self.policy_is_strict and self.capture is None:
            return strict(table, starts, ids, slots)
        own = partial(strict, table, starts, ids, slots)
        chosen = None if self.capture is None else ids.clone()
        accept_len, accepted = self._decide(own, sampled, step, table, starts, ids, slots)
        if self.capture is not None and chosen is not None:
            self.capture.add(step, table, starts, slots, sampled.logits, chosen, ids, accept_len)
        return accept_len, accepted

    def _decide(
        self,
        own: Callable[[], tuple[Tensor, Tensor]],
        sampled: Sampled,
        step: Step,
        table: Tensor,
        starts: Tensor,
        ids: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        local = self.local
        if self.policy_is_strict or not self._prepare(step, table):
            return own()
        assert self.ledger is not None
        if local.workspace is None:
            local.workspace = accept.Workspace(self.ledger)
        accept_len, accepted, told = local.workspace.decide(
            table, starts, ids, slots, sampled.logits, sampled.logprobs, max(step.rows) - 1
        )
        if sampled.rank is not None and sampled.ranks is not None:
            sampled.ranks.copy_(sampled.rank(sampled.logits, ids))
        if sampled.host is not None:
            self._copy_again(sampled)
        local.copy = self._to_host(told)
        return accept_len, accepted

    def _lose(self, reason: str, detail: str = "") -> None:
        """What is decided here can no longer be vouched for: strict from here on, and not armed.

        Only for what every rank sees: they must decide alike.
        """
        self.lost = self.lost or reason
        self._disarm(reason, f"{detail}: strict from here on")

    def _disarm(self, reason: str, detail: str) -> None:
        self.telemetry.armed = False
        with self.account.lock:
            counters = self.telemetry.of(self.policy)
            counters.fall_back(reason)
            first = counters.fallbacks[reason] == 1
        if first:
            print(f"specaccept: {reason}{detail}, not armed", file=sys.stderr, flush=True)

    def look(self, run_reqs: Sequence[Any], packs: Sequence[Any]) -> None:
        """Of an engine that decides by itself: what its post-processing call was."""
        try:
            self.account.look(run_reqs, packs)
        except Contradiction as error:
            self._lose(CONTRADICTED, f": {error}")
        except OSError as error:
            self._disarm(UNWRITTEN, f": {error}")

    def handled(self, step: Step | None, run_reqs: Sequence[Any], packs: Sequence[Any]) -> None:
        """A post-processing call, of a verify call or (None) of a prefill."""
        try:
            if step is None:
                self.account.end(run_reqs)
            else:
                self.account.add(step, run_reqs, packs)
        except OSError as error:  # in the thread of the engine, and on this rank alone: requests go on by their rule
            self._disarm(UNWRITTEN, f": {error}")

    def _prepare(self, step: Step, table: Tensor) -> bool:
        """Bring the ledger to this step's requests; False: nothing of it may be relaxed."""
        with self.making:  # two threads, one ledger
            if self.ledger is None:
                self.ledger = accept.Ledger.empty(self.policy, table.shape[0], table.device)
        ledger, some = self.ledger, False
        for req, rows, live in zip(step.requests, step.rows, step.live, strict=True):
            marks = marks_of(req)
            if marks.temperature is None:
                if not marks.entered:  # the last owner may have left a budget
                    ledger.enter(req.req_idx, 1.0)
                    marks.entered = True
                continue
            if not marks.entered:
                ledger.enter(req.req_idx, marks.temperature)
                marks.entered = True
            if rows == 1:
                continue
            proposed = live == rows - 1 or not self.check_proposals
            if proposed != marks.is_open:
                if proposed:
                    ledger.open(req.req_idx, marks.temperature)
                else:
                    ledger.close(req.req_idx)
                marks.is_open = proposed
            some |= proposed
        return some

    @staticmethod
    def _copy_again(sampled: Sampled) -> None:
        """The host's copies were queued before verification: queue them once more behind it, into the same memory.

        The engine waits for an event recorded later on this stream before it reads them.
        """
        assert sampled.host is not None
        ids, logprobs, ranks = sampled.host
        ids.copy_(sampled.ids.view(ids.shape), non_blocking=True)
        logprobs.copy_(sampled.logprobs.view(logprobs.shape), non_blocking=True)
        if sampled.ranks is not None and sampled.rank is not None:
            ranks.copy_(sampled.ranks.view(ranks.shape), non_blocking=True)

    def _to_host(self, told: Tensor) -> Tensor:
        """Queue the step's detail into this thread's pinned memory: read after the engine waited for the step."""
        local, count = self.local, told.shape[0]
        if local.pinned is None or local.pinned.shape[0] < count:
            local.pinned = torch.empty(max(2048, 2 * count), dtype=torch.float32, pin_memory=told.is_cuda)
        return local.pinned[:count].copy_(told, non_blocking=True)

    def proposed(self, drafts: int) -> None:
        """The step's requests got `drafts` new draft columns."""
        step = self.local.step
        if step is not None:
            for req in step.requests:
                marks_of(req).drafts = drafts

    def take_step(self) -> Step | None:
        """This thread's step, its detail read. Called once the step's copies are on the host."""
        local = self.local
        step, copy, local.step, local.copy = local.step, local.copy, None, None
        if step is not None and copy is not None:
            told, requests = copy.tolist(), len(step.requests)
            step.regret, step.stop = told[:-requests], told[-requests:]
        return step

    def snapshot(self) -> dict[str, Any]:
        """Between two steps' counts, not within one."""
        with self.account.lock:
            self.account.settle()
            snapshot = self.telemetry.snapshot()
        if self.capture is not None:
            self.capture.recorder.sync()  # what is counted is on disk: nothing ends this process in order
        return snapshot

    def _capture(self, rank: int, args: Any) -> None:
        """Where SPECACCEPT_CAPTURE asks for one, on the first rank: all of them decide alike."""
        try:
            wanted = Settings.from_environment()
            if wanted is not None and rank == 0:
                self.capture = Capture(wanted, self.telemetry.engine, args, self.policy)
                self.telemetry.capture = self.capture.recorder.describe()
                self.account.ended = self.capture.ended
        except CaptureError as error:
            raise seams.Refused([str(error)]) from None

    def serve(self, rank: int, world: int, args: Any = None) -> None:
        """Every seam is in place: say so, and answer a harness that asks."""
        missing = sorted(_wanted(self.layout) - self.installed)
        if self.engine_decides and getattr(args, "mtp_dynamic_verify", False):
            missing.append("mtp_dynamic_verify, which was not in LIGHTLLM_START_ARGS when the modules loaded")
        if missing:
            raise seams.Refused([f"{self.layout}: not armed at {name}" for name in missing])
        self._capture(rank, args)
        self.telemetry.armed = True
        folder = os.environ.get(exchange.FOLDER, "").strip()
        if folder:
            try:
                self.account.finished = exchange.Journal(Path(folder), rank).write
                exchange.Responder(Path(folder), rank, world, self.snapshot).start()
            except OSError as error:
                raise seams.Refused([f"{exchange.FOLDER}: expected a folder to write to, found {error}"]) from None
        if rank == 0:
            print(f"specaccept: armed {self.policy.key} at {self.layout}", file=sys.stderr, flush=True)


_engine: Engine | None = None


def engine() -> Engine:
    """The process's one Engine, made when its first seam loads."""
    global _engine
    if _engine is None:
        root = seams.root_of(sys.modules["lightllm"])
        _engine = Engine(seams.require(root), root)
    return _engine


def _wanted(layout: str) -> set[str]:
    """Modules that must have been armed."""
    common = {seams.BACKEND, seams.NORMAL, seams.PARALLEL}
    return common | {seams.SPECULATIVE} if layout == "lightspec" else common


def module_loaded(module: ModuleType) -> None:
    """Put the wrappers of one module in place, checking every seam on the objects themselves. Twice does nothing."""
    state = engine()
    if module.__name__ in state.installed:
        return
    for seam in seams.LAYOUTS[state.layout]:
        if seam.module == module.__name__ and "." not in seam.name:
            _original(module, seam.name, state.layout)
    if module.__name__ == seams.BACKEND:
        _arm_backend(module, state)
    elif state.engine_decides:
        pass
    elif module.__name__ == seams.SPECULATIVE:
        _arm_verify(module, state)
        _arm_scatter(module, "scatter_mtp_next_tokens", lambda named: named["proposal"].token_ids.shape[1], state)
    else:
        _arm_sample(module, state)
        if state.layout == "earlier":
            _arm_scatter(
                module, "mtp_scatter_next_token_ids", lambda named: named["all_next_token_ids"].shape[1] - 1, state
            )
    state.installed.add(module.__name__)


def _original(holder: Any, name: str, layout: str) -> Callable[..., Any]:
    """The function about to be replaced, its signature checked on the object itself."""
    function = getattr(holder, name)
    for seam in seams.LAYOUTS[layout]:
        if isinstance(seam, seams.Seam) and seam.name.rsplit(".", 1)[-1] == name:
            problems = seams.live_drift(seam, function)
            if problems:
                raise seams.Refused([f"{layout}: {line}" for line in problems])
    return function


def _arm_verify(module: Any, state: Engine) -> None:
    original = _original(module, "mtp_verify", state.layout)

    @wraps(original)
    def mtp_verify(req_to_next_token_ids, b_req_mtp_start_loc, new_next_token_ids, b_req_idx):
        return state.verify(original, req_to_next_token_ids, b_req_mtp_start_loc, new_next_token_ids, b_req_idx)

    module.mtp_verify = mtp_verify


def _arm_sample(module: Any, state: Engine) -> None:
    original = _original(module, "sample", state.layout)

    @wraps(original)
    def sample(logits, reqs, *rest, **named):
        ids, logprobs = original(logits, reqs, *rest, **named)
        state.sampled(logits, reqs, ids, logprobs)
        return ids, logprobs

    module.sample = sample


def _arm_scatter(module: Any, name: str, drafts: Callable[[dict[str, Any]], int], state: Engine) -> None:
    original = _original(module, name, state.layout)
    parameters = next(s.parameters for s in seams.LAYOUTS[state.layout] if isinstance(s, seams.Seam) and s.name == name)

    @wraps(original)
    def scatter(*positional, **named):
        result = original(*positional, **named)
        if positional:
            named = dict(zip(parameters, positional, strict=False)) | named
        state.proposed(drafts(named))
        return result

    setattr(module, name, scatter)


def _arm_backend(module: Any, state: Engine) -> None:
    if state.layout == "earlier":
        _arm_verify(module, state)
    backend = module.ModeBackend
    take = partial(_original, backend, layout=state.layout)
    copy, rank = take("_async_copy_next_token_infos_to_pin_mem"), take("_get_next_token_ranks")
    prefill, post_handle, init_model = take("_sample_and_scatter_token"), take("_post_handle"), take("init_model")

    @wraps(rank)
    def _get_next_token_ranks(self, logits, next_token_ids):
        ranks = rank(self, logits, next_token_ids)
        sampled = state.local.sampled
        if sampled is not None and sampled.ids is next_token_ids and self.args.enable_rl:
            sampled.ranks, sampled.rank = ranks, partial(rank, self)
        return ranks

    @wraps(copy)
    def _async_copy_next_token_infos_to_pin_mem(self, next_token_ids, next_token_logprobs, next_token_ranks):
        host = copy(self, next_token_ids, next_token_logprobs, next_token_ranks)
        sampled = state.local.sampled
        if sampled is not None and sampled.ids is next_token_ids:
            sampled.host = host
        return host

    @wraps(prefill)
    def _sample_and_scatter_token(self, logits, b_req_idx, b_mtp_index, run_reqs, *rest, **named):
        result = prefill(self, logits, b_req_idx, b_mtp_index, run_reqs, *rest, **named)
        for req in run_reqs:  # column 0 moved on: the drafts behind it belong to another position, or to nobody
            marks_of(req).drafts = 0
        return result

    @wraps(post_handle)
    def _post_handle(
        self,
        run_reqs,
        next_token_ids,
        next_token_logprobs,
        next_token_ranks,
        run_reqs_update_packs,
        *rest,
        **named,
    ):
        step = None if state.engine_decides else state.take_step()
        result = post_handle(
            self,
            run_reqs,
            next_token_ids,
            next_token_logprobs,
            next_token_ranks,
            run_reqs_update_packs,
            *rest,
            **named,
        )
        if self.is_master_in_dp and state.engine_decides:
            state.look(run_reqs, run_reqs_update_packs)
        elif self.is_master_in_dp:
            state.handled(step, run_reqs, run_reqs_update_packs)
        return result

    @wraps(init_model)
    def _init_model(self, kvargs):
        seams.require_arguments(kvargs["args"], state.root)
        result = init_model(self, kvargs)
        state.serve(self.global_rank, self.global_world_size, kvargs["args"])
        return result

    backend.init_model, backend._post_handle = _init_model, _post_handle
    if state.engine_decides:
        return
    if not state.policy_is_strict:  # these two are for what was edited
        backend._get_next_token_ranks = _get_next_token_ranks
        backend._async_copy_next_token_infos_to_pin_mem = _async_copy_next_token_infos_to_pin_mem
    backend._sample_and_scatter_token = _sample_and_scatter_token


__all__ = ["Engine", "Sampled", "account", "engine", "module_loaded"]
