"""An engine for tests: SGLang's native HTTP subset over an invented model that is exact, instant and repeatable.

The answer to a prompt is a function of its ids. A policy with a budget changes the last id of some answers and says so.
FAKE_FAULT names one way to misbehave (FAULTS); FAKE_AFTER: only from that many generations on. FAKE_TICKS: a pipe that
gets a byte per generation, and ends with the process.

Run as a module it takes the command line of the reference engine.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import socket

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from adapters.policy import Policy, PolicyError
from adapters.telemetry import Telemetry

K = 7
FAULTS = (
    "none",
    "usage",  # completion_tokens is not the number of ids
    "http",  # status 500
    "hang",  # never answers
    "drip",  # a byte now and then
    "truncated",  # the body ends early
    "garbled",  # a body that is no JSON
    "aborted",  # finish reason abort
    "die",  # the process exits
    "frozen",  # counters do not move
    "overcount",  # counters move by more than the answers say
    "nonce",  # another launch's nonce
    "unarmed",  # no adapter
    "model",  # another model
    "files",  # another adapter
    "drafts",  # no drafts verified
    "b0",  # an empty budget changes ids
    "lenient",  # strict relaxes
    "inert",  # a budget never changes anything
    "fallback",  # served by another rule
    "cached",  # the prefix cache is on
    "slow",  # 20 ms an answer
    "flaky",  # one 500 in the middle
    "never-ready",  # /health is never green
    "stubborn",  # ignores SIGTERM, and so does its worker
    "restless",  # the same greedy request, other ids
)


class Fake:
    def __init__(self, model: str, draft: str, fault: str = "none", after: int = 0) -> None:
        assert fault in FAULTS, fault
        self.model, self.draft, self.wanted, self.after = model, draft, fault, after
        self.telemetry = Telemetry("reference", "fake", "1", Policy.from_environment())
        self.telemetry.armed = True
        self.count = 0
        self.ticks = os.open(os.environ["FAKE_TICKS"], os.O_WRONLY) if "FAKE_TICKS" in os.environ else None

    def fault(self, name: str) -> bool:
        return self.wanted == name and self.count > self.after

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        single = isinstance(body["input_ids"][0], int)
        prompts = [body["input_ids"]] if single else body["input_ids"]
        params = body["sampling_params"] if isinstance(body["sampling_params"], list) else [body["sampling_params"]]
        try:
            answers = [self.answer(ids, each) for ids, each in zip(prompts, params, strict=True)]
        except PolicyError as error:
            return JSONResponse({"error": {"message": f"sampling_params.custom_params.specaccept: {error}"}}, 400)
        if self.fault("hang"):
            await asyncio.sleep(3600)
        if self.fault("slow"):
            await asyncio.sleep(0.02)
        if self.fault("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault("http") or (self.wanted == "flaky" and self.count == self.after + 1):
            return JSONResponse({"error": {"message": "no memory left"}}, 500)
        content = json.dumps(answers[0] if single else answers).encode()
        if self.fault("garbled"):
            return Response(content[:-5], media_type="application/json")
        if self.fault("truncated"):
            return StreamingResponse(self.part(content), headers={"content-length": str(len(content))})
        if self.fault("drip"):
            return StreamingResponse(self.drip(content), headers={"content-length": str(len(content))})
        return Response(content, media_type="application/json")

    async def part(self, content: bytes):
        yield content[: len(content) // 2]
        raise ConnectionError("cut")

    async def drip(self, content: bytes):
        for byte in content:
            yield bytes([byte])
            await asyncio.sleep(0.05)

    def answer(self, prompt: list[int], params: dict) -> dict:
        self.count += 1
        if self.ticks is not None:
            os.write(self.ticks, b".")
        custom = params.get("custom_params") or {}
        policy = Policy.from_json(custom.get("specaccept", {"rule": "strict"}))
        seed = f"{prompt}{params.get('sampling_seed')}" + (str(self.count) if self.fault("restless") else "")
        digest = hashlib.sha256(seed.encode()).digest()
        wanted = 8 + digest[0] % 24
        length = min(wanted, params["max_new_tokens"])
        ids = [5 + byte % 20 for byte in (digest * 2)[:length]]
        relaxed = 0
        strict = policy.is_strict or policy.rule != "asd"
        if (not strict and digest[1] % 2 and not self.fault("inert")) or (
            policy.rule == "strict" and self.fault("lenient")
        ):
            ids[-1] += 1
            relaxed = 1
        if policy.rule == "asd" and policy.budget == 0 and self.fault("b0"):
            ids[-1] += 1
        steps = -(-length // 4)
        proposed = 0 if self.fault("drafts") else K * steps
        accepted = min(length - steps, proposed)
        if not self.fault("frozen"):
            counters = self.telemetry.of(policy)
            counters.requests += 1
            counters.blocks += steps + self.fault("overcount")
            counters.drafts_verified += proposed
            counters.relaxed += relaxed
            counters.committed_tokens += length
            if self.fault("fallback"):
                counters.fall_back("sampled request")
        finish = {"type": "stop", "matched": ids[-1]} if length == wanted else {"type": "length", "length": length}
        if self.fault("aborted"):
            finish = {"type": "abort", "message": "out of slots"}
        own = {"policy": policy.key, "relaxed": relaxed, "regret": 0.5 * relaxed, "spent": 0.5 * relaxed}
        if custom.get("specaccept_first_rejections"):
            own["first_rejections"] = [[0.25 * (1 + digest[i] % 8), i % K, K] for i in range(steps)]
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": "0",
                "finish_reason": finish,
                "prompt_tokens": len(prompt),
                "completion_tokens": length + self.fault("usage"),
                "cached_tokens": 4 if self.fault("cached") else 0,
                "spec_verify_ct": steps,
                "spec_num_proposed_drafts": proposed,
                "spec_num_correct_drafts": accepted,
                "spec_correct_drafts_histogram": [0, 0, 0, steps],
                "specaccept": own,
                "e2e_latency": 0.001,
            },
        }

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self.wanted == "never-ready" else 200)

    async def info(self, request: Request) -> Response:
        snapshot = self.telemetry.snapshot()
        if self.wanted == "nonce":
            snapshot["nonce"] = "another"
        if self.wanted == "files":
            snapshot["files"] = snapshot["files"] | {"adapters/policy.py": "0" * 64}
        described = {
            "version": "1",
            "model_path": "another" if self.wanted == "model" else self.model,
            "speculative_draft_model_path": self.draft,
            "max_running_requests": 16,
        }
        return JSONResponse(described if self.wanted == "unarmed" else described | {"specaccept": snapshot})

    async def flush(self, request: Request) -> Response:
        return Response()

    def app(self) -> Starlette:
        routes = [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/health", self.health),
            Route("/server_info", self.info),
            Route("/flush_cache", self.flush, methods=["POST"]),
        ]
        return Starlette(routes=routes)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in (
        "model-path",
        "draft-path",
        "host",
        "port",
        "dtype",
        "device",
        "max-running-requests",
        "threads",
        "seed",
    ):
        parser.add_argument(f"--{name}")
    arguments = parser.parse_args()
    if os.environ.get("FAKE_FAULT") == "refuse":
        raise SystemExit("fake: draft: expected a folder, found nothing")
    if os.environ.get("FAKE_FAULT") == "stubborn":  # outlives SIGTERM, and leaves a worker
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            signal.pause()
    fake = Fake(
        arguments.model_path,
        arguments.draft_path,
        os.environ.get("FAKE_FAULT", "none"),
        int(os.environ.get("FAKE_AFTER", "0")),
    )
    # With proto 0 asyncio leaves Nagle on, and every answer waits 40 ms for an acknowledgement.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind((arguments.host, int(arguments.port)))
        listener.listen()  # before the line that invites connections
        print(f"fake engine ready on http://{arguments.host}:{listener.getsockname()[1]}", flush=True)
        server = uvicorn.Server(uvicorn.Config(fake.app(), log_level="warning"))
        if fake.wanted == "stubborn":
            server.handle_exit = lambda number, frame: None
        server.run(sockets=[listener])


if __name__ == "__main__":
    main()
