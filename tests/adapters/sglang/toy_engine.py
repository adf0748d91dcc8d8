"""SGLang's own worker, verify executor and requests around toy tensors: no model, no server, no GPU."""

from __future__ import annotations

import dataclasses
from array import array
from types import SimpleNamespace

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult
from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

SLOTS = 64


class Result(SimpleNamespace):
    """What the hooks read of a GenerationBatchResult."""


class ToyWorker(DSparkWorkerV2):
    """The real entry (`forward_batch_generation`) and the real accept; drafts and logits come with the batch."""

    def __init__(self, drafts: int) -> None:
        self._target_worker = SimpleNamespace()
        self._hosts_draft = True
        self.gamma, self.device = drafts, "cpu"
        self.enable_dp_spec_prefill_coordination = False
        self._verify_planner = SimpleNamespace(note_non_decode_step=lambda: None)
        self._observers = SimpleNamespace(
            note_prefill_step=lambda: None, dump_info_records=lambda: None, clear_info_records=lambda: None
        )
        self._simulate_acc_len, self._verify_epilogue, self._greedy_draft = 0.0, None, False
        self._sampling_accept_graph = self._rejection_noise = None
        self.model_runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(SLOTS, 4, dtype=torch.int32))
        )
        self._verify_executor = executor(drafts)

    def _forward_prefill(self, batch, *args, **kwargs):
        return Result()

    def _forward_decode(self, batch, *args, **kwargs):
        outs = self._verify_executor.accept_and_finalize(**batch.toy)
        return Result(
            outs=outs,
            next_token_ids=outs.out_tokens.reshape(-1),
            num_correct_drafts_per_req_cpu=outs.correct_len.tolist(),
            cap_lens=None if batch.toy["layout"] is None else batch.toy["layout"].verify_lens,
        )


def executor(drafts: int) -> TargetVerifyExecutor:
    made = object.__new__(TargetVerifyExecutor)
    made.gamma, made.verify_num_draft_tokens = drafts, drafts + 1
    made.verify_epilogue = made._simulated_correct_len = made._rejection_noise = None
    made._simulate_acc_len, made._fused_argmax, made._block_verification = 0.0, False, False
    made._tp_sync = SimpleNamespace(sync=lambda site, values: values)
    return made


def request(rid="r", temperature=0.0, policy=None, max_new_tokens=64, top_p=1.0, top_k=-1, stop=None) -> Req:
    params = SamplingParams(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=stop,
        custom_params=None if policy is None else {"specaccept": policy.to_json()},
    )
    params.normalize(None)
    ids = array("q", [1, 2, 3])
    return Req(rid=rid, origin_input_text="", origin_input_ids=ids, sampling_params=params, vocab_size=1000)


def extend(reqs, slots) -> SimpleNamespace:
    return _batch(ForwardMode.EXTEND, reqs, slots)


def decode(reqs, slots, drafts, logits, verify_lens=None, draft_logits=None) -> SimpleNamespace:
    """drafts [B, K], logits [B, K+1, V], draft_logits [B, K, V] where some request is sampled."""
    batch = _batch(ForwardMode.DECODE, reqs, slots)
    B, K = drafts.shape
    greedy = torch.tensor([r.sampling_params.top_k <= 1 for r in reqs])
    temperatures = torch.tensor([[r.sampling_params.temperature] for r in reqs])
    top_ks = torch.tensor([r.sampling_params.top_k for r in reqs])
    top_ps = torch.tensor([r.sampling_params.top_p for r in reqs])
    info = SimpleNamespace(
        is_all_greedy=bool(greedy.all()),
        is_any_greedy=bool(greedy.any()),
        temperatures=temperatures,
        top_ks=top_ks,
        top_ps=top_ps,
        need_top_k_sampling=bool((top_ks[~greedy] < logits.shape[2]).any()),
        need_top_p_sampling=bool((top_ps != 1).any()),
    )
    more = {"greedy_draft": False} if "greedy_draft" in DraftBlockResult.__struct_fields__ else {}
    block = DraftBlockResult(
        draft_tokens=drafts,
        corrected_logits=draft_logits,
        greedy_mask=greedy,
        temperatures=temperatures.view(-1),
        **more,
    )
    batch.toy = {
        "folded_accept": False,
        "bs": B,
        "verify_ids_2d": torch.cat([torch.full((B, 1), 3), drafts], 1),
        "target_logits": logits.reshape(B * (K + 1), -1),
        "draft_block": block,
        "sampling_info": info,
        "draft_input": SimpleNamespace(max_top_k=None, uniform_top_k_value=None),
        "layout": None if verify_lens is None else SimpleNamespace(verify_lens=verify_lens),
        "prefix_lens": torch.full((B,), 5),
        "draft_tokens": drafts,
    }
    return batch


def _batch(mode, reqs, slots) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=mode,
        is_extend_in_batch=False,
        return_logprob=False,
        reqs=list(reqs),
        req_pool_indices=torch.as_tensor(slots, dtype=torch.int64),
    )


def prefilled(worker, reqs, slots) -> None:
    """Run the prefill of these requests: each has its first output id afterwards, as the engine appends it."""
    worker.forward_batch_generation(extend(reqs, slots))
    for req in reqs:
        req.output_ids.append(7)


def blocks(seed: int, rows: int, K: int, V: int, ties: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """drafts [rows, K] int64 that match, nearly match or miss; logits [rows, K+1, V] on a coarse grid: exact ties."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randint(-8, 9, (rows, K + 1, V), generator=g).float() / 4
    if not ties:
        logits += torch.rand(rows, K + 1, V, generator=g) / 8
    order = logits[:, :K].argsort(dim=-1, descending=True, stable=True)
    rank = torch.randint(0, 12, (rows, K), generator=g)
    rank = torch.where(rank < 3, rank, 0).clamp(max=V - 1)  # three of four drafts are the argmax or tie with it
    return order.gather(2, rank[..., None])[..., 0], logits


def accumulator() -> _GenerationStreamAccumulator:
    """What the engine's output streamer fills of one step."""
    values = {
        "return_logprob": False,
        "return_hidden_states": False,
        "return_routed_experts": False,
        "return_indexer_topk": False,
        "spec_algorithm": SpeculativeAlgorithm.DSPARK,
        "disaggregation_mode": DisaggregationMode.NULL,
        "default_stream_interval": 1,
        "default_force_stream_interval": 50,
        "get_cached_tokens_details": lambda req: None,
        "is_request_level_customized_info_key": lambda key: False,
        "current_weight_version": None,
    }
    fields = {f.name for f in dataclasses.fields(_GenerationStreamAccumulator)}
    return _GenerationStreamAccumulator(**{k: v for k, v in values.items() if k in fields})


def server_args(**changed) -> SimpleNamespace:
    plain = {"disaggregation_mode": "null", "pp_size": 1, "tokenizer_worker_num": 1, "tp_size": 1}
    plain["enable_dp_attention"] = False
    return SimpleNamespace(**plain | changed)
