"""Row statistics against sums in exact order on tiny rows, and the kernel against the oracle."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.rules import RuleError, rowstats
from adapters.rules.rowstats import RowStats, naive

ORACLE = settings(derandomize=True, deadline=None, max_examples=150)
KERNEL = settings(
    derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
VALUES = [0.0, -0.0, 0.25, 1.0, 1.5, -2.0, 7.0, -30.0, math.inf, -math.inf, math.nan]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EXACT = ("peak", "top", "ties", "z", "rank")


@st.composite
def cases(draw):
    R, V = draw(st.integers(0, 4)), draw(st.integers(1, 9))
    values = st.sampled_from(VALUES[:8] if draw(st.booleans()) else VALUES)
    rows = torch.tensor(draw(st.lists(values, min_size=R * V, max_size=R * V))).view(R, V)
    ids = torch.tensor(draw(st.lists(st.integers(-1, V), min_size=R, max_size=R)), dtype=torch.int64)
    scales = draw(st.lists(st.sampled_from([0.25, 1.0, 2.0]), min_size=R, max_size=R))
    scale = torch.tensor(scales) if draw(st.booleans()) else None
    return rows.to(draw(st.sampled_from(DTYPES))), ids, scale


def brute(row, x, scale):
    """One row of Python floats -> the fields of RowStats."""
    V = len(row)
    if any(math.isnan(z) for z in row):
        top = next(v for v in range(V) if math.isnan(row[v]))
        peak, ties, lse, entropy = math.nan, 0, math.nan, math.nan
    else:
        peak = max(row)
        top, ties = row.index(peak), row.count(peak)
        lse, entropy = peak, math.nan
        if math.isfinite(peak):
            S = math.fsum(math.exp((z - peak) * scale) for z in row)
            lse = peak * scale + math.log(S)
            p = [math.exp((z - peak) * scale) / S for z in row]
            entropy = -math.fsum(each * math.log(each) for each in p if each > 0)
    z = row[x] if 0 <= x < V else math.nan
    order = sorted((v for v in range(V) if not math.isnan(row[v])), key=lambda v: (-row[v], v))
    rank = V if math.isnan(z) else order.index(x)
    return peak, top, ties, z, rank, lse, entropy


def check_stats(rows, ids, scale, found, tolerance):
    for r in range(len(rows)):
        want = brute([float(z) for z in rows[r].tolist()], int(ids[r]), 1.0 if scale is None else float(scale[r]))
        for name, expected in zip(RowStats._fields, want, strict=True):
            got = getattr(found, name)[r].item()
            if name in EXACT or not math.isfinite(expected):
                assert got == expected or (math.isnan(got) and math.isnan(expected)), name
            else:
                assert math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance), name


@ORACLE
@given(cases())
def test_the_oracle_is_the_definition(case):
    check_stats(*case, naive.measure(*case), 2e-6)


@KERNEL
@given(case=cases())
def test_the_kernel_is_the_definition(case, device):
    from adapters.rules.rowstats import triton

    rows, ids, scale = case
    on = [None if t is None else t.to(device) for t in (rows, ids, scale)]
    check_stats(rows, ids, scale, RowStats(*(t.cpu() for t in triton.measure(*on))), 4e-6)


def long_rows(V, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = 5 * torch.randn(5, V, generator=g)
    rows[1] = rows[1].round()  # ties, also across pieces
    rows[2, -1], rows[3, ::3], rows[4, V // 2] = math.nan, -math.inf, 400.0
    return rows, torch.randint(0, V, (5,), generator=g), 0.5 + torch.rand(5, generator=g)


@pytest.mark.parametrize("V", [4095, 4096, 4097, 9000, 20011])
def test_pieces_of_a_long_row_add_up(V, device):
    from adapters.rules.rowstats import triton

    rows, ids, scale = long_rows(V)
    want = naive.measure(rows.double(), ids, scale)
    found = triton.measure(rows.to(device), ids.to(device), scale.to(device))
    for name, a, b in zip(RowStats._fields, want, found, strict=True):
        torch.testing.assert_close(b.cpu(), a.to(b.dtype), rtol=3e-6, atol=3e-6, equal_nan=True, msg=name)


def test_a_row_has_the_same_numbers_in_every_batch(device):
    from adapters.rules.rowstats import triton

    rows, ids, scale = (t.to(device) for t in long_rows(9000, seed=1))
    whole = triton.measure(rows, ids, scale)
    for r in range(len(rows)):
        alone = triton.measure(rows[r], ids[r], scale[r])
        for a, b in zip(whole, alone, strict=True):
            assert torch.equal(a[r].nan_to_num(-7), b.nan_to_num(-7))


def test_the_kernel_fills_the_buffers_it_is_given(device):
    from adapters.rules.rowstats import triton

    rows, ids, _ = (t.to(device) for t in long_rows(5000))
    out, space = RowStats.empty((5,), device), triton.Space(8, 5000, device)
    returned = triton.measure(rows, ids, None, out, space)
    assert all(a is b for a, b in zip(returned, out, strict=True))
    for a, b in zip(out, triton.measure(rows, ids), strict=True):
        assert torch.equal(a.nan_to_num(-7), b.nan_to_num(-7))
    with pytest.raises(RuleError, match="space: expected room for 5 rows, found 4"):
        triton.measure(rows, ids, None, out, triton.Space(4, 5000, device))
    with pytest.raises(RuleError, match=r"space\.keys: expected shape"):
        triton.measure(rows, ids, None, out, triton.Space(8, 4000, device))


def test_leading_dimensions_and_strides_are_free(path, device):
    from adapters.rules.rowstats import triton

    measure, on = (naive.measure, torch.device("cpu")) if path == "oracle" else (triton.measure, device)
    rows, ids, scale = (t.to(on) for t in long_rows(40))
    wide = rows.new_zeros(1, 5, 80)
    wide[0, :, ::2] = rows
    found = measure(wide[:, :, ::2], ids[None], scale[None])
    for a, b in zip(found, measure(rows, ids, scale), strict=True):
        assert a.shape == (1, 5)
        torch.testing.assert_close(a[0], b, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "ids", "scale", "words"),
    [
        (torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64), None, r"rows: expected shape \[\.\.\., V\]"),
        (torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), None, "rows: expected dtype"),
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), None, r"ids: expected shape \[3\], found \[2\]"),
        (torch.zeros(3, 4), torch.zeros(3), None, "ids: expected dtype int32 or int64"),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), torch.ones(4), "inverse_temperature: expected shape"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(rows, ids, scale, words):
    with pytest.raises(RuleError, match=words):
        rowstats.measure(rows, ids, scale)


def test_out_on_the_cpu_is_filled_in_place():
    rows, ids, scale = long_rows(50)
    out = RowStats.empty((5,), "cpu")
    assert rowstats.measure(rows, ids, scale, out) is out
    for a, b in zip(out, rowstats.measure(rows, ids, scale), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)
    with pytest.raises(RuleError, match=r"out\.peak: expected shape \[5\]"):
        rowstats.measure(rows, ids, scale, RowStats.empty((4,), "cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_holds_both_launches_on_a_real_vocabulary():
    from adapters.rules.rowstats import triton

    g = torch.Generator().manual_seed(7)
    V, rows = 151936, (4 * torch.randn(64, 151936, generator=g)).cuda()
    ids = torch.randint(0, V, (64,), generator=g).cuda()
    scale = (0.5 + torch.rand(64, generator=g)).cuda()
    out, space = RowStats.empty((64,), "cuda"), triton.Space(64, V, "cuda")
    triton.measure(rows, ids, scale, out, space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton.measure(rows, ids, scale, out, space)
    for seed in (8, 9):
        rows.normal_(generator=torch.Generator("cuda").manual_seed(seed)).mul_(3)
        graph.replay()
        want = naive.measure(rows.double().cpu(), ids.cpu(), scale.cpu())
        for name, a, b in zip(RowStats._fields, want, out, strict=True):
            torch.testing.assert_close(b.cpu(), a.to(b.dtype), rtol=4e-6, atol=4e-6, msg=name)
