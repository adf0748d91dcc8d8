"""Strict and ASD against a row-by-row brute force in numpy float32 scalars."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.policy import Policy, PolicyError
from adapters.rules import RuleError, asd, strict
from adapters.rules.asd import AsdConfig, Report, as_params, settle

ORACLE = settings(derandomize=True, deadline=None, max_examples=250)
KERNEL = settings(
    derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
VALUES = [0.0, -0.0, 0.25, 0.5, 1.0, 1.5, 2.0, -1.0, 1e-45, -3e38, 3e38, math.inf, -math.inf, math.nan]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
f32 = np.float32


class Case(NamedTuple):
    draft_ids: torch.Tensor
    logits: torch.Tensor
    spent: torch.Tensor
    configs: list
    live: torch.Tensor


configs = st.builds(
    AsdConfig,
    budget=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0625, 8.0]),
    gate=st.sampled_from([0.0, 0.25, 0.5, 1.0, math.inf]),
    max_mismatches=st.sampled_from([None, 0, 1, 2]),
    suffix_value=st.sampled_from(["suffix", "normalized"]),
)


@st.composite
def cases(draw, largest=5):
    B, K, V = draw(st.integers(1, largest)), draw(st.integers(1, largest)), draw(st.integers(1, 2 * largest + 1))
    tame = draw(st.booleans())  # without huge and special values more blocks get past their first draft
    value = st.sampled_from(VALUES[:8] if tame else VALUES)
    count = B * (K + 1) * V
    z = torch.tensor(draw(st.lists(value, min_size=count, max_size=count))).view(B, K + 1, V)
    z = z.to(draw(st.sampled_from(DTYPES)))
    follow = torch.tensor(draw(st.lists(st.booleans(), min_size=B * K, max_size=B * K))).view(B, K)
    free = torch.tensor(draw(st.lists(st.integers(-2, V + 1), min_size=B * K, max_size=B * K))).view(B, K)
    ids = torch.where(follow, z[:, :K].argmax(-1), free)
    spent = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=B, max_size=B)))
    live = torch.tensor(draw(st.lists(st.integers(0, K), min_size=B, max_size=B)), dtype=torch.int32)
    return Case(ids, z, spent, draw(st.lists(configs, min_size=B, max_size=B)), live)


def first_largest(row):
    """The index torch.argmax documents: the first NaN, else the first of the largest."""
    best = 0
    for v, x in enumerate(row):
        if math.isnan(row[best]):
            break
        if math.isnan(x) or x > row[best]:
            best = v
    return best


def brute(ids, rows, spent, config, live):
    """One request: (length, bonus, spent, charges, stop). rows: K+1 lists of floats."""
    top = [first_largest(row) for row in rows]
    budget, gate = f32(config.budget), f32(config.gate)
    spent, charges, relaxed = f32(spent), [0.0] * len(ids), 0
    for i in range(live):
        x, row = ids[i], rows[i]
        if x == top[i]:
            continue
        stop = None
        if not 0 <= x < len(row):
            stop = asd.INVALID
        else:
            with np.errstate(all="ignore"):
                r = f32(row[top[i]]) - f32(row[x])
                value = f32(live - i) / f32(live) if config.suffix_value == "normalized" else f32(live - i)
                limit = gate * value
            if not math.isfinite(r):
                stop = asd.INVALID
            elif not spent < budget or not spent + r <= budget:
                stop = asd.BUDGET
            elif not r <= limit:
                stop = asd.GATE
            elif config.max_mismatches is not None and relaxed + 1 > config.max_mismatches:
                stop = asd.CAP
        if stop is not None:
            return i, top[i], spent, charges, stop
        spent, relaxed, charges[i] = f32(spent + r), relaxed + 1, r
    return live, top[live], spent, charges, asd.FULL


def run(path, case, device, report=None):
    """asd through one of the two paths; spent comes back as a new tensor."""
    on = torch.device("cpu") if path == "oracle" else device
    module = asd.naive
    if path == "kernel":
        from adapters.rules.asd import triton as module
    spent = case.spent.clone().to(on)
    params = as_params(case.configs, len(spent), on)
    report_on = None if report is None else Report.empty(*case.draft_ids.shape, device=on)
    out = module.accept(case.draft_ids.to(on), case.logits.to(on), spent, params, case.live.to(on), report_on)
    if report is not None:
        report.charge.copy_(report_on.charge)
        report.relaxed.copy_(report_on.relaxed)
        report.stop.copy_(report_on.stop)
    return out.length.cpu(), out.bonus.cpu(), spent.cpu()


def check_asd(path, case, device):
    report = Report.empty(*case.draft_ids.shape)
    length, bonus, spent = run(path, case, device, report)
    assert (length.dtype, bonus.dtype) == (torch.int32, torch.int64)
    for b, config in enumerate(case.configs):
        want = brute(
            case.draft_ids[b].tolist(), case.logits[b].tolist(), case.spent[b].item(), config, int(case.live[b])
        )
        assert (int(length[b]), int(bonus[b])) == want[:2]
        assert f32(spent[b].item()).tobytes() == f32(want[2]).tobytes(), "the ledger, bit for bit"
        assert report.charge[b].tolist() == [float(c) for c in want[3]]
        assert int(report.relaxed[b]) == sum(
            1 for i in range(want[0]) if case.draft_ids[b, i] != first_largest(case.logits[b, i].tolist())
        )
        assert int(report.stop[b]) == want[4]
    settled = settle(case.spent, report.charge, length)
    assert torch.equal(settled, spent), "settling the whole block is what the rule charged"
    assert torch.equal(settle(case.spent, report.charge, torch.zeros_like(length)), case.spent)


@ORACLE
@given(cases())
def test_asd_oracle_is_the_rule(case):
    check_asd("oracle", case, torch.device("cpu"))


@KERNEL
@given(case=cases())
def test_asd_kernel_is_the_rule(case, device):
    check_asd("kernel", case, device)


def check_strict(case, module, on):
    out = module.accept(case.draft_ids.to(on), case.logits.to(on), case.live.to(on))
    for b in range(len(case.spent)):
        top = [first_largest(row) for row in case.logits[b].tolist()]
        n = 0
        while n < case.live[b] and case.draft_ids[b, n] == top[n]:
            n += 1
        assert (int(out.length[b]), int(out.bonus[b])) == (n, top[n])


@ORACLE
@given(cases())
def test_strict_oracle_is_prefix_match(case):
    check_strict(case, strict.naive, torch.device("cpu"))


@settings(KERNEL, max_examples=10)
@given(case=cases())
def test_strict_kernel_is_prefix_match(case, device):
    from adapters.rules.strict import triton

    check_strict(case, triton, device)


@ORACLE
@given(cases(), st.booleans())
def test_no_budget_or_no_mismatches_is_strict(case, by_budget):
    nothing = AsdConfig(0.0) if by_budget else AsdConfig(8.0, max_mismatches=0)
    spent = torch.zeros_like(case.spent)
    got = asd.accept(case.draft_ids, case.logits, spent, nothing, case.live)
    want = strict.accept(case.draft_ids, case.logits, case.live)
    assert torch.equal(got.length, want.length)
    assert torch.equal(got.bonus, want.bonus)
    assert not spent.any()


def one(ids, rows, config, spent=0.0, live=None, path="oracle", device="cpu"):
    """(length, bonus, spent) of a single request; rows without the bonus row, which is appended."""
    rows = [*rows, [0.0] * (len(rows[0]) - 1) + [9.0]]
    case = Case(
        torch.tensor([ids]),
        torch.tensor([rows]),
        torch.tensor([spent]),
        [config],
        torch.tensor([len(ids) if live is None else live], dtype=torch.int32),
    )
    length, bonus, after = run(path, case, torch.device(device))
    return int(length), int(bonus), float(after)


def test_tie_is_a_mismatch_of_regret_zero(path, device):
    rows = [[5.0, 5.0, 0.0]]
    assert one([1], rows, AsdConfig(0.0), path=path, device=device) == (0, 0, 0.0)
    assert one([1], rows, AsdConfig(1.0, max_mismatches=0), path=path, device=device) == (0, 0, 0.0)
    assert one([1], rows, AsdConfig(1.0), path=path, device=device) == (1, 2, 0.0)


def test_tie_is_rejected_once_the_budget_is_exactly_spent(path, device):
    rows = [[1.0, 0.0, 0.0], [5.0, 5.0, 0.0]]
    assert one([1, 1], rows, AsdConfig(1.0), path=path, device=device) == (1, 0, 1.0)
    assert one([1, 1], rows, AsdConfig(1.25), path=path, device=device) == (2, 2, 1.0)


def test_ledger_adds_in_order_in_float32(path, device):
    rows = [[0.0, -3e-8], [0.0, -3e-8], [0.0, -1.0]]
    spent = f32(f32(f32(1.0) + f32(3e-8)) + f32(3e-8)) + f32(1.0)
    assert one([1, 1, 1], rows, AsdConfig(8.0), spent=1.0, path=path, device=device) == (3, 1, float(spent))
    assert float(spent) == 2.0, "each small regret is lost on its own; their sum would not be"


def test_gate_scales_with_what_is_left(path, device):
    rows = [[0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]
    gate = AsdConfig(8.0, gate=0.25)
    assert one([1, 1], rows, gate, path=path, device=device) == (1, 0, 0.5)  # q = 2, then 1
    assert one([1, 1], rows, gate, live=1, path=path, device=device) == (0, 0, 0.0)
    halves = AsdConfig(8.0, gate=0.5, suffix_value="normalized")
    assert one([1, 1], rows, halves, path=path, device=device) == (1, 0, 0.5)  # q = 1, then 1/2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinite_rows_leave_strict_to_decide(bad, path, device):
    rows = [[0.0, bad, 0.0]]
    assert one([1], rows, AsdConfig(8.0), path=path, device=device) == (1, 2, 0.0)
    assert one([0], rows, AsdConfig(8.0), path=path, device=device) == (0, 1, 0.0)


@pytest.mark.parametrize("draft", [-1, 3, 2**40, -(2**40)])
def test_id_outside_the_vocabulary_stops(draft, path, device):
    assert one([draft], [[0.0, 0.0, 0.0]], AsdConfig(8.0), path=path, device=device) == (0, 0, 0.0)


def test_kernel_equals_oracle_at_odd_sizes(device):
    """Rows of several pieces and blocks, unaligned, strided, in every dtype; ties put across piece borders."""
    gen = torch.Generator().manual_seed(7)
    for V, K, B, dtype in [(9001, 3, 2, torch.float32), (16411, 2, 1, torch.bfloat16), (8193, 15, 1, torch.float16)]:
        wide = (torch.randn(B, K + 1, V + 3, generator=gen) * 4).to(dtype)
        z = wide[:, :, :V]
        z[:, 0, [5, 4096, 8192]] = z.max()
        z[:, 1, V - 1] = math.nan
        z[:, K] = -math.inf
        ids = torch.where(torch.rand(B, K, generator=gen) < 0.8, z[:, :K].argmax(-1), z[:, :K].topk(2).indices[..., 1])
        ids[:, 0] = 4096
        case = Case(ids, z, torch.zeros(B), [AsdConfig(2.0)] * B, torch.full((B,), K, dtype=torch.int32))
        reports = [Report.empty(B, K), Report.empty(B, K)]
        got, want = run("kernel", case, device, reports[0]), run("oracle", case, device, reports[1])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(torch.equal(getattr(reports[0], f), getattr(reports[1], f)) for f in ("charge", "relaxed", "stop"))


def test_dispatch_follows_the_variable(monkeypatch):
    """TRITON_INTERPRET=1 sends CPU tensors to the kernel, unset to the oracle."""
    from adapters.rules.asd import triton

    seen = []
    monkeypatch.setattr(triton, "accept", lambda *a: seen.append("kernel"))
    monkeypatch.setattr(asd.naive, "accept", lambda *a: seen.append("oracle"))
    call = (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 2, 3), torch.zeros(1), AsdConfig(1.0))
    for value in ("1", "0"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        asd.accept(*call)
    assert seen == ["kernel", "oracle"]


ids, z, spent = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4, 5), torch.zeros(2)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("draft_ids", {"draft_ids": ids[0]}),
        ("draft_ids", {"draft_ids": ids[:, :0]}),
        ("draft_ids", {"draft_ids": ids.int()}),
        ("target_logits", {"target_logits": z[:, :3]}),
        ("target_logits", {"target_logits": z.long()}),
        ("target_logits", {"target_logits": z.to("meta")}),
        ("spent", {"spent": spent.double()}),
        ("spent", {"spent": spent[:1]}),
        ("live", {"live": torch.tensor([0, 4])}),
        ("live", {"live": torch.tensor([-1, 0])}),
        ("live", {"live": torch.tensor([1.0, 1.0])}),
        ("config", {"config": [AsdConfig(1.0)]}),
        ("config", {"config": [AsdConfig(1.0), 2.0]}),
        ("report.charge", {"report": Report.empty(2, 2)}),
    ],
)
def test_errors_name_the_field(field, change):
    good = {"draft_ids": ids, "target_logits": z, "spent": spent, "config": AsdConfig(1.0)}
    asd.accept(**good)
    with pytest.raises(RuleError, match=rf"^{field}: expected .*found"):
        asd.accept(**good | change)


def test_config_comes_from_a_policy():
    policy = Policy("asd", 2.0625, 2.0625, 1, "normalized")
    assert AsdConfig.from_policy(policy) == AsdConfig(2.0625, 2.0625, 1, "normalized")
    assert AsdConfig.from_policy(Policy("strict")).budget == 0
    with pytest.raises(RuleError, match=r"policy\.rule"):
        AsdConfig.from_policy(Policy("block"))
    with pytest.raises(PolicyError, match=r"policy\.budget"):
        AsdConfig(-1.0)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("charge", (torch.zeros(2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int32))),
        ("spent_before", (torch.zeros(3), torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32))),
        ("committed", (torch.zeros(2), torch.zeros(2, 3), torch.zeros(2))),
    ],
)
def test_settle_names_the_field(field, call):
    with pytest.raises(RuleError, match=f"^{field}"):
        settle(*call)


def test_settle_stops_where_the_answer_was_cut():
    charge = torch.tensor([[0.5, 0.0, 0.25]])
    for committed, spent in [(0, 1.0), (1, 1.5), (2, 1.5), (3, 1.75)]:
        assert settle(torch.tensor([1.0]), charge, torch.tensor([committed])).item() == spent


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as every second element of each dimension of a larger tensor of other values."""
    big = torch.full([2 * n for n in tensor.shape], 7, dtype=tensor.dtype, device=tensor.device)
    view = big[tuple(slice(None, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


@settings(parent=KERNEL)
@given(case=cases())
def test_views_with_strides_are_read_and_written_where_they_are(path, device, case):
    module = asd.naive
    if path == "kernel":
        from adapters.rules.asd import triton as module
    else:
        device = torch.device("cpu")
    B, K = case.draft_ids.shape
    data = [t.to(device) for t in (case.draft_ids, case.logits, case.spent, case.live)]
    params = as_params(case.configs, B, device)
    plain, views = Report.empty(B, K, device), Report(*map(strided, vars(Report.empty(B, K, device)).values()))
    ids, z, spent, live = map(strided, data)
    wanted = module.accept(*data[:3], params, data[3], plain)
    found = module.accept(ids, z, spent, type(params)(*map(strided, params)), live.contiguous(), views)
    assert torch.equal(found.length, wanted.length)
    assert torch.equal(found.bonus, wanted.bonus)
    assert torch.equal(spent, data[2])
    for name in ("charge", "relaxed", "stop"):
        assert torch.equal(getattr(views, name), getattr(plain, name))
    around = spent._base if spent._base is not None else spent
    assert (around[1::2] == 7).all()  # nothing beside the view was written


def test_a_ledger_whose_rows_share_memory_is_refused():
    ids, z = torch.ones(2, 2, dtype=torch.int64), torch.zeros(2, 3, 4)
    with pytest.raises(RuleError, match=r"spent: expected memory of its own .* strides \[0\]"):
        asd.accept(ids, z, torch.zeros(1).expand(2), AsdConfig(1.0))
    report = Report.empty(2, 2)
    report.stop = torch.zeros(1, dtype=torch.int8).expand(2)
    with pytest.raises(RuleError, match=r"report.stop"):
        asd.accept(ids, z, torch.zeros(2), AsdConfig(1.0), report=report)


@pytest.mark.parametrize("config", [5, None, 1.0])
def test_a_config_of_another_type_is_named(config):
    with pytest.raises(RuleError, match=r"config: expected AsdConfig .* found"):
        asd.accept(torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, 2, 3), torch.zeros(1), config)
