"""Bring an engine up, prove it is the right one, and always bring it down: process, attach (docker: not yet).

A launcher is a context manager `(config, log) -> RunningEngine`; a new one is a module here and a line in LAUNCHERS.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from harness.config import Config
from harness.launch import attach, docker, process
from harness.launch.base import LaunchError, RunningEngine

LAUNCHERS: dict[str, Callable[[Config, Path], AbstractContextManager[RunningEngine]]] = {
    "process": process.launch,
    "attach": attach.launch,
    "docker": docker.launch,
}


def launch(config: Config, log: Path) -> AbstractContextManager[RunningEngine]:
    """The engine of `config`, its output in `log`. Raises LaunchError."""
    return LAUNCHERS[config.launch.name](config, log)


__all__ = ["LaunchError", "RunningEngine", "launch"]
