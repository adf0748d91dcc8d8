"""launch=docker: the engine in a container of recipes/docker-images, one or several replicas of it.

Ready is proven (ready.py) while the container's exit code is watched. Whatever ends the run, its containers are stopped
and removed; a run that is killed cannot do that, so every start first removes what dead runs left (docker_daemon.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from adapters.policy import Policy
from harness.config import Config, rooted
from harness.engines import connect
from harness.engines.base import EngineClient, EngineError, Server
from harness.engines.checkpoint import is_hub_id
from harness.engines.checkpoint import is_local as is_here
from harness.launch import cores, docker_gpu
from harness.launch.base import LaunchError, RunningEngine
from harness.launch.capability import gpus, unsupported
from harness.launch.docker_container import Container, argv, host_config, hub_cache, inside, secret, unreadable
from harness.launch.docker_daemon import (
    FOLDER,
    OWNED,
    OWNER,
    RUN,
    TEMPORARY,
    adapter_digest,
    connected,
    default_tag,
    explained,
    host,
    is_local,
    owner,
    pull,
    reap,
    remove,
)
from harness.launch.ready import adapter, check_adapter, probe
from harness.launch.shards import ShardedClient

POLL_S = 0.2
SETTLE_S = 2.0


def preflight(config: Config) -> None:
    """What can be known before anything is recorded or started."""
    reason = unsupported(config) or card(config)
    if reason is not None:
        raise LaunchError(f"{config.model.name} in {config.image.name}: {reason}")
    with connected() as client:
        find_image(client, config)
        if is_local():
            _here(config)
        elif config.launch.cores is not None:
            raise LaunchError(
                f"launch.cores: expected an engine of this machine, whose cores are known, found {host()}"
            )
        elif not config.engine.per_request_policy:
            raise LaunchError(f"{config.engine.name}: its counters come by a shared folder, and {host()} shares none")


@contextmanager
def launch(config: Config, log: Path, policy: Policy) -> Iterator[RunningEngine]:
    replicas = config.launch.replicas or 1
    nonce = secrets.token_hex(8)
    with ExitStack() as stack:
        client = stack.enter_context(connected())
        with log.open("a") as notes:
            notes.writelines(f"removed {name}, left behind by a run that is gone\n" for name in reap(client))
        image = find_image(client, config)
        devices = docker_gpu.devices(config, replicas)
        docker_gpu.settle()  # of the arm before
        docker_gpu.watch([each for ids in devices for each in ids])
        output = stack.enter_context(log.open("ab"))
        stack.callback(_sweep, client, nonce)
        own = cores.shares(config, replicas)
        stack.enter_context(cores.client(own))
        started = []
        for index in range(replicas):
            telemetry = _shared(stack, config)
            container = _create(
                client, config, image, policy, nonce, index, devices[index], telemetry, own[index] if own else None
            )
            stack.callback(container.close, config.launch.stop_timeout_s)
            container.start(output, f"[{index}] " if replicas > 1 else "")
            started.append((container, telemetry))
        deadline = time.monotonic() + config.engine.ready_timeout_s
        lanes, servers = [], []
        for container, telemetry in started:
            lane = connect(config.engine.api, _url(config, container), telemetry)
            stack.callback(lane.close)
            lanes.append(lane)
            servers.append(_ready(lane, config, nonce, policy, container.check_alive, deadline))
        check_alive = _all([container for container, _ in started])
        shared = lanes[0] if replicas == 1 else ShardedClient(lanes)
        server = servers[0] if replicas == 1 else shared.server()
        pinned = {} if own is None else {"cores": own, "client_cores": cores.available()}
        yield RunningEngine(shared, server, nonce, _how(config, image, started) | pinned, check_alive)


def card(config: Config) -> str | None:
    """Why no GPU here can run the image; None where one can, or where none is seen."""
    wanted, found = config.image.cards, gpus()
    if not wanted or not found or not is_local() or any(each in gpu.name for gpu in found for each in wanted):
        return None
    return f"{config.image.cards_why} (found {found[0].name})"


def _here(config: Config) -> None:
    """The models the containers will mount."""
    for what, path in (("target", config.model.target), ("draft", config.model.draft)):
        if is_hub_id(path) and (not config.launch.offline or config.launch.hub_cache):
            continue
        if is_here(path):
            if not is_hub_id(path) and (name := unreadable(rooted(path))) is not None:
                raise LaunchError(
                    f"model.{what}: {name} in {path} is private and the container not root: chmod -R a+rX"
                )
            continue
        fix = f"`hf download {path}`, or launch.offline=false" if is_hub_id(path) else "a folder with config.json"
        raise LaunchError(f"model.{what}: {path} is not on this machine: expected {fix}")


def find_image(client: Any, config: Config) -> Any:
    """The image, pulled where it is named by digest and missing. It must hold this checkout's adapter layer."""
    name = config.image.reference or default_tag(config.image)
    from docker.errors import ImageNotFound

    with explained(f"image {name}", f"make images IMAGE={config.image.name}"):
        try:
            image = client.images.get(name)
        except ImageNotFound:
            if "@sha256:" not in name:
                raise
            image = pull(client, name)
    labels = image.labels or {}
    for label, expected in (("specaccept.engine", config.engine.name), ("specaccept.adapter", adapter_digest())):
        if labels.get(label) != expected:
            raise LaunchError(
                f"image {name}: label {label}: expected {expected[:12]}, found {str(labels.get(label))[:12]}: "
                f"it is not built from this checkout: make images IMAGE={config.image.name}"
            )
    return image


def _create(
    client: Any,
    config: Config,
    image: Any,
    policy: Policy,
    nonce: str,
    index: int,
    devices: list[str],
    telemetry: Path | None,
    own: cores.Cores | None,
) -> Container:
    port = None if config.launch.port is None else config.launch.port + index
    labels = {OWNED: "engine", RUN: nonce, OWNER: owner()} | ({FOLDER: str(telemetry)} if telemetry else {})
    with explained(f"image {config.image.name}"):
        made = client.containers.create(
            image.id,
            argv(config),
            name=f"specaccept-{nonce}-{index}",
            labels=labels,
            **host_config(config, policy, nonce, devices, port, telemetry, own),
        )
        secret(made, config)
    return Container(made, config.engine.name)


def _shared(stack: ExitStack, config: Config) -> Path | None:
    """The folder by which an engine without a policy per request publishes its counters."""
    if config.engine.per_request_policy:
        return None
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=TEMPORARY)))
    folder.chmod(0o777)  # the container's user is another one
    return folder


def _url(config: Config, container: Container) -> str:
    """Where this machine reaches the container's port."""
    address, port = container.endpoint()
    if is_local():
        return f"http://127.0.0.1:{port}" if address in ("127.0.0.1", "0.0.0.0") else f"http://{address}:{port}"
    name = urlsplit(host()).hostname
    if address.startswith("127."):
        raise LaunchError(
            f"launch.publish: {host()} is another machine, and its loopback out of reach: expected an address "
            "of it on a network you trust; or tunnel to it and use launch=attach"
        )
    return f"http://{name if address == '0.0.0.0' else address}:{port}"


def _ready(
    client: EngineClient, config: Config, nonce: str, policy: Policy, check_alive: Callable[[], None], deadline: float
) -> Server:
    """The server's own description, once it serves and has proven who it is."""
    while not client.healthy():
        check_alive()
        if time.monotonic() > deadline:
            raise LaunchError("engine: not ready in time (engine.ready_timeout_s)")
        time.sleep(POLL_S)
    try:
        server = client.server()
        check_adapter(config, adapter(server), nonce, policy)
        probe(client, config, policy)
    except EngineError as error:
        check_alive()
        raise LaunchError(f"engine: {error}") from None
    expected = inside(config).model.target
    if server.target != expected:
        raise LaunchError(f"engine: identity: model_path: expected {expected!r}, found {server.target!r}")
    return replace(server, target=config.model.target, draft=config.model.draft if server.draft else None)


def _all(containers: list[Container]) -> Callable[[], None]:
    def check_alive() -> None:
        for container in containers:
            container.check_alive(SETTLE_S)

    return check_alive


def _sweep(client: Any, nonce: str) -> None:
    """What this run created and holds no handle of: a signal may fall between the two."""
    with contextlib.suppress(Exception):
        for container in client.containers.list(all=True, filters={"label": f"{RUN}={nonce}"}, ignore_removed=True):
            remove(container)


def _how(config: Config, image: Any, started: list[tuple[Container, Path | None]]) -> dict[str, Any]:
    """For the record. image_digest: what the containers really run, by its digest at the registry where it has one."""
    ids = {container.image_id for container, _ in started}
    if ids != {image.id}:
        raise LaunchError(f"image: expected every container to run {image.id}, found {', '.join(sorted(ids))}")
    at_registry = sorted(each.partition("@")[2] for each in image.attrs.get("RepoDigests") or [])
    replicas = len(started)
    per_server = config.image.gpus if config.image.gpus is not None else config.model.gpus
    return {
        "kind": "docker",
        "url": None,
        "command": " ".join(argv(config)),
        "image": config.image.reference or default_tag(config.image),
        "image_id": image.id,
        "image_digest": at_registry[0] if at_registry else image.id,
        "labels": {
            k: v for k, v in sorted((image.labels or {}).items()) if k.startswith(("org.opencontainers", "spec"))
        },
        "engine": "local" if is_local() else "remote",
        "replicas": replicas,
        "gpus": replicas * per_server,
        "environment": dict(sorted(config.image.env.items())),
        "hub_cache": None if hub_cache(config) is None else "read-only",
        "token": "none" if config.launch.offline or not os.environ.get("HF_TOKEN") else "by secret",
    }
