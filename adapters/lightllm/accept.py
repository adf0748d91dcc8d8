"""ASD on the tensors of one LightLLM verify call: ragged rows, a ledger by request slot, nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from adapters.policy import Policy
from adapters.rules.asd import AsdConfig, Params, Report, as_params, naive
from adapters.rules.common import RuleError, use_kernel

if TYPE_CHECKING:
    from adapters.lightllm import kernel

MANY = 256  # shapes that are remembered at most


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
    said: dict[str, list[float]]  # gate and budget of each slot as the host last wrote them: what stays is not written

    @classmethod
    def empty(cls, policy: Policy, slots: int, device: torch.device) -> Ledger:
        """Every slot closed."""
        params = as_params(AsdConfig.from_policy(policy), slots, device)
        params.budget.zero_()
        said = {"budget": [0.0] * slots, "gate": [policy.gate] * slots}
        return cls(policy, torch.zeros(slots, dtype=torch.float32, device=device), params, said)

    def enter(self, slot: int, temperature: float) -> None:
        """A request that was never judged before owns the slot: nothing of the last owner is left."""
        self.spent[slot] = 0.0
        self._write("gate", slot, self.policy.gate / temperature)
        self._write("budget", slot, 0.0)

    def open(self, slot: int, temperature: float) -> None:
        """The slot's columns hold a proposal of a greedy request."""
        self._write("budget", slot, self.policy.budget / temperature)

    def close(self, slot: int) -> None:
        self._write("budget", slot, 0.0)

    def _write(self, name: str, slot: int, value: float) -> None:
        if self.said[name][slot] != value:
            self.said[name][slot] = value
            getattr(self.params, name)[slot] = value


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
    """Walk every request of a verify call and charge its slot: the padded torch oracle, for a CPU without Triton.

    table [slots, W] int64: column j+1 is the draft judged at the request's row j. starts [N] int: first row of each
    request, contiguous rows. ids [R] int: the engine's chosen ids. rows_slot [R] int: slot of each row. logits [R, V].
    width: most drafts of a request here (the longest run of rows less one).
    """
    (R, V), device = logits.shape, ids.device
    slots, drafts = rows_slot.index_select(0, starts).long(), table[:, 1 : 1 + width]
    report = Report.empty(starts.shape[0], width, device)
    starts = starts.long()
    ends = torch.cat([starts[1:], starts.new_tensor([R])])
    live = (ends - starts - 1).to(torch.int32)
    index = (starts[:, None] + torch.arange(width + 1, device=device)).clamp(max=R - 1)
    x, top = drafts[slots], ids.long()[index]
    known = (x >= 0) & (x < V)
    z_top = logits[index[:, :-1], top[:, :-1]].float()
    z_draft = logits[index[:, :-1], x.clamp(0, V - 1)].float()
    regret = torch.where(known, z_top - z_draft, torch.nan)
    spent = ledger.spent[slots]
    params = Params(*(field[slots] for field in ledger.params))
    length = naive.walk(x, top, regret, spent, params, live, report).length
    ledger.spent[slots] = spent
    committed, accepted = ids.clone(), torch.zeros(R, dtype=torch.int32, device=device)
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


class Workspace:
    """What one thread's verify calls are decided in, again and again: buffers, and arguments that stay.

    A thread's steps follow each other on one stream, so the buffers of a step are free when its next one is launched.
    The two tensors that the engine keeps (accept_len, accepted) are new ones in every step.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.known: dict[tuple[int, ...], kernel.Prepared] = {}

    def decide(
        self,
        table: Tensor,
        starts: Tensor,
        ids: Tensor,
        rows_slot: Tensor,
        logits: Tensor,
        logprobs: Tensor,
        width: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """judge and commit of one verify call: ids [R] and logprobs [R] are edited in place.

        -> accept_len [N] and accepted [R] as the engine's kernel says them, and for the host [R + N] float32: the
        regret of relaxed rows (-1 elsewhere), then the reason why each request stopped, until this thread's next call.
        Raises RuleError for tensors that the kernels would misread.
        """
        N, R = starts.shape[0], ids.shape[0]
        if not use_kernel(logits):
            verdict = judge(table, starts, ids, rows_slot, logits, self.ledger, width)
            regret = commit(verdict, ids, logprobs, logits)
            return verdict.accept_len, verdict.accepted, torch.cat([regret, verdict.stop.float()])
        from adapters.lightllm import kernel

        if not (ids.is_contiguous() and logprobs.is_contiguous() and logits.stride(1) == 1):
            raise RuleError("ids, logprobs, logits: expected contiguous rows, found strides between their elements")
        key = (N, R, width, table.data_ptr(), logits.stride(0), logits.shape[1], ids.element_size())
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= MANY:
                self.known.clear()
            found = self.known[key] = kernel.prepare(table, starts, ids, logits, self.ledger, width)
        slots = rows_slot.index_select(0, starts)
        accept_len = torch.empty(N, dtype=torch.int32, device=ids.device)
        accepted = torch.empty(R, dtype=torch.int32, device=ids.device)
        return accept_len, accepted, kernel.run(found, starts, ids, slots, logits, logprobs, accept_len, accepted)
