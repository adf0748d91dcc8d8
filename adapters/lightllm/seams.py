"""What the adapter needs of a LightLLM tree, by name and signature, and what it refuses. No torch, no LightLLM import.

Two layouts are known: `lightspec` (LightSpec, upstream PR #1465 and later) and `earlier` (the MTP modes of v1.2.0).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from adapters import arm
from adapters.lightllm import unsupported_rule
from adapters.policy import ENVIRONMENT, Policy, PolicyError

_INFER = "lightllm.server.router.model_infer"
BACKEND = f"{_INFER}.mode_backend.base_backend"
NORMAL = f"{_INFER}.mode_backend.chunked_prefill.impl"
PARALLEL = f"{_INFER}.mode_backend.dp_backend.impl"
SPECULATIVE = f"{_INFER}.mtp_speculative.utils"
BATCH = f"{_INFER}.infer_batch"
SAMPLER = f"{_INFER}.mode_backend.generic_post_process"
KERNELS = "lightllm.common.basemodel.triton_kernel.mtp_utils"
FUSED = f"{_INFER}.mode_backend.chunked_prefill.mtp_fused_decode_graph"
ARGUMENTS = "LIGHTLLM_START_ARGS"  # JSON, set before a server's processes start
FUSED_OFF = "LIGHTLLM_DISABLE_MTP_FUSED_GRAPH"

PATCHED_MODULES = (BACKEND, NORMAL, PARALLEL, SPECULATIVE)
KNOWN_MODES = (
    "vanilla_with_att",
    "eagle_with_att",
    "vanilla_no_att",
    "eagle_no_att",
    "eagle3",
    "dspark",
    "dflash",
)
NEED_FA3 = ("dspark", "dflash")
HOPPER = ("H100", "H200", "H800", "H20")
SAMPLED_PATH = f"{_INFER}.mtp_speculative.engine"


@dataclass(frozen=True)
class Seam:
    """A function `name` of `module` with these parameters in this order.

    exact: nothing else. Otherwise further parameters may follow when they have defaults: the wrapper passes them on.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    exact: bool = False


@dataclass(frozen=True)
class Alias:
    """A name that `module` binds at its top level by import, and looks up there when it calls."""

    module: str
    name: str


_VERIFY = ("req_to_next_token_ids", "b_req_mtp_start_loc", "new_next_token_ids", "b_req_idx")
_COPY = ("self", "next_token_ids", "next_token_logprobs", "next_token_ranks")
_COMMON: tuple[Seam | Alias, ...] = (
    Seam("lightllm.server.api_start", "normal_or_p_d_start", ("args",)),
    Seam(KERNELS, "mtp_verify", _VERIFY, exact=True),
    Seam(SAMPLER, "sample", ("logits", "reqs", "eos_id")),
    Alias(NORMAL, "sample"),
    Alias(PARALLEL, "sample"),
    Seam(BACKEND, "ModeBackend.init_model", ("self", "kvargs"), exact=True),
    Seam(
        BACKEND,
        "ModeBackend._sample_and_scatter_token",
        ("self", "logits", "b_req_idx", "b_mtp_index", "run_reqs", "is_prefill"),
    ),
    Seam(BACKEND, "ModeBackend._get_next_token_ranks", ("self", "logits", "next_token_ids"), exact=True),
    Seam(BACKEND, "ModeBackend._async_copy_next_token_infos_to_pin_mem", _COPY, exact=True),
    Seam(
        BACKEND,
        "ModeBackend._post_handle",
        (
            "self",
            "run_reqs",
            "next_token_ids",
            "next_token_logprobs",
            "next_token_ranks",
            "run_reqs_update_packs",
        ),
    ),
    Seam(BATCH, "InferReqUpdatePack.__init__", ("self", "req_obj", "output_len"), exact=True),
)
LAYOUTS: dict[str, tuple[Seam | Alias, ...]] = {
    "lightspec": (
        *_COMMON,
        Alias(SPECULATIVE, "mtp_verify"),
        Seam(
            SPECULATIVE,
            "verify_mtp_tokens",
            ("backend", "next_token_ids", "b_req_idx", "b_req_mtp_start_loc", "b_mtp_index"),
            exact=True,
        ),
        Seam(
            SPECULATIVE,
            "scatter_mtp_next_tokens",
            (
                "backend",
                "proposal",
                "target_next_token_ids",
                "b_req_mtp_start_loc",
                "b_req_idx",
                "mtp_accept_len",
            ),
        ),
        # The totals of a request that strict and B = 0 are counted from.
        Seam(
            SPECULATIVE,
            "record_request_mtp_metrics",
            ("backend", "decode_reqs", "accept_lengths_cpu", "verify_run_reqs"),
            exact=True,
        ),
        Seam(BATCH, "InferReq.update_mtp_accepted_token_num", ("self", "accept_token_num"), exact=True),
        Seam(BATCH, "InferReq.update_mtp_verify_token_num", ("self", "verify_token_num"), exact=True),
        Seam(BATCH, "InferReq.update_mtp_verify_step_num", ("self", "verify_step_num"), exact=True),
    ),
    "earlier": (
        *_COMMON,
        Alias(BACKEND, "mtp_verify"),
        Seam(
            KERNELS,
            "mtp_scatter_next_token_ids",
            ("req_to_next_token_ids", "b_req_mtp_start_loc", "all_next_token_ids", "b_req_idx", "mtp_accept_len"),
        ),
        Alias(NORMAL, "mtp_scatter_next_token_ids"),
        Alias(PARALLEL, "mtp_scatter_next_token_ids"),
    ),
}


class Refused(SystemExit):
    """The server must not start armed. A SystemExit, so that a launcher ends with the message and status 1."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__("specaccept: refused: " + "; ".join(reasons))


def root_of(package: ModuleType) -> Path:
    """The folder that holds lightllm/."""
    assert package.__file__ is not None
    return Path(package.__file__).resolve().parent.parent


def file_of(root: Path, module: str) -> Path:
    return root.joinpath(*module.split(".")).with_suffix(".py")


@lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module | None:
    return ast.parse(path.read_bytes()) if path.is_file() else None


def layout_of(root: Path) -> str:
    return "lightspec" if file_of(root, SPECULATIVE).is_file() else "earlier"


def engine_can_tell(layout: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the engine's own totals of a request say all there is to count where its own functions decide.

    Not before LightSpec, which counts accepted drafts only, and not under dynamic verification, where a step may verify
    columns that were not drafted. A server's processes find its arguments in their environment.
    """
    arguments = json.loads(environ.get(ARGUMENTS, "") or "{}")
    return layout == "lightspec" and not arguments.get("mtp_dynamic_verify", False)


def drift(root: Path) -> list[str]:
    """What differs from the layout this tree belongs to: one line each, naming the seam, expected and found."""
    layout = layout_of(root)
    lines = [f"{layout}: {line}" for seam in LAYOUTS[layout] for line in _differs(root, seam)]
    return list(dict.fromkeys(lines))


def _differs(root: Path, seam: Seam | Alias) -> list[str]:
    tree = _tree(file_of(root, seam.module))
    if tree is None:
        return [f"{seam.module}: expected a module, found none"]
    if isinstance(seam, Alias):
        bound = {alias.asname or alias.name for node in tree.body for alias in getattr(node, "names", [])}
        return [] if seam.name in bound else [f"{seam.module}: expected {seam.name} imported by name, found none"]
    function = _find(tree, seam.name)
    if function is None:
        return [f"{seam.module}.{seam.name}: expected a function, found none"]
    found = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    required = len(found) - len(function.args.defaults)
    return _signature(seam, found, required)


def _signature(seam: Seam, found: list[str], required: int) -> list[str]:
    expected = list(seam.parameters)
    extra = len(found) - len(expected)
    fits = found[: len(expected)] == expected and (extra == 0 or (not seam.exact and required <= len(expected)))
    if fits:
        return []
    return [f"{seam.module}.{seam.name}: expected ({', '.join(expected)}), found ({', '.join(found)})"]


def _find(tree: ast.Module, dotted: str) -> ast.FunctionDef | None:
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in dotted.split("."):
        found = next((n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part), None)
        if found is None:
            return None
        body = found.body
    return found if isinstance(found, ast.FunctionDef) else None


def live_drift(seam: Seam, function: Callable[..., Any]) -> list[str]:
    """The same comparison on the object that is about to be replaced."""
    parameters = inspect.signature(function).parameters.values()
    found = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return _signature(seam, found, required)


def policy_of(environ: Mapping[str, str] = os.environ) -> Policy:
    """The server's policy. Raises Refused for one that LightLLM cannot serve."""
    try:
        arming = arm.Arming.from_environment(environ)
    except PolicyError as error:
        raise Refused([f"{ENVIRONMENT}: {error}"]) from None
    except arm.Refused as error:
        raise Refused([str(error)]) from None
    if arming.verify_cap is not None:
        raise Refused(
            [f"{arm.VERIFY_CAP}: expected unset, found {arming.verify_cap}: LightLLM commits what it verified"]
        )
    policy = arming.default
    if policy is None:
        raise Refused([f"{ENVIRONMENT}: expected a policy, found none"])
    if reason := unsupported_rule(policy.rule):
        raise Refused([f"policy.rule: {policy.rule} is unsupported ({reason})"])
    return policy


def require(root: Path, environ: Mapping[str, str] = os.environ) -> Policy:
    """The policy, when this tree can be armed with it. Raises Refused naming what is wrong."""
    policy = policy_of(environ)
    problems = drift(root)
    if problems:
        raise Refused(problems)
    return policy


def gpu_names() -> list[str]:
    """Of this machine, as its driver names them; none where it cannot be asked."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return text.split("\n")[:-1]


def _fa3_refusals(mode: str, backends: Any, gpus: list[str]) -> list[str]:
    """DSpark and DFlash decode through FA3, which LightLLM selects on Hopper only."""
    instead = "--mtp_mode eagle3 runs on Triton"
    chosen = [backends] if isinstance(backends, str) else list(backends)
    if not {"fa3", "auto"} & set(chosen):
        return [f"--llm_decode_att_backend: expected fa3 for --mtp_mode {mode}, found {' '.join(chosen)}; {instead}"]
    other = [name for name in gpus if not any(chip in name for chip in HOPPER)]
    return (
        [f"--mtp_mode {mode}: expected GPUs with FA3 ({', '.join(HOPPER)}), found {other[0]}; {instead}"]
        if other
        else []
    )


def refusals(
    args: Any, root: Path, environ: Mapping[str, str] = os.environ, gpus: list[str] | None = None
) -> list[str]:
    """Why a server with these start arguments cannot be armed; empty: it can. args: LightLLM's StartArgs."""
    gpus = gpu_names() if gpus is None else gpus

    def value(name: str, default: Any = None) -> Any:
        return getattr(args, name, default)

    reasons = []
    mode = value("mtp_mode")
    if mode is None:
        reasons.append("--mtp_mode: expected a mode that drafts, found none: nothing is verified")
    elif mode not in KNOWN_MODES:
        reasons.append(f"--mtp_mode: expected one of {', '.join(KNOWN_MODES)}, found {mode!r}: its path was not read")
    if mode in NEED_FA3:
        reasons += _fa3_refusals(mode, value("llm_decode_att_backend", ["auto"]), gpus)
    if value("run_mode", "normal") == "prefill":
        reasons.append("--run_mode prefill: verifies nothing; set the policy on the decode node")
    if value("output_constraint_mode", "none") != "none":
        reasons.append(
            f"--output_constraint_mode {value('output_constraint_mode')}: a relaxed draft may leave the grammar"
        )
    for flag, reason in (
        ("first_token_constraint_mode", "its mask is not part of the verified logits"),
        ("token_healing_mode", "its mask is not part of the verified logits"),
        ("diverse_mode", "it fills the draft table by a path of its own"),
        ("use_reward_model", "it generates nothing"),
    ):
        if value(flag, False):
            reasons.append(f"--{flag}: {reason}")
    if value("target_vocab_topk_sampling"):
        reasons.append("--target_vocab_topk_sampling: the logits of other tokens are filled in, regrets are not theirs")
    engine = _tree(file_of(root, SAMPLED_PATH))
    if engine is not None and _find(engine, "SpecEngine.sample_and_verify") is not None:
        reasons.append(
            "DFlash2 sampled path (SpecEngine.sample_and_verify): it verifies sampled requests elsewhere, and its "
            "logits do not pass the seam of sample"
        )
    if file_of(root, FUSED).is_file() and environ.get(FUSED_OFF) != "1":
        reasons.append(
            f"fused decode graph (mtp_fused_decode_graph.py): verifies inside a CUDA graph; set {FUSED_OFF}=1"
        )
    return reasons


def require_arguments(args: Any, root: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Raises Refused with every reason at once."""
    reasons = refusals(args, root, environ)
    if reasons:
        raise Refused(reasons)


def engine_version(root: Path) -> str:
    """Of the checkout itself, since it has no version of its own: a digest of the files that hold the seams."""
    layout = layout_of(root)
    digest = hashlib.sha256()
    for module in sorted({seam.module for seam in LAYOUTS[layout]}):
        digest.update(file_of(root, module).read_bytes())
    return f"{layout}+seams.{digest.hexdigest()[:12]}"
