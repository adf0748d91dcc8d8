"""The start command of each engine, from its configuration."""

from __future__ import annotations

import sys
from typing import Any

from harness.config import Config


def _flags(values: dict[str, Any]) -> list[str]:
    arguments: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return arguments


def command(config: Config, port: int, armed: bool = True, nonce: str | None = None) -> list[str]:
    """argv of the engine on 127.0.0.1:port; the reference engine takes port 0 and says which one it got.

    armed: false: the engine's own start module, without the adapter's. nonce: of this launch, where the engine itself
    can say it back (SGLang's `--weight-version`, LightLLM's `--model_name`): the only proof of identity of a server
    without the adapter.
    """
    model, engine = config.model, config.engine
    gpus = max(model.gpus, 1)
    dtype = model.dtypes.get(engine.kind, model.dtype)
    dtype_flag = None if dtype == "auto" else dtype
    if engine.kind == "reference":
        own: dict[str, Any] = {
            "model-path": model.target,
            "draft-path": model.draft,
            "revision": model.revision,
            "draft-revision": model.draft_revision,
            "host": "127.0.0.1",
            "port": port,
            "dtype": dtype_flag,
            "device": engine.device or ("cuda" if model.gpus else None),
            "max-running-requests": engine.max_running_requests,
            "threads": engine.threads,
            "seed": config.seed,
        }
    elif engine.kind == "sglang":
        own = {
            "model-path": model.target,
            "speculative-algorithm": "DSPARK",
            "speculative-draft-model-path": model.draft,
            "revision": model.revision,
            "speculative-draft-model-revision": model.draft_revision,
            "speculative-dspark-block-size": model.block_size,
            "dtype": dtype_flag,
            "tp-size": gpus,
            "max-running-requests": engine.max_running_requests,
            "random-seed": config.seed,
            "weight-version": nonce,
            "host": "127.0.0.1",
            "port": port,
        }
    elif engine.kind == "lightllm":
        own = {
            "model_dir": model.target,
            "mtp_mode": "dspark",
            "mtp_draft_model_dir": model.draft,
            "mtp_step": model.block_size,
            "data_type": dtype_flag,
            "tp": gpus,
            "model_name": nonce,
            "running_max_req_size": engine.max_running_requests,
            "host": "127.0.0.1",
            "port": port,
        }
    else:
        raise ValueError(f"engine.name: no start command for {engine.name!r}")
    bare = None if armed else engine.unarmed
    start = [bare] if bare else [engine.module, *engine.arguments]
    return [sys.executable, "-m", *start, *_flags(own | engine.flags)]


def printable(argv: list[str]) -> str:
    """The command for the record: without the place of the interpreter."""
    return " ".join(["python", *argv[1:]])
