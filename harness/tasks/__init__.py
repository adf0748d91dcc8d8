"""Tasks: each module has `run(config) -> exit status`. 0 pass, 1 fail, 2 inconclusive or not run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from harness.config import Config

PASS, FAIL, INCONCLUSIVE = 0, 1, 2
STATUS = {"pass": PASS, "fail": FAIL, "inconclusive": INCONCLUSIVE}


def find(name: str) -> Callable[[Config], int]:
    """The task's function; its module is imported only now, so that each task pays for what it uses."""
    return import_module(f"harness.tasks.{name.replace('-', '_')}").run
