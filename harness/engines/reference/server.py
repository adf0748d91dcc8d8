"""SGLang's native HTTP subset over one Engine: /generate, /health, /server_info, /flush_cache, /abort_request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
import uuid
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from adapters import __version__
from harness.engines.reference.engine import Engine, Request
from harness.engines.reference.loading import Options
from harness.engines.reference.sampling import RequestError, Sampling, token_ids

FIELDS = {"input_ids", "rid", "stream", "sampling_params"}


async def read(http: HttpRequest) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestError."""
    try:
        body = json.loads(await http.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"body: expected JSON, found {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"body: expected a JSON object, found {type(body).__name__}")
    return body


def parse(body: dict[str, Any], engine: Engine) -> tuple[list[Request], bool, bool]:
    """The body of /generate -> requests, whether it was a list, whether to stream. Raises RequestError."""
    unknown = sorted(key for key in body.keys() - FIELDS if body[key] is not None)
    if unknown:
        raise RequestError(f"{unknown[0]}: this engine does not have it; it has {', '.join(sorted(FIELDS))}")
    vocabulary = engine.target.vocabulary
    ids = body.get("input_ids")
    many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    prompts: list[Any] = ids if isinstance(ids, list) and many else [ids]
    stream = body.get("stream") or False
    if not isinstance(stream, bool) or (stream and many):
        raise RequestError(f"stream: expected true or false, and false with a list of inputs, found {stream!r}")

    def spread(field: str) -> list[Any]:
        value = body.get(field)
        if not (many and isinstance(value, list)):
            return [value] * len(prompts)
        if len(value) != len(prompts):
            raise RequestError(f"{field}: expected one entry per input ({len(prompts)}), found {len(value)}")
        return value

    rids, params = spread("rid"), spread("sampling_params")
    requests = []
    for index, (prompt, rid, raw) in enumerate(zip(prompts, rids, params, strict=True)):
        where = f"input_ids[{index}]" if many else "input_ids"
        prompt = token_ids(where, prompt, vocabulary)
        if not prompt:
            raise RequestError(f"{where}: expected at least one id, found none")
        if rid is not None and (not isinstance(rid, str) or (many and isinstance(body["rid"], str))):
            raise RequestError(f"rid: expected a string per input, found {body['rid']!r}")
        if rid is not None and not (rid.isprintable() and len(rid) <= 256):
            raise RequestError(f"rid: expected at most 256 printable characters, found {rid[:256]!r}")
        sampling = Sampling.from_json({} if raw is None else raw, vocabulary)
        total = len(prompt) + sampling.max_new_tokens
        if total > engine.limit:
            raise RequestError(
                f"sampling_params.max_new_tokens: expected {where} + max_new_tokens <= {engine.limit} "
                f"(max_total_tokens), found {len(prompt)} + {sampling.max_new_tokens}"
            )
        requests.append(Request(rid or uuid.uuid4().hex, prompt, sampling))
    return requests, many, stream


class Service:
    def __init__(self, engine: Engine, tokenizer: Any, options: Options) -> None:
        self.engine, self.tokenizer, self.options = engine, tokenizer, options
        self.live: dict[str, Request] = {}
        self.app = Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/abort_request", self.abort_request, methods=["POST"]),
                Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
                Route("/health", self.health),
                Route("/server_info", self.server_info),
                Route("/get_server_info", self.server_info),
            ]
        )

    def answer(self, request: Request) -> dict[str, Any]:
        """The response body of a request as it stands; the id that ended it is no part of the text."""
        ids = request.output
        shown = ids[:-1] if request.finish is not None and request.finish["type"] == "stop" else ids
        text = None if self.tokenizer is None else self.tokenizer.decode(shown, skip_special_tokens=True)
        return {"text": text, "output_ids": list(ids), "meta_info": request.meta(self.engine.drafts)}

    async def generate(self, http: HttpRequest) -> Response:
        try:
            requests, many, stream = parse(await read(http), self.engine)
        except RequestError as error:
            return failure(400, str(error))
        twice = [request.rid for request in requests if request.rid in self.live]
        if twice or len({request.rid for request in requests}) < len(requests):
            return failure(400, f"rid: expected ids not in use, found {(twice or [requests[0].rid])[0]!r} twice")
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        changes: asyncio.Queue[None] = asyncio.Queue()
        left = len(requests)

        def arrived(ended: bool) -> None:
            nonlocal left
            left -= ended
            if stream:
                changes.put_nowait(None)
            if not left:
                done.set()

        def on_change(request: Request) -> None:
            if stream or request.finish is not None:
                with contextlib.suppress(RuntimeError):  # the event loop has gone: nobody is left to tell
                    loop.call_soon_threadsafe(arrived, request.finish is not None)

        for request in requests:
            request.on_change = on_change
            self.live[request.rid] = request
        self.engine.submit(requests)
        if stream:
            return StreamingResponse(self.events(requests[0], changes), media_type="text/event-stream")
        try:
            await self.wait(http, done)
        finally:
            self.release(requests)
        if not done.is_set():
            return Response(status_code=499)
        broken = next((r.finish for r in requests if r.finish and r.finish["type"] == "abort"), None)
        if broken is not None and not many:
            return failure(503 if self.engine.failure else 500, broken["message"])
        answers = [self.answer(request) for request in requests]
        return JSONResponse(answers if many else answers[0])

    async def wait(self, http: HttpRequest, done: asyncio.Event) -> None:
        """Until all requests ended, or the client went away."""

        async def gone() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(done.wait()), asyncio.create_task(gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def events(self, request: Request, changes: asyncio.Queue[None]) -> AsyncIterator[str]:
        """SSE, cumulative as SGLang's: every event repeats the ids so far."""
        try:
            while True:
                await changes.get()
                while not changes.empty():
                    changes.get_nowait()
                finish = request.finish
                yield f"data: {json.dumps(self.answer(request))}\n\n"
                if finish is not None:
                    yield "data: [DONE]\n\n"
                    return
        finally:
            self.release([request])

    def release(self, requests: list[Request]) -> None:
        """Forget requests; what still runs of them is aborted."""
        self.engine.abort(request for request in requests if request.finish is None)
        for request in requests:
            self.live.pop(request.rid, None)

    async def abort_request(self, http: HttpRequest) -> Response:
        try:
            rid = (await read(http)).get("rid")
        except RequestError as error:
            return failure(400, str(error))
        if not isinstance(rid, str) or rid not in self.live:
            return failure(400, f"rid: expected a request that is running, found {rid!r}")
        self.engine.abort([self.live[rid]])
        return Response()

    async def flush_cache(self, _: HttpRequest) -> Response:
        return Response("No prompt is cached between requests.\n", media_type="text/plain")

    async def health(self, _: HttpRequest) -> Response:
        return failure(503, self.engine.failure) if self.engine.failure else Response()

    async def server_info(self, _: HttpRequest) -> Response:
        engine, options = self.engine, self.options
        return JSONResponse(
            {
                "version": __version__,
                "model_path": options.target,
                "speculative_draft_model_path": options.draft,
                "speculative_algorithm": "DSPARK",
                "speculative_num_draft_tokens": engine.drafts + 1,
                "dtype": options.dtype,
                "device": options.device,
                "max_running_requests": engine.slots,
                "max_total_tokens": engine.limit,
                "random_seed": engine.seed,
                "deterministic": options.deterministic,
                "threads": torch.get_num_threads(),
                "specaccept": engine.telemetry.snapshot(),
            }
        )


def failure(status: int, message: str | None) -> Response:
    # ASCII: a message may quote what no UTF-8 can carry.
    return Response(json.dumps({"error": {"message": message}}), status_code=status, media_type="application/json")


class _Server(uvicorn.Server):
    """uvicorn raises a caught signal again once it has shut down; here a signal is a clean end."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


def serve(engine: Engine, tokenizer: Any, options: Options, host: str, port: int) -> int:
    """Serve until SIGTERM or SIGINT (-> 0) or until the engine fails (-> 1). Port 0: a free one."""
    service = Service(engine, tokenizer, options)
    # asyncio turns Nagle's algorithm off (40 ms an answer) only where the protocol is named.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    server = _Server(uvicorn.Config(service.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5))

    def run() -> None:
        try:
            engine.run()
        finally:
            server.should_exit = True

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, engine.stop)
        print(f"specaccept reference engine ready on http://{host}:{listener.getsockname()[1]}", flush=True)
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=run, name="engine")
    thread.start()
    try:
        asyncio.run(main())
    finally:
        engine.stop()
        thread.join()
    return 1 if engine.failure else 0
