"""results/kernels/README.md and its plots, drawn from the CSV files beside it and from nothing else.

    python -m adapters.rules.benchmark_report [--folder results/kernels] [--check]

Of each shape and batch the newest run counts, and the newest sweep of launch parameters if it is of the same commit.
--check writes nothing and fails where the README differs from its CSV files.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

Key = tuple[str, str, int, int, int, str, str]  # kernel, provider, V, K, B, dtype, metric

HEADER = """# Acceptance kernels

`make bench-kernels` on a GPU appends to the CSV files here; `python -m adapters.rules.benchmark_report` writes this
page and the plots from them. Times are microseconds, medians of CUDA-graph replays over rotated data. The floor is the
bytes of the logits over the highest bandwidth that anything in the table reached: a copy, or a pass over logits of more
than 250 MB. The CSV has the 20th and 80th percentile of every cell, and the commit that was measured.
"""
GREEDY, SAMPLED = "greedy accept", "sampled accept"
ARGMAX, ROW_ARGMAX = "torch.argmax", "sglang row_argmax"
WALKED, FUSED, RULE = "torch.argmax + specaccept walk", "specaccept fused", "float64 tensor rule"
MINE, PLAIN = "specaccept block from logits", "plain PyTorch block + softmaxes"
SGLANG = "sglang block kernel + softmaxes"
# Rows of logits a request's accept reads at least once, by provider: what its time says about the bandwidth.
PASSES = {
    ARGMAX: lambda K: K + 1,
    ROW_ARGMAX: lambda K: K + 1,
    FUSED: lambda K: K + 1,
    "specaccept block from logits, one-hot": lambda K: K + 1,
    "specaccept chain from logits": lambda K: 2 * K + 1,
    MINE: lambda K: 2 * K + 1,
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OUT_OF_CACHE = 250e6


def read(paths: Iterable[Path]) -> dict[str, dict[Key, dict[str, str]]]:
    """gpu -> key -> row of the newest run of its shape, batch and metric."""
    rows = []
    for path in sorted(paths):
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    newest: dict[tuple[str, ...], str] = {}
    for row in rows:
        newest[run(row)] = max(newest.get(run(row), ""), row["timestamp"])
    out: dict[str, dict[Key, dict[str, str]]] = {}
    for row in rows:
        if row["timestamp"] == newest[run(row)]:
            size = int(row["V"]), int(row["K"]), int(row["B"])
            key = (row["kernel"], row["provider"], *size, row["dtype"], row["metric"])
            out.setdefault(row["gpu"], {})[key] = row
    for table in out.values():
        tables = {(key[2:6], row["commit"]) for key, row in table.items() if key[6] == "latency"}
        for key in [k for k, row in table.items() if k[6] == "sweep" and (k[2:6], row["commit"]) not in tables]:
            del table[key]  # of kernels that are no more
    return out


def run(row: dict[str, str]) -> tuple[str, ...]:
    """What a later run of the same supersedes."""
    return tuple(row[name] for name in ("gpu", "kernel", "V", "K", "B", "dtype", "metric"))


def bandwidth(rows: dict[Key, dict[str, str]]) -> tuple[float, str]:
    """(TB/s, who reached it): the fastest copy or pass."""
    best = (0.0, "")
    for (kernel, provider, V, K, B, dtype, metric), row in rows.items():
        if kernel == "copy":
            best = max(best, (float(row["p50"]), provider))
        elif metric == "latency" and provider in PASSES and row["p50"]:
            size = V * B * PASSES[provider](K) * BYTES[dtype]
            if size > OUT_OF_CACHE:
                best = max(best, (size / float(row["p50"]) * 1e-6, f"{provider}, B = {B}, {dtype}"))
    return best


class Shape:
    """The rows of one (V, K, dtype)."""

    def __init__(self, rows: dict[Key, dict[str, str]], V: int, K: int, dtype: str) -> None:
        self.rows, self.V, self.K, self.dtype = rows, V, K, dtype
        self.speed = bandwidth(rows)[0]
        self.copy = max((float(row["p50"]) for key, row in rows.items() if key[0] == "copy"), default=0.0)
        self.batches = sorted({k[4] for k in rows if (k[2], k[3], k[5]) == (V, K, dtype)})

    def floor(self, kernel: str, B: int) -> float:
        """us: target logits once, or both logits once."""
        rows = self.K + 1 if kernel == GREEDY else 2 * self.K + 1
        return self.V * B * rows * BYTES[self.dtype] / self.speed * 1e-6

    def measured(self) -> str:
        """Commits and times of the runs its latencies are from."""
        mine = [r for k, r in self.rows.items() if (k[2], k[3], k[5], k[6]) == (self.V, self.K, self.dtype, "latency")]
        runs = sorted({(r["timestamp"], r["commit"][:12]) for r in mine}, reverse=True)
        return "; ".join(f"commit {commit}, {timestamp}" for timestamp, commit in runs)

    def us(self, kernel: str, provider: str, B: int, metric: str = "latency") -> float | None:
        """The median, None where it was not measured."""
        if provider == "floor":
            return self.floor(kernel, B)
        row = self.rows.get((kernel, provider, self.V, self.K, B, self.dtype, metric))
        return float(row["p50"]) if row and row["p50"] else None

    def providers(self, kernel: str, metric: str = "latency") -> list[str]:
        """In the order they were measured."""
        wanted = (kernel, self.V, self.K, self.dtype, metric)
        return list(dict.fromkeys(k[1] for k in self.rows if (k[0], k[2], k[3], k[5], k[6]) == wanted))

    def notes(self, kernel: str) -> list[str]:
        """Why a cell is empty."""
        found = {}
        for provider in self.providers(kernel):
            for B in self.batches:
                row = self.rows.get((kernel, provider, self.V, self.K, B, self.dtype, "latency"))
                if row and not row["p50"]:
                    found[provider] = row["note"]
        return [f"{provider}: {note}" for provider, note in found.items()]


def cell(value: float | None) -> str:
    """Three digits, or a dash."""
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def table(shape: Shape, kernel: str) -> list[str]:
    """Providers down, batches across."""
    lines = [f"| {kernel} | " + " | ".join(f"B = {B}" for B in shape.batches) + " |"]
    lines.append("| --- |" + " --- |" * len(shape.batches))
    for provider in shape.providers(kernel):
        cells = [cell(shape.us(kernel, provider, B)) for B in shape.batches]
        lines.append(f"| {provider} | " + " | ".join(cells) + " |")
    return [*lines, *(f"\n{note}" for note in shape.notes(kernel)), ""]


def sweep_table(shape: Shape) -> list[str]:
    """Launch parameters that were tried: the printed best."""
    providers = [(kernel, p) for kernel in (GREEDY, SAMPLED) for p in shape.providers(kernel, "sweep")]
    if not providers:
        return []
    lines = [
        "| sweep | " + " | ".join(f"B = {B}" for B in shape.batches) + " |",
        "| --- |" + " --- |" * len(shape.batches),
    ]
    for kernel, provider in providers:
        cells = [cell(shape.us(kernel, provider, B, "sweep")) for B in shape.batches]
        lines.append(f"| {provider} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def least(*values: float | None) -> float | None:
    present = [v for v in values if v is not None]
    return min(present) if present else None


def bars(shape: Shape) -> list[str]:
    """The bars, each value computed from the cells above."""
    lines = [
        "| against the bars | " + " | ".join(f"B = {B}" for B in shape.batches) + " | bar |",
        "| --- |" + " --- |" * (len(shape.batches) + 1),
    ]

    def line(name: str, bar: str, values: list[float | None]) -> None:
        lines.append(f"| {name} | " + " | ".join(map(cell, values)) + f" | {bar} |")

    def each(kernel: str, provider: str) -> list[float | None]:
        return [shape.us(kernel, provider, B) for B in shape.batches]

    def pairwise(
        operation: Callable[[float | None, float | None], float | None], a: list[float | None], b: list[float | None]
    ) -> list[float | None]:
        return [operation(x, y) for x, y in zip(a, b, strict=True)]

    argmax, mine, fused = each(GREEDY, ARGMAX), each(SAMPLED, MINE), each(GREEDY, FUSED)
    sweeps = [p for p in shape.providers(GREEDY, "sweep") if p.startswith("fused")]
    swept = [least(*(shape.us(GREEDY, p, B, "sweep") for p in sweeps)) for B in shape.batches]
    best = pairwise(least, argmax, each(GREEDY, ROW_ARGMAX))
    line("walk adds to its argmax, us", "<= 6", pairwise(minus, each(GREEDY, WALKED), argmax))
    line("tensor rule adds, us", "", pairwise(minus, each(GREEDY, RULE), argmax))
    line("fused / faster argmax", "< 1", pairwise(over, fused, best))
    if sweeps:
        line("fused, best of the sweep / faster argmax", "< 1", pairwise(over, swept, best))
    line("fused / floor", "", pairwise(over, fused, each(GREEDY, "floor")))
    line("sglang block + softmaxes / ours", ">= 3, 2.5 at 256", pairwise(over, each(SAMPLED, SGLANG), mine))
    line("plain PyTorch + softmaxes / ours", ">= 8 up to 64", pairwise(over, each(SAMPLED, PLAIN), mine))
    line("ours / floor", "<= 1.7 from 16", pairwise(over, mine, each(SAMPLED, "floor")))
    floors = [shape.floor(SAMPLED, B) * shape.speed / shape.copy if shape.copy else None for B in shape.batches]
    line("ours / floor of a copy", "<= 1.7 from 16", pairwise(over, mine, floors))
    tried = [p for p in shape.providers(SAMPLED, "sweep") if not p.startswith("block up to")]
    if tried:
        best = [least(*(shape.us(SAMPLED, p, B, "sweep") for p in tried)) for B in shape.batches]
        line("ours, best of the sweep / floor of a copy", "<= 1.7 from 16", pairwise(over, best, floors))
    line("extra memory, % of logits", "< 2", [shape.us(SAMPLED, MINE, B, "memory") for B in shape.batches])
    return [*lines, ""]


def page(data: dict[str, dict[Key, dict[str, str]]]) -> str:
    """The README."""
    lines = [HEADER]
    for gpu, rows in data.items():
        newest = max(rows.values(), key=lambda row: row["timestamp"])
        speed, who = bandwidth(rows)
        shapes = sorted({(k[5], k[2], k[3]) for k in rows if k[2]}, key=lambda s: (s[0] != "float32", -s[1], -s[2]))
        lines.append(f"## {gpu}\n")
        lines.append(f"torch {newest['torch']}, triton {newest['triton']}; floor at {speed:.2f} TB/s ({who}).\n")
        lines += [f"![{kernel}]({plot_name(gpu, kernel)})" for kernel in (GREEDY, SAMPLED)]
        for dtype, V, K in shapes:
            shape = Shape(rows, V, K, dtype)
            lines += [f"\n### {dtype}, V = {V:,}, K = {K}\n", f"{shape.measured()}\n"]
            lines += [*table(shape, GREEDY), *table(shape, SAMPLED), *bars(shape), *sweep_table(shape)]
    return "\n".join(lines).rstrip() + "\n"


def plot_name(gpu: str, kernel: str) -> str:
    """File name of a plot."""
    return f"{gpu.lower()}-{kernel}.svg".replace(" ", "-")


def plot(folder: Path, data: dict[str, dict[Key, dict[str, str]]]) -> None:
    """Latency over batch, one file per GPU and kernel: float32, the largest vocabulary and K measured."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "specaccept"
    from matplotlib import pyplot

    for gpu, rows in data.items():
        V, K = max((k[2], k[3]) for k in rows if k[5] == "float32")
        shape = Shape(rows, V, K, "float32")
        for kernel in (GREEDY, SAMPLED):
            figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
            for provider in shape.providers(kernel):
                points = [(B, us) for B in shape.batches if (us := shape.us(kernel, provider, B)) is not None]
                if points:
                    ours, floor = "specaccept" in provider, provider == "floor"
                    style = {"color": "black", "linestyle": ":"} if floor else {"linewidth": 2.5 if ours else 1}
                    axes.plot(
                        *zip(*points, strict=True), marker="" if floor else "o", markersize=4, label=provider, **style
                    )
            axes.set(xscale="log", yscale="log", xlabel="requests in the step", ylabel="us, median")
            axes.set_xticks(shape.batches, [str(B) for B in shape.batches])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.set_title(f"{kernel}, {gpu}, V = {V:,}, K = {K}, float32", fontsize=10)
            axes.legend(fontsize=7, frameon=False)
            figure.savefig(folder / plot_name(gpu, kernel), metadata={"Date": None})
            pyplot.close(figure)


def main() -> int:
    """Exit status 0: written, or nothing to write to; 1: --check found a difference; 2: no CSV."""
    parser = argparse.ArgumentParser(prog="python -m adapters.rules.benchmark_report", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("results/kernels"))
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    data = read(args.folder.glob("*.csv"))
    if not data:
        print(f"benchmark_report: no CSV in {args.folder}; run make bench-kernels on a GPU first", file=sys.stderr)
        return 2
    text, readme = page(data), args.folder / "README.md"
    if args.check:
        same = readme.exists() and readme.read_text() == text
        print(f"{readme}: {'as its CSV files say' if same else 'differs from its CSV files'}")
        return 0 if same else 1
    readme.write_text(text)
    plot(args.folder, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
