"""launch=docker: a container of recipes/docker-images. Refused until it exists."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from adapters.policy import Policy
from harness.config import Config
from harness.launch.base import LaunchError, RunningEngine


def preflight(config: Config) -> None:
    raise LaunchError(
        f"launch=docker is not supported yet for {config.engine.name}: use launch=process or launch=attach"
    )


def launch(config: Config, log: Path, policy: Policy) -> AbstractContextManager[RunningEngine]:
    raise LaunchError("launch=docker is not supported yet")
