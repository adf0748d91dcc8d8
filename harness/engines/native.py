"""Client of SGLang's native HTTP API, which the embedded reference engine serves too.

The one difference between them is where the policy snapshot lies in /server_info: `_published` knows both places.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from adapters.policy import CUSTOM_PARAM
from harness.engines import fields
from harness.engines.base import EngineError, Generation, Request, Server, Snapshot
from harness.engines.transport import Transport, TransportError

SNAPSHOT_SCHEMA = 1
NO_VERSION = "default"  # SGLang's weight_version where none was given


class NativeClient:
    """Synchronous, one connection per thread in use. control_timeout_s: of /health, /server_info and /flush_cache.

    unarmed: the engine without the adapter; a snapshot, or an answer under a policy, is then an identity error.
    """

    def __init__(self, url: str, control_timeout_s: float = 30.0, unarmed: bool = False) -> None:
        self.url = url.rstrip("/")
        self.control_timeout_s = control_timeout_s
        self.unarmed = unarmed
        self._http = Transport(self.url)

    def close(self) -> None:
        self._http.close()

    def generate(self, request: Request) -> Generation:
        self._refuse_policies([request])
        started = time.monotonic()
        body = self._post("/generate", _body([request])[0], request.deadline_s)
        return self._known(_generation(body, request, started, time.monotonic() - started))

    def generate_many(self, requests: Sequence[Request]) -> list[Generation]:
        if not requests:
            return []
        self._refuse_policies(requests)
        started = time.monotonic()
        bodies = _body(requests)
        merged = {"rid": [body["rid"] for body in bodies], "input_ids": [body["input_ids"] for body in bodies]}
        merged["sampling_params"] = [body["sampling_params"] for body in bodies]
        answer = self._post("/generate", merged, sum(request.deadline_s for request in requests))
        wall = time.monotonic() - started
        if not isinstance(answer, list) or len(answer) != len(requests):
            found = f"{len(answer)}" if isinstance(answer, list) else type(answer).__name__
            raise EngineError("garbled", f"/generate: expected a list of {len(requests)} answers, found {found}")
        pairs = zip(answer, requests, strict=True)
        return [self._known(_generation(body, request, started, wall)) for body, request in pairs]

    def _refuse_policies(self, requests: Sequence[Request]) -> None:
        if self.unarmed and (asked := [request.rid for request in requests if request.policy is not None]):
            raise EngineError("identity", f"{asked[0]}: policy: expected none of an unarmed engine, found one")

    def _known(self, answer: Generation) -> Generation:
        if self.unarmed and answer.policy_key is not None:
            found = f"meta_info.specaccept: expected none of an unarmed engine, found {answer.policy_key!r}"
            raise EngineError("identity", found)
        return answer

    def server(self) -> Server:
        info = self._get("/server_info")
        if not isinstance(info, dict):
            raise EngineError("garbled", f"/server_info: expected an object, found {type(info).__name__}")
        snapshot = self._own_snapshot(info)
        try:
            return Server(
                version=fields.text(info.get("version"), "version"),
                target=fields.text(info.get("model_path"), "model_path"),
                draft=_optional(fields.text, info, "speculative_draft_model_path"),
                max_running_requests=_optional(fields.count, info, "max_running_requests"),
                snapshot=snapshot,
                nonce=_nonce(info, snapshot),
                info=info,
            )
        except ValueError as error:
            raise EngineError("garbled", f"/server_info: {error}") from None

    def _own_snapshot(self, info: dict[str, Any]) -> Snapshot | None:
        found = _published(info)
        if not self.unarmed:
            return _snapshot(found)
        if found is not None:
            raise EngineError("identity", "/server_info: expected no snapshot of an unarmed engine, found one")
        return None

    def healthy(self) -> bool:
        try:
            return self._http.send("GET", "/health", None, self.control_timeout_s)[0] == 200
        except (TimeoutError, TransportError):
            return False

    def flush(self) -> None:
        self._post("/flush_cache", None, self.control_timeout_s, parse=False)

    def _get(self, path: str) -> Any:
        return self._send("GET", path, None, self.control_timeout_s, parse=True)

    def _post(self, path: str, body: Any, deadline_s: float, parse: bool = True) -> Any:
        return self._send("POST", path, body, deadline_s, parse)

    def _send(self, method: str, path: str, body: Any, deadline_s: float, parse: bool) -> Any:
        content = None if body is None else json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        try:
            status, answer = self._http.send(method, path, content, deadline_s)
        except TimeoutError:
            raise EngineError("timeout", f"{path}: no complete answer within {deadline_s:g} s") from None
        except TransportError as error:
            raise EngineError("connection", f"{path}: {error}") from None
        if status >= 400:
            text = answer.decode(errors="replace").strip()
            raise EngineError("http", f"{path}: status {status}: {text[:300]}")
        if not parse:
            return None
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            found = answer[:80]
            raise EngineError("garbled", f"{path}: expected JSON, found {found!r} ({error})") from None


def _body(requests: Sequence[Request]) -> list[dict[str, Any]]:
    bodies = []
    for request in requests:
        params: dict[str, Any] = {"temperature": request.temperature, "max_new_tokens": request.max_new_tokens}
        if request.temperature > 0 and request.seed is not None:
            params["sampling_seed"] = request.seed
        if request.ignore_eos:
            params["ignore_eos"] = True
        custom: dict[str, Any] = {}
        if request.policy is not None:
            custom[CUSTOM_PARAM] = request.policy.to_json()
        if request.first_rejections:
            custom[f"{CUSTOM_PARAM}_first_rejections"] = True
        if custom:
            params["custom_params"] = custom
        bodies.append({"rid": request.rid, "input_ids": list(request.input_ids), "sampling_params": params})
    return bodies


def _generation(body: Any, request: Request, started: float, wall: float) -> Generation:
    """The answer, checked: a missing field or an id count that differs from the usage is an error."""
    try:
        meta = fields.mapping(body["meta_info"], "meta_info")
        finish = fields.mapping(meta["finish_reason"], "finish_reason")
        policy = fields.mapping(meta.get("specaccept") or {}, "specaccept")
        generation = Generation(
            output_ids=fields.ids(body["output_ids"], "output_ids"),
            finish=fields.text(finish["type"], "finish_reason.type"),
            prompt_tokens=fields.count(meta["prompt_tokens"], "prompt_tokens"),
            started_s=started,
            wall_s=wall,
            server_s=_optional(fields.number, meta, "e2e_latency"),
            **_speculation(meta, policy),
            **_charged(policy),
        )
        usage = fields.count(meta["completion_tokens"], "completion_tokens")
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError("garbled", f"/generate {request.rid}: {type(error).__name__}: {error}") from None
    if generation.finish not in ("stop", "length"):
        raise EngineError("aborted", f"/generate {request.rid}: finish reason {finish}")
    _account(request, generation, usage)
    return generation


def _optional(read: Callable[[Any, str], Any], owner: dict[str, Any], name: str, default: Any = None) -> Any:
    """A field that an engine leaves out where it has nothing to say."""
    value = owner.get(name)
    return default if value is None else read(value, name)


def _speculation(meta: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    """proposed: live drafts as the adapter counts them; SGLang's own count takes a capped block for a full one."""
    proposed = _optional(fields.count, meta, "spec_num_proposed_drafts", 0)
    return {
        "cached_tokens": _optional(fields.count, meta, "cached_tokens", 0),
        "steps": _optional(fields.count, meta, "spec_verify_ct", 0),
        "proposed": _optional(fields.count, policy, "drafts_verified", proposed),
        "accepted": _optional(fields.count, meta, "spec_num_correct_drafts", 0),
        "histogram": _optional(fields.counts, meta, "spec_correct_drafts_histogram", []),
    }


def _charged(policy: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy_key": _optional(fields.text, policy, "policy"),
        "relaxed": _optional(fields.count, policy, "relaxed", 0),
        "regret": _optional(fields.number, policy, "regret", 0.0),
        "spent": _optional(fields.number, policy, "spent", 0.0),
        "exhausted": _optional(fields.count, policy, "budget_exhausted", 0),
        "first_rejections": _optional(fields.rejections, policy, "first_rejections"),
        "step_lengths": _optional(fields.counts, policy, "step_lengths"),
    }


def _account(request: Request, generation: Generation, usage: int) -> None:
    """Counts that do not agree are an error: a rate made of them would be wrong."""
    produced, sent, seen = len(generation.output_ids), len(request.input_ids), generation.prompt_tokens
    if produced != usage or not produced:
        problem = f"{produced} output ids, completion_tokens says {usage}"
    elif produced > request.max_new_tokens:
        problem = f"{produced} output ids, max_new_tokens was {request.max_new_tokens}"
    elif seen != sent:
        problem = f"sent {sent} prompt ids, prompt_tokens says {seen}"
    elif (lengths := generation.step_lengths) is not None and (
        (len(lengths), sum(lengths)) != (generation.steps, generation.accepted)
    ):
        said = f"{generation.steps} steps and {generation.accepted} accepted drafts"
        problem = f"{said}, step_lengths say {len(lengths)} and {sum(lengths)}"
    else:
        return
    raise EngineError("count", f"/generate {request.rid}: {problem}")


def _nonce(info: dict[str, Any], snapshot: Snapshot | None) -> str | None:
    """What this launch gave the server: the adapter says it, and SGLang's own `--weight-version`."""
    own = _optional(fields.text, info, "weight_version", NO_VERSION)
    return own if own != NO_VERSION else None if snapshot is None else snapshot.nonce


def _published(info: dict[str, Any]) -> Any:
    """The adapter's snapshot as it stands in /server_info, or None."""
    found = info.get("specaccept")
    if found is None:
        states = info.get("internal_states")
        for state in states if isinstance(states, list) else []:
            record = state.get("dspark_info_record") if isinstance(state, dict) else None
            for place in (state, record):
                if isinstance(place, dict) and isinstance(place.get("specaccept"), dict):
                    found = place["specaccept"]
    return found


def _snapshot(found: Any) -> Snapshot:
    """The adapter's snapshot. Without one the engine runs an acceptance of its own: no policy to measure."""
    if not isinstance(found, dict):
        raise EngineError("identity", "/server_info: expected a snapshot under specaccept, found none (not armed)")
    if found.get("schema") != SNAPSHOT_SCHEMA or not isinstance(found.get("counters"), dict):
        raise EngineError("identity", f"specaccept.schema: expected {SNAPSHOT_SCHEMA}, found {found.get('schema')!r}")
    return typed(found, "/server_info")


def typed(raw: dict[str, Any], where: str) -> Snapshot:
    """A snapshot whose counters are numbers and whose hashes are text."""
    try:
        fields.snapshot(raw)
    except ValueError as error:
        raise EngineError("garbled", f"{where}: {error}") from None
    return Snapshot(raw)
