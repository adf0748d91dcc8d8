"""Client of LightLLM's own HTTP API, and of the adapter's files beside it (adapters/lightllm/exchange.py).

LightLLM serves one policy per server and says nothing about a request's verification that ends with the request. So a
request carries a seed (greedy decoding ignores it) as its tag, and the adapter's record under that tag says the rest.
Of an unarmed server the engine's own mtp_* totals are all there is: they run past the end of a request, by the rest of
its last block and the step in flight. `do_sample` is always explicit: LightLLM takes its default from the model's
generation_config.json.
"""

from __future__ import annotations

import importlib.util
import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.lightllm import exchange, seams, unsupported_rule
from adapters.policy import Policy
from harness.engines import fields
from harness.engines.base import EngineError, Generation, Request, Server, Snapshot
from harness.engines.native import SNAPSHOT_SCHEMA, NativeClient, typed

RECORD_TIMEOUT_S = 5.0
FINISHED = ("stop", "length")
NO_NAME = "default_model_name"  # LightLLM's model_name where none was given


class LightLLMClient(NativeClient):
    """Synchronous, usable from several threads. telemetry: the server's SPECACCEPT_TELEMETRY_DIR; None: not armed.

    What an unarmed server is asked carries no policy; one that is asked for is an identity error.
    """

    def __init__(self, url: str, telemetry: Path | str | None, control_timeout_s: float = 30.0) -> None:
        super().__init__(url, control_timeout_s, unarmed=telemetry is None)
        self.telemetry = Path(telemetry) if telemetry is not None else None
        self._records = exchange.Follower(self.telemetry) if self.telemetry is not None else None
        self._tags = itertools.count(secrets.randbits(40) << 20)
        self._policy: Policy | None = None
        self._once = threading.Lock()

    def generate(self, request: Request) -> Generation:
        self._check_policy(request)
        own = request.seed if request.temperature > 0 else None
        tag = next(self._tags) if own is None else own
        started = time.monotonic()
        answer = self._post("/generate", body(request, tag), request.deadline_s)
        wall = time.monotonic() - started
        if self._records is None:
            return generation(answer, None, request, started, wall)
        try:
            record = self._records.take(tag, RECORD_TIMEOUT_S)
        except exchange.NoAnswer as error:
            raise EngineError("identity", f"/generate {request.rid}: {error}") from None
        return generation(answer, record, request, started, wall)

    def generate_many(self, requests: Sequence[Request]) -> list[Generation]:
        """All at once, each on a connection of its own: the server orders them as they arrive."""
        if not requests:
            return []
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.generate, requests))

    def server(self) -> Server:
        info = self._get("/get_server_info")
        if not isinstance(info, dict):
            raise EngineError("garbled", f"/get_server_info: expected an object, found {type(info).__name__}")
        snapshot = None if self.unarmed else self._snapshot()
        version = installed_version() if snapshot is None else snapshot.raw["engine"].get("version")
        name = info.get("model_name")
        drafts = info.get("mtp_draft_model_dir") or [None]
        draft = drafts[0] if isinstance(drafts, list) else drafts
        try:
            return Server(
                version=fields.text(version, "specaccept.engine.version"),
                target=fields.text(info.get("model_dir"), "model_dir"),
                draft=None if draft is None else fields.text(draft, "mtp_draft_model_dir"),
                max_running_requests=info.get("running_max_req_size"),
                snapshot=snapshot,
                nonce=snapshot.nonce if snapshot is not None else None if name == NO_NAME else name,
                info=info,
            )
        except ValueError as error:
            raise EngineError("garbled", f"/get_server_info: {error}") from None

    def flush(self) -> None:
        """Nothing to do without a prompt cache. LightLLM cannot drop one, so a server that has one is refused."""
        info = self._get("/get_server_info")
        if not info.get("disable_dynamic_prompt_cache"):
            raise EngineError("http", "flush: expected --disable_dynamic_prompt_cache, found a prompt cache")

    def _check_policy(self, request: Request) -> None:
        """A request may name the server's own policy, or none."""
        if self.unarmed:
            return self._refuse_policies([request])
        with self._once:
            if self._policy is None:
                self._policy = Policy.from_json(self._snapshot().raw["default_policy"])
        if request.policy is not None and request.policy.key != self._policy.key and request.temperature == 0:
            raise EngineError(
                "identity",
                f"{request.rid}: policy: expected this server's {self._policy.key}, found {request.policy.key}",
            )
        if request.policy is not None and (reason := unsupported_rule(request.policy.rule)):
            found = f"{request.policy.rule} is unsupported ({reason})"
            raise EngineError("identity", f"{request.rid}: policy: {found}")

    def _snapshot(self) -> Snapshot:
        assert self.telemetry is not None
        try:
            raw = exchange.ask(self.telemetry, self.control_timeout_s)
        except exchange.NoAnswer as error:
            raise EngineError("identity", f"{error} (not armed?)") from None
        if raw.get("schema") != SNAPSHOT_SCHEMA:
            raise EngineError("identity", f"specaccept.schema: expected {SNAPSHOT_SCHEMA}, found {raw.get('schema')!r}")
        return typed(raw, "the adapter's snapshot")


def installed_version() -> str:
    """Of the checkout that a server started here runs, which LightLLM does not say itself; empty: none here."""
    spec = importlib.util.find_spec("lightllm")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return ""  # without an origin: any folder of that name on the path, and no checkout
    return seams.engine_version(Path(next(iter(spec.submodule_search_locations))).resolve().parent)


def body(request: Request, tag: int) -> dict[str, Any]:
    """The JSON of /generate."""
    sampled = request.temperature > 0
    parameters: dict[str, Any] = {
        "do_sample": sampled,
        "max_new_tokens": request.max_new_tokens,
        "return_details": True,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": tag,
    }
    if request.ignore_eos:
        parameters["ignore_eos"] = True
    if sampled:
        parameters |= {"temperature": request.temperature, "top_p": 1.0, "top_k": -1}
    return {"inputs": list(request.input_ids), "parameters": parameters}


def recorded(record: dict[str, Any]) -> dict[str, Any]:
    """The part of an answer that the adapter's record tells."""
    regret = fields.number(record["regret_charged"], "regret_charged")
    return {
        "steps": fields.count(record["blocks"], "blocks"),
        "proposed": fields.count(record["drafts_verified"], "drafts_verified"),
        "accepted": fields.count(record["accepted"], "accepted"),
        "histogram": fields.counts(record["histogram"], "histogram"),
        "policy_key": fields.text(record["policy"], "policy"),
        "relaxed": fields.count(record["relaxed"], "relaxed"),
        "regret": regret,
        "spent": regret,
        "exhausted": fields.count(record["budget_exhausted"], "budget_exhausted"),
    }


def told(last: dict[str, Any]) -> dict[str, Any]:
    """The same by the engine's own totals, as the last token has them: the step in flight at the end counts too."""
    steps = fields.count(last["mtp_verify_step_num"], "mtp_verify_step_num")
    verified = fields.count(last["mtp_verify_token_num"], "mtp_verify_token_num")
    return {
        "steps": steps,
        "proposed": fields.count(verified - steps, "mtp_verify_token_num - mtp_verify_step_num"),
        "accepted": fields.count(last["mtp_accepted_token_num"], "mtp_accepted_token_num"),
        "histogram": [],
        "policy_key": None,
        "relaxed": 0,
        "regret": 0.0,
        "spent": 0.0,
        "exhausted": 0,
    }


def generation(answer: Any, record: dict[str, Any] | None, request: Request, started: float, wall: float) -> Generation:
    """The answer and the adapter's record of it (None: not armed), checked against each other."""
    try:
        tokens = answer["tokens"]
        ids = fields.ids([token["id"] for token in tokens], "tokens.id")
        finish = fields.text(answer["finish_reason"], "finish_reason")
        usage = fields.count(answer["count_output_tokens"], "count_output_tokens")
        seen = fields.count(answer["prompt_tokens"], "prompt_tokens")
        made = Generation(
            output_ids=ids,
            finish=finish,
            prompt_tokens=seen,
            cached_tokens=fields.count(tokens[-1].get("prompt_cache_len") or 0, "prompt_cache_len") if tokens else 0,
            started_s=started,
            wall_s=wall,
            **(told(tokens[-1]) if record is None else recorded(record)),
        )
        committed = None if record is None else fields.count(record["committed_tokens"], "committed_tokens")
        if record is not None and len(ids) - 1 == committed:  # else the first id is a step's: the prompt was cached
            made = replace(made, step_lengths=fields.counts(record["step_lengths"], "step_lengths"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineError("garbled", f"/generate {request.rid}: {type(error).__name__}: {error}") from None
    if finish not in FINISHED:
        raise EngineError("aborted", f"/generate {request.rid}: finish reason {finish!r}")
    if len(ids) != usage or not ids:
        problem = f"{len(ids)} output ids, count_output_tokens says {usage}"
    elif len(ids) > request.max_new_tokens:
        problem = f"{len(ids)} output ids, max_new_tokens was {request.max_new_tokens}"
    elif seen != len(request.input_ids):
        problem = f"sent {len(request.input_ids)} prompt ids, prompt_tokens says {seen}"
    elif committed is not None and len(ids) - committed not in (0, 1):  # 1: the first id came from the prefill
        problem = f"{len(ids)} output ids, the adapter saw {committed} committed by verification"
    elif committed is None and made.accepted + made.steps < len(ids) - 1:
        problem = f"{len(ids)} output ids, the engine counted {made.steps} steps and {made.accepted} accepted drafts"
    else:
        return made
    raise EngineError("count", f"/generate {request.rid}: {problem}")
