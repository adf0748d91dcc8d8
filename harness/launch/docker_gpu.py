"""GPUs of containers: which ones a replica gets, and the wait for their memory once it is gone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.config import Config
from harness.launch.base import LaunchError
from harness.launch.capability import gpus
from harness.launch.docker_daemon import is_local

SLACK_MIB = 512  # a driver's own, and what another process may have taken meanwhile
WAIT_S = 60.0
POLL_S = 0.5


def devices(config: Config, replicas: int) -> list[list[str]]:
    """Device ids per replica, none for a CPU image. Raises LaunchError where there are not enough."""
    each = config.model.gpus if config.image.gpus is None else config.image.gpus
    if each == 0:
        return [[] for _ in range(replicas)]
    needed = replicas * each
    ids = config.launch.gpus or list(range(needed))
    if len(ids) < needed or len(set(ids)) != len(ids):
        raise LaunchError(f"launch.gpus: expected {needed} different ids ({replicas} x {each}), found {ids}")
    if is_local() and (found := len(gpus())) <= max(ids[:needed]):
        raise LaunchError(
            f"GPU absent: {config.image.name} needs {needed} ({replicas} replicas of {each}), found {found}: "
            f"set launch.replicas and image.gpus to what is here, or DOCKER_HOST to where they are"
        )
    return [[str(ids[k * each + i]) for i in range(each)] for k in range(replicas)]


def used_mib() -> dict[str, float]:
    """Memory in use by GPU id; empty without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = (line.split(",") for line in text.splitlines() if line.count(",") == 1)
    return {index.strip(): float(used) for index, used in rows}


@dataclass(frozen=True)
class Memory:
    """What the GPUs of a run held before it."""

    before: Mapping[str, float]
    read: Callable[[], Mapping[str, float]] = used_mib

    def settle(self, wait_s: float = WAIT_S, poll_s: float = POLL_S) -> None:
        """Wait until they hold no more than that. Raises LaunchError: an arm beside leftovers measures them too."""
        deadline = time.monotonic() + wait_s
        while self.before:
            now = self.read()
            held = {each: now[each] - mib for each, mib in self.before.items() if now.get(each, 0) - mib > SLACK_MIB}
            if not held:
                return
            if time.monotonic() > deadline:
                index, mib = max(held.items(), key=lambda item: item[1])
                raise LaunchError(
                    f"GPU {index}: {mib:.0f} MiB more in use than before the run, {wait_s:g} s after its engine ended: "
                    "see nvidia-smi for the process that holds them"
                )
            time.sleep(poll_s)


_before: list[Memory] = []  # what this process found on its GPUs before its last server


def watch(ids: Sequence[str]) -> None:
    """Note what the GPUs of a server hold before it starts. Another machine's are not seen from here."""
    now = used_mib() if ids and is_local() else {}
    _before.append(Memory({each: now[each] for each in ids if each in now}))


def settle() -> None:
    """Before the next server: wait until the last one's memory is free again. Raises LaunchError."""
    while _before:
        _before.pop().settle()
