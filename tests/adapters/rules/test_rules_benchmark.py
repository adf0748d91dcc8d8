"""What the benchmark compares with is right before it is timed, and its page holds nothing but the CSV's numbers."""

import csv
from pathlib import Path

import pytest
import torch

from adapters.rules import asd, benchmark, benchmark_report, strict
from adapters.rules.asd import AsdConfig


def greedy_case(seed=0, B=40, K=5, V=31):
    gen = torch.Generator().manual_seed(seed)
    z = torch.randn(B, K + 1, V, generator=gen)
    best = z[:, :K].topk(2).indices
    return torch.where(torch.rand(B, K, generator=gen) < 0.3, best[..., 1], best[..., 0]), z


def test_strict_baseline_is_strict():
    ids, z = greedy_case()
    length, bonus = benchmark.strict_accept(ids, z)
    want = strict.accept(ids, z)
    assert torch.equal(length.int(), want.length)
    assert torch.equal(bonus[:, 0], want.bonus)


def test_tensor_rule_baseline_is_the_asd_rule():
    """Without ties and away from the thresholds float64 sums decide as the walk does."""
    ids, z = greedy_case(1)
    spent, ledger = torch.zeros(len(ids), dtype=torch.float64), torch.zeros(len(ids))
    length, bonus = benchmark.tensor_rule(ids, z, spent, 1.5, 0.75, 2)
    want = asd.accept(ids, z, ledger, AsdConfig(1.5, 0.75, 2, "normalized"))
    assert torch.equal(length.int(), want.length)
    assert torch.equal(bonus[:, 0], want.bonus)
    assert torch.allclose(spent, ledger.double(), atol=1e-6)
    assert ledger.any()


def test_plain_block_baseline_accepts_as_block_verification_does():
    """p = (1/3, 2/3), q = (2/3, 1/3), K = 2: 11/9 on average; the first token is distributed as p."""
    torch.manual_seed(2)
    n = 20_000
    p, q = torch.tensor([1 / 3, 2 / 3]).expand(n, 3, 2), torch.tensor([2 / 3, 1 / 3]).expand(n, 2, 2)
    ids = (torch.rand(n, 2) < 1 / 3).long()
    length, bonus = benchmark.plain_block(ids, p, q)
    assert float(length.double().mean()) == pytest.approx(11 / 9, abs=5 / n**0.5)
    first = torch.where(length > 0, ids[:, 0], bonus[:, 0])
    assert float(first.double().mean()) == pytest.approx(2 / 3, abs=5 * 0.5 / n**0.5)


def test_benchmark_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmark"])
    assert benchmark.main() == 2
    assert "needs a CUDA device, found none" in capsys.readouterr().err


def test_a_kernel_that_does_not_import_says_so():
    with pytest.raises(benchmark.Unsupported, match=r"sglang\.kernels\.ops\.speculative\.nothing\.f does not import"):
        benchmark.sglang("nothing", "f")


@pytest.fixture
def folder(tmp_path):
    """Two runs of one shape; the older row must not be read."""
    same = {
        "V": 1000,
        "K": 7,
        "B": 4,
        "dtype": "float32",
        "metric": "latency",
        "unit": "us",
        "gpu": "GPU X",
        "torch": "1",
    }
    rows = [
        {**same, "kernel": "copy", "provider": "torch", "V": 0, "K": 0, "B": 0, "metric": "bandwidth", "p50": 0.024}
    ]
    times = {
        "greedy accept": {
            "floor": 5,
            "torch.argmax": 20,
            "torch.argmax + specaccept walk": 23.5,
            "specaccept fused": 10,
        },
        "sampled accept": {"floor": 777, "specaccept block from logits": 16, "sglang block kernel + softmaxes": 64},
    }
    for kernel, providers in times.items():
        rows += [{**same, "kernel": kernel, "provider": provider, "p50": us} for provider, us in providers.items()]
    rows.append({**same, "kernel": "greedy accept", "provider": "specaccept fused", "p50": 777, "timestamp": "2000"})
    rows.append({**same, "kernel": "greedy accept", "provider": "sglang row_argmax", "note": "unsupported (no sglang)"})
    with (tmp_path / "x.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, benchmark.COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({"triton": "2", "commit": "abc", "timestamp": "2026", **row} for row in rows)
    return tmp_path


def test_page_is_computed_from_the_csv(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark_report", "--folder", str(folder)])
    assert benchmark_report.main() == 0
    text = (folder / "README.md").read_text()
    for line in (
        "| specaccept fused | 10 |",
        "| sglang row_argmax | - |",
        "sglang row_argmax: unsupported (no sglang)",
        "| walk adds to its argmax, us | 3.5 | <= 6 |",
        "| fused / faster argmax | 0.5 | < 1 |",
        "| sglang block + softmaxes / ours | 4 | >= 3, 2.5 at 256 |",
        "| plain PyTorch + softmaxes / ours | - | >= 8 up to 64 |",
        "| ours / floor | 1.6 | <= 1.7 from 16 |",
    ):
        assert line in text
    assert "777" not in text
    assert {p.name for p in folder.glob("*.svg")} == {"gpu-x-greedy-accept.svg", "gpu-x-sampled-accept.svg"}
    monkeypatch.setattr("sys.argv", ["benchmark_report", "--folder", str(folder), "--check"])
    assert benchmark_report.main() == 0
    (folder / "README.md").write_text(text.replace("| 10 |", "| 9 |"))
    assert benchmark_report.main() == 1
    assert "differs" in capsys.readouterr().out


def test_no_csv_is_inconclusive(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmark_report", "--folder", str(tmp_path)])
    assert benchmark_report.main() == 2


def test_committed_page_is_what_its_csv_says():
    folder = Path(__file__).parents[3] / "results" / "kernels"
    files = sorted(folder.glob("*.csv"))
    assert files
    assert benchmark_report.page(benchmark_report.read(files)) == (folder / "README.md").read_text()
    for path in files:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                assert all(row[field] for field in ("gpu", "torch", "triton", "commit", "timestamp")), "provenance"
                assert row["p50"] or row["note"].startswith("unsupported ("), "a value, or why there is none"
