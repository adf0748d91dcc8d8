"""Whether a model, an engine and a machine go together, and what is missing. Nothing heavy is imported to find out."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from harness.config import Config, EngineConfig, choices, member, rooted
from harness.engines import APIS
from harness.engines.checkpoint import is_hub_id, is_local
from harness.launch.base import LaunchError

MIB_PER_GIB = 1024


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """What nvidia-smi reports; none where it is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rsplit(",", 1) for line in text.splitlines() if "," in line]
    return tuple(Gpu(name.strip(), float(memory) / MIB_PER_GIB) for name, memory in rows)


def installed(package: str) -> bool:
    """Importable as a package of its own: any folder on the path makes a namespace of its name, without an origin."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def pair(model: str, engine: str) -> Config:
    """The configuration of a model on an engine, by name."""
    return Config(model=member("model", model), engine=member("engine", engine))


def unsupported(config: Config) -> str | None:
    """Why this pair can run nowhere (a property of the project, not of the machine), or None."""
    model, engine = config.model, config.engine
    if engine.kind not in model.engines:
        return f"{model.name} runs on {', '.join(model.engines)} only"
    if engine.drafts != model.draft_kind:
        return f"its draft is of kind {model.draft_kind}, {engine.name} takes {engine.drafts}"
    if engine.kind == "lightllm" and (model.revision or model.draft_revision):
        return "LightLLM takes no revision: expected model.target and model.draft as folders"
    if engine.api not in APIS:
        return f"no client for {engine.name} in this version"
    if engine.adapter and not installed(engine.adapter):
        return f"no adapter for {engine.name} in this version"
    reason = unsupported_rule(engine, config.policy.rule)
    return f"{config.policy.rule} is unsupported ({reason})" if reason else None


def unsupported_rule(engine: EngineConfig, rule: str) -> str | None:
    """Why an engine's adapter cannot serve a rule, or None: it can, or says so itself when it is asked."""
    told = getattr(importlib.import_module(engine.adapter), "unsupported_rule", None) if engine.adapter else None
    return told(rule) if told else None


def missing(config: Config) -> list[str]:
    """What this machine lacks to start this engine with this model."""
    model, engine = config.model, config.engine
    lacks = [f"the Python package {name}" for name in engine.requires if not installed(name)]
    needed, memory = (max(model.gpus, 1) if engine.cuda or model.gpus else 0), model.gpu_memory_gib
    fitting = [gpu for gpu in gpus() if gpu.memory_gib >= memory * 0.95]  # a "40 GiB" card reports a little less
    if len(fitting) < needed:
        size = f" of {memory} GiB" if memory else ""
        found = ", ".join(f"{gpu.name} {gpu.memory_gib:.0f} GiB" for gpu in gpus()) or "none"
        lacks.append(f"{needed} CUDA GPU{'s' if needed > 1 else ''}{size} (found {found})")
    if engine.cards and gpus() and not any(card in gpu.name for gpu in gpus() for card in engine.cards):
        found = gpus()[0].name
        lacks.append(f"one of {', '.join(engine.cards)} (found {found}: {engine.cards_why})")
    for what, path in (("target", model.target), ("draft", model.draft)):
        if not is_local(path) and (not is_hub_id(path) or os.environ.get("HF_HUB_OFFLINE")):
            lacks.append(f"the {what} {path}")
    return lacks


def require(config: Config) -> None:
    """LaunchError in one line: what is missing, and what would run instead."""
    reason = unsupported(config)
    if reason is None and (lacks := missing(config)):
        reason = f"missing {' and '.join(dict.fromkeys(lacks))}"
    if reason is not None:
        instead = runnable()
        here = f"MODEL={instead[0]} ENGINE={instead[1]} runs here" if instead else "nothing runs here, see make doctor"
        raise LaunchError(f"{config.model.name} on {config.engine.name}: {reason}; {here}")


def runnable() -> tuple[str, str] | None:
    """A model and an engine this machine can run, the largest model first."""
    pairs = [pair(model, engine) for model in choices("model") for engine in choices("engine")]
    fitting = [each for each in pairs if unsupported(each) is None and not missing(each)]
    if not fitting:
        return None
    best = max(fitting, key=lambda each: (each.model.gpus * each.model.gpu_memory_gib, each.engine.name == "reference"))
    return best.model.name, best.engine.name


def weights(path: str) -> str:
    """Where a model's weights come from, for doctor."""
    if Path(rooted(path)).is_dir():
        return "in this checkout" if not Path(path).is_absolute() else "local folder"
    return "in the hub's cache" if is_local(path) else "downloaded from the hub"
