"""Scores rows in place, after the timed arms and with the engine down: code answers run, and their limits matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from harness.config import Config
from harness.records import Row
from harness.score import Runner, SandboxError, Score, score
from harness.traffic import Item, Traffic

ERROR = "error"  # of the scorer: neither right nor wrong


@contextmanager
def code_runner(config: Config, traffic: Traffic) -> Iterator[Runner | None]:
    """Where answers to coding items run: None is a process here. Containers are of the run's own image."""
    if config.launch.code == "process" or all(item.task != "code" for item in traffic.items):
        yield None
        return
    from harness.launch.docker_daemon import default_tag
    from harness.score.container import runner

    with runner(config.image.reference or default_tag(config.image)) as found:
        yield found


def score_rows(traffic: Traffic, rows: Sequence[Row], runner: Runner | None = None) -> None:
    """Equal answers to one item are scored once. A row without an answer stays without an outcome."""
    items = {item.id: item for item in traffic.items}
    known: dict[tuple[str, str, str], Score | SandboxError] = {}
    for row in rows:
        if row.error is not None or row.finish is None:
            continue
        key = row.item, row.text, row.finish
        if key not in known:
            known[key] = _score(items[row.item], row.text, row.finish, runner)
        found = known[key]
        if isinstance(found, Score):
            row.outcome, row.parsed, row.rule = found.outcome, found.parsed, found.rule
        else:
            row.outcome, row.rule = ERROR, str(found)


def _score(item: Item, text: str, finish: str, runner: Runner | None) -> Score | SandboxError:
    try:
        return score(item, text, finish, runner=runner)
    except SandboxError as error:
        return error
