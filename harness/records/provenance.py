"""What a record's numbers were made with: code, adapter, models, machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.config import ROOT, Config
from harness.engines.checkpoint import identify
from harness.launch.capability import gpus
from harness.records.archive import without_git
from harness.records.run import plan_digest
from harness.records.schema import Identity

CODE = ("adapters", "harness", "recipes", "pyproject.toml", "requirements.lock")  # what can change a measurement
CODE_SUFFIXES = {".py", ".yaml", ".toml", ".lock", ".j2", ".json"}
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "sglang", "lightllm", "httpx", "pyarrow", "hydra-core")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit_time() -> str | None:
    """Of the commit, ISO 8601; None outside a git checkout."""
    return _git("log", "-1", "--format=%cI")


@lru_cache(maxsize=1)
def code() -> dict[str, Any]:
    """Commit, whether the code differs from it, and the SHA-256 of the code as it lies on disk.

    As this process found them when it first asked. dirty looks at the code alone: records and tables that a run leaves
    behind do not make the next one dirty. Outside a git checkout they are what its archive says (archive.py), or None;
    the SHA-256 still names the content.
    """
    content = _content()
    status = _git("status", "--porcelain", "--untracked-files=all", "--", *CODE) if (ROOT / ".git").exists() else None
    if status is None:
        return without_git(ROOT, content) | {"sha256": content}
    return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(status), "sha256": content}


def _content() -> str:
    digest = hashlib.sha256()
    for top in CODE:
        path = ROOT / top
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix in CODE_SUFFIXES:
                digest.update(
                    f"{file.relative_to(ROOT).as_posix()}\0".encode() + hashlib.sha256(file.read_bytes()).digest()
                )
    return digest.hexdigest()


def identity(config: Config, data: dict[str, Any]) -> Identity:
    """The part of the identity that is known before the engine starts."""
    model = config.model
    found = Identity(
        plan="",
        digest=None,
        config=config.resolved(),
        code=code(),
        target=identify(model.target, model.revision),
        draft=identify(model.draft, model.draft_revision),
        data=data,
    )
    found.plan = plan_digest(found)
    return found


def environment() -> dict[str, Any]:
    """The machine: what can explain a difference between two records of one identity."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.memory_gib, 1)} for gpu in gpus()],
        "driver": _driver() if gpus() else None,
        "system": f"{platform.system()} {platform.release()}",
        "boot": _boot(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
