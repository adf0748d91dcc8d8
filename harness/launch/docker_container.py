"""One engine container: what it is created with, its log, its end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from adapters.policy import ENVIRONMENT, Policy
from adapters.telemetry import NONCE
from harness.config import Config, rooted
from harness.engines.checkpoint import is_hub_id
from harness.launch.base import TELEMETRY, LaunchError
from harness.launch.command import command
from harness.launch.cores import spelled
from harness.launch.docker_daemon import explained, is_local, remove

PORT = 30000
TARGET, DRAFT, HUB, SHARED = "/models/target", "/models/draft", "/models/hub", "/run/specaccept"
SECRET = "/run/secrets/hf_token"
USER = 10001  # of the images
GIB = 1 << 30
TAIL_LINES = 3


def inside(config: Config) -> Config:
    """The configuration as the container sees it: its paths, tensor parallel over its own GPUs, the image's flags."""
    model, image = config.model, config.image
    target = model.target if is_hub_id(model.target) else TARGET
    draft = model.draft if is_hub_id(model.draft) else TARGET if model.draft == model.target else DRAFT
    per_server = model.gpus if image.gpus is None else image.gpus
    return replace(
        config,
        model=replace(model, target=target, draft=draft, gpus=per_server),
        engine=replace(config.engine, flags=config.engine.flags | image.flags),
    )


def argv(config: Config) -> list[str]:
    """The engine's command line. It listens on the container's own addresses; only `publish` reaches them."""
    arguments = command(inside(config), PORT)[1:]
    return ["python3", *("0.0.0.0" if text == "127.0.0.1" else text for text in arguments)]


def hub_cache(config: Config) -> str | None:
    """The folder to mount as the hub's cache, None where no model comes from it."""
    if not config.launch.offline or not any(map(is_hub_id, (config.model.target, config.model.draft))):
        return None
    if config.launch.hub_cache:
        return config.launch.hub_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(Path(HF_HUB_CACHE).resolve())


def mounts(config: Config, telemetry: Path | None) -> list[Any]:
    from docker.types import Mount

    found = []
    for path, place in ((config.model.target, TARGET), (config.model.draft, DRAFT)):
        if not is_hub_id(path):
            found.append(Mount(place, str(rooted(path).resolve()), type="bind", read_only=True))
    if (cache := hub_cache(config)) is not None:
        found.append(Mount(HUB, cache, type="bind", read_only=True))
    if telemetry is not None:
        found.append(Mount(SHARED, str(telemetry), type="bind"))
    return found


def environment(config: Config, policy: Policy, nonce: str) -> dict[str, str]:
    """Nothing secret: `docker inspect` shows it. NCCL variables of this machine reach the engine."""
    own = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    found = {
        NONCE: nonce,
        ENVIRONMENT: json.dumps(policy.to_json()),
        "PYTHONUNBUFFERED": "1",
        "HOME": "/tmp",
        **own,
        **config.image.env,
    }
    if config.launch.offline:
        found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if hub_cache(config) is not None:
            found["HF_HUB_CACHE"] = HUB
    elif os.environ.get("HF_TOKEN"):
        found["HF_TOKEN_PATH"] = SECRET
    if not config.engine.per_request_policy:
        found[TELEMETRY] = SHARED
    return found


def user() -> str:
    """Never root: the caller, who can read the models, or the image's own user where the caller is root."""
    return f"{os.getuid()}:{os.getgid()}" if is_local() and os.getuid() else f"{USER}:{USER}"


def unreadable(folder: Path) -> str | None:
    """The first thing in a model folder that the container's user cannot read, None where it can read all."""
    if os.getuid():
        return None
    for path in (folder, *sorted(folder.iterdir())):
        needed = 0o005 if path.is_dir() else 0o004
        if path.stat().st_mode & needed != needed:
            return path.name
    return None


def host_config(
    config: Config,
    policy: Policy,
    nonce: str,
    devices: list[str],
    port: int | None,
    telemetry: Path | None,
    cores: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Arguments of containers.create. devices: GPU ids, none for a CPU engine. cores: all it may run on."""
    from docker.types import DeviceRequest, Ulimit

    image = config.image
    return {
        "user": user(),
        "environment": environment(config, policy, nonce),
        "mounts": mounts(config, telemetry),
        "ports": {f"{PORT}/tcp": (config.launch.publish, port)},
        "init": True,
        "device_requests": [DeviceRequest(device_ids=devices, capabilities=[["gpu"]])] if devices else None,
        "shm_size": int(image.shm_gib * GIB),
        "ipc_mode": image.ipc,
        "mem_limit": int(image.memory_gib * GIB) if image.memory_gib else None,
        "memswap_limit": int(image.memory_gib * GIB) if image.memory_gib else None,
        "nano_cpus": int(image.cpus * 1e9) if image.cpus else None,
        "cpuset_cpus": spelled(cores) if cores else None,
        "pids_limit": image.pids,
        "ulimits": [Ulimit(name="memlock", soft=-1, hard=-1)] if devices else None,  # NCCL pins host memory
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "restart_policy": {"Name": "no"},
    }


def secret(container: Any, config: Config) -> None:
    """The hub token as a file only the engine's user can read, in this container and nowhere else."""
    token = os.environ.get("HF_TOKEN")
    if config.launch.offline or not token:
        return
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        folder = tarfile.TarInfo("secrets")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        file = tarfile.TarInfo("secrets/hf_token")
        file.size, file.mode, file.uid, file.gid = len(token.encode()), 0o400, USER, USER
        tar.addfile(file, io.BytesIO(token.encode()))
    container.put_archive("/run", stream.getvalue())


class Container:
    """A created container: start it, watch it, end it."""

    def __init__(self, container: Any, engine: str) -> None:
        self._container = container
        self._engine = engine
        self._pump: threading.Thread | None = None

    def start(self, output: BinaryIO, prefix: str) -> None:
        """Its output goes to `output`, every line with `prefix`, until it ends."""
        with explained(f"start {self._engine}"):
            self._container.start()
            stream = self._container.logs(stream=True, follow=True)
        self._pump = threading.Thread(target=_copy, args=(stream, output, prefix.encode()), daemon=True)
        self._pump.start()

    @property
    def image_id(self) -> str:
        """Of what it really runs."""
        self._reload()
        return self._container.attrs["Image"]

    def endpoint(self) -> tuple[str, int]:
        """The address and port its own port is bound to."""
        self._reload()
        bound = (self._container.attrs["NetworkSettings"]["Ports"] or {}).get(f"{PORT}/tcp")
        if not bound:
            self.check_alive()
            raise LaunchError(f"docker: {self._container.name}: expected a published port, found none")
        return bound[0]["HostIp"], int(bound[0]["HostPort"])

    def check_alive(self, settle_s: float = 0.0) -> None:
        """Raises LaunchError with the exit status and the end of its log once it is not running.

        settle_s: how long one that is being killed may still look alive.
        """
        deadline = time.monotonic() + settle_s
        while True:
            self._reload()
            state = self._container.attrs["State"]
            if not state["Running"]:
                break
            if time.monotonic() >= deadline:
                return
            time.sleep(0.1)
        why = ", killed for memory (image.memory_gib)" if state.get("OOMKilled") else ""
        raise LaunchError(f"engine: container exited with status {state['ExitCode']}{why}: {self.tail()}")

    def tail(self) -> str:
        with contextlib.suppress(Exception):
            text = self._container.logs(tail=40).decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return " | ".join(lines[-TAIL_LINES:])
        return "it wrote nothing"

    def close(self, stop_timeout_s: float) -> None:
        """Stop it, then remove it, whatever state it is in. Its log is complete before it goes."""
        with contextlib.suppress(Exception):
            self._container.stop(timeout=max(1, int(stop_timeout_s)))
        if self._pump is not None:
            self._pump.join(10)
        with explained(f"remove {self._container.name}"):
            remove(self._container)

    def _reload(self) -> None:
        from docker.errors import NotFound

        try:
            with explained("engine"):
                self._container.reload()
        except LaunchError as error:
            if isinstance(error.__cause__ or error.__context__, NotFound):
                raise LaunchError("engine: its container was removed by someone else") from None
            raise


def _copy(stream: Any, output: BinaryIO, prefix: bytes) -> None:
    """A full disk must not stop the engine: what cannot be written is lost."""
    rest = b""
    with contextlib.suppress(Exception):
        for part in stream:
            rest += part
            *lines, rest = rest.split(b"\n")
            for line in lines:
                with contextlib.suppress(OSError):
                    output.write(prefix + line + b"\n")
                    output.flush()
    with contextlib.suppress(OSError, ValueError):
        if rest:
            output.write(prefix + rest + b"\n")
            output.flush()
