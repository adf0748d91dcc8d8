"""SGLang's verify steps for adapters.capture: what the accept saw, and how much of it reached each request's output.

The device side runs in the forward stream and never waits. A step's blocks are settled when the engine has processed
its result; a step that it ran for a request beyond its end (overlap) is never settled, and thereby void.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adapters.capture import Blocks, CaptureError, Drawn, Recorder, Settings
from adapters.capture.layout import DRAWN, SAMPLED
from adapters.capture.recorder import describe_model, describe_tokenizer
from adapters.policy import Policy

HEALTH_CHECK = "HEALTH_CHECK"  # request ids of the engine's own probes
MARK = "_specaccept_captured"  # the attribute of an engine request that holds its Captured


# Of the draft worker: accepts that run inside a CUDA graph, where nothing can be captured.
FOLDED = ("_verify_epilogue", "_sampling_accept_graph")


@dataclass
class Captured:
    """One request. number: in the capture, -1: left out. begun, settled: verify steps. outputs: ids accounted for."""

    number: int
    begun: int = 0
    settled: int = 0
    outputs: int = 0


@dataclass
class Pending:
    """The lists of one step, taken before the engine verifies it. p, q, coins: of its sampled accept, all rows."""

    requests: list[int]
    steps: list[int]
    flags: list[int]
    temperatures: list[float]
    top: Tensor | None = None
    p: Tensor | None = None
    q: Tensor | None = None
    coins: Tensor | None = None


class Capture:
    def __init__(self, recorder: Recorder, drawn: bool) -> None:
        """drawn: sampled drafts are drawn from their distribution."""
        self.recorder, self.drawn = recorder, drawn

    @classmethod
    def from_environment(
        cls, version: str, server_args: Any, drafts: int, default: Policy | None, worker: Any
    ) -> Capture | None:
        """None where no capture is asked for. Raises CaptureError. worker: the engine's draft worker, made."""
        settings = Settings.from_environment()
        if settings is None:
            return None
        for name in FOLDED:
            if getattr(worker, name, None) is not None:
                raise CaptureError(f"SPECACCEPT_CAPTURE: expected an accept outside the CUDA graphs, found {name}")
        drawn = not getattr(worker, "_greedy_draft", False)
        target, draft = server_args.model_path, server_args.speculative_draft_model_path
        about = {
            "engine": {"name": "sglang", "version": version},
            "target": describe_model(target),
            "draft": describe_model(draft or ""),
            "tokenizer": describe_tokenizer(getattr(server_args, "tokenizer_path", None) or target),
            "policy": None if default is None else default.to_json(),
            "logits": "processed",  # penalties, bias and grammar masks are in them
            "temperature_applied": False,
        }
        recorder = Recorder(settings, "sglang", drafts, None, about)
        recorder.close_at_sigterm()  # the scheduler would end at once
        return cls(recorder, drawn)

    def prefill(self, reqs: Sequence[Any], keys: Sequence[str], asked: Sequence[str]) -> None:
        """Requests of a prefill batch and the policy that decides each. A retracted request comes back with steps in
        flight that the engine drops: its capture ends with what was settled."""
        for req, key, wanted in zip(reqs, keys, asked, strict=True):
            mark = req.__dict__.get(MARK)
            if mark is None and req.rid.startswith(HEALTH_CHECK):
                mark = req.__dict__[MARK] = Captured(-1)
            elif mark is None:
                params = req.sampling_params
                mark = req.__dict__[MARK] = Captured(
                    self.recorder.enter(
                        req.rid,
                        key,
                        asked=wanted,
                        greedy=params.top_k == 1,
                        temperature=float(params.temperature),
                        top_k=int(params.top_k),
                        top_p=float(params.top_p),
                        max_new_tokens=params.max_new_tokens,
                        prompt=list(req.origin_input_ids),
                    )
                )
            elif mark.begun and mark.number >= 0:
                self.recorder.end(mark.number, mark.settled, self.recorder.drafts + 1)
                mark.number = -1
            mark.outputs = len(req.output_ids) + 1  # the prefill gives one id itself

    def begin(self, reqs: Sequence[Any], sampled: Sequence[bool]) -> Pending:
        """The step that is about to be verified."""
        pending = Pending([], [], [], [])
        for req, is_sampled in zip(reqs, sampled, strict=True):
            mark = req.__dict__.get(MARK) or Captured(-1)
            pending.requests.append(mark.number)
            pending.steps.append(mark.begun)
            pending.flags.append((SAMPLED | (DRAWN if self.drawn else 0)) if is_sampled else 0)
            pending.temperatures.append(float(req.sampling_params.temperature) if is_sampled else 1.0)
            mark.begun += 1
        return pending

    def add(
        self,
        pending: Pending,
        candidates: Tensor,
        target_logits: Tensor,
        live: Tensor | None,
        length: Tensor,
        bonus: Tensor,
    ) -> None:
        """candidates [B, K+1], target_logits [B (K+1), V], live, length, bonus [B]: of the accept, on the device."""
        B, W = candidates.shape
        logits = target_logits.view(B, W, -1)
        drawn = None
        if pending.p is not None and pending.q is not None and any(flag & DRAWN for flag in pending.flags):
            drawn = Drawn(range(B), pending.p, pending.q, pending.coins)
        self.recorder.add(
            Blocks(
                requests=pending.requests,
                steps=pending.steps,
                positions=[-1] * B,
                flags=pending.flags,
                temperatures=pending.temperatures,
                anchors=candidates[:, 0],
                drafts=candidates[:, 1:].contiguous(),
                logits=logits,
                top=logits.argmax(-1) if pending.top is None else pending.top,
                length=length,
                bonus=bonus,
                live=live,
                drawn=drawn,
            )
        )

    def settle(self, req: Any, outputs: int) -> None:
        """One step of a request is on the host, cuts done. outputs: ids that it has by now, the stop id included."""
        mark = req.__dict__.get(MARK)
        if mark is None or mark.number < 0:
            return
        kept, mark.outputs = outputs - mark.outputs, outputs
        mark.settled += 1
        if req.finished():
            self.recorder.end(mark.number, mark.settled, kept)
