"""Bring an engine up, prove it is the right one, and always bring it down: process, attach (docker: not yet).

A launcher is a module with `preflight(config)`, which refuses in one line what cannot run before anything is recorded,
and the context manager `launch(config, log, policy) -> RunningEngine`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from adapters.policy import Policy
from harness.config import Config
from harness.launch import attach, docker, process
from harness.launch.base import LaunchError, RunningEngine

LAUNCHERS = {"process": process, "attach": attach, "docker": docker}


def preflight(config: Config) -> None:
    """Raises LaunchError for what cannot run here, and says what would."""
    LAUNCHERS[config.launch.name].preflight(config)


def launch(config: Config, log: Path, policy: Policy) -> AbstractContextManager[RunningEngine]:
    """The engine of `config`, its output appended to `log`. Raises LaunchError.

    policy: the server's default; all that it serves where the engine has no policy per request.
    """
    return LAUNCHERS[config.launch.name].launch(config, log, policy)


__all__ = ["LaunchError", "RunningEngine", "launch", "preflight"]
