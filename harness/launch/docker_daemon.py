"""The Docker engine: where it is, what it says when something is wrong, and what an earlier run left on it.

Every container carries who owns it. A run that is killed cannot remove its own, so the next one does: a container whose
owner is a process of this machine that no longer lives is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapters import __version__
from adapters.telemetry import file_hashes
from harness.config import ImageConfig
from harness.launch.base import LaunchError

OWNED = "specaccept.owned"  # label: a container of this project
RUN = "specaccept.run"  # label: of which run, its nonce
OWNER = "specaccept.owner"  # label: machine, boot, process and its start
FOLDER = "specaccept.folder"  # label: a temporary folder it shares with its run
TEMPORARY = "specaccept-"
LOCAL = "unix:///var/run/docker.sock"
TIMEOUT_S = 60
PULL_TIMEOUT_S = 3600

# What the engine says -> what to do about it. The first that fits counts.
_FAULTS: tuple[tuple[str, str], ...] = (
    (
        r"no space left on device|disk quota exceeded",
        "disk full: make room where Docker keeps its data (docker system df, docker system prune)",
    ),
    (
        r"could not select device driver|nvidia-container-cli|libnvidia-ml|unknown runtime.*nvidia|CDI device",
        "no GPU for containers: install the NVIDIA container toolkit on the engine's machine, or take an image without",
    ),
    (
        r"address already in use|port is already allocated|Bind for",
        "port taken: choose another launch.port, or leave it out and a free one is found",
    ),
    (r"no such image|manifest unknown|not found: manifest|repository does not exist", "image missing: {image}"),
    (r"bind source path does not exist", "a folder to mount is missing on the engine's machine"),
    (r"connection refused|dial tcp|no such host", "a registry or engine does not answer"),
)


def host() -> str:
    return os.environ.get("DOCKER_HOST") or LOCAL


def is_local(address: str | None = None) -> bool:
    """Whether the engine shares this machine's files and loopback."""
    address = address or host()
    return address.startswith(("unix://", "http+unix://")) or re.match(
        r"(tcp|https?)://(127\.[\d.]+|localhost|\[::1\])[:/]?", address
    ) is not None  # fmt: skip


@contextlib.contextmanager
def connected(timeout_s: float = TIMEOUT_S) -> Iterator[Any]:
    """A client of the engine at DOCKER_HOST. Raises LaunchError where none answers."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=int(timeout_s), use_ssh_client=host().startswith("ssh://"))
        client.ping()
    except (DockerException, OSError) as error:
        raise LaunchError(f"docker: no engine at {host()}: start it, or set DOCKER_HOST ({_short(error)})") from None
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def explained(what: str, image: str = "build it with make images") -> Iterator[None]:
    """What the engine refuses inside, as a LaunchError of one line that says what to do."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        raise LaunchError(
            f"docker: {what}: {explain(str(getattr(error, 'explanation', None) or error), image)}"
        ) from None


def explain(text: str, image: str = "build it with make images") -> str:
    for pattern, advice in _FAULTS:
        if re.search(pattern, text, re.IGNORECASE):
            return f"{advice.format(image=image)} ({_short(text)})"
    return _short(text)


def _short(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 240 else f"{text[:110]} ... {text[-120:]}"


def default_tag(config: ImageConfig) -> str:
    """Repository names are lower case."""
    return f"specaccept/{config.name.lower()}:{__version__}"


def adapter_digest() -> str:
    """Of the adapter layer of this checkout: an image that holds another one cannot serve it."""
    return hashlib.sha256(json.dumps(file_hashes(), sort_keys=True).encode()).hexdigest()


def pull(client: Any, name: str) -> Any:
    """An image by digest from its registry. Raises LaunchError with what the engine said last."""
    with explained(f"pull {name}", "its registry does not have it"):
        for line in client.api.pull(name, stream=True, decode=True):
            if "error" in line:
                raise LaunchError(f"docker: pull {name}: {explain(line['error'], 'its registry does not have it')}")
        return client.images.get(name)


def owner() -> str:
    """This process, told apart from any later one with its number."""
    return f"{socket.gethostname()} {_boot()} {os.getpid()} {_started(os.getpid())}"


def is_orphan(label: str) -> bool:
    """Whether the owner was a process of this machine that has ended; another machine's is left alone."""
    parts = label.split()
    if len(parts) != 4 or parts[0] != socket.gethostname():
        return False
    return parts[1] != _boot() or not parts[2].isdecimal() or _started(int(parts[2])) != parts[3]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"


def _started(pid: int) -> str:
    """Clock ticks from boot to the start of a process; `-` where it does not live (a zombie does not)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "-"
    return "-" if fields[0] in "ZX" else fields[19]


def owned(client: Any) -> list[Any]:
    """Every container of this project, running or not."""
    return client.containers.list(all=True, filters={"label": OWNED}, ignore_removed=True)


def reap(client: Any) -> list[str]:
    """Remove what runs that are gone left behind. Returns the names."""
    gone = []
    for container in owned(client):
        if is_orphan(container.labels.get(OWNER, "")):
            remove(container)
            folder = Path(container.labels.get(FOLDER) or "/")
            if folder.name.startswith(TEMPORARY):
                shutil.rmtree(folder, ignore_errors=True)
            gone.append(container.name)
    return gone


def remove(container: Any) -> None:
    """With its anonymous volumes; one that is already gone, or going, is no error."""
    from docker.errors import APIError, NotFound

    try:
        container.remove(force=True, v=True)
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:
            raise
