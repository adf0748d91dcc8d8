"""Acceptance kernels against the memory floor and against what engines run today, on one GPU.

    python -m adapters.rules.benchmark [--out results/kernels] [--B 1 16] [--sweep]

Appends long-form rows to <out>/<gpu>.csv; nothing is ever replaced. Table and plots from it:
`python -m adapters.rules.benchmark_report`.

Every time is a CUDA-graph replay divided by the calls in it. The calls of one graph rotate over data sets of at least
250 MB together, so that none finds its logits in the L2 cache. A provider that cannot run leaves a row that says why.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from adapters.rules.asd import triton as asd_kernel
from adapters.rules.asd.config import AsdConfig
from adapters.rules.asd.engine import AsdState
from adapters.rules.block import triton as block_kernel
from adapters.rules.block.engine import SampledState
from adapters.rules.block.noise import CHUNK

COLUMNS = (
    "kernel", "provider", "V", "K", "B", "dtype", "metric", "unit", "p50", "p20", "p80",
    "note", "gpu", "torch", "triton", "commit", "timestamp",
)  # fmt: skip
SHAPES = ((151_936, 7), (151_936, 5), (129_280, 7), (129_280, 5))
BATCHES = (1, 4, 16, 64, 256)
ROTATE = 250e6  # bytes; the L2 of an H200 is 60 MB
MS = 25  # of measuring per provider and shape


class Unsupported(RuntimeError):
    """Why a provider cannot run here."""


@dataclass
class Data:
    """One set: a verified block of B requests. Logits as an engine has them; drafts drawn from the draft's softmax."""

    target: Tensor  # [B, K+1, V]
    draft: Tensor  # [B, K, V]
    greedy_ids: Tensor  # [B, K]: mostly the target's argmax, else its second choice
    sampled_ids: Tensor  # [B, K]


def make_data(B: int, K: int, V: int, dtype: torch.dtype, generator: torch.Generator) -> Data:
    """Peaked rows (about 20 tokens carry the mass) and a draft about as far from its target as a good draft head is."""
    device = generator.device
    draft = torch.randn(B, K, V, device=device, generator=generator).mul_(3)
    target = torch.randn(B, K + 1, V, device=device, generator=generator)
    target[:, :K].mul_(0.6).add_(draft)
    target[:, K].mul_(3)
    draft, target = draft.to(dtype), target.to(dtype)
    rows = draft.view(B * K, V)
    sampled = torch.cat([r.float().softmax(-1).multinomial(1, generator=generator) for r in rows.split(256)])
    best = torch.cat([r.topk(2).indices for r in target[:, :K].reshape(B * K, V).split(256)]).view(B, K, 2)
    miss = torch.rand(B, K, device=device, generator=generator) < 0.25
    return Data(target, draft, torch.where(miss, best[..., 1], best[..., 0]), sampled.view(B, K))


# --- timing ------


def replay_us(calls: list[Callable[[], object]]) -> tuple[float, float, float]:
    """(p20, p50, p80) microseconds a call, from replays of one graph that holds every call once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (calls[0], calls[0], calls[-1]):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()

    def timed(repeats: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    repeats = max(9, min(60, int(MS / max(min(timed(2)), 1e-3))))
    times = torch.tensor(timed(repeats)) * 1e3 / len(calls)
    p20, p50, p80 = times.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return p20, p50, p80


def copy_bandwidth() -> dict[str, tuple[float, float, float]]:
    """How it was copied -> (p20, p50, p80) TB/s, 2 GB, bytes read plus bytes written. The floor takes the fastest."""
    source = torch.randn(500_000_000, device="cuda")
    sink = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "torch.Tensor.copy_": lambda: sink.copy_(source),
        "torch.mul": lambda: torch.mul(source, 1.5, out=sink),
    }
    found = {}
    for name, call in ways.items():
        p20, p50, p80 = (2 * source.numel() * 4 / us * 1e-6 for us in replay_us([call] * 4))
        found[name] = (p80, p50, p20)  # the longest time is the lowest bandwidth
    return found


# --- what engines and papers run today ------


def strict_accept(ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """torch.argmax and prefix match."""
    top = target.argmax(-1)
    length = (ids == top[:, :-1]).cumprod(1).sum(1)
    return length, top.gather(1, length[:, None])


def tensor_rule(
    ids: Tensor, target: Tensor, spent: Tensor, budget: float, gate: float, cap: int
) -> tuple[Tensor, Tensor]:
    """The ASD rule as float64 cumulative sums over the block, normalised suffix value."""
    K = ids.shape[1]
    top = target.argmax(-1)
    best = target[:, :K].gather(2, top[:, :K, None])[..., 0].double()
    regret = (best - target[:, :K].gather(2, ids[..., None])[..., 0].double()).clamp(min=0)
    match = ids == top[:, :K]
    value = torch.arange(K, 0, -1, device=ids.device, dtype=torch.float64) / K
    risk = torch.where(match, 0.0, regret)
    after = risk.cumsum(1)
    left = budget - spent[:, None]
    fits = (regret / value <= gate) & (after - risk < left) & (after <= left)
    keep = ((match | fits) & ((~match).cumsum(1) <= cap)).cumprod(1)
    length = keep.sum(1)
    spent += (risk * keep).sum(1)
    return length, top.gather(1, length[:, None])


def plain_block(ids: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification as plain tensor code: recursion, sums over the vocabulary, a race over [B, K+1, V]."""
    K = ids.shape[1]
    ratio = p[:, :K].gather(2, ids[..., None])[..., 0] / q.gather(2, ids[..., None])[..., 0]
    w = [torch.ones_like(ratio[:, 0])]
    for i in range(K):
        w.append((w[-1] * ratio[:, i]).clamp(max=1))
    weight = torch.stack(w, 1)  # [B, K+1]
    residual = (weight[:, :K, None] * p[:, :K] - q).clamp(min=0)
    S = residual[:, 1:].sum(-1)
    h = torch.cat([S / (S + 1 - weight[:, 1:K]), weight[:, K:]], 1)
    good = torch.rand_like(h) <= h
    length = (good * torch.arange(1, K + 1, device=ids.device)).amax(1)
    everything = torch.cat([residual, p[:, K:]], 1)
    winners = (everything / torch.empty_like(everything).exponential_()).argmax(-1)
    return length, winners.gather(1, length[:, None])


def both_softmaxes(d: Data) -> tuple[Tensor, Tensor]:
    """float32 probabilities of target and draft, temperature 1."""
    return d.target.softmax(-1, dtype=torch.float32), d.draft.softmax(-1, dtype=torch.float32)


def sglang(module: str, name: str) -> Callable:
    """A kernel of SGLang's own, wherever sglang is importable."""
    path = f"sglang.kernels.ops.speculative.{module}"
    try:
        return getattr(importlib.import_module(path), name)
    except Exception as error:
        raise Unsupported(f"{path}.{name} does not import: {type(error).__name__}: {error}") from None


def sglang_verify(kernel: Callable, block: bool, ids: Tensor) -> Callable[[Tensor, Tensor], object]:
    """chain_speculative_sampling_triton on (p, q): buffers made once, coins drawn in every call."""
    B, K = ids.shape
    candidates = torch.cat([ids[:, :1], ids], 1)
    index = torch.arange(B * (K + 1), device=ids.device).view(B, K + 1)
    predicts, accepted, length = index.flatten().clone(), index.clone(), index[:, 0].to(torch.int32)
    flags = {"block_verification": True} if block else {}

    def call(p: Tensor, q: Tensor) -> object:
        coins, last = torch.rand(B, K + 1, device=ids.device), torch.rand(B, device=ids.device)
        chain = (predicts, accepted, length, candidates, index, index, index)
        return kernel(*chain, coins, last, p, q, 1.0, 1.0, True, **flags)

    return call


# --- providers: name -> calls over the data sets ------

GREEDY, SAMPLED = "greedy accept", "sampled accept"
Calls = list[Callable[[], object]]


def each(sets: list[Data], call: Callable[[Data], object]) -> Calls:
    """The call on every data set."""
    return [partial(call, d) for d in sets]


def greedy_providers(sets: list[Data]) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Providers of the greedy accept."""
    B, K, V = *sets[0].greedy_ids.shape, sets[0].target.shape[2]
    slots = torch.arange(B, device="cuda")
    state = AsdState(B, K, B, "cuda")
    state.assign(range(B), AsdConfig(1e6, 2.0625, 1, "normalized"))
    spent = torch.zeros(B, dtype=torch.float64, device="cuda")

    def row_argmax() -> Calls:
        kernel = sglang("row_argmax", "row_argmax")
        if sets[0].target.dtype != torch.float32:
            raise Unsupported("row_argmax takes float32 logits only")
        return each(sets, lambda d: kernel(d.target.view(-1, V)))

    def walked() -> Calls:
        return each(sets, lambda d: state.walk(d.greedy_ids, d.target.argmax(-1), d.target, slots))

    yield "torch.argmax", lambda: each(sets, lambda d: d.target.argmax(-1))
    yield "torch.argmax + specaccept walk", walked
    yield "specaccept fused", lambda: each(sets, lambda d: state.fused(d.greedy_ids, d.target, slots))
    yield "torch.argmax + prefix match", lambda: each(sets, lambda d: strict_accept(d.greedy_ids, d.target))
    yield "sglang row_argmax", row_argmax
    yield (
        "float64 tensor rule",
        lambda: each(sets, lambda d: tensor_rule(d.greedy_ids, d.target, spent, 1e6, 2.0625, 1)),
    )


def sampled_providers(sets: list[Data]) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Providers of the sampled accept. Where a name says softmaxes, the time includes both."""
    B, K, V = *sets[0].sampled_ids.shape, sets[0].target.shape[2]
    slots = torch.arange(B, device="cuda")

    def state(rule: str) -> SampledState:
        made = SampledState(rule, B, K, B, V, "cuda")  # type: ignore[arg-type]
        made.assign(range(B), range(B))
        return made

    def from_logits(rule: str, one_hot: bool = False) -> Calls:
        s = state(rule)
        return each(sets, lambda d: s.from_logits(d.sampled_ids, d.target, None if one_hot else d.draft, slots))

    def from_probs() -> Calls:
        s = state("block")
        calls: Calls = []
        for d in sets:
            p, q = both_softmaxes(d)
            calls.append(partial(s.from_probs, d.sampled_ids, p, q, slots))
        return calls

    def theirs(block: bool) -> Calls:
        kernel = sglang("reject_sampling", "chain_speculative_sampling_triton")
        verify = [sglang_verify(kernel, block, d.sampled_ids) for d in sets]
        return [partial(lambda d, v: v(*both_softmaxes(d)), d, v) for d, v in zip(sets, verify, strict=True)]

    def blockwise() -> Calls:
        kernel = sglang("dspark.blockwise_rejection", "blockwise_rejection_triton")
        noise = sglang("dspark.blockwise_rejection", "make_rejection_noise")(0, "cuda")
        warm = torch.ones(B, device="cuda")
        candidates = [torch.cat([d.sampled_ids[:, :1], d.sampled_ids], 1) for d in sets]

        def call(d: Data, chain: Tensor) -> object:
            return kernel(
                candidates=chain,
                target_logits=d.target.view(-1, V),
                draft_logits=d.draft,
                target_temperatures=warm,
                draft_temperatures=warm,
                noise=noise,
            )

        return [partial(call, d, chain) for d, chain in zip(sets, candidates, strict=True)]

    yield "specaccept block from logits", lambda: from_logits("block")
    yield "specaccept chain from logits", lambda: from_logits("chain")
    yield "specaccept block from logits, one-hot", lambda: from_logits("block", one_hot=True)
    yield "specaccept block from probabilities", from_probs
    yield "two softmaxes", lambda: each(sets, lambda d: both_softmaxes(d))
    yield "sglang block kernel + softmaxes", lambda: theirs(True)
    yield "sglang chain kernel + softmaxes", lambda: theirs(False)
    yield "sglang blockwise rejection (token rule)", blockwise
    yield (
        "plain PyTorch block + softmaxes",
        lambda: each(sets, lambda d: plain_block(d.sampled_ids, *both_softmaxes(d))),
    )


# --- rows ------


@dataclass(frozen=True)
class Row:
    """One line of the CSV."""

    kernel: str
    provider: str
    V: int
    K: int
    B: int
    dtype: str
    metric: str
    unit: str
    p50: float | None
    p20: float | None = None
    p80: float | None = None
    note: str = ""


def commit() -> str:
    """The checkout's commit, "+dirty" where files differ from it; "unknown" outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
        return head + ("+dirty" if dirty.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Log:
    """Appends rows with their provenance; writes the header once."""

    def __init__(self, path: Path, revision: str) -> None:
        self.path = path
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.same = (torch.cuda.get_device_name(), torch.__version__, triton.__version__, revision, now)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with path.open("x", newline="") as file:
                csv.writer(file).writerow(COLUMNS)

    def add(self, row: Row) -> None:
        """One row, flushed."""
        values = ["" if v is None else f"{v:.4g}" if isinstance(v, float) else v for v in vars(row).values()]
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow([*values, *self.same])


def bench(log: Log, shapes: list[tuple[int, int]], batches: list[int], dtypes: list[torch.dtype]) -> None:
    """Every provider at every shape."""
    generator = torch.Generator("cuda").manual_seed(1)
    middle = 0.0
    for way, (p20, p50, p80) in copy_bandwidth().items():
        log.add(Row("copy", way, 0, 0, 0, "float32", "bandwidth", "TB/s", p50, p20, p80))
        print(f"{way} {p50:.2f} TB/s", flush=True)
        middle = max(middle, p50)
    for dtype in dtypes:
        for V, K in shapes:
            for B in batches:
                name = str(dtype).removeprefix("torch.")
                size = B * V * dtype.itemsize
                target, both = size * (K + 1), size * (2 * K + 1)
                sets = [make_data(B, K, V, dtype, generator) for _ in range(max(1, round(ROTATE / both)))]
                space = SampledState("block", B, K, B, V, "cuda")._space
                assert space is not None
                base = Row("", "floor", V, K, B, name, "latency", "us", None)
                log.add(replace(base, kernel=GREEDY, p50=target / middle * 1e-6, note="target logits once"))
                log.add(replace(base, kernel=SAMPLED, p50=both / middle * 1e-6, note="both logits once"))
                extra = 100 * space.bytes / both
                mine = "specaccept block from logits"
                log.add(replace(base, kernel=SAMPLED, provider=mine, metric="memory", unit="% of logits", p50=extra))
                line = f"{name} V={V} K={K} B={B} floors {target / middle * 1e-6:.1f} {both / middle * 1e-6:.1f}:"
                for kernel, providers in ((GREEDY, greedy_providers), (SAMPLED, sampled_providers)):
                    for provider, make in providers(sets):
                        row = replace(base, kernel=kernel, provider=provider)
                        try:
                            p20, p50, p80 = replay_us(make())
                            row = replace(row, p50=p50, p20=p20, p80=p80)
                            line += f" | {provider} {p50:.1f}"
                        except (Unsupported, torch.cuda.OutOfMemoryError) as error:
                            row = replace(row, note=f"unsupported ({str(error).splitlines()[0]})")
                            line += f" | {provider} -"
                        log.add(row)
                print(line, flush=True)
                del sets
                torch.cuda.empty_cache()


def sweep(log: Log, batches: list[int], dtypes: list[torch.dtype]) -> None:
    """Launch parameters at V = 151,936, K = 7: what the defaults of `plan` and `Tuning` come from."""
    V, K = 151_936, 7
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in dtypes:
        for B in batches:
            both = B * V * dtype.itemsize * (2 * K + 1)
            sets = [make_data(B, K, V, dtype, generator) for _ in range(max(1, round(ROTATE / both)))]
            slots = torch.arange(B, device="cuda")
            name = str(dtype).removeprefix("torch.")
            for kernel, found in (
                (GREEDY, sweep_fused(sets, slots)),
                (SAMPLED, sweep_block(sets, slots)),
                (SAMPLED, sweep_stages(sets, slots)),
            ):
                for us, variant in found:
                    log.add(Row(kernel, variant, V, K, B, name, "sweep", "us", us))
                best = ", ".join(f"{variant} {us:.1f}" for us, variant in sorted(found)[:7])
                print(f"{name} B={B}: {best}", flush=True)


def sweep_fused(sets: list[Data], slots: Tensor) -> list[tuple[float, str]]:
    """(us, "fused block / warps, registers") of the greedy accept."""
    B, K = sets[0].greedy_ids.shape
    state = AsdState(B, K, B, "cuda")
    state.assign(range(B), AsdConfig(1e6))
    calls, found = each(sets, lambda d: state.fused(d.greedy_ids, d.target, slots)), []
    for block, warps, registers in (
        (2048, 4, 64),
        (2048, 4, 48),
        (2048, 8, 64),
        (4096, 4, 64),
        (4096, 8, 64),
        (8192, 8, 64),
    ):
        asd_kernel.TUNING = asd_kernel.Tuning(block, warps, registers)
        found.append((replay_us(calls)[1], f"fused {block}/{warps}, {registers} registers"))
    asd_kernel.TUNING = asd_kernel.Tuning()
    return found


def sweep_block(sets: list[Data], slots: Tensor) -> list[tuple[float, str]]:
    """(us, "block what differs from the default") of the block verification from logits."""
    B, K, V, found = *sets[0].sampled_ids.shape, sets[0].target.shape[2], []
    tried: tuple[tuple[str, int, dict], ...] = (
        ("as it is", CHUNK, {}),
        ("chunks of 1024", 1024, {}),
        ("chunks of 4096", 4096, {}),
        ("4096 programs", CHUNK, {"programs": 4096}),
        ("8 warps for stats", CHUNK, {"stats": 8}),
        ("8 warps for mass", CHUNK, {"mass": 8}),
        ("2 warps to prepare", CHUNK, {"prepare": 2}),
        ("8 warps to finish", CHUNK, {"finish": 8}),
        ("launches one after another", CHUNK, {"pdl": False}),
    )
    for name, chunk, changed in tried:
        state = SampledState("block", B, K, B, V, "cuda", chunk)
        state.assign(range(B), range(B))
        calls = each(sets, partial(lambda s, d: s.from_logits(d.sampled_ids, d.target, d.draft, slots), state))
        block_kernel.TUNING = block_kernel.Tuning(**changed)
        found.append((replay_us(calls)[1], f"block {name}"))
    block_kernel.TUNING = block_kernel.Tuning()
    return found


def sweep_stages(sets: list[Data], slots: Tensor) -> list[tuple[float, str]]:
    """(us, "block up to ...") of the block verification with its later launches left out: where its time goes."""
    B, K, V, found = *sets[0].sampled_ids.shape, sets[0].target.shape[2], []
    for count, name in enumerate(("stats", "prepare", "mass", "finish"), 1):
        state = SampledState("block", B, K, B, V, "cuda")  # of its own: what a launch left out would clear stays
        state.assign(range(B), range(B))
        calls = each(sets, partial(lambda s, d: s.from_logits(d.sampled_ids, d.target, d.draft, slots), state))
        block_kernel.STAGES = count
        found.append((replay_us(calls)[1], f"block up to {name}"))
    block_kernel.STAGES = 4
    return found


def main() -> int:
    """Exit status 0: measured; 2: no CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m adapters.rules.benchmark", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/kernels"))
    parser.add_argument("--B", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--shapes", nargs="+", default=[f"{V}x{K}" for V, K in SHAPES], help="VxK, e.g. 151936x7")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--commit", default=None, help="revision to record where the checkout's own is not at hand")
    parser.add_argument("--sweep", action="store_true", help="launch parameters instead of the benchmark")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("adapters.rules.benchmark: needs a CUDA device, found none", file=sys.stderr)
        return 2
    dtypes = [getattr(torch, name) for name in args.dtypes]
    gpu = torch.cuda.get_device_name().lower().replace(" ", "-")
    shapes = [(int(V), int(K)) for V, K in (s.split("x") for s in args.shapes)]
    log = Log(args.out / f"{gpu}.csv", args.commit or commit())
    if args.sweep:
        sweep(log, args.B, dtypes)
    else:
        bench(log, shapes, args.B, dtypes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
