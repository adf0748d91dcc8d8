"""An engine whose service times are known: `python -m harness.load.mock`. Prints `ready on http://127.0.0.1:PORT`.

It speaks as much of SGLang's native API as the harness and sglang.bench_serving ask for. A request for n tokens is
answered `BASE_S + n * TOKEN_S` seconds after its last byte came, by one process that does nothing else: answers of one
length are made once. GET /truth: of each answered request its arrival and departure (CLOCK_MONOTONIC, which all
processes of a machine share) and its tokens; then, and at POST /flush_cache, it forgets them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from functools import lru_cache

BASE_S, TOKEN_S = 0.05, 0.004
LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
IDS = 4  # of a prompt, where one is told by text


@lru_cache(maxsize=4096)
def answer(prompt: int, tokens: int, stream: bool) -> bytes:
    """The whole HTTP response."""
    steps = -(-tokens // 4)
    meta = {
        "id": "0",
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "spec_verify_ct": steps,
        "spec_num_proposed_drafts": 7 * steps,
        "spec_num_correct_drafts": tokens - steps,
        "spec_correct_drafts_histogram": [],
        "specaccept": {"policy": "strict", "relaxed": 0, "regret": 0.0, "spent": 0.0},
        "e2e_latency": service_s(tokens),
    }
    body = json.dumps({"text": "x " * tokens, "output_ids": [5] * tokens, "meta_info": meta}).encode()
    if stream:
        body = b"data: " + body + b"\n\ndata: [DONE]\n\n"
    return _response(body, b"text/event-stream" if stream else b"application/json")


def service_s(tokens: int) -> float:
    return BASE_S + tokens * TOKEN_S


def _response(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
    return head + body


class Mock(asyncio.Protocol):
    """One connection, one request at a time, as HTTP/1.1 without pipelining has it."""

    truth: list[tuple[float, float, int]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.received = transport, b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not found or len(body) < (int(length.group(1)) if length else 0):
            return
        arrived, self.received = time.monotonic(), b""
        path = head.split(b" ", 2)[1]
        if path == b"/generate":
            asked = json.loads(body)
            tokens = asked["sampling_params"]["max_new_tokens"]
            prompt = len(asked["input_ids"]) if "input_ids" in asked else IDS
            loop = asyncio.get_running_loop()
            content = answer(prompt, tokens, bool(asked.get("stream")))
            loop.call_at(loop.time() + service_s(tokens), self.leave, arrived, tokens, content)
        elif path == b"/truth":
            content, Mock.truth = _response(json.dumps(Mock.truth).encode()), []
            self.transport.write(content)
        elif path in (b"/server_info", b"/get_server_info", b"/model_info", b"/get_model_info"):
            told = {"version": "mock", "model_path": "mock", "tokenizer_path": "mock", "internal_states": [{}]}
            self.transport.write(_response(json.dumps(told).encode()))
        elif path == b"/flush_cache":
            Mock.truth = []
            self.transport.write(_response(b"{}"))
        else:
            self.transport.write(_response(b"{}"))

    def leave(self, arrived: float, tokens: int, content: bytes) -> None:
        Mock.truth.append((arrived, time.monotonic(), tokens))
        self.transport.write(content)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Mock, "127.0.0.1", port, backlog=1024)
    print(f"ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
