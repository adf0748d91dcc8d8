"""The two launches of an ASD step: the walk of adapters.rules.asd, and what it means for the engine's own tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapters.lightllm.accept import Ledger
from adapters.rules.asd import Report
from adapters.rules.asd.triton import Launch
from adapters.rules.asd.triton import _walk_kernel as walk_kernel

LANES = 128  # rows of a program of the second launch
REQUESTS = 8  # of a program of the walk


@triton.jit(do_not_specialize=["rows", "requests"])
def _commit_kernel(
    Ids, Committed, Logprobs, Logits, stride_z, rows, Length, Stop, requests, AcceptLen, Host, LANES: tl.constexpr
):  # fmt: skip
    """Rows: the committed id, its log-probability, the regret of a relaxed one. Requests: length with the bonus, stop.

    A row's z(target id) - z(draft) is at once its regret and what its log-probability loses.
    """
    r = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = r < rows
    old = tl.load(Ids + r, mask=here, other=0)
    new = tl.load(Committed + r, mask=here, other=0)
    relaxed = here & (old != new)
    row = r.to(tl.int64) * stride_z
    gap = tl.load(Logits + row + old, mask=relaxed, other=0.0) - tl.load(Logits + row + new, mask=relaxed, other=0.0)
    logprob = tl.load(Logprobs + r, mask=relaxed, other=0.0)
    tl.store(Logprobs + r, logprob - gap, mask=relaxed)
    tl.store(Ids + r, new, mask=relaxed)
    tl.store(Host + r, tl.where(relaxed, gap, -1.0), mask=here)
    asks = r < requests  # no more of them than rows
    tl.store(AcceptLen + r, tl.load(Length + r, mask=asks, other=0) + 1, mask=asks)
    tl.store(Host + rows + r, tl.load(Stop + r, mask=asks, other=0).to(tl.float32), mask=asks)


class Prepared(NamedTuple):
    """Both launches of one shape, with every buffer and argument that stays. host [R + N] float32."""

    drafts: Tensor
    stride_d: int
    V: int
    sizes: tuple[int, int]
    ledger: tuple[Tensor, ...]
    length: Tensor
    bonus: Tensor
    committed: Tensor
    rest: tuple[Tensor, ...]
    stop: Tensor
    flags: dict[str, Any]
    walk: Any
    commit: Any
    host: Tensor


def prepare(table: Tensor, starts: Tensor, ids: Tensor, logits: Tensor, ledger: Ledger, width: int) -> Prepared:
    """For verify calls of this shape over this table and ledger. Raises RuleError for a tensor it would misread."""
    N, R, device = starts.shape[0], ids.shape[0], ids.device
    drafts = table[:, 1 : 1 + width]
    report = Report(
        torch.empty(N, width, dtype=torch.float32, device=device),
        torch.empty(N, dtype=torch.int32, device=device),
        torch.empty(N, dtype=torch.int8, device=device),
    )
    launch = Launch(
        draft_ids=drafts,
        logits=logits,
        length=torch.empty(N, dtype=torch.int32, device=device),
        bonus=torch.empty(N, dtype=torch.int64, device=device),
        spent=ledger.spent,
        params=ledger.params,
        slots=torch.empty(N, dtype=torch.int32, device=device),
        starts=starts,
        table=True,
        ids=torch.empty_like(ids),
        accepted=torch.empty(R, dtype=torch.int32, device=device),
        report=report,
    )
    tensors, flags = launch.arguments()
    assert launch.ids is not None
    return Prepared(
        drafts,
        drafts.stride(0),
        logits.shape[1],
        (N, R),
        tensors[5:10],
        launch.length,
        launch.bonus,
        launch.ids,
        tensors[14:],
        report.stop,
        flags | {"LANES": REQUESTS, "num_warps": 1},
        walk_kernel[(triton.cdiv(N, REQUESTS),)],
        _commit_kernel[(triton.cdiv(R, LANES),)],
        torch.empty(R + N, dtype=torch.float32, device=device),
    )


def run(
    p: Prepared,
    starts: Tensor,
    ids: Tensor,
    slots: Tensor,
    logits: Tensor,
    logprobs: Tensor,
    accept_len: Tensor,
    accepted: Tensor,
) -> Tensor:
    """The two launches; p.host. Every tensor as accept.Workspace.decide has it."""
    N, R = p.sizes
    stride_z = logits.stride(0)
    p.walk(
        p.drafts, p.stride_d, ids, logits, 0, stride_z, p.V,
        slots, starts, p.length, N, R, *p.ledger, p.length, p.bonus, p.committed, accepted, *p.rest, **p.flags,
    )  # fmt: skip
    p.commit(
        ids, p.committed, logprobs, logits, stride_z, R, p.length, p.stop, N, accept_len, p.host,
        LANES=LANES, num_warps=1,
    )  # fmt: skip
    return p.host
