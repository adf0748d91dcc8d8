"""LightLLM's HTTP API over an invented model: exact, instant and repeatable, armed as the adapter's account would be.

The answer to a prompt is a function of its ids; a policy with a budget changes the last id of some. With a prompt
cache a prompt asked again has no prefill: its first id is a verify step's. FAKE_FAULT=b0: an empty budget changes ids.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import threading
from pathlib import Path

import lightllm
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapters.lightllm import exchange, seams
from adapters.policy import ENVIRONMENT, Policy
from adapters.telemetry import Telemetry

K = 7


class Fake:
    def __init__(self, start: argparse.Namespace) -> None:
        self.start, self.cached, self.lock = start, set(), threading.Lock()
        self.fault = os.environ.get("FAKE_FAULT", "none")
        self.policy = Policy.from_environment() if os.environ.get(ENVIRONMENT) else None
        if self.policy is None:
            return
        folder, version = Path(os.environ[exchange.FOLDER]), seams.engine_version(seams.root_of(lightllm))
        self.telemetry = Telemetry("lightllm", "lightllm", version, self.policy)
        self.telemetry.armed = True
        self.journal = exchange.Journal(folder, 0)
        exchange.Responder(folder, 0, 1, self.telemetry.snapshot).start()

    async def generate(self, request: Request) -> Response:
        asked = await request.json()
        with self.lock:
            return JSONResponse(self.answer(asked["inputs"], asked["parameters"]))

    def answer(self, prompt: list[int], parameters: dict) -> dict:
        sampled = parameters["do_sample"]
        digest = hashlib.sha256(f"{prompt}{parameters['seed'] if sampled else ''}".encode()).digest()
        wanted = 8 + digest[0] % 24
        length = min(wanted, parameters["max_new_tokens"])
        ids = [5 + byte % 20 for byte in (digest * 2)[:length]]
        known = not self.start.disable_dynamic_prompt_cache and tuple(prompt) in self.cached
        self.cached.add(tuple(prompt))
        steps = -(-(length - (not known)) // 4)
        accepted = max(0, length - (not known) - steps)
        relaxed = 0
        if self.policy is not None and self.policy.rule == "asd" and not sampled:
            budget = not self.policy.is_strict
            relaxed = int(budget and accepted > 0 and digest[1] % 2)
            ids[-1] += relaxed + (known and relaxed) or (self.fault == "b0" and not budget)  # its steps lie elsewhere
        if self.policy is not None:
            self.count(parameters["seed"], sampled, steps, accepted, relaxed, length - (not known))
        totals = {
            "prompt_cache_len": len(prompt) - 1 if known else 0,
            "mtp_accepted_token_num": accepted,
            "mtp_verify_token_num": (K + 1) * (steps + 1),  # the step in flight at the end
            "mtp_verify_step_num": steps + 1,
        }
        return {
            "tokens": [{"id": i, "logprob": -0.1} | totals for i in ids],
            "count_output_tokens": length,
            "prompt_tokens": len(prompt),
            "finish_reason": "stop" if length == wanted else "length",
        }

    def count(self, tag: int, sampled: bool, steps: int, accepted: int, relaxed: int, committed: int) -> None:
        lengths = [accepted // steps + (n < accepted % steps) for n in range(steps)] if steps else []
        detail = {
            "blocks": steps,
            "drafts_verified": K * steps,
            "strict_accepted": accepted - relaxed,
            "relaxed": relaxed,
            "regret_charged": 0.25 * relaxed,
            "committed_tokens": committed,
        }
        own, serving = self.telemetry.of(self.policy), self.telemetry.of("strict" if sampled else self.policy)
        own.requests += 1
        if sampled:
            own.fall_back("sampled request")
        for name, value in detail.items():
            setattr(serving, name, getattr(serving, name) + value)
        histogram = [lengths.count(n) for n in range(max(lengths, default=-1) + 1)]
        told = {"accepted": accepted, "budget_exhausted": 0, "histogram": histogram, "step_lengths": lengths}
        key = "strict" if sampled else self.policy.key
        self.journal.write({"tag": tag, "policy": key} | detail | told)

    async def info(self, request: Request) -> Response:
        own = vars(self.start)
        return JSONResponse(own | {"mtp_draft_model_dir": [own["mtp_draft_model_dir"]]})

    async def health(self, request: Request) -> Response:
        return Response()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model_dir", "mtp_mode", "mtp_draft_model_dir", "host", "model_name", "data_type"):
        parser.add_argument(f"--{name}")
    for name in ("mtp_step", "tp", "port", "running_max_req_size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--disable_dynamic_prompt_cache", action="store_true")
    start, _ = parser.parse_known_args()
    if start.model_name is None:
        start.model_name = "default_model_name"
    fake = Fake(start)
    routes = [
        Route("/generate", fake.generate, methods=["POST"]),
        Route("/get_server_info", fake.info),
        Route("/health", fake.health),
    ]
    print(f"fake LightLLM, armed: {fake.policy is not None}", file=sys.stderr, flush=True)
    uvicorn.run(Starlette(routes=routes), host=start.host, port=start.port, log_level="warning")


if __name__ == "__main__":
    main()
