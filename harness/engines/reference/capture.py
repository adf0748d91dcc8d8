"""What the embedded engine hands to adapters.capture: every verified block, with p and q where drafts were drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from adapters.capture import Blocks, Drawn, Recorder, Settings
from adapters.capture.layout import DRAWN, SAMPLED
from adapters.capture.recorder import describe_model, describe_tokenizer

if TYPE_CHECKING:
    from harness.engines.reference.engine import Draws, Engine, Request


class Capture:
    """The recorder of one engine. Called from the engine's thread alone."""

    def __init__(self, settings: Settings, engine: Engine, target: str, draft: str) -> None:
        telemetry = engine.telemetry
        default = telemetry.default_policy
        about: Mapping[str, Any] = {
            "engine": dict(telemetry.engine),
            "target": describe_model(target),
            "draft": describe_model(draft),
            "tokenizer": describe_tokenizer(target),
            "policy": None if default is None else default.to_json(),
            "logits": "raw",
            "temperature_applied": False,
        }
        self.recorder = Recorder(settings, "reference", engine.drafts, engine.target.vocabulary, about)
        telemetry.capture = self.recorder.describe()

    def enter(self, requests: Sequence[Request]) -> None:
        """Requests behind their prefill; one that its first token ended is over."""
        for request in requests:
            params = request.params
            request.captured = self.recorder.enter(
                request.rid,
                request.policy.key,
                asked=request.asked,
                greedy=params.greedy,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                max_new_tokens=params.max_new_tokens,
                prompt=request.prompt,
            )
            if request.finish is not None:
                self.recorder.end(request.captured, 0, 0)

    def step(
        self,
        running: Sequence[Request],
        committed: Sequence[tuple[int, int, int]],
        anchors: Tensor,
        drafts: Tensor,
        logits: Tensor,
        top: Tensor,
        draws: Draws | None,
    ) -> None:
        """A verified step behind its commit. committed: accepted drafts, bonus id and kept tokens of each request."""
        flags = [0 if request.generator is None else DRAWN | SAMPLED for request in running]
        drawn = None if draws is None else Drawn(draws.rows, draws.p, draws.q_rows, draws.eta)
        self.recorder.add(
            Blocks(
                requests=[request.captured for request in running],
                steps=[request.steps - 1 for request in running],
                positions=[r.length - kept for r, (_, _, kept) in zip(running, committed, strict=True)],
                flags=flags,
                temperatures=[1.0 if r.generator is None else r.params.temperature for r in running],
                anchors=anchors,
                drafts=drafts,
                logits=logits,
                top=top,
                length=[length for length, _, _ in committed],
                bonus=[bonus for _, bonus, _ in committed],
                drawn=drawn,
            )
        )
        for request, (_, _, kept) in zip(running, committed, strict=True):
            if request.finish is not None:
                self.recorder.end(request.captured, request.steps, kept)

    def close(self) -> None:
        self.recorder.close()
