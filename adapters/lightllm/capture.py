"""LightLLM's verify calls for adapters.capture: ragged rows padded to blocks, argmax drafts, logits after `sample`.

`sample` divides logits by the temperature and applies penalties before verification sees them: they are captured so,
and the manifest says it. Drafts are the argmax of the draft model in every proposer here, so q is one-hot. Two threads
take steps in turn; the recorder is told of one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.capture import Blocks, Recorder, Settings
from adapters.capture.layout import SAMPLED
from adapters.capture.recorder import describe_model, describe_tokenizer
from adapters.lightllm.account import Step, marks_of
from adapters.policy import Policy

MARK = "_specaccept_captured"  # the attribute of an engine request: its number in the capture, and its verify calls
SAMPLED_MATCH = "sampled match"  # how this engine decides a sampled request: by comparing the id it drew


class Capture:
    def __init__(self, settings: Settings, engine: dict[str, str], args: Any, policy: Policy) -> None:
        """args: the engine's start arguments. Raises CaptureError."""
        target = str(args.model_dir)
        drafts = getattr(args, "mtp_draft_model_dir", None)
        draft = drafts[0] if isinstance(drafts, list | tuple) and drafts else drafts
        about = {
            "engine": dict(engine),
            "target": describe_model(target),
            "draft": describe_model(str(draft or "")),
            "tokenizer": describe_tokenizer(str(getattr(args, "tokenizer_dir", None) or target)),
            "policy": policy.to_json(),
            "logits": "processed",
            "temperature_applied": True,
        }
        self.policy = policy
        self.recorder = Recorder(settings, "lightllm", int(args.mtp_step), None, about)
        self.lock = threading.Lock()

    def add(
        self,
        step: Step,
        table: Tensor,
        starts: Tensor,
        slots: Tensor,
        logits: Tensor,
        chosen: Tensor,
        committed: Tensor,
        accept_len: Tensor,
    ) -> None:
        """One verify call behind its decision. table [slots, W], starts [N], slots [R], logits [R, V]: as it had them;
        chosen [R]: the ids that `sample` picked; committed [R]: the ids that stand there now; accept_len [N]: with the
        bonus. Drafts that were no proposal (step.live) are not live here either, whatever the engine made of them."""
        K, device = self.recorder.drafts, logits.device
        starts = starts.long()
        index = (starts[:, None] + torch.arange(K + 1, device=device)).clamp(max=len(chosen) - 1)
        live = _to(torch.tensor([min(each, K) for each in step.live], dtype=torch.int64), device)
        columns = table.index_select(0, slots.index_select(0, starts).long())
        rows = logits[index]
        greedy = [marks_of(req).temperature is not None for req in step.requests]
        top = chosen.long()[index]
        if not all(greedy):  # of a sampled row that is the id it drew
            top = torch.where(_to(torch.tensor(greedy), device)[:, None], top, rows.argmax(-1))
        with self.lock:
            numbers, steps = self._enter(step.requests)
            self.recorder.add(
                Blocks(
                    requests=numbers,
                    steps=steps,
                    positions=[-1] * len(numbers),
                    flags=[0 if each else SAMPLED for each in greedy],
                    temperatures=[float(req.sampling_param.shm_param.temperature) for req in step.requests],
                    anchors=columns[:, 0],
                    drafts=columns[:, 1 : K + 1].long(),
                    logits=rows,
                    top=top,
                    length=torch.minimum(accept_len.long() - 1, live),
                    bonus=committed[(starts + accept_len.long() - 1).clamp(max=len(committed) - 1)],
                    live=live,
                )
            )

    def _enter(self, requests: Sequence[Any]) -> tuple[list[int], list[int]]:
        numbers, steps = [], []
        for req in requests:
            mark = getattr(req, MARK, None)
            if mark is None:
                param, shm = req.sampling_param.shm_param, req.shm_req
                greedy = marks_of(req).temperature is not None
                key = self.policy.key if greedy else SAMPLED_MATCH
                prompt = [int(token) for token in shm.shm_prompt_ids.arr[: shm.input_len]]
                rid = str(getattr(shm, "request_id", None) or getattr(req, "req_id", ""))
                facts = {"greedy": greedy, "temperature": float(param.temperature), "top_k": int(param.top_k)}
                facts |= {"top_p": float(param.top_p), "max_new_tokens": int(param.max_new_tokens)}
                number = self.recorder.enter(rid, key, asked=self.policy.key, prompt=prompt, **facts)
                mark = [number, 0]
                setattr(req, MARK, mark)
            numbers.append(mark[0])
            steps.append(mark[1])
            mark[1] += 1
        return numbers, steps

    def ended(self, req: Any, steps: int, kept: int) -> None:
        """A request ended with its verify call number `steps`, of which `kept` tokens reached the output."""
        mark = getattr(req, MARK, None)
        if mark is not None:
            with self.lock:
                self.recorder.end(mark[0], steps, kept)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
