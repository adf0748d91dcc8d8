"""task=doctor: what this machine can run, a row per model and engine and a row per image, and why not."""

from __future__ import annotations

from harness.config import Config, choices
from harness.launch import docker_doctor
from harness.launch.capability import gpus, missing, pair, unsupported, weights
from harness.publish.console import table
from harness.records.provenance import environment
from harness.tasks import PASS


def run(config: Config) -> int:
    machine = environment()
    cards = ", ".join(f"{gpu.name} {gpu.memory_gib:.0f} GiB" for gpu in gpus()) or "none"
    print(f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; GPUs: {cards}")
    rows = [_row(model, engine) for model in choices("model") for engine in choices("engine")]
    table(("model", "engine", "here", "weights", "why not / command"), rows)
    line, images = docker_doctor.rows()
    print(line)
    table(docker_doctor.COLUMNS, images)
    return PASS


def _row(model: str, engine: str) -> list[str]:
    here = pair(model, engine)
    where = weights(here.model.target)
    if reason := unsupported(here):
        return [model, engine, "unsupported", where, reason]
    if lacks := missing(here):
        return [model, engine, "no", where, "missing " + ", ".join(dict.fromkeys(lacks))]
    return [model, engine, "yes", where, f"make bench MODEL={model} ENGINE={engine}"]
