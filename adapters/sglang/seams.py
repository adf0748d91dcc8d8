"""The places of SGLang this adapter holds on to, per release: names and parameter lists, checked before anything runs.

A release that is not in the table, a name that is gone or a parameter list that changed is refused with what drifted:
the same keyword can mean something else in the next release, and an engine logs a failing plugin and serves on.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from adapters.arm import Refused

VERSIONS = ("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")

# Tensor-parallel ranks agree on the accepted lengths from here on (rank 0 wins); before, the adapter broadcasts.
TP_SYNC_SINCE = "0.5.19"
# The engine's own block verification kernel.
NATIVE_BLOCK_SINCE = "0.5.22"

_SPEC = "sglang.srt.speculative.dspark_components"
_ACCEPT = {
    "0.5.16": f"{_SPEC}.kernels.dspark_accept",
    "0.5.17": "sglang.kernels.ops.speculative.dspark.dspark_accept",
}
_VERIFY = f"{_SPEC}.dspark_verify"
_WORKER = f"{_SPEC}.dspark_worker_v2.DSparkWorkerV2"
_MANAGERS = "sglang.srt.managers"

_OUTS = "self folded_accept bs verify_ids_2d target_logits draft_block sampling_info draft_input layout prefix_lens"
_DRAFT = "candidates target_logits draft_block sampling_info draft_input gamma verify_num_draft_tokens cutoff_layout"
_CHAIN = (
    "predicts accept_index accept_token_num candidates retrive_index retrive_next_token retrive_next_sibling "
    "uniform_samples uniform_samples_for_final_sampling target_probs draft_probs threshold_single threshold_acc "
    "deterministic"
)
_CORE = _DRAFT.replace("draft_block", "draft_probs").replace("cutoff_layout", "cutoff_verify_lens")
_GREEDY = "candidates target_logits verify_num_draft_tokens cutoff_verify_lens"

# name -> (module or class by first release, attribute, parameters by first release); the last entry holds on.
_TABLE: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    # Hooked.
    "greedy": (_ACCEPT, "compute_dflash_correct_drafts_and_bonus", {"0.5.16": "candidates target_predict"}),
    "sampled": (
        _ACCEPT,
        "chain_speculative_sampling_triton",
        {"0.5.16": _CHAIN, NATIVE_BLOCK_SINCE: f"{_CHAIN} block_verification"},
    ),
    "accept": (
        {"0.5.16": _VERIFY},
        "accept_draft_tokens",
        {
            "0.5.16": _DRAFT,
            "0.5.21": f"{_DRAFT} fused_argmax",
            "0.5.22": f"{_DRAFT} fused_argmax block_verification",
            "0.5.23": f"{_DRAFT} fused_argmax block_verification rejection_noise",
        },
    ),
    "worker": (
        {"0.5.16": _WORKER},
        "__init__",
        {
            "0.5.16": "self server_args gpu_id ps nccl_port target_worker",
            "0.5.19": "self server_args gpu_id ps nccl_port target_worker draft_worker_cls",
            "0.5.21": "self server_args gpu_id nccl_port target_worker draft_worker_cls",
        },
    ),
    "forward": (
        {"0.5.16": _WORKER},
        "forward_batch_generation",
        {
            "0.5.16": "self batch on_publish",
            "0.5.17": "self batch on_publish grammar_barrier",
            "0.5.21": "self batch on_publish grammar_barrier pp_proxy_tensors",
        },
    ),
    "records": ({"0.5.16": _WORKER}, "dump_info_records", {"0.5.16": "self"}),
    "clear": ({"0.5.16": _WORKER}, "clear_info_records", {"0.5.16": "self"}),
    "result": (
        {"0.5.16": f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"},
        "_handle_finish_state_updated_req",
        {"0.5.16": "self req batch result i logits_output"},
    ),
    "resolve": (
        {"0.5.16": f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"},
        "_resolve_spec_v2_tokens",
        {"0.5.16": "self result batch"},
    ),
    "payload": (
        {"0.5.16": f"{_MANAGERS}.scheduler_components.output_streamer._GenerationStreamAccumulator"},
        "to_payload",
        {"0.5.16": "self dp_rank is_idle_batch"},
    ),
    "admit": (
        {"0.5.16": "sglang.srt.speculative.dflash_utils"},
        "validate_dflash_request",
        {"0.5.16": "req enable_overlap"},
    ),
    "scheduler": (
        {"0.5.16": f"{_MANAGERS}.scheduler.Scheduler"},
        "__init__",
        {
            "0.5.16": (
                "self server_args port_args gpu_id tp_rank moe_ep_rank pp_rank attn_cp_rank moe_dp_rank dp_rank"
            ),
            "0.5.21": "self server_args port_args",
        },
    ),
    "params": (
        {"0.5.16": "sglang.srt.sampling.sampling_params.SamplingParams"},
        "verify",
        {"0.5.16": "self vocab_size"},
    ),
    "meta": (
        {"0.5.16": f"{_MANAGERS}.tokenizer_manager.TokenizerManager"},
        "_calculate_spec_decoding_metrics",
        {"0.5.16": "self meta_info recv_obj i"},
    ),
    # Called, or relied on to lie between two hooks.
    "finalize": (
        {"0.5.16": f"{_VERIFY}.TargetVerifyExecutor"},
        "accept_and_finalize",
        {"0.5.16": f"{_OUTS} draft_tokens", "0.5.22": f"{_OUTS} draft_tokens simulate_bonus_sampling_info"},
    ),
    "accept greedy": (
        {v: f"{m}.AcceptGreedy" for v, m in _ACCEPT.items()},
        "triton",
        {"0.5.16": _GREEDY, "0.5.21": f"{_GREEDY} fused_argmax"},
    ),
    "sampling core": (
        _ACCEPT,
        "_accept_sampling_core",
        {
            "0.5.16": _CORE,
            "0.5.22": f"{_CORE} block_verification",
        },
    ),
}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def since(version: str, first: str) -> bool:
    """Whether `version` is `first` or later. Both from VERSIONS."""
    return _number(version) >= _number(first)


def _at(version: str, by_version: dict[str, str]) -> str:
    return by_version[max((v for v in by_version if since(version, v)), key=_number)]


def expected(version: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """name -> (dotted path, parameter names) of one release of the table. Raises Refused for any other."""
    if version not in VERSIONS:
        raise Refused(f"sglang {version}: expected one of {', '.join(VERSIONS)}")
    return {
        name: (f"{_at(version, owner)}.{attribute}", tuple(_at(version, parameters).split()))
        for name, (owner, attribute, parameters) in _TABLE.items()
    }


def resolve(path: str) -> Any:
    """The object at a dotted path, importing what it takes."""
    return pkgutil.resolve_name(path)


def check(version: str, resolve: Callable[[str], Any] = resolve) -> dict[str, str]:
    """Look every seam up in the installed engine. Returns name -> dotted path; raises Refused naming what drifted."""
    paths = {}
    for name, (path, parameters) in expected(version).items():
        try:
            found = tuple(inspect.signature(resolve(path)).parameters)
        except (AttributeError, ImportError) as error:
            raise Refused(f"sglang {version}: {path}: expected a callable, found {error}") from error
        if found != parameters:
            raise Refused(f"sglang {version}: {path}: expected parameters {list(parameters)}, found {list(found)}")
        paths[name] = path
    return paths
