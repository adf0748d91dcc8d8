"""task=calibrate: regret over suffix value at the first rejections of a strict arm, and the quantile policy of it.

The published protocol: calibration items that are never measured, one greedy strict answer each; every block that ends
in a rejection gives the regret r_i of its first rejected draft; the policy's B and g are a quantile (linear
interpolation) of the positive ratios r_i / q_i, m = 1. The engine has to report those regrets; one that does not is
refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from adapters.policy import Policy
from harness.config import Config
from harness.publish.tables import write
from harness.records.run import write_atomically
from harness.records.schema import Verdict
from harness.tasks import INCONCLUSIVE, PASS
from harness.tasks.arms import Plan
from harness.tasks.errors import TaskError
from harness.tasks.session import Session, session
from harness.traffic import Item

SUFFIX_VALUE = "normalized"


def run(config: Config) -> int:
    strict = Plan("strict", Policy("strict"), "recipe", 0.0)
    workload = {"concurrency": 1, "order": "calibration items"}
    with session(config, [strict], workload, lambda traffic: traffic.calibration[: config.task.items]) as this:
        items = this.traffic.calibration[: config.task.items]
        if this.todo([strict], items):
            with this.serving([strict]), this.counted([strict]):
                for order, item in enumerate(items):
                    if this.todo([strict], [item]):
                        _first_rejections(this, strict, item, order)
                        this.unit()
        found = frozen([each for row in this.run.rows for each in row.rejections or ()], config.task.quantile)
        this.run.record.summary = {"baseline": "strict", "arms": {}, "calibration": found}
        enough = found["policy"] is not None
        verdict = Verdict("pass" if enough else "inconclusive", [] if enough else ["no positive first-rejection ratio"])
        identity = this.run.record.identity
        provenance = {
            "run": this.run.record.id,
            "identity": identity.digest,
            "target": identity.target,
            "draft": identity.draft,
        }
        content = msgspec.json.format(msgspec.json.encode(found | provenance), indent=1)
        write_atomically(this.run.folder / "calibration.json", content + b"\n")
        this.run.finish("complete", verdict)
    write(config.results)
    print(f"first rejections: {found['rejections']}, positive ratios: {found['ratios']}")
    print(f"q{100 * config.task.quantile:g}: {found['value']}")
    print(f"policy: {os.path.relpath(this.run.folder / 'calibration.json')}")
    return PASS if enough else INCONCLUSIVE


def _first_rejections(this: Session, arm: Plan, item: Item, order: int) -> None:
    request = this.request(arm, item, first_rejections=True)
    answer = this.known(this.engine.client.generate(request))
    if answer.first_rejections is None:
        raise TaskError(f"calibrate: {this.config.engine.name} does not report regrets at first rejections")
    row = this.answered(this.blank(arm, item, order, request, answer.started_s), answer)
    row.rejections = [[r if np.isfinite(r) else None, float(i), float(live)] for r, i, live in answer.first_rejections]
    this.run.append(row)


def frozen(rejections: Sequence[Sequence[float | None]], quantile: float) -> dict[str, Any]:
    """The quantile of positive ratios r / q, q = (live - i) / live, and the policy made of it.

    rejections: (regret in nats, position i, live) of each block's first rejected draft; a regret that is None is none.
    """
    numbers = [[np.nan if each is None else each for each in rejection] for rejection in rejections]
    ratios = [regret / ((live - i) / live) for regret, i, live in numbers]
    positive = sorted(ratio for ratio in ratios if ratio > 0 and np.isfinite(ratio))
    value = float(np.quantile(positive, quantile, method="linear")) if positive else None
    policy = None if value is None else Policy("asd", value, value, 1, SUFFIX_VALUE)
    return {
        "quantile": quantile,
        "rejections": len(ratios),
        "ratios": len(positive),
        "value": value,
        "policy": None if policy is None else asdict(policy),
    }
