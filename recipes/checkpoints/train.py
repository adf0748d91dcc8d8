"""Train the tiny pair: a Qwen3 target and its DSpark block draft, on generated problems only.

    python recipes/checkpoints/train.py --out recipes/checkpoints

Stages: the target on packed problems; the target's own answers to fresh training prompts; the draft on those answers
and on the target's hidden states; then, from the exported files, accuracy on test seeds, tokens per step, regret at
first rejections and the q25 calibration. Every seed is fixed. Artefacts are written as soon as a stage ends.
"""

from __future__ import annotations

import argparse
import builtins
import json
import math
import multiprocessing
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import data  # noqa: E402
from model import Target, TargetConfig  # noqa: E402

from harness.engines.reference.dspark import DraftConfig, DSparkDraft  # noqa: E402

TARGET, DRAFT = "tiny-qwen3", "tiny-qwen3-dspark-block7"
DRAFT_SEEDS = 900_000_000  # training seeds that the target never saw
ANSWER_LIMIT = {"math": 256, "code": 448}  # tokens; longer than any solution that training saw


@dataclass(frozen=True)
class Plan:
    """How much of everything. Steps are optimiser steps; rows hold data.LENGTH tokens.

    A stage that would take longer than its seconds decays its rate faster and ends in time (training.json tells).
    """

    steps: int = 2500
    rows: int = 128
    target_seconds: float = 90.0
    math_share: float = 0.6
    muon: float = 0.02
    adam: float = 4e-3
    weight_decay: float = 0.01
    corpus: int = 24_000
    corpus_batch: int = 4096
    sampled_share: float = 0.25
    sampling_temperature: float = 0.7
    corpus_seconds: float = 60.0
    draft_steps: int = 500
    draft_seconds: float = 150.0
    draft_rows: int = 128
    anchors: int = 24
    draft_muon: float = 0.02
    draft_adam: float = 3e-3
    draft_layers: int = 1
    draft_intermediate: int = 768
    draft_reads: tuple[int, ...] = (1, 3)  # target layers; the last one is not allowed
    markov_rank: int = 32
    hard_weight: float = 0.3
    decay: float = 4.0
    tests: int = 1000
    calibration_items: int = 32
    seed: int = 20261129


PLANS = {
    "full": Plan(),
    "probe": Plan(steps=500, corpus=8192, draft_steps=300, tests=256),
    "tiny": Plan(
        steps=6, rows=4, corpus=16, corpus_batch=8, draft_steps=4, draft_rows=4, anchors=3, tests=6, calibration_items=4
    ),
}
BLOCK = 7


class Log:
    """training.json: written again after every entry, so that a stop leaves what is known."""

    def __init__(self, path: Path, plan: Plan, known: dict[str, Any] | None = None) -> None:
        self.path, self.start = path, time.monotonic()
        self.entries: dict[str, Any] = {"plan": asdict(plan), "torch": torch.__version__, "curves": {}} | (known or {})

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def put(self, name: str, value: Any) -> None:
        self.entries[name] = value
        self.entries.setdefault("seconds", {})[name] = round(self.seconds(), 1)
        self.path.write_text(json.dumps(self.entries, indent=1) + "\n")
        print(f"[{self.seconds():6.1f}s] {name}: {json.dumps(value)[:600]}", flush=True)

    def curve(self, name: str, step: int, value: float) -> None:
        self.entries["curves"].setdefault(name, []).append([step, round(value, 4)])
        print(f"[{self.seconds():6.1f}s] {name} {step}: {value:.4f}", flush=True)


class Muon:
    """Momentum, then the nearest orthogonal matrix (Newton-Schulz): for the layers' matrices, grouped by shape."""

    def __init__(self, params: list[nn.Parameter], rate: float, weight_decay: float) -> None:
        shapes = sorted({tuple(p.shape) for p in params})
        self.groups = [[p for p in params if tuple(p.shape) == shape] for shape in shapes]
        self.momenta = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.rate, self.weight_decay = rate, weight_decay

    @torch.no_grad()
    def step(self, scale: float) -> None:
        rate = self.rate * scale
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            grad = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(grad, 0.05)
            update = _orthogonal(grad.lerp(momentum, 0.95)) * max(1.0, grad.shape[1] / grad.shape[2]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_add_(group, list(update.to(group[0].dtype).unbind()), alpha=-rate)


def _orthogonal(g: Tensor) -> Tensor:
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Optimiser:
    """Muon for the layers' matrices, AdamW for embeddings and norms; linear warm-up, then linear decay to 0."""

    def __init__(self, model: nn.Module, steps: int, muon: float, adam: float, weight_decay: float) -> None:
        def matrix(name: str, p: nn.Parameter) -> bool:
            return p.ndim == 2 and "embed" not in name and "markov" not in name

        self.params = [p for p in model.parameters() if p.requires_grad]
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.muon = Muon([p for n, p in named if matrix(n, p)], muon, weight_decay)
        rest = [p for n, p in named if not matrix(n, p)]
        self.adam = torch.optim.AdamW(rest, lr=adam, betas=(0.9, 0.98), weight_decay=0.0)
        self.warm, self.rate = max(1, steps // 40), adam

    def step(self, index: int, progress: float) -> None:
        """progress: the part of the stage that is over, 0..1."""
        scale = min((index + 1) / self.warm, 1.0 - progress)
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.muon.step(scale)
        for group in self.adam.param_groups:
            group["lr"] = self.rate * scale
        self.adam.step()
        for p in self.params:
            p.grad = None


# ---- the target


class Rows:
    """Packed rows, filled on the device by a thread in a fixed order while training already reads them."""

    def __init__(self, pool: Any, rows: int, math_share: float, device: torch.device) -> None:
        self.ids = torch.zeros(rows, data.LENGTH, dtype=torch.int16, device=device)
        self.marks = torch.zeros(rows, data.LENGTH, dtype=torch.uint8, device=device)
        self.filled, self.error = 0, None
        each = 2048 if rows > 4096 else 64
        jobs = [(i * each, each, math_share) for i in range(max(1, int(rows * 2.75 / each)))]
        self.problems = len(jobs) * each
        self.results = pool.imap(data.shard, jobs)
        self.done = threading.Event()
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self) -> None:
        try:
            for ids, marks in self.results:
                n = min(len(ids), len(self.ids) - self.filled)
                self.ids[self.filled : self.filled + n] = torch.from_numpy(ids[:n].astype(np.int16)).to(self.ids.device)
                self.marks[self.filled : self.filled + n] = torch.from_numpy(marks[:n]).to(self.ids.device)
                self.filled += n
                if self.filled == len(self.ids):
                    break
        except Exception as error:
            self.error = error
        self.done.set()

    def batch(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        start = step * rows
        while start + rows > self.filled and not self.done.is_set():
            time.sleep(0.01)
        if self.error is not None:
            raise self.error
        if self.filled < rows:
            raise RuntimeError(f"rows: expected at least {rows}, the workers made {self.filled}")
        if start + rows > self.filled:  # another pass over the rows there are
            start = start % max(1, self.filled - rows)
        return self.ids[start : start + rows].long(), self.marks[start : start + rows]


def target_loss(target: Target, ids: Tensor, marks: Tensor) -> Tensor:
    """Mean cross-entropy of the answer tokens; a document sees only itself."""
    document = marks & (data.IN_LOSS - 1)
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    mask = ((document[:, :, None] == document[:, None, :]) & causal)[:, None]
    hidden, _ = target(ids, mask)
    logits = target.logits(hidden[:, :-1]).float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weight = (marks[:, 1:] >= data.IN_LOSS).flatten().float()
    return (losses * weight).sum() / weight.sum()


def train_target(plan: Plan, pool: Any, device: torch.device, log: Log) -> Target:
    torch.manual_seed(plan.seed)
    target = Target(TargetConfig()).to(device)
    rows = Rows(pool, plan.steps * plan.rows, plan.math_share, device)
    optimiser = Optimiser(target, plan.steps, plan.muon, plan.adam, plan.weight_decay)
    loss_of: Callable[..., Tensor] = torch.compile(target_loss) if device.type == "cuda" else target_loss
    begin, step = log.seconds(), 0
    for step in range(plan.steps):
        ids, marks = rows.batch(step, plan.rows)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(target, ids, marks)
        loss.backward()
        progress = max((step + 1) / plan.steps, (log.seconds() - begin) / plan.target_seconds if step > 20 else 0.0)
        optimiser.step(step, min(progress, 1.0))
        if step in (0, 20) or step % 250 == 249:
            log.curve("target_loss", step, float(loss.detach()))
        if step == 20:
            begin = log.seconds()  # compiled by now
        if progress >= 1:
            break
    spent = log.seconds() - begin
    log.put("target", {
        "parameters": sum(p.numel() for p in target.parameters()), "steps": step + 1, "of": plan.steps,
        "problems_prepared": rows.problems, "rows_prepared": rows.filled,
        "tokens": (step + 1) * plan.rows * data.LENGTH,
        "tokens_per_second": round(max(0, step - 20) * plan.rows * data.LENGTH / max(spent, 1e-9)),
    })  # fmt: skip
    return target


# ---- the target's own answers


@dataclass(frozen=True)
class Answer:
    task: str
    seed: int
    prompt: list[int]
    output: list[int]  # closes with <|im_end|> unless it was cut


def answers(
    target: Target, task: str, seeds: range, prompts: list[list[int]], stop: int, batch: int, temperature: float = 0.0
) -> list[Answer]:
    order = sorted(range(len(seeds)), key=lambda i: (len(prompts[i]), i))
    made: dict[int, list[int]] = {}
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        found = target.generate([prompts[i] for i in part], ANSWER_LIMIT[task], stop, temperature)
        made.update(zip(part, found, strict=True))
    return [Answer(task, seeds[i], prompts[i], made[i]) for i in range(len(seeds))]


def corpus(target: Target, plan: Plan, pool: Any, log: Log) -> list[Answer]:
    """The target's answers to fresh training prompts, most greedy, some sampled."""
    device = target.embed_tokens.weight.device
    stop, size = data.tokenizer().token_to_id("<|im_end|>"), 512
    begin, found = log.seconds(), []
    counts = {"math": round(plan.corpus * 0.55), "code": plan.corpus - round(plan.corpus * 0.55)}
    jobs = [(task, DRAFT_SEEDS + i, min(size, n - i)) for task, n in counts.items() for i in range(0, n, size)]
    listed = pool.map(data.prompts, jobs)
    torch.manual_seed(plan.seed + 1)
    for task, n in counts.items():
        prompts = [p for (name, _, _), part in zip(jobs, listed, strict=True) if name == task for p in part]
        sampled = round(n * plan.sampled_share)
        for first, last, temperature in ((0, n - sampled, 0.0), (n - sampled, n, plan.sampling_temperature)):
            for at in range(first, last, plan.corpus_batch):
                end = min(at + plan.corpus_batch, last)
                seeds = range(DRAFT_SEEDS + at, DRAFT_SEEDS + end)
                if log.seconds() - begin > plan.corpus_seconds * (0.5 if task == "math" else 1.0):
                    break
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    found += answers(target, task, seeds, prompts[at:end], stop, plan.corpus_batch, temperature)
                log.curve("corpus_answers", len(found), log.seconds() - begin)
    whole = [a for a in found if a.output[-1] == stop and len(a.output) > 2]
    log.put("corpus", {
        "answers": len(found), "whole": len(whole), "output_tokens": sum(len(a.output) for a in whole),
        "seconds": round(log.seconds() - begin, 1),
    })  # fmt: skip
    return whole


# ---- the draft


def draft_batches(
    found: list[Answer], rows: int, anchors: int, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless (ids [B, T], lengths [B], anchors [B, A]): rows of like length, anchors anywhere in the answers."""
    step = 64
    width = np.array([-(-(len(a.prompt) + len(a.output)) // step) * step for a in found])
    every = {}
    for w in sorted(set(width.tolist())):
        members = [found[i] for i in np.flatnonzero(width == w)]
        ids = np.zeros((len(members), w), np.int16)
        for row, a in zip(ids, members, strict=True):
            row[: len(a.prompt) + len(a.output)] = a.prompt + a.output
        ends = torch.tensor([[len(a.prompt), len(a.prompt) + len(a.output)] for a in members], device=device)
        every[w] = torch.from_numpy(ids).to(device), ends
    rng = np.random.default_rng(seed)
    chances = np.array([len(ids) * w for w, (ids, _) in every.items()], float)
    widths = list(every)
    while True:
        ids, ends = every[widths[rng.choice(len(widths), p=chances / chances.sum())]]
        count = max(1, rows * 256 // ids.shape[1])
        pick = torch.from_numpy(rng.integers(len(ids), size=count)).to(device)
        ends = ends[pick]
        spread = torch.from_numpy(rng.random((count, anchors))).to(device)
        # An anchor is an output token that is followed by another one.
        at = ends[:, :1] + (spread * (ends[:, 1:] - 1 - ends[:, :1])).long()
        yield ids[pick].long(), ends[:, 1], at


def draft_loss(
    draft: DSparkDraft,
    ids: Tensor,
    lengths: Tensor,
    anchors: Tensor,
    context: Tensor,
    target_logits: Tensor,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the target's argmax plus total variation to its distribution, later positions weighing less.

    Also returns the mean accept length over the anchors.
    """
    blocks = draft.forward_blocks(ids, context, anchors)
    k = blocks.labels.shape[-1]
    at = anchors[..., None] + torch.arange(k, device=ids.device)
    valid = at + 1 < lengths[:, None, None]
    flat = (
        at.clamp(max=ids.shape[1] - 1) + ids.shape[1] * torch.arange(len(ids), device=ids.device)[:, None, None]
    ).flatten()
    wanted = target_logits.flatten(0, 1).index_select(0, flat)
    logits = blocks.logits.flatten(0, 2).float()
    best = wanted.argmax(-1)
    hard = F.cross_entropy(logits, best, reduction="none")
    variation = (logits.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)
    weight = (valid * torch.exp(-torch.arange(k, device=ids.device) / plan.decay)).flatten()
    loss = ((plan.hard_weight * hard + (1 - plan.hard_weight) * variation) * weight).sum() / weight.sum()
    with torch.no_grad():
        match = (logits.argmax(-1) == best).view(valid.shape) & valid
        accepted = match.int().cumprod(-1).sum(-1).float().mean()
    return loss, accepted


def train_draft(target: Target, found: list[Answer], plan: Plan, out: Path, log: Log) -> None:
    device = target.embed_tokens.weight.device
    c = target.config
    torch.manual_seed(plan.seed + 2)
    config = DraftConfig(
        hidden_size=c.hidden_size, intermediate_size=plan.draft_intermediate, num_hidden_layers=plan.draft_layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
        vocab_size=c.vocab_size, rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope_theta, block_size=BLOCK,
        mask_token_id=data.tokenizer().token_to_id("<|mask|>"), target_layer_ids=plan.draft_reads,
        num_target_layers=c.num_hidden_layers,
        markov_rank=plan.markov_rank, max_position_embeddings=c.max_position_embeddings,
    )  # fmt: skip
    draft = DSparkDraft(config).to(device).attach(target.requires_grad_(False))
    for name, p in draft.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "markov_w2.weight")):
            nn.init.zeros_(p)
        elif p.ndim == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    optimiser = Optimiser(draft, plan.draft_steps, plan.draft_muon, plan.draft_adam, 0.01)
    batches = draft_batches(found, plan.draft_rows, plan.anchors, plan.seed, device)
    begin, step, accepted = log.seconds(), 0, torch.zeros(())
    for step in range(plan.draft_steps):
        ids, lengths, anchors = next(batches)
        with torch.no_grad():
            hidden, context = target(ids, keep=plan.draft_reads)
            target_logits = target.logits(hidden)
        assert context is not None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, accepted = draft_loss(draft, ids, lengths, anchors, context, target_logits, plan)
        loss.backward()
        progress = max((step + 1) / plan.draft_steps, (log.seconds() - begin) / plan.draft_seconds)
        optimiser.step(step, min(progress, 1.0))
        if step in (0, 20) or step % 250 == 249:
            log.curve("draft_loss", step, float(loss.detach()))
            log.curve("draft_accept_length", step, float(accepted))
            draft.save_folder(out / DRAFT)
        if progress >= 1:
            break
    draft.save_folder(out / DRAFT)
    log.put("draft", {
        "parameters": sum(p.numel() for p in draft.parameters()), "steps": step + 1, "of": plan.draft_steps,
        "accept_length": round(float(accepted), 3), "seconds": round(log.seconds() - begin, 1),
        "steps_per_second": round((step + 1) / (log.seconds() - begin), 2),
    })  # fmt: skip


# ---- what the exported pair does

_ALLOWED = (
    "abs all any bool dict divmod enumerate filter float int isinstance len list map max min ord pow print range repr "
    "reversed round set sorted str sum tuple zip"
)


def passes(job: tuple[int, str]) -> bool:
    """Whether the function in an answer passes its task's tests. In a worker: few builtins, limited time, memory."""
    seed, text = job
    fence = re.search(r"```python\n(.*?)\n?```", text.split("</think>")[-1], re.S)
    if fence is None:
        return False

    def only_math(name: str, *_: Any) -> Any:
        if name != "math":
            raise ImportError(name)
        return math

    scope = {"__builtins__": {n: getattr(builtins, n) for n in _ALLOWED.split()} | {"__import__": only_math}}
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        exec("\n".join((fence.group(1), *data.MODULES["code"].problem(seed).tests)), scope)
        return True
    except BaseException:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def right(found: list[Answer], pool: Any) -> list[bool]:
    texts = [data.tokenizer().decode(a.output) for a in found]
    if found and found[0].task == "code":
        return list(pool.map(passes, [(a.seed, text) for a, text in zip(found, texts, strict=True)], chunksize=8))
    boxed = [re.findall(r"\\boxed\{([^}]*)\}", text) for text in texts]
    return [bool(b) and b[-1] == data.MODULES["math"].problem(a.seed).answer for a, b in zip(found, boxed, strict=True)]


@torch.no_grad()
def speculate(target: Target, draft: DSparkDraft, found: list[Answer], batch: int = 16) -> dict[str, Any]:
    """What strict verification does on greedy answers: accept length of every block, regret at every first rejection.

    A greedy answer is its own continuation, so the blocks at all its anchors are proposed at once, and a teacher-forced
    Markov head proposes what a free one would up to and with the first rejected draft.
    """
    device = target.embed_tokens.weight.device
    lengths, regrets, indices, tokens = [], [], [], 0
    for start in range(0, len(found), batch):
        part = [a for a in found[start : start + batch] if len(a.output) > 1]
        if not part:
            continue
        width = max(len(a.prompt) + len(a.output) for a in part)
        ids = torch.tensor([(r := a.prompt + a.output) + [0] * (width - len(r)) for a in part], device=device)
        ends = torch.tensor([len(a.prompt) + len(a.output) for a in part], device=device)
        begins = torch.tensor([len(a.prompt) for a in part], device=device)
        hidden, context = target(ids, keep=draft.config.target_layer_ids)
        logits = target.logits(hidden)
        assert context is not None
        most = max(len(a.output) for a in part) - 1
        anchors = (begins[:, None] + torch.arange(most, device=device)).clamp(max=width - 1)
        blocks = draft.forward_blocks(ids, context, anchors)
        drafts = blocks.logits.argmax(-1)
        at = anchors[..., None] + torch.arange(drafts.shape[-1], device=device)
        inside = at + 1 < ends[:, None, None]
        accept = ((drafts == blocks.labels) & inside).int().cumprod(-1).sum(-1)
        first = accept.clamp(max=drafts.shape[-1] - 1)
        where = (anchors + first).clamp(max=width - 1)
        z = logits.gather(1, where[..., None].expand(-1, -1, logits.shape[-1]))
        wrong = drafts.gather(2, first[..., None])
        regret = (z.amax(-1, keepdim=True) - z.gather(2, wrong)).squeeze(-1)
        for a, row, losses in zip(part, accept.tolist(), regret.tolist(), strict=True):
            s, last = 0, len(a.output) - 1
            while s < last:
                n = row[s]
                lengths.append(n)
                if n < drafts.shape[-1] and s + n < last:
                    regrets.append(losses[s])
                    indices.append(n)
                s += n + 1
            tokens += last
    return {"lengths": lengths, "regrets": regrets, "indices": indices, "tokens": tokens, "steps": len(lengths)}


def quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"q{round(q * 100)}": round(float(np.quantile(values, q)), 4) for q in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
    }


def describe(spoken: dict[str, Any]) -> dict[str, Any]:
    lengths = spoken["lengths"]
    return {
        "steps": spoken["steps"],
        "tokens": spoken["tokens"],
        "tokens_per_step": round(spoken["tokens"] / max(1, spoken["steps"]), 3),
        "accept_length": round(float(np.mean(lengths)) if lengths else 0.0, 3),
        "accept_histogram": np.bincount(lengths, minlength=BLOCK + 1).tolist() if lengths else [],
        "first_rejections": len(spoken["regrets"]),
        "regret_at_first_rejection": quantiles(spoken["regrets"]),
    }


def calibrate(target: Target, draft: DSparkDraft, plan: Plan, stop: int) -> dict[str, Any]:
    """q25 as published: at strict first rejections on calibration prompts, the ratio of regret and normalised suffix
    value (K - i) / K; the 25 % quantile (linear interpolation) of the positive ones is budget and gate, m = 1."""
    ratios, items, half = [], {}, plan.calibration_items // 2
    for task in ("math", "code"):
        seeds = range((first := data.MODULES[task].split("calibration").start), first + half)
        found = answers(target, task, seeds, data.prompts((task, first, half)), stop, half)
        spoken = speculate(target, draft, found)
        own = [r / ((BLOCK - i) / BLOCK) for r, i in zip(spoken["regrets"], spoken["indices"], strict=True)]
        items[task] = {
            "seeds": [seeds.start, seeds.stop],
            "rejections": len(own),
            "q25": quantiles([r for r in own if r > 0]).get("q25"),
        }
        ratios += own
    positive = [r for r in ratios if r > 0]
    value = round(float(np.quantile(positive, 0.25)), 4) if positive else 0.0
    return {
        "policy": {"rule": "asd", "budget": value, "gate": value, "max_mismatches": 1, "suffix_value": "normalized"},
        "protocol": "25 % quantile (linear) of the positive regret / ((K - i) / K) at strict first rejections",
        "items": items, "rows": len(ratios), "positive": len(positive), "ratio": quantiles(positive),
    }  # fmt: skip


def evaluate(out: Path, plan: Plan, pool: Any, device: torch.device, log: Log, tasks: list[str]) -> None:
    """Everything measured from the exported files, bf16 weights in float32 arithmetic."""
    torch.set_float32_matmul_precision("highest")
    target = Target.from_folder(out / TARGET, device)
    draft = (
        DSparkDraft.from_folder(out / DRAFT, target, device=device)
        if (out / DRAFT / "model.safetensors").exists()
        else None
    )
    stop = data.tokenizer().token_to_id("<|im_end|>")
    if draft is not None:
        found = calibrate(target, draft, plan, stop)
        (out / DRAFT / "calibration.json").write_text(json.dumps(found, indent=2) + "\n")
        log.put("calibration", found)
    for task in tasks:
        first = data.MODULES[task].split("test").start
        seeds = range(first, first + plan.tests)
        parts = pool.map(data.prompts, [(task, s, min(64, seeds.stop - s)) for s in range(first, seeds.stop, 64)])
        batch = 1024 if device.type == "cuda" else 64
        made = answers(target, task, seeds, [p for part in parts for p in part], stop, batch)
        good = right(made, pool)
        ended = [a.output[-1] == stop for a in made]
        result: dict[str, Any] = {
            "device": device.type,
            "items": len(made), "right": sum(good), "accuracy": round(sum(good) / len(good), 4),
            "cut": len(ended) - sum(ended),
            "output_tokens": round(sum(len(a.output) for a in made) / len(made), 1),
        }  # fmt: skip
        if draft is not None:
            result |= describe(speculate(target, draft, [a for a, e in zip(made, ended, strict=True) if e]))
        log.put(f"test_{task}", result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder that receives the two checkpoints and training.json"
    )
    parser.add_argument("--plan", choices=PLANS, default="full")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="change single fields of the plan")
    parser.add_argument("--target", type=Path, help="skip the first stage: a folder that holds a trained target")
    parser.add_argument("--evaluate", nargs="*", choices=ANSWER_LIMIT, help="only calibrate and measure again")
    parser.add_argument("--workers", type=int, default=None)
    args = parser.parse_args()
    plan = PLANS[args.plan]
    for item in args.set:
        name, value = item.split("=", 1)
        plan = replace(plan, **{name: type(getattr(plan, name))(value)})
    args.out.mkdir(parents=True, exist_ok=True)
    known = json.loads((args.out / "training.json").read_text()) if args.evaluate is not None else None
    log = Log(args.out / "training.json", plan, known)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and generation has many
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        if args.evaluate is not None:
            evaluate(args.out, plan, pool, device, log, args.evaluate)
            return
        log.put("device", torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
        stop, end = (data.tokenizer().token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
        trained = Target.from_folder(args.target) if args.target else train_target(plan, pool, device, log)
        trained.save_folder(args.out / TARGET, stop, end)
        target = Target.from_folder(args.out / TARGET, device)  # the draft learns on what is deployed
        train_draft(target, corpus(target, plan, pool, log), plan, args.out, log)
        evaluate(args.out, plan, pool, device, log, list(ANSWER_LIMIT))
        log.put("finished", True)


if __name__ == "__main__":
    main()
