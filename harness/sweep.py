"""task=sweep: one bench (or gate) per point of a grid of Hydra overrides, by Hydra multirun and its launchers.

    python -m harness task=sweep policy.budget=1,2,4 policy.gate=1,2 traffic=generated limit=60 out=PATH
    python -m harness task=sweep sweep.launcher=joblib sweep.jobs=2 ...

Every override with several values (a,b,c or Hydra's range()) is an axis; the rest is shared. Hydra makes the jobs and
hands them to the launcher; a job composes its configuration as any run does. A job whose plan has a complete record is
skipped, one whose run was cut off continues it: a sweep that was killed is started again with the same command.

Hydra leaves nothing behind: no log, no working directory. Its launchers keep their options (hydra.launcher.NAME=VALUE).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import math
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
import msgspec
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from harness import interrupt
from harness.config import RECIPES, Config, ConfigError, hydra_override, load
from harness.publish.labels import commit
from harness.records.provenance import identity
from harness.records.read import Loaded, read, read_all
from harness.records.run import complete, wait
from harness.records.schema import Identity, canonical
from harness.records.sweeps import Manifest, Point, joined, manifest, read_sweeps, write
from harness.stats.estimate import Estimate
from harness.tasks import FAIL, INCONCLUSIVE, PASS, find
from harness.tasks.errors import TaskError
from harness.traffic import load as load_traffic

OWN = "sweep."
TASKS = ("bench", "gate")
LAUNCHERS = {  # name: (Hydra's name, distribution, extra)
    "serial": ("basic", None, None),
    "joblib": ("joblib", "hydra_joblib_launcher", "sweep"),
    "ray": ("ray", "hydra_ray_launcher", "ray"),
    "slurm": ("submitit_slurm", "hydra_submitit_launcher", "slurm"),
}
PLACES = ("out", "data", "url")


@dataclass
class Options:
    """sweep.NAME=VALUE. task: of each job. launcher: of LAUNCHERS. jobs: at a time, here or in Slurm's array.

    jobs is 1 unless asked: benches that share a machine measure each other.
    """

    task: str = "bench"
    launcher: str = "serial"
    jobs: int = 1

    def __post_init__(self) -> None:
        for name, choices in (("task", TASKS), ("launcher", tuple(LAUNCHERS))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"sweep.{name}: expected one of {', '.join(choices)}, found {getattr(self, name)!r}")
        if self.jobs < 1:
            raise ConfigError(f"sweep.jobs: expected an integer >= 1, found {self.jobs}")
        package, extra = LAUNCHERS[self.launcher][1:]
        if package and importlib.util.find_spec(f"hydra_plugins.{package}") is None:
            needed = package.replace("_", "-")
            raise ConfigError(f"sweep.launcher: {self.launcher} needs {needed}: pip install 'specaccept[{extra}]'")


def options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """sweep.NAME=VALUE, and the rest."""
    own = {}
    for text in arguments:
        name, _, value = text.partition("=")
        if name.startswith(OWN):
            own[name.removeprefix(OWN)] = value
    if unknown := sorted(set(own) - set(Options.__dataclass_fields__)):
        known = ", ".join(OWN + name for name in Options.__dataclass_fields__)
        raise ConfigError(f"unknown override {OWN}{unknown[0]!s}, expected one of {known}")
    try:
        found = msgspec.convert(own, dict[str, str])
        jobs = int(found.pop("jobs", "1"))
    except ValueError:
        raise ConfigError(f"sweep.jobs: expected an integer >= 1, found {own['jobs']!r}") from None
    rest = [text for text in arguments if not text.startswith((OWN, "task="))]
    return Options(**found, jobs=jobs), rest


@dataclass(frozen=True)
class Grid:
    """base: overrides all points share. axes: `name` -> its values as text. launcher: overrides of Hydra itself."""

    base: list[str]
    axes: dict[str, list[str]]
    launcher: list[str]

    def points(self) -> Iterator[list[str]]:
        """The overrides of each point, axes only, the last one fastest."""
        for values in itertools.product(*self.axes.values()):
            yield [f"{name}={value}" for name, value in zip(self.axes, values, strict=True)]


def grid(overrides: Sequence[str]) -> Grid:
    base, axes, launcher = [], {}, []
    for text, override in zip(overrides, _parsed(overrides), strict=True):
        if override.key_or_group.startswith(("hydra.", "hydra/")):
            launcher.append(text)
        elif not override.is_sweep_override():
            base.append(text)
        elif override.is_discrete_sweep():
            axes[text.partition("=")[0]] = list(override.sweep_string_iterator())
        else:
            raise ConfigError(f"{override.key_or_group}: expected values to try in turn (a,b,c), found {text}")
    if not axes:
        raise ConfigError("sweep: expected an override with several values, as in policy.budget=1,2,4, found none")
    return Grid(base, axes, launcher)


def _parsed(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides([hydra_override(text) for text in overrides])
    except HydraException as error:
        raise ConfigError(f"{str(error).splitlines()[0]} (expected NAME=VALUE, see --help)") from None


def _values(overrides: Sequence[str]) -> dict[str, Any]:
    """Names and typed values; `inf` is text, since JSON has no number for it."""
    found = {override.key_or_group: override.value() for override in _parsed(overrides)}
    return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in found.items()}


@lru_cache(maxsize=8)
def _provenance(options: str) -> dict[str, Any]:
    return load_traffic(msgspec.json.decode(options)).provenance


def traffic_provenance(config: Config) -> dict[str, Any]:
    return _provenance(msgspec.json.encode(config.traffic.options()).decode())


def plan(config: Config) -> str:
    """Digest of all that this configuration asks for: the plan its record will have."""
    try:
        return identity(config, traffic_provenance(config)).plan
    except (ValueError, OSError) as error:
        raise TaskError(str(error).splitlines()[0]) from None


def planned(task: str, wanted: Grid, jobs: int = 1) -> tuple[Manifest, Path]:
    """The sweep and its root of results. Every point is composed and checked before the first one runs.

    jobs: at a time on one machine.
    """
    points, results, seen = [], None, dict[str, list[str]]()
    for own in wanted.points():
        config = load([f"task={task}", *wanted.base, *own])
        if config.launch.cores is not None and jobs > 1:
            raise ConfigError(f"launch.cores: jobs side by side would share them: expected sweep.jobs=1, found {jobs}")
        results = config.results
        point = Point(_values(own), plan(config))
        if (twin := seen.setdefault(point.plan, own)) is not own:  # one run would stand for both, and each against each
            raise ConfigError(f"sweep: expected points that differ, found {' '.join(twin)} and {' '.join(own)}")
        points.append(point)
    assert results is not None
    base = [text for text in wanted.base if text.partition("=")[0] not in PLACES]
    axes = {
        name: [_values([f"{name}={value}"])[name.lstrip("+")] for value in values]
        for name, values in wanted.axes.items()
    }
    return manifest(task, base, axes, points), results


def run(arguments: Sequence[str]) -> int:
    """The whole sweep. Raises ConfigError, TaskError."""
    own, overrides = options(arguments)
    wanted = grid(overrides)
    asked, results = planned(own.task, wanted, 1 if own.launcher == "slurm" else own.jobs)
    try:
        write(results, asked)
    except OSError as error:
        found = f"{results}: {error.strerror}"
        raise ConfigError(f"out: expected a folder that can be written, found {found}") from None
    todo = [point for point in asked.points if complete(results / "runs", point.plan) is None]
    there = len(asked.points) - len(todo)
    say(f"sweep {asked.id}: {len(asked.points)} points, {there} already complete")
    for line in not_taken(asked, wanted, todo, results):
        say(f"sweep {asked.id}: {line}")
    if todo:
        multirun(own, wanted, asked, results)
    return report(asked, results)


def not_taken(asked: Manifest, wanted: Grid, todo: Sequence[Point], results: Path) -> list[str]:
    """Earlier sweeps that measured points of this one which it measures again, a line each, with the reason."""
    overrides = dict(zip((point.plan for point in asked.points), wanted.points(), strict=True))
    lines = []
    for other in read_sweeps(results):
        if other.id == asked.id or (other.task, sorted(other.base)) != (asked.task, sorted(asked.base)):
            continue
        folders = [(point, complete(results / "runs", point.plan)) for point in other.points]
        done = {canonical(point.point): folder for point, folder in folders if folder is not None}
        again = [point for point in todo if canonical(point.point) in done]
        record = read(done[canonical(again[0].point)]).record if again else None
        if record is not None:
            config = load([f"task={asked.task}", *wanted.base, *overrides[again[0].plan]])
            why = difference(record.identity, identity(config, traffic_provenance(config)))
            count = f"{len(again)} point{'s' if len(again) > 1 else ''}"
            lines.append(f"{count} complete in sweep {other.id}, measured again: {why}")
    return lines


def difference(before: Identity, now: Identity) -> str:
    """Which part of two plans differs first, in words."""
    if before.code != now.code:
        there, here = (f"{commit(code)}, content {code['sha256'][:12]}" for code in (before.code, now.code))
        return f"the code is another: {there} there, {here} now"
    for name in ("target", "draft", "data", "config"):
        if changed := _changed({name: getattr(before, name)}, {name: getattr(now, name)}):
            return "{}: {!r} there, {!r} now".format(*changed)
    return "its plan is another"


def _changed(old: dict[str, Any], new: dict[str, Any], path: str = "") -> tuple[str, Any, Any] | None:
    """The first field of two nested objects that differs."""
    for name in [*old, *new]:
        left, right = old.get(name), new.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            if found := _changed(left, right, f"{path}{name}."):
                return found
        elif left != right:
            return f"{path}{name}", left, right
    return None


def multirun(own: Options, wanted: Grid, asked: Manifest, results: Path) -> None:
    """Hydra's own multirun, as from its command line, in a folder that goes when it ends."""
    with _folder(own, asked, results) as folder:
        name = LAUNCHERS[own.launcher][0]
        settings = [
            f"hydra/launcher={name}",
            f"hydra.sweep.dir='{folder}'",
            "hydra.sweep.subdir=.",
            *_jobs(own, wanted),
        ]
        settings += ["hydra/hydra_logging=none", "hydra/job_logging=none", "hydra.output_subdir=null"]
        axes = [f"{axis}={','.join(values)}" for axis, values in wanted.axes.items()]
        overrides = [hydra_override(text) for text in (f"task={own.task}", *wanted.base, *axes)]
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to its makers unless told
        before = sys.argv
        sys.argv = [before[0], "--multirun", *settings, *wanted.launcher, *overrides]
        try:
            hydra.main(str(RECIPES), "config", version_base="1.3")(_task(asked))()
        except SystemExit as error:  # Hydra's own end of an error, which is no verdict
            say(f"sweep {asked.id}: sweep.launcher={own.launcher} ended with status {error.code}, the reason is above")
        finally:
            sys.argv = before


def _task(asked: Manifest) -> Callable[[Any], int]:
    def one(composed: Any) -> int:
        from harness.sweep import job

        return job(asked)

    return one


def _jobs(own: Options, wanted: Grid) -> list[str]:
    """How many at a time, in the launcher's words."""
    if own.launcher == "joblib":
        return [f"hydra.launcher.n_jobs={own.jobs}"]
    if own.launcher == "slurm":
        return [f"hydra.launcher.array_parallelism={own.jobs}"]
    if own.launcher == "ray" and not any("ray.init" in text for text in wanted.launcher):
        return [f"+hydra.launcher.ray.init.num_cpus={own.jobs}"]  # a cluster of this machine; another has its own size
    return []


@contextmanager
def _folder(own: Options, asked: Manifest, results: Path) -> Iterator[Path]:
    """Where Hydra keeps its own. Slurm's jobs need it where they run, and their logs stay."""
    if own.launcher == "slurm":
        yield results / "sweeps" / f"{asked.id}.slurm"
        return
    folder = Path(tempfile.mkdtemp(prefix="specaccept-sweep-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def job(asked: Manifest) -> int:
    """One point, in whatever process the launcher runs it: an exit status. A failure is told at once, here."""
    composed = HydraConfig.get()
    if threading.current_thread() is threading.main_thread():
        interrupt.install()
    overrides = [str(text).lstrip("+") for text in composed.overrides.task]
    own = [text for text in overrides if text.partition("=")[0] in {name.lstrip("+") for name in asked.axes}]
    point = _values(own)
    name = " ".join(f"{key}={value}" for key, value in point.items())
    title = f"sweep {asked.id}: {composed.job.num + 1}/{len(asked.points)} {name}"
    try:
        with _own_hydra():
            return _point(asked, load(overrides), point, title)
    except Exception as error:
        say(f"{title}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}")
        return INCONCLUSIVE
    finally:
        with contextlib.suppress(OSError):
            Path(composed.runtime.output_dir).rmdir()  # of another machine: nothing was put there


@contextmanager
def _own_hydra() -> Iterator[None]:
    """A job composes a configuration of its own inside the one that Hydra made for it."""
    hydra_ = GlobalHydra.instance()
    outer = hydra_.hydra
    hydra_.clear()
    try:
        yield
    finally:
        hydra_.hydra = outer


def _point(asked: Manifest, config: Config, point: dict[str, Any], title: str) -> int:
    runs, own = config.results / "runs", plan(config)
    if own not in {each.plan for each in asked.points}:
        raise TaskError("plan: code, models or data are not those the sweep was begun with: start it again")
    wait(runs, own)
    if (folder := complete(runs, own)) is not None:
        say(f"{title}: {folder.name} is complete: skipped")
        return PASS
    config.sweep = asked.of(own, point)
    say(f"{title}: starting")
    with contextlib.redirect_stdout(io.StringIO()):  # a table per job: the sweep prints one of all
        status = find(config.task.name)(config)
    folder = complete(runs, own)
    verdict = read(folder).record.verdict.outcome if folder is not None else "no record"  # type: ignore[union-attr]
    say(f"{title}: {verdict}")
    return status


def say(text: str) -> None:
    print(f"specaccept: {text}", file=sys.stderr, flush=True)


def report(asked: Manifest, results: Path) -> int:
    """The table of all points and the exit status: a point without a complete record is `not run`."""
    from harness.publish.selection import select
    from harness.publish.tables import write as write_tables

    runs = read_all(results)
    chosen = select(runs, read_sweeps(results)).sweeps
    places = {each.record.id: each for sweep in chosen if sweep.id == asked.id for each in sweep.points}
    print(f"sweep {asked.id}: {len(asked.points)} points, each against the baseline of its own run")
    print(f"{'point':24} {'tokens/s':>24} {'accuracy':>24}  stands")
    outcomes = []
    for point, loaded in joined(asked, runs):
        name = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in point.point.items())
        if loaded is None or not loaded.complete or loaded.record is None or loaded.record.verdict is None:
            outcomes.append("not run")
            print(f"{name:24} {'not run':>24} {'not run':>24}  not run ({_why(loaded)})")
            continue
        verdict = loaded.record.verdict
        outcomes.append(verdict.outcome)
        place = places.get(loaded.record.id)
        if place is None:
            told = f"{verdict.outcome}{f' ({verdict.reasons[0]})' if verdict.reasons else ''}"
            print(f"{name:24} {'no place':>24} {'no place':>24}  {told}")
            continue
        by = f" (by {place.by})" if place.by else ""
        print(f"{name:24} {_cell(place.speed, '%'):>24} {_cell(place.accuracy, 'pp'):>24}  {place.standing}{by}")
    write_tables(results)
    return FAIL if "fail" in outcomes else PASS if set(outcomes) == {"pass"} else INCONCLUSIVE


def _why(loaded: Loaded | None) -> str:
    if loaded is None or loaded.record is None:
        return "no record"
    if loaded.problems:
        return loaded.problems[0]
    return f"{loaded.record.status}{f': {loaded.record.error}' if loaded.record.error else ''}"


def _cell(found: Estimate, unit: str) -> str:
    value, low, high = (100 * each for each in (found.value, found.low, found.high))
    return f"{value:+.1f} {unit} [{low:+.1f}, {high:+.1f}]"
