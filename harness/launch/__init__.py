"""Bring an engine up, prove it is the right one, and always bring it down: process, docker, attach.

A launcher is a module with `preflight(config)`, which refuses in one line what cannot run before anything is recorded,
and the context manager `launch(config, log, policy) -> RunningEngine`. `process` has `launch_all` too, for several
servers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from adapters.policy import Policy
from harness.config import Config
from harness.launch import attach, cores, docker, process
from harness.launch.base import LaunchError, RunningEngine

LAUNCHERS = {"process": process, "attach": attach, "docker": docker}


def preflight(config: Config, servers: int = 1) -> None:
    """Raises LaunchError for what cannot run here, and says what would. servers: that are up at once."""
    LAUNCHERS[config.launch.name].preflight(config)
    cores.shares(config, servers * (config.launch.replicas or 1))


def launch(config: Config, log: Path, policy: Policy | None) -> AbstractContextManager[RunningEngine]:
    """The engine of `config`, its output appended to `log`. Raises LaunchError.

    policy: the server's default; all that it serves where the engine has no policy per request. None: no adapter.
    """
    if policy is None and config.launch.name != "process":
        raise LaunchError(f"an engine without its adapter needs launch=process, found {config.launch.name}")
    return LAUNCHERS[config.launch.name].launch(config, log, policy)


@contextmanager
def launch_all(config: Config, servers: Sequence[tuple[Path, Policy | None]]) -> Iterator[list[RunningEngine]]:
    """Several servers side by side, each with its log and policy. Whatever happens, all are stopped.

    Raises LaunchError.
    """
    if len(servers) == 1:
        with launch(config, *servers[0]) as engine:
            yield [engine]
        return
    if config.launch.name != "process":
        raise LaunchError(f"several servers at once need launch=process, found {config.launch.name}")
    with process.launch_all(config, servers) as engines:
        yield engines


__all__ = ["LaunchError", "RunningEngine", "launch", "launch_all", "preflight"]
