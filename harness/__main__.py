"""python -m harness: Hydra overrides in, an exit status out. 0 pass, 1 fail, 2 inconclusive or not run.

128 + n: stopped by signal n, with what was measured kept. Errors are one line on stderr.
"""

from __future__ import annotations

import errno
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from harness import interrupt
from harness.config import EXPERIMENT, GROUPS, Config, ConfigError, choices, load
from harness.engines.base import EngineError
from harness.launch.base import LaunchError
from harness.tasks import INCONCLUSIVE, find
from harness.tasks.errors import TaskError

WRITING = ("bench", "gate", "calibrate", "replay", "tables", "site")  # tasks that leave something below out=
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
TASKS = {
    "bench": "strict, asd-b0 and the policy, interleaved on one engine: throughput, accuracy, identity",
    "gate": "B = 0 against strict: complete token-id lists, with a positive control",
    "calibrate": "regret at first rejections of a strict arm -> a quantile policy",
    "sweep": "a bench per point of a grid (a,b,c), resumable, by a Hydra launcher; its front",
    "replay": "every policy on one capture: tokens per step, by phase, and predicted TPS (capture=DIR)",
    "tables": "results/README.md, its plots and the site, again, from the records",
    "site": "results/site/index.html alone: one page, no server",
    "rejudge": "verdict of a sealed run again, by today's code, in a file beside it (run=FOLDER why=REASON)",
    "tables-check": "whether tables and records hold together",
    "doctor": "what this machine can run, and why not",
}
EXAMPLES = """
    python -m harness task=bench
    python -m harness task=bench model=tiny-qwen3 policy=asd traffic=gsm8k data=PATH limit=200
    python -m harness task=bench policy=asd policy.budget=4 out=/tmp/results
    python -m harness task=bench policy=block traffic=generated-code
    python -m harness task=bench 'arms=[strict,asd,asd-stable]' task.aa=true task.concurrency=8 verdict=published
    python -m harness task=gate engine=sglang task.baseline=unarmed launch.together=true
    python -m harness task=gate traffic=generated limit=200
    python -m harness task=sweep policy.budget=1,2,4 policy.gate=1,2 limit=60 sweep.launcher=joblib
    python -m harness task=replay capture=DIR replay.times=[results/runs/ID]
    python -m harness task=bench launch=attach engine=sglang url=http://127.0.0.1:30000
"""


def usage() -> str:
    lines = [
        "usage: python -m harness [task=TASK] [GROUP=MEMBER ...] [GROUP.FIELD=VALUE ...] [NAME=VALUE ...]",
        "",
        "tasks:",
    ]
    lines += [f"  {name:13} {text}" for name, text in TASKS.items()]
    lines += ["", "groups:"]
    lines += [f"  {group:13} {', '.join(choices(group))}" for group in (*GROUPS, EXPERIMENT) if group != "task"]
    lines += [
        "",
        "names:",
        "  arms          policies of a bench, the baseline first: [strict,asd-b0,asd]; unarmed: no adapter",
        "  limit         items (default: what the traffic says)",
        "  data          folder of a local data set",
        "  capture       folder that an engine under SPECACCEPT_CAPTURE wrote, for task=replay",
        "  run, why      of task=rejudge: the run's folder, and the reason",
        "  url           server to measure, with launch=attach",
        "  out           root of records and tables (default: results)",
        "  seed          item order and sampling",
        "  resume        continue an unfinished run of the same plan: stopped (default), failed, never",
        "  sweep.        of task=sweep: task (bench, gate), launcher (serial, joblib, ray, slurm), jobs",
        "",
        "exit status: 0 pass, 1 fail, 2 inconclusive or not run, 128 + n stopped by signal n",
        "",
        "examples:",
        dedent(EXAMPLES).strip("\n").replace("python", "  python"),
    ]
    return "\n".join(lines)


def check_writable(results: Path) -> None:
    """Folders of records and plots exist and take files: found out before an engine has run for hours."""
    try:
        for folder in (results / "runs", results / "plots"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        if (results / "README.md").is_dir():
            raise IsADirectoryError(errno.EISDIR, "README.md is a directory")
    except OSError as error:
        raise ConfigError(f"out: expected a folder that can be written, found {results}: {error.strerror}") from None


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help", "help"} & set(arguments):
        print(usage())
        return 0
    interrupt.install()
    try:
        if "task=sweep" in arguments:
            from harness.sweep import run as sweep

            return sweep(arguments)
        config: Config = load(arguments)
        if config.task.name in WRITING:
            check_writable(config.results)
        return find(config.task.name)(config)
    except (ConfigError, LaunchError, EngineError, TaskError) as error:
        print(f"specaccept: {error}", file=sys.stderr)
        return INCONCLUSIVE
    except interrupt.Interrupted as signal:
        print(f"specaccept: stopped by {signal}; what was measured is kept", file=sys.stderr)
        return signal.status
    except Exception as error:  # a defect is no verdict: never the status of a failed comparison
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            print(f"specaccept: {error.strerror}: make room, or choose another out=", file=sys.stderr)
            return INCONCLUSIVE
        traceback.print_exc()
        print(f"specaccept: {type(error).__name__}: {error} (a defect, see above)", file=sys.stderr)
        return INCONCLUSIVE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
