"""launch.cores: CPU cores of its own for every server process that is up, and the rest for this one, the client.

An idle engine spins a core, and where the scheduler puts it changes the times of another by a per cent or two. Cores
are taken in the order of this process's own affinity mask, which is what a job or a container was given. A server's
are set before it is executed, so that everything it starts inherits them, and are read back once it is ready.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.config import Config
from harness.launch.base import LaunchError

Cores = Sequence[int]


def available() -> list[int]:
    """Cores that this process may run on."""
    if sys.platform != "linux":
        raise LaunchError(f"launch.cores: expected Linux, whose affinity it sets, found {sys.platform}")
    return sorted(os.sched_getaffinity(0))


def shares(config: Config, servers: int) -> list[list[int]] | None:
    """The cores of each of the server processes that are up at once; None: not asked for. Raises LaunchError."""
    size = config.launch.cores
    if size is None:
        return None
    found, needed = available(), servers * size + 1
    if len(found) < needed:
        many = f"{servers} servers" if servers > 1 else "1 server"
        raise LaunchError(
            f"launch.cores: expected {needed} cores ({many} x {size}, and one for the client), "
            f"found {len(found)} ({spelled(found)})"
        )
    return [found[index * size : (index + 1) * size] for index in range(servers)]


def spelled(cores: Collection[int]) -> str:
    """`0-3,8`, as taskset and cpuset have it."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


@contextmanager
def client(taken: Sequence[Cores] | None) -> Iterator[None]:
    """Every thread of this process on the cores that no server has, until the servers are down."""
    if taken is None:
        yield
        return
    before = os.sched_getaffinity(0)
    _move(before - {core for each in taken for core in each})
    try:
        yield
    finally:
        _move(before)


def _move(cores: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def check(session: int, cores: Cores) -> None:
    """Raises LaunchError where a thread of a server's session may run elsewhere: an engine can set its own affinity."""
    for process in _processes(session):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(process / "task"):
                found = os.sched_getaffinity(int(thread))
                if not found <= set(cores):
                    name = (process / "comm").read_text().strip()
                    raise LaunchError(
                        f"launch.cores: {name} ({process.name}): expected cores {spelled(cores)}, "
                        f"found {spelled(found)}: the engine sets its own affinity"
                    )


def _processes(session: int) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            after_name = (process / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[3]) == session:
                yield process
