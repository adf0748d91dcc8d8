"""Pure statistics: numbers in, dataclasses out, every random draw seeded. README.md says which is used where."""

from harness.stats.accuracy import (
    PairedAccuracy,
    clustered_difference,
    items_for_margin,
    mcnemar,
    mismatch_bound,
    paired_accuracy,
    smallest_detectable_change,
    tango,
    wilson,
)
from harness.stats.estimate import CONFIDENCE, SEED, Estimate
from harness.stats.loops import Loop, find_loop, loop_share
from harness.stats.throughput import (
    MAX_DRIFT,
    RESAMPLES,
    TripletGain,
    bootstrap,
    change,
    drift,
    mean,
    ratio,
    throughput_change,
    tokens_per_step,
    triplet_gain,
)
from harness.stats.verdict import EXIT_STATUS, Verdict, combine, holm, step_down, verdict

__all__ = [
    "CONFIDENCE",
    "EXIT_STATUS",
    "MAX_DRIFT",
    "RESAMPLES",
    "SEED",
    "Estimate",
    "Loop",
    "PairedAccuracy",
    "TripletGain",
    "Verdict",
    "bootstrap",
    "change",
    "clustered_difference",
    "combine",
    "drift",
    "find_loop",
    "holm",
    "items_for_margin",
    "loop_share",
    "mcnemar",
    "mean",
    "mismatch_bound",
    "paired_accuracy",
    "ratio",
    "smallest_detectable_change",
    "step_down",
    "tango",
    "throughput_change",
    "tokens_per_step",
    "triplet_gain",
    "verdict",
    "wilson",
]
