"""From folders or hub ids to an Engine. transformers reads configuration, weights and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapters import __version__
from adapters.capture import CaptureError, Settings
from adapters.policy import Policy, PolicyError
from adapters.telemetry import Telemetry
from harness.engines.reference.capture import Capture
from harness.engines.reference.dspark import DraftConfig, DSparkDraft
from harness.engines.reference.engine import Engine
from harness.engines.reference.model import Target
from harness.engines.reference.proposer import Proposer
from harness.engines.reference.sampling import within

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NAME = "specaccept-reference"
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
SMALL = 100_000_000
SPAN = 512  # keys that CPU attention takes at a time


class LoadError(ValueError):
    """A pair that this engine cannot serve, in one line."""


@dataclass(frozen=True)
class Options:
    """limit: longest prompt + output of one request; None: the target's max_position_embeddings, at most 4096.
    deterministic: a request's arithmetic does not depend on its company (README, Determinism); refused where it does.
    threads: CPU threads of one operation; None: one for a small target, else torch's own number.
    revision, draft_revision: of a hub id; a folder has none."""

    target: str
    draft: str
    dtype: str = "float32"
    device: str = "cpu"
    slots: int = 16
    limit: int | None = None
    seed: int = 0
    deterministic: bool = False
    threads: int | None = None
    revision: str | None = None
    draft_revision: str | None = None


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _folder(name: str, path: str, revision: str | None) -> Path:
    if Path(path).is_dir():
        if revision is not None:
            raise LoadError(f"{name}: expected no revision of a folder, found {revision!r}")
        return Path(path)
    if path.count("/") != 1 or path.startswith((".", "/")):
        raise LoadError(f"{name}: expected a folder or a hub id, found {path!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise LoadError(f"{name}: {path} from the hub: {first_line(error)}") from None


def check_target(folder: Path) -> Any:
    """The target's configuration, checked for what this engine's forward pass does not have."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise LoadError(f"model-path: expected a config.json in {folder}, found none")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise LoadError(f"model-path: {folder}: {first_line(error)}") from None
    for field, expected in (
        ("model_type", "qwen3"),
        ("attention_bias", False),
        ("hidden_act", "silu"),
        ("use_sliding_window", False),
    ):
        found = getattr(config, field, None)
        if found != expected:
            raise LoadError(f"model-path: config.{field}: expected {expected!r}, found {found!r}")
    rope = config.rope_parameters.get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise LoadError(f"model-path: config.rope_parameters.rope_type: expected a fixed rope, found {rope!r}")
    return config


def load_target(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """A Qwen3ForCausalLM."""
    from safetensors import SafetensorError
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # stderr is for what is wrong
    logging.set_verbosity_error()
    try:
        loaded: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise LoadError(f"model-path: {folder}: {first_line(error)}") from None
    model, info = loaded
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):  # transformers would fill in random weights
        if info[problem]:
            raise LoadError(
                f"model-path: {folder}: expected the tensors of the config, found {problem}: {min(info[problem])}"
            )
    return model.to(device).eval()


def check_limits(config: Any, options: Options) -> int:
    """The longest prompt + output of a request."""
    positions = config.max_position_embeddings
    limit = min(positions, 4096) if options.limit is None else options.limit
    if not 2 <= limit <= positions:
        raise LoadError(f"max-total-tokens: expected 2..{positions} (max_position_embeddings), found {limit}")
    if options.slots < 1:
        raise LoadError(f"max-running-requests: expected >= 1, found {options.slots}")
    return limit


def set_threads(model: Any, threads: int | None) -> None:
    """On a small target's products a second thread waits more than it works."""
    if threads is None and sum(p.numel() for p in model.parameters()) < SMALL:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def eos_ids(model: Any) -> set[int]:
    """What ends an answer: config and generation config of the target."""
    ids: set[int] = set()
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        ids |= set(eos) if isinstance(eos, list | tuple) else set() if eos is None else {eos}
    return ids


def check_rows(weights: Sequence[Tensor], slots: int, block: int) -> None:
    """Rows of a matrix product must not depend on how many there are: true of some CPUs' libraries, so it is tried."""
    g = torch.Generator().manual_seed(0)
    for weight in {tuple(w.shape): w for w in weights}.values():  # [in, out]
        x = torch.randn(slots * block, weight.shape[0], generator=g)
        alone = torch.mm(x[:block], weight)
        for n in range(2, slots + 1):
            if not torch.equal(torch.mm(x[: n * block], weight)[:block], alone):
                raise LoadError(
                    f"deterministic: on this CPU a row of a [{n * block}, {weight.shape[0]}] x {list(weight.shape)} "
                    f"product depends on the number of rows; max-running-requests {n - 1} is the most it allows"
                )


def build(
    model: Any, draft: DSparkDraft, options: Options, default_policy: Policy | None = None, release: bool = False
) -> Engine:
    """An engine over weights that are loaded already. release: `model` is of no use afterwards."""
    limit = check_limits(model.config, options)
    room = limit + draft.config.block_size + 1  # the last block may reach past the limit
    with torch.inference_mode():
        quantum = SPAN if options.deterministic else 1
        target = Target(model, draft.config.target_layer_ids, options.slots, room, quantum, release)
        proposer = Proposer(draft, target.head, options.slots, room, quantum)
        if options.deterministic:
            for stack, rows in ((target.stack, draft.config.block_size + 1), (proposer.stack, draft.config.block_size)):
                products = [w for layer in stack.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]
                check_rows([*products, target.head], options.slots, rows)
    try:
        default_policy = None if default_policy is None else within(default_policy, target.vocabulary)
    except PolicyError as error:
        raise LoadError(f"SPECACCEPT_POLICY: {error}") from None
    telemetry = Telemetry("reference", NAME, __version__, default_policy)
    telemetry.armed = True
    return Engine(target, proposer, telemetry, options.slots, limit, eos_ids(model), options.seed)


def load(options: Options, default_policy: Policy | None = None) -> tuple[Engine, Any]:
    """-> the engine and the target's tokenizer (None where its folder has none)."""
    if options.dtype not in DTYPES:
        raise LoadError(f"dtype: expected {' or '.join(DTYPES)}, found {options.dtype!r}")
    if options.deterministic and (options.device, options.dtype) != ("cpu", "float32"):
        found = f"{options.device}, {options.dtype}"
        raise LoadError(f"deterministic: expected device cpu and dtype float32, found {found}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise LoadError("device: expected a CUDA device, found none (torch.cuda.is_available() is false)")
    dtype = DTYPES[options.dtype]
    target_folder = _folder("model-path", options.target, options.revision)
    draft_folder = _folder("draft-path", options.draft, options.draft_revision)
    check_limits(check_target(target_folder), options)
    DraftConfig.from_folder(draft_folder)
    model = load_target(target_folder, dtype, options.device)
    set_threads(model, options.threads)
    draft = DSparkDraft.from_folder(draft_folder, model, dtype, options.device)
    engine = build(model, draft, options, default_policy, release=True)
    try:
        if (settings := Settings.from_environment()) is not None:
            engine.capture = Capture(settings, engine, options.target, options.draft)
    except CaptureError as error:
        raise LoadError(str(error)) from None
    tokenizer = None
    if any((target_folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(target_folder)
    return engine, tokenizer
