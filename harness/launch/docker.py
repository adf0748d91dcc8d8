"""launch=docker: a container of recipes/docker-images. Refused until it exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.config import Config
from harness.launch.base import LaunchError, RunningEngine


@contextmanager
def launch(config: Config, log: Path) -> Iterator[RunningEngine]:
    raise LaunchError(
        f"launch=docker is not supported yet for {config.engine.name}: use launch=process or launch=attach"
    )
    yield  # the shape of every launcher
