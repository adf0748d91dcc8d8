"""ASD inside an engine's step: ledger, policy and counters by slot, in buffers that never move.

    state = AsdState(slots=256, K=7, rows=64, device="cuda")
    state.assign([slot], [AsdConfig(2.0625, 2.0625, 1, "normalized")])   # a request enters; outside a graph
    step = state.walk(draft_ids, top, logits, slots)                     # in the step, capturable, no host sync

On CPU tensors the same object runs the oracle (the kernels under TRITON_INTERPRET=1), so an adapter is tested without a
GPU. A slot of -1 pads: it is not read, charged or counted. A slot that was never assigned is strict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adapters.rules.asd import naive
from adapters.rules.asd.config import AsdConfig, Params, as_params
from adapters.rules.asd.report import BUDGET, Report, settle
from adapters.rules.common import COUNTERS, FLOATS, INTS, MAX_DRAFTS, RuleError, check, use_kernel

_STRICT = AsdConfig(budget=0.0, max_mismatches=0)
_PIECES, _NOTHING = 128, -(2**63)  # MAX_PIECES and NOTHING of triton.py, without importing Triton


class Step(NamedTuple):
    """Views of the state's buffers, overwritten by its next step.

    length [B] int32: drafts committed. bonus [B] int64: the token after them. ids [rows] int64: the id each verified
    row commits, up to and with the bonus; after that the target's own. accepted [rows] int32: 1 on those rows.
    report: charge [B, K], relaxed [B], stop [B].
    """

    length: Tensor
    bonus: Tensor
    ids: Tensor
    accepted: Tensor
    report: Report


class AsdState:
    """Static buffers for `slots` request slots and steps of up to `rows` requests of up to K drafts (K <= 15).

    spent [slots] float32 ledger; params [slots] policy; counts [slots, len(COUNTERS)] int64 and regret [slots] float64
    since the slot was assigned. Raises RuleError naming the field.
    """

    def __init__(self, slots: int, K: int, rows: int, device: torch.device | str) -> None:
        if not 1 <= K <= MAX_DRAFTS:
            raise RuleError(f"K: expected 1..{MAX_DRAFTS} drafts, found {K}")
        device = torch.empty(0, device=device).device
        self.K, self.rows = K, rows
        self.params = as_params(_STRICT, slots, device)
        self.spent = torch.zeros(slots, dtype=torch.float32, device=device)
        self.counts = torch.zeros(slots, len(COUNTERS), dtype=torch.int64, device=device)
        self.regret = torch.zeros(slots, dtype=torch.float64, device=device)
        self.before = torch.zeros(rows, dtype=torch.float32, device=device)
        self.bits = torch.zeros(rows, dtype=torch.int32, device=device)
        self._length = torch.zeros(rows, dtype=torch.int32, device=device)
        self._bonus = torch.zeros(rows, dtype=torch.int64, device=device)
        self._ids = torch.zeros(rows * (K + 1), dtype=torch.int64, device=device)
        self._accepted = torch.zeros(rows * (K + 1), dtype=torch.int32, device=device)
        self._report = Report.empty(rows, K, device)
        self._keys = torch.full((rows * (K + 1) * _PIECES,), _NOTHING, dtype=torch.int64, device=device)

    def assign(self, slots: Sequence[int], configs: AsdConfig | Sequence[AsdConfig]) -> None:
        """Give slots to new requests: their policy, an empty ledger, counters of 0. Copies from the host."""
        for slot in slots:
            if not 0 <= slot < len(self.spent):
                raise RuleError(f"slots: expected 0..{len(self.spent) - 1}, found {slot}")
        index = torch.tensor(list(slots), dtype=torch.int64, device=self.spent.device)
        for mine, new in zip(self.params, as_params(configs, len(index), self.spent.device), strict=True):
            mine[index] = new
        for buffer in (self.spent, self.counts, self.regret):
            buffer[index] = 0

    def counters(self, slot: int) -> dict[str, int | float]:
        """What the slot's request did so far. Waits for the device."""
        counts = dict(zip(COUNTERS, self.counts[slot].tolist(), strict=True))
        return counts | {"regret_charged": float(self.regret[slot]), "spent": float(self.spent[slot])}

    def walk(
        self,
        draft_ids: Tensor,
        top: Tensor,
        logits: Tensor,
        slots: Tensor,
        live: Tensor | None = None,
        starts: Tensor | None = None,
        table: bool = False,
    ) -> Step:
        """Accept on top of the engine's argmax.

        draft_ids [B, K] int, or with table=True [slots, K], row = slot; top: the engine's chosen id of every verified
        row; logits: the rows those were chosen from, penalties applied and temperature not; slots [B] int.
        Dense: top [B, K+1], logits [B, K+1, V], live [B] int or None (= K). Ragged (starts [B] int, rising): top [R],
        logits [R, V], request b owns rows starts[b] up to the next start; live is its rows - 1.
        A row whose id was sampled belongs to a slot without budget: the walk is then the engine's own prefix match.
        """
        self._check(draft_ids, logits, slots, live, starts, table)
        expected = tuple(logits.shape[:-1])
        check("top", top, expected, INTS, draft_ids)
        if not top.is_contiguous():
            raise RuleError(f"top: expected a contiguous tensor, found strides {list(top.stride())}")
        return self._run(draft_ids, top, logits, slots, live, starts, table)

    def fused(
        self,
        draft_ids: Tensor,
        logits: Tensor,
        slots: Tensor,
        live: Tensor | None = None,
        starts: Tensor | None = None,
        table: bool = False,
    ) -> Step:
        """`walk` with the argmax found in the same pass over the logits: torch.argmax's, ties and NaN included."""
        self._check(draft_ids, logits, slots, live, starts, table)
        if logits.dtype == torch.float64:
            raise RuleError("logits: expected float32, bfloat16 or float16 for the fused pass, found float64")
        return self._run(draft_ids, None, logits, slots, live, starts, table)

    def cut(self, slots: Tensor, committed: Tensor) -> None:
        """Take back what the last step charged beyond `committed` [B] int drafts (an EOS or max_tokens cut them).

        slots: those of the last step. Ledger, regret, relaxed and strict_accepted follow; no host sync.
        """
        B, K = len(slots), self.K
        check("committed", committed, (B,), INTS, slots)
        kept = torch.minimum(committed.to(torch.int32), self._length[:B]).clamp(min=0)
        charge, real = self._report.charge[:B], slots >= 0
        index = slots.long().clamp(min=0)
        position = torch.arange(K, device=slots.device)
        gone = (position >= kept[:, None]) & (position < self._length[:B, None])
        was_relaxed = ((self.bits[:B, None] >> position) & 1).bool()
        zero = torch.zeros((), dtype=torch.int64, device=slots.device)
        after = settle(self.before[:B], charge, kept)
        now = self.spent.gather(0, index)
        changed = real & (kept < self._length[:B])
        target = torch.where(changed, index, len(self.spent))  # the rest write past the end, into a bin
        roomy = torch.cat([self.spent, self.spent.new_zeros(1)])
        roomy[target] = torch.where(changed, after, now)
        self.spent.copy_(roomy[:-1])
        self.regret.index_add_(0, index, -torch.where(gone & real[:, None], charge, 0.0).double().sum(1))
        for name, lost in (("relaxed", gone & was_relaxed), ("strict_accepted", gone & ~was_relaxed)):
            column = self.counts[:, COUNTERS.index(name)]
            column.index_add_(0, index, torch.where(real, -lost.sum(1), zero))

    def _check(
        self,
        draft_ids: Tensor,
        logits: Tensor,
        slots: Tensor,
        live: Tensor | None,
        starts: Tensor | None,
        table: bool,
    ) -> None:
        B, K = len(slots), self.K
        check("slots", slots, (B,), INTS, draft_ids)
        if self.rows < B:
            raise RuleError(f"slots: expected at most {self.rows} requests, found {B}")
        check("draft_ids", draft_ids, (len(self.spent) if table else B, K), INTS, self.spent)
        if draft_ids.stride(1) != 1:
            raise RuleError(f"draft_ids: expected contiguous rows, found strides {list(draft_ids.stride())}")
        V = logits.shape[-1]
        if starts is None:
            check("logits", logits, (B, K + 1, V), FLOATS, draft_ids)
        else:
            check("starts", starts, (B,), INTS, draft_ids)
            rows = logits.shape[0]
            check("logits", logits, (rows, V), FLOATS, draft_ids)
            if not B <= rows <= B * (K + 1):
                raise RuleError(f"logits: expected {B}..{B * (K + 1)} rows for {B} requests, found {rows}")
            if live is not None:
                raise RuleError("live: expected None beside starts, which say it, found a tensor")
        if logits.stride(-1) != 1:
            raise RuleError(f"logits: expected contiguous rows, found strides {list(logits.stride())}")
        if live is not None:
            check("live", live, (B,), INTS, draft_ids)

    def _run(
        self,
        draft_ids: Tensor,
        top: Tensor | None,
        logits: Tensor,
        slots: Tensor,
        live: Tensor | None,
        starts: Tensor | None,
        table: bool,
    ) -> Step:
        B = len(slots)
        rows = B * (self.K + 1) if starts is None else logits.shape[0]
        report = Report(self._report.charge[:B], self._report.relaxed[:B], self._report.stop[:B])
        step = Step(self._length[:B], self._bonus[:B], self._ids[:rows], self._accepted[:rows], report)
        if not use_kernel(logits):
            self._oracle(step, draft_ids, top, logits, slots, live, starts, table)
            return step
        import adapters.rules.asd.triton as kernel  # Triton only where it is used

        launch = kernel.Launch(
            draft_ids, logits, step.length, step.bonus, self.spent, self.params, slots, live, starts, table,
            step.ids, step.accepted, report, self.before[:B], self.bits[:B], self.counts, self.regret,
        )  # fmt: skip
        if top is None:
            kernel.fused(launch, self._keys)
        else:
            kernel.walk(launch, top)
        return step

    def _oracle(
        self,
        step: Step,
        draft_ids: Tensor,
        top: Tensor | None,
        logits: Tensor,
        slots: Tensor,
        live: Tensor | None,
        starts: Tensor | None,
        table: bool,
    ) -> None:
        """Request by request through naive.walk."""
        K, flat = self.K, logits.reshape(-1, logits.shape[-1])
        chosen = flat.argmax(-1) if top is None else top.reshape(-1).long()
        ends = [] if starts is None else [*starts.tolist()[1:], len(flat)]
        for b, slot in enumerate(slots.tolist()):
            if slot < 0:
                for buffer in (step.length, step.bonus, *vars(step.report).values(), self.before, self.bits):
                    buffer[b] = 0
                continue
            if starts is None:
                first, n = b * (K + 1), K if live is None else min(max(int(live[b]), 0), K)
            else:
                first = int(starts[b])
                n = min(max(ends[b] - first - 1, 0), K)
            ids = draft_ids[slot if table else b, :n].long()[None]
            z, t = flat[None, first : first + n + 1], chosen[None, first : first + n + 1]
            mine = slice(slot, slot + 1)
            report = Report.empty(1, n)
            self.before[b] = self.spent[slot]
            length, bonus = naive.walk(
                ids, t, naive.regrets(ids, z, t), self.spent[mine], Params(*(p[mine] for p in self.params)),
                torch.tensor([n], dtype=torch.int32), report,
            )  # fmt: skip
            taken, row = int(length), slice(first, first + n + 1)
            step.length[b], step.bonus[b] = length[0], bonus[0]
            step.report.charge[b] = 0
            step.report.charge[b, :n] = report.charge[0]
            step.report.relaxed[b], step.report.stop[b] = report.relaxed[0], report.stop[0]
            step.ids[row] = torch.cat([ids[0, :taken], t[0, taken:]])
            step.accepted[row] = (torch.arange(n + 1) <= taken).to(torch.int32)
            relaxed = [i for i in range(taken) if ids[0, i] != t[0, i]]
            self.bits[b] = sum(1 << i for i in relaxed)
            exhausted = int(report.stop[0]) == BUDGET
            new = (1, n, taken - len(relaxed), len(relaxed), int(exhausted))
            self.counts[slot] += torch.tensor(new, dtype=torch.int64)
            self.regret[slot] += report.charge.double().sum()
