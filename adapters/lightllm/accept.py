"""ASD on the tensors of one LightLLM verify call: ragged rows, a ledger by request slot, nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adapters.policy import Policy
from adapters.rules.asd import AsdConfig, Params, Report, as_params, naive
from adapters.rules.common import use_kernel


@dataclass
class Ledger:
    """What ASD keeps of each request slot, on the device.

    spent [slots] float32: regret charged so far. params [slots] each. A slot whose budget is 0 is strict: such is one
    whose draft columns hold no proposal, or whose request is sampled.

    LightLLM divides a row's logits by its temperature before verification, for greedy requests too (top_k = 1).
    Regrets of raw logits are temperature times larger, so the slot's budget and gate are divided by it instead.
    """

    policy: Policy
    spent: Tensor
    params: Params

    @classmethod
    def empty(cls, policy: Policy, slots: int, device: torch.device) -> Ledger:
        """Every slot closed."""
        params = as_params(AsdConfig.from_policy(policy), slots, device)
        params.budget.zero_()
        return cls(policy, torch.zeros(slots, dtype=torch.float32, device=device), params)

    def enter(self, slot: int, temperature: float) -> None:
        """A request that was never judged before owns the slot: nothing of the last owner is left."""
        self.spent[slot] = 0.0
        self.params.gate[slot] = self.policy.gate / temperature
        self.params.budget[slot] = 0.0

    def open(self, slot: int, temperature: float) -> None:
        """The slot's columns hold a proposal of a greedy request."""
        self.params.budget[slot] = self.policy.budget / temperature

    def close(self, slot: int) -> None:
        self.params.budget[slot] = 0.0


class Verdict(NamedTuple):
    """accept_len [N] int32: drafts committed + 1. accepted [R] int32: 1 at committed rows, as the engine's kernel says.

    ids [R]: committed drafts, then the target's own ids. stop [N] int8: why a request stopped (adapters.rules.asd).
    """

    accept_len: Tensor
    accepted: Tensor
    ids: Tensor
    stop: Tensor


def judge(
    table: Tensor, starts: Tensor, ids: Tensor, rows_slot: Tensor, logits: Tensor, ledger: Ledger, width: int
) -> Verdict:
    """Walk every request of a verify call and charge its slot.

    table [slots, W] int64: column j+1 is the draft judged at the request's row j. starts [N] int: first row of each
    request, contiguous rows. ids [R] int: the engine's chosen ids. rows_slot [R] int: slot of each row. logits [R, V].
    width: most drafts of a request here (the longest run of rows less one).
    """
    N, R = starts.shape[0], ids.shape[0]
    slots = rows_slot.index_select(0, starts)
    drafts = table[:, 1 : 1 + width]
    device = ids.device
    if not use_kernel(logits):
        return _oracle(drafts, starts, ids, slots.long(), logits, ledger, Report.empty(N, width, device))
    from adapters.rules.asd import triton

    length = torch.empty(N, dtype=torch.int32, device=device)
    accepted = torch.empty(R, dtype=torch.int32, device=device)
    committed = torch.empty_like(ids)
    report = Report(  # the kernel fills all of it
        torch.empty(N, width, dtype=torch.float32, device=device),
        torch.empty(N, dtype=torch.int32, device=device),
        torch.empty(N, dtype=torch.int8, device=device),
    )
    launch = triton.Launch(
        draft_ids=drafts,
        logits=logits,
        length=length,
        bonus=torch.empty(N, dtype=torch.int64, device=device),
        spent=ledger.spent,
        params=ledger.params,
        slots=slots,
        starts=starts,
        table=True,
        ids=committed,
        accepted=accepted,
        report=report,
    )
    triton.walk(launch, ids)
    return Verdict(length + 1, accepted, committed, report.stop)


def _oracle(
    drafts: Tensor, starts: Tensor, ids: Tensor, slots: Tensor, logits: Tensor, ledger: Ledger, report: Report
) -> Verdict:
    """The same through the padded torch oracle: what runs on a CPU without Triton's interpreter."""
    R, V = logits.shape
    starts = starts.long()
    ends = torch.cat([starts[1:], starts.new_tensor([R])])
    live = (ends - starts - 1).to(torch.int32)
    width = drafts.shape[1]
    index = (starts[:, None] + torch.arange(width + 1, device=ids.device)).clamp(max=R - 1)
    x, top = drafts[slots], ids.long()[index]
    known = (x >= 0) & (x < V)
    z_top = logits[index[:, :-1], top[:, :-1]].float()
    z_draft = logits[index[:, :-1], x.clamp(0, V - 1)].float()
    regret = torch.where(known, z_top - z_draft, torch.nan)
    spent = ledger.spent[slots]
    params = Params(*(field[slots] for field in ledger.params))
    length = naive.walk(x, top, regret, spent, params, live, report).length
    ledger.spent[slots] = spent
    committed, accepted = ids.clone(), torch.zeros(R, dtype=torch.int32, device=ids.device)
    for n, (start, end, count) in enumerate(zip(starts.tolist(), ends.tolist(), length.tolist(), strict=True)):
        accepted[start : min(end, start + count + 1)] = 1
        committed[start : start + count] = x[n, :count].to(ids.dtype)
    return Verdict(length + 1, accepted, committed, report.stop)


def commit(verdict: Verdict, ids: Tensor, logprobs: Tensor, logits: Tensor) -> Tensor:
    """Make the engine's own tensors say what was committed, in place: ids [R], logprobs [R].

    A relaxed row's log-probability moves by z(draft) - z(target id): both are logits of the row the engine sampled.
    Returns [R] float32: the regret of relaxed rows, of these logits; -1 elsewhere.
    """
    relaxed = verdict.ids != ids
    new, old = verdict.ids.long().view(-1, 1), ids.long().view(-1, 1)
    gap = (logits.gather(1, old) - logits.gather(1, new)).view(-1)
    logprobs.copy_(torch.where(relaxed, logprobs - gap, logprobs))
    ids.copy_(verdict.ids)
    return torch.where(relaxed, gap, -1.0)
