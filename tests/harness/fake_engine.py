"""An engine for tests: SGLang's native HTTP subset over an invented model that is exact, instant and repeatable.

The answer to a prompt is a function of its ids. A policy with a budget changes the last id of some answers and says so.
FAKE_FAULT names one way to misbehave (FAULTS); FAKE_AFTER: only from that many generations on. FAKE_TICKS: a pipe that
gets a byte per generation, and ends with the process. FAKE_UNARMED: there is no adapter, and nobody asks for one.
FAKE_ROAMS: it sets its own affinity, to every core there is.

Run as a module it takes the command line of the reference engine.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from adapters.policy import Policy, PolicyError
from adapters.telemetry import Telemetry

K = 7
FAULTS = {  # name: what the engine does
    "none": "nothing",
    "usage": "completion_tokens that is not the number of ids",
    "http": "status 500",
    "hang": "never answers",
    "drip": "a byte now and then",
    "truncated": "ends the body early",
    "garbled": "a body that is no JSON",
    "aborted": "finish reason abort",
    "die": "its process is killed",
    "frozen": "counters do not move",
    "overcount": "counters move by more than the answers say",
    "nonce": "another launch's nonce",
    "unarmed": "has no adapter",
    "model": "another model",
    "files": "another adapter",
    "drafts": "verifies no drafts",
    "b0": "an empty budget changes ids",
    "lenient": "strict relaxes",
    "inert": "a budget never changes anything",
    "fallback": "serves another rule",
    "cached": "its prefix cache is on",
    "slow": "takes 20 ms more for an answer",
    "flaky": "one 500 in the middle",
    "never-ready": "/health is never green",
    "stubborn": "ignores SIGTERM, and so does its worker",
    "restless": "the same greedy request, other ids",
    "silent": "a budget says that it relaxed, and changes no id",
    "unasked": "a budget changes ids, and says that it relaxed nothing",
    "overspent": "a request spends more than its budget",
    "greedy": "more relaxed drafts than the policy allows",
    "uncharged": "the counter of regret does not move",
    "uncommitted": "the counter of committed tokens does not move",
    "overaccepted": "the counters accept more drafts than the answers",
    "impossible": "more ids than drafts and steps can make",
    "histogram": "steps by accepted drafts do not add up",
    "wide": "more drafts in a step than a block has",
    "clock": "says it took longer than the client waited",
    "stray-id": "an id outside the vocabulary",
    "negative-id": "an id below 0",
    "huge-id": "an id no int32 holds",
    "real-id": "an id that is 7.0",
    "nan": "a regret that is NaN",
    "late": "e2e_latency as text",
    "text-count": "a number of steps as text",
    "text-counter": "a counter as text",
    "swap": "in the middle another target",
    "swap-draft": "in the middle another draft",
    "no-draft": "says it has no draft",
    "other-draft": "another draft",
    "chunks": "sends the body in pieces of 7 bytes, several ids or half of one in each",
    "no-usage": "leaves completion_tokens out",
    "no-ids": "answers without an id",
    "empty": "status 200 and no body",
    "cut": "closes the connection in the middle of a body of unknown length",
    "restart": "is another process from then on: a new nonce, counters from 0",
    "forgets": "counters from 0 in the middle, the same nonce",
    "double": "answers a request twice, and counts both",
}
SPOILT: dict[str, Callable[[dict], object]] = {  # what a fault does to a finished answer
    "stray-id": lambda answer: answer["output_ids"].__setitem__(0, 100_000),
    "negative-id": lambda answer: answer["output_ids"].__setitem__(0, -1),
    "huge-id": lambda answer: answer["output_ids"].__setitem__(0, 2**70),
    "real-id": lambda answer: answer["output_ids"].__setitem__(0, 7.0),
    "nan": lambda answer: answer["meta_info"]["specaccept"].update(regret=math.nan),
    "no-usage": lambda answer: answer["meta_info"].pop("completion_tokens"),
    "no-ids": lambda answer: (answer["output_ids"].clear(), answer["meta_info"].update(completion_tokens=0)),
    "late": lambda answer: answer["meta_info"].update(e2e_latency="soon"),
    "text-count": lambda answer: answer["meta_info"].update(spec_verify_ct="3"),
    "clock": lambda answer: answer["meta_info"].update(e2e_latency=1000.0),
    "histogram": lambda answer: answer["meta_info"]["spec_correct_drafts_histogram"].append(1),
}


class Fake:
    def __init__(self, model: str, draft: str, fault: str = "none", after: int = 0) -> None:
        assert fault in FAULTS, fault
        self.model, self.draft, self.wanted, self.after = model, draft, fault, after
        self.telemetry = Telemetry("reference", "fake", "1", Policy.from_environment())
        self.telemetry.armed = True
        self.count, self.again = 0, False
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
        if (self.fault("restart") or self.fault("forgets")) and not self.again:
            self.again = True
            self.telemetry.counters.clear()
        if self.fault("hang"):
            await asyncio.sleep(3600)
        if self.fault("slow"):
            await asyncio.sleep(0.02)
        if self.fault("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault("http") or (self.wanted == "flaky" and self.count == self.after + 1):
            return JSONResponse({"error": {"message": "no memory left"}}, 500)
        content = json.dumps(answers[0] if single else answers).encode()
        if self.fault("double"):
            self.answer(prompts[0], params[0])
        if self.fault("empty"):
            return Response(b"", media_type="application/json")
        if self.fault("chunks"):
            return StreamingResponse(self.pieces(content), media_type="application/json")
        if self.fault("cut"):
            return StreamingResponse(self.part(content), media_type="application/json")
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

    async def pieces(self, content: bytes):
        for start in range(0, len(content), 7):
            yield content[start : start + 7]

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
        if params.get("ignore_eos"):
            wanted = 1 + params["max_new_tokens"]  # its end comes later
        length = min(wanted, params["max_new_tokens"])
        ids = [5 + byte % 20 for byte in (digest * 2)[:length]]
        steps, proposed, accepted, histogram = self.drafted(length)
        budget = policy.rule == "asd" and not policy.is_strict
        asked = (budget and digest[1] % 2 and not self.fault("inert")) or (
            policy.rule == "strict" and self.fault("lenient")
        )
        relaxed = 1 if asked and accepted else 0
        ids[-1] += relaxed and not self.fault("silent")
        if policy.rule == "asd" and policy.is_strict and self.fault("b0"):
            ids[-1] += 1
        relaxed = 0 if self.fault("unasked") else accepted if relaxed and self.fault("greedy") else relaxed
        regret = 0.25 * bool(relaxed) + (policy.budget if relaxed and self.fault("overspent") else 0)
        if not self.fault("frozen"):
            counters = self.telemetry.of(policy)
            counters.requests += 1
            counters.blocks += steps + self.fault("overcount")
            counters.drafts_verified += proposed
            counters.strict_accepted += accepted - relaxed + self.fault("overaccepted")
            counters.relaxed += relaxed
            counters.regret_charged += 0 if self.fault("uncharged") else regret
            counters.committed_tokens += 0 if self.fault("uncommitted") else length
            if self.fault("fallback"):
                counters.fall_back("sampled request")
        finish = {"type": "stop", "matched": ids[-1]} if length == wanted else {"type": "length", "length": length}
        if self.fault("aborted"):
            finish = {"type": "abort", "message": "out of slots"}
        own = {"policy": policy.key, "relaxed": relaxed, "regret": regret, "spent": regret}
        if custom.get("specaccept_first_rejections"):
            own["first_rejections"] = [[0.25 * (1 + digest[i] % 8), i % K, K] for i in range(steps)]
        answer = {
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
                "spec_correct_drafts_histogram": histogram,
                "specaccept": own,
                "e2e_latency": 0.0,
            },
        }
        if "FAKE_UNARMED" in os.environ:
            del answer["meta_info"]["specaccept"]
        if self.wanted in SPOILT and self.fault(self.wanted):
            SPOILT[self.wanted](answer)
        return answer

    def drafted(self, length: int) -> tuple[int, int, int, list[int]]:
        """Verify steps, drafts verified and accepted, and the steps by accepted drafts, of an answer of length ids."""
        steps = length if self.fault("drafts") else 1 if self.fault("impossible") else -(-length // 4)
        proposed = 0 if self.fault("drafts") else K * steps
        accepted = min(length - steps, 3 * steps)
        histogram = [0] * (K + 1)
        for step in range(steps):
            histogram[accepted // steps + (step < accepted % steps)] += 1
        if self.fault("wide"):
            histogram = [steps - 1, *[0] * K, 1]
            accepted = K + 1
        return steps, proposed, accepted, histogram

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self.wanted == "never-ready" else 200)

    async def info(self, request: Request) -> Response:
        snapshot = self.telemetry.snapshot()
        if self.wanted == "nonce" or (self.wanted == "restart" and self.again):
            snapshot["nonce"] = "another"
        if self.wanted == "files":
            snapshot["files"] = snapshot["files"] | {"adapters/policy.py": "0" * 64}
        if self.fault("text-counter"):
            snapshot["counters"] = {key: counters | {"blocks": "12"} for key, counters in snapshot["counters"].items()}
        described = {
            "version": "1",
            "model_path": "another" if self.wanted == "model" or self.fault("swap") else self.model,
            "speculative_draft_model_path": self.reported_draft(),
            "max_running_requests": 16,
        }
        bare = self.wanted == "unarmed" or "FAKE_UNARMED" in os.environ
        return JSONResponse(described if bare else described | {"specaccept": snapshot})

    def reported_draft(self) -> str | None:
        if self.wanted == "no-draft":
            return None
        return "another" if self.wanted == "other-draft" or self.fault("swap-draft") else self.draft

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
    if "FAKE_ROAMS" in os.environ:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
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
