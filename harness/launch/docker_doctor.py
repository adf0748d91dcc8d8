"""What containers this machine can run: a row per image, and why not."""

from __future__ import annotations

from typing import Any

from harness.config import Config, ConfigError, choices, load
from harness.launch.base import LaunchError
from harness.launch.capability import gpus, unsupported
from harness.launch.docker_daemon import connected, host, is_local, owned
from harness.launch.images import bases

COLUMNS = ("image", "engine", "here", "built", "why not / command")


def rows() -> tuple[str, list[list[str]]]:
    """A line about the Docker engine, and a row of COLUMNS per image."""
    names = [name for name in choices("image") if name != "auto"]
    try:
        with connected(timeout_s=10) as client:
            version = client.version().get("Version")
            runtimes = ", ".join(sorted(client.info().get("Runtimes") or {}))
            left = [container.name for container in owned(client)]
            note = f"; containers of runs: {', '.join(left)}" if left else ""
            line = f"docker: {version} at {host()}; runtimes: {runtimes}{note}"
            return line, [_row(name, client) for name in names]
    except LaunchError as error:
        return str(error), [_row(name, None) for name in names]


def _row(name: str, client: Any) -> list[str]:
    config = _config(name)
    if config is None:
        return [name, "unknown", "no", "unknown", "no model of this version fits it"]
    engine, built = config.engine.name, "unknown" if client is None else _built(config, client)
    model = config.model.name
    if client is None:
        return [name, engine, "no", built, "no Docker engine"]
    if reason := unsupported(config) or _lacks(config):
        return [name, engine, "no", built, reason]
    if built != "yes":
        pinned = bases()[name].digest is not None
        first = "" if pinned else f"python -m harness.launch.images refresh {name}; "
        return [name, engine, "once built", built, f"{first}make images IMAGE={name}"]
    return [name, engine, "yes", built, f"make bench MODEL={model} ENGINE={engine} LAUNCH=docker"]


def _config(name: str) -> Config | None:
    """The image with the first model it is for."""
    for model in load([f"image={name}"]).image.models:
        try:
            return load(["launch=docker", f"image={name}", f"model={model}", "launch.replicas=1"])
        except ConfigError:
            continue
    return None


def _built(config: Config, client: Any) -> str:
    from harness.launch.docker import find_image

    try:
        find_image(client, config)
    except LaunchError as error:
        return "from another checkout" if "not built from this checkout" in str(error) else "no"
    return "yes"


def _lacks(config: Config) -> str | None:
    """GPUs, as far as they are seen from here."""
    from harness.launch.docker import card

    if not is_local():
        return None
    if reason := card(config):
        return reason
    needed = config.model.gpus if config.image.gpus is None else config.image.gpus
    fitting = [gpu for gpu in gpus() if gpu.memory_gib >= config.model.gpu_memory_gib * 0.95]
    if len(fitting) < needed:
        found = ", ".join(f"{gpu.name} {gpu.memory_gib:.0f} GiB" for gpu in gpus()) or "none"
        return f"missing {needed} CUDA GPU of {config.model.gpu_memory_gib} GiB per replica (found {found})"
    return None
