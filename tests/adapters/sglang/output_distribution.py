"""Whether sampled outputs of a bench have the target's own distribution: an exact test, from the record alone.

    python tests/adapters/sglang/output_distribution.py results/runs/RUN [--out FILE]

The target (a local checkpoint) says the probability of every id given what came before it, in float32 on the CPU.
Under a lossless rule each id is a draw from it, so two sums over all ids have mean 0 and a known variance, whatever the
drafts were: surprisal minus entropy (z), and how often the r-th likeliest id came, by r (chi-square). The control asks
the same of a target at 0.9 times the temperature, and must be rejected. The first id of an answer is the prefill's and
left out. Exit status 0 where no arm is rejected at 0.1 % and every control is.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from scipy.stats import chi2, norm
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from harness.config import rooted
from harness.engines.checkpoint import tokenizer
from harness.records.read import read
from harness.traffic import load
from harness.traffic.chat import render

LEVEL = 0.001
CONTROL = 0.9  # of the temperature
BINS = (0, 1, 2, 3, 4, 8)  # ranks from here to the next; the last to the end


def prompts(record) -> dict[str, list[int]]:
    """Input ids by item, as the run rendered them."""
    config = record.identity.config
    wanted = {k: v for k, v in config["traffic"].items() if v is not None and k != "data"}
    words = tokenizer(config["model"]["target"], config["model"]["revision"])
    return {item.id: render(words, item) for item in load(wanted).items}


class Sums:
    """Of one arm under one hypothesis."""

    def __init__(self) -> None:
        self.ids, self.excess, self.variance = 0, 0.0, 0.0
        self.observed = torch.zeros(len(BINS), dtype=torch.float64)
        self.expected = torch.zeros(len(BINS), dtype=torch.float64)
        self.covariance = torch.zeros(len(BINS), len(BINS), dtype=torch.float64)

    def add(self, logits: Tensor, ids: Tensor) -> None:
        """logits [T, V] float64 of the distribution that ids [T] were drawn from."""
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        surprise = -log_p
        entropy = (p * surprise).nan_to_num(0.0).sum(-1)
        self.ids += len(ids)
        self.excess += float((surprise.gather(1, ids[:, None])[:, 0] - entropy).sum())
        self.variance += float(((p * surprise**2).nan_to_num(0.0).sum(-1) - entropy**2).sum())
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        rank = (order == ids[:, None]).int().argmax(-1)
        edges = torch.tensor([*BINS, p.shape[1]])
        share = torch.stack([ordered[:, a:b].sum(-1) for a, b in pairwise(edges.tolist())], 1)
        self.observed += torch.bincount(torch.bucketize(rank, edges[1:], right=True), minlength=len(BINS))
        self.expected += share.sum(0)
        self.covariance += torch.diag(share.sum(0)) - share.T @ share

    def result(self) -> dict:
        z = self.excess / self.variance**0.5
        off = (self.observed - self.expected)[1:]  # the shares add up to 1: one of them says nothing new
        statistic = float(off @ torch.linalg.solve(self.covariance[1:, 1:], off))
        half = norm.ppf(0.975) * self.variance**0.5 / self.ids
        return {
            "ids": self.ids,
            "excess_nats_per_id": round(self.excess / self.ids, 6),
            "interval": [round(self.excess / self.ids - half, 6), round(self.excess / self.ids + half, 6)],
            "p_surprisal": float(2 * norm.sf(abs(z))),
            "chi_square": round(statistic, 3),
            "degrees": len(BINS) - 1,
            "p_ranks": float(chi2.sf(statistic, len(BINS) - 1)),
            "observed": [int(n) for n in self.observed],
            "expected": [round(float(n), 1) for n in self.expected],
        }


@torch.no_grad()
def check(folder: Path) -> dict:
    from transformers import Qwen3ForCausalLM

    loaded = read(folder)
    if loaded.record is None or loaded.problems:
        raise SystemExit(f"{folder}: {loaded.problems[0] if loaded.problems else 'no record'}")
    record = loaded.record
    model = Qwen3ForCausalLM.from_pretrained(rooted(record.identity.config["model"]["target"]), dtype=torch.float32)
    inputs = prompts(record)
    sums: dict[str, tuple[Sums, Sums]] = {}
    for row in loaded.rows:
        temperature = record.arms[row.arm].temperature
        if row.error or not temperature or len(row.output_ids) < 2:
            continue
        prompt = inputs[row.item]
        logits = model(torch.tensor([prompt + row.output_ids])).logits[0, len(prompt) : -1].double()
        ids = torch.tensor(row.output_ids[1:])
        own, control = sums.setdefault(row.arm, (Sums(), Sums()))
        own.add(logits / temperature, ids)
        control.add(logits / (CONTROL * temperature), ids)
    if not sums:
        raise SystemExit(f"{folder}: expected arms with a temperature, found none")
    arms = {name: {"target": own.result(), "control": other.result()} for name, (own, other) in sums.items()}
    low = [min(arm["target"]["p_surprisal"], arm["target"]["p_ranks"]) for arm in arms.values()]
    seen = [min(arm["control"]["p_surprisal"], arm["control"]["p_ranks"]) for arm in arms.values()]
    return {
        "run": folder.name,
        "level": LEVEL,
        "control": f"temperature times {CONTROL}",
        "arms": arms,
        "ok": min(low) * 2 * len(low) >= LEVEL and max(seen) < LEVEL,  # Bonferroni: two tests of every arm
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = check(args.run)
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
