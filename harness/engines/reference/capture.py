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
        numbers: list[int] = []  # one loop: between two steps of a model nothing of this is in a cache
        steps: list[int] = []
        positions: list[int] = []
        flags: list[int] = []
        temperatures: list[float] = []
        lengths: list[int] = []
        bonuses: list[int] = []
        over = []
        for request, (length, bonus, kept) in zip(running, committed, strict=True):
            greedy = request.generator is None
            numbers.append(request.captured)
            steps.append(request.steps - 1)
            positions.append(request.length - kept)
            flags.append(0 if greedy else DRAWN | SAMPLED)
            temperatures.append(1.0 if greedy else request.params.temperature)
            lengths.append(length)
            bonuses.append(bonus)
            if request.finish is not None:
                over.append((request, kept))
        drawn = None if draws is None else Drawn(draws.rows, draws.p, draws.q_rows, draws.eta)
        self.recorder.add(
            Blocks(
                numbers,
                steps,
                positions,
                flags,
                temperatures,
                anchors,
                drafts,
                logits,
                top,
                lengths,
                bonuses,
                None,
                drawn,
            )
        )
        for request, kept in over:
            self.recorder.end(request.captured, request.steps, kept)

    def close(self) -> None:
        self.recorder.close()
