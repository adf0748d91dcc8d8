"""When an engine counts as ready: it answers, it is the one expected, and it generates the same ids twice.

A green /health proves none of the three.
"""

from __future__ import annotations

from adapters.policy import Policy
from harness.config import Config
from harness.engines.base import EngineClient, EngineError, Generation, Request, Server, Snapshot

PROBE_IDS = (1, 2, 3, 5, 7, 11)
PROBE_TOKENS = 8


def check_adapter(config: Config, snapshot: Snapshot, nonce: str | None = None, policy: Policy | None = None) -> None:
    """Raises EngineError("identity") unless the snapshot is an armed adapter of this engine.

    nonce, policy: of this launch; None for a server someone else started.
    """
    served = None if policy is None else policy.to_json()
    for name, expected, found in (
        ("specaccept.adapter", config.engine.kind, snapshot.raw.get("adapter")),
        ("specaccept.armed", True, snapshot.raw.get("armed")),
        ("specaccept.nonce", nonce, snapshot.nonce if nonce is not None else None),
        ("specaccept.default_policy", served, snapshot.raw.get("default_policy") if served is not None else None),
    ):
        if expected != found:
            raise EngineError("identity", f"{name}: expected {expected!r}, found {found!r}")


def adapter(server: Server) -> Snapshot:
    """The snapshot of an armed server. Raises EngineError("identity")."""
    if server.snapshot is None:
        raise EngineError("identity", "specaccept: expected the adapter's snapshot, found none (not armed)")
    return server.snapshot


def check_server(config: Config, server: Server, nonce: str, policy: Policy | None) -> None:
    """Raises EngineError("identity") unless this is the server of this launch, armed with the policy, or not at all.

    An unarmed server has no snapshot, which its client sees to; its nonce is checked where the engine returns one.
    """
    if policy is not None:
        check_adapter(config, adapter(server), nonce, policy)
    elif server.nonce not in (None, nonce):
        raise EngineError("identity", f"nonce: expected {nonce!r}, found {server.nonce!r}")


def probe(client: EngineClient, config: Config, policy: Policy | None) -> None:
    """Two greedy answers to the same ids. Raises EngineError.

    policy: the server's default, asked for where the engine has no policy per request; None: of an unarmed server.
    With a prefix cache a third is asked for: without a prefill the verify steps lie elsewhere, and so may relaxed ids.
    """
    asked = Policy("strict") if policy is not None and config.engine.per_request_policy else policy
    answers: list[Generation] = []
    while len(answers) < 2 or (len(answers) == 2 and answers[0].cached_tokens != answers[1].cached_tokens):
        request = Request(
            rid=f"probe-{len(answers)}",
            input_ids=PROBE_IDS,
            max_new_tokens=PROBE_TOKENS,
            policy=asked,
            deadline_s=config.engine.request_timeout_s,
        )
        answers.append(client.generate(request))
    first, second = (answer.output_ids for answer in answers[-2:])
    if first != second:
        raise EngineError("identity", f"probe: expected the same greedy ids twice, found {first} and {second}")
    if answers[0].policy_key != (key := asked and asked.key):
        raise EngineError("identity", f"probe: asked for policy {key}, answered under {answers[0].policy_key!r}")
