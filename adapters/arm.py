"""What an engine process is asked to arm, read from its environment; and what a request asks for.

Shared by the engine adapters. Nothing here touches an engine: an adapter takes an `Arming`, checks its own seams, and
raises `Refused` for what it cannot honour. An arm that runs without its policy is worse than one that does not start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapters.policy import CUSTOM_PARAM, ENVIRONMENT, GREEDY_RULES, Policy, PolicyError

# Switches of the public DeepSeek-V4.1 TP4 recipe, kept as aliases; unset they do nothing.
BLOCK_VERIFY = "DSV41_BLOCK_VERIFY"
VERIFY_CAP = "DSV41_VERIFY_CAP"
OFF = ("", "0", "off", "false")

SAMPLED_REQUEST = "sampled request"
GREEDY_REQUEST = "greedy request"


class Refused(RuntimeError):
    """A policy this engine process cannot honour, or a seam that is not what the adapter was written for."""


@dataclass(frozen=True)
class Arming:
    """default: the policy of a request that brings none; None: the engine's own rules.

    verify_cap: drafts of a block that may be committed at most; None: all the engine verifies.
    """

    default: Policy | None = None
    verify_cap: int | None = None

    @property
    def required(self) -> bool:
        """The operator asked for something, so a process that cannot arm must not serve."""
        return self.default is not None or self.verify_cap is not None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Arming:
        """Raises PolicyError for a malformed policy and Refused for switches that contradict each other."""
        return cls(_default(environ), _verify_cap(environ.get(VERIFY_CAP, "")))


def _default(environ: Mapping[str, str]) -> Policy | None:
    policy = Policy.from_environment(environ)
    alias = environ.get(BLOCK_VERIFY, "").strip().lower()
    if alias in OFF:
        return policy
    if alias not in ("1", "on", "true"):
        raise Refused(f"{BLOCK_VERIFY}: expected 0 or 1, found {alias!r}")
    if policy is not None and policy.rule != "block":
        raise Refused(f"{BLOCK_VERIFY}: expected unset or 0 beside {ENVIRONMENT} {policy.key!r}, found {alias!r}")
    return Policy("block")


def _verify_cap(text: str) -> int | None:
    text = text.strip().lower()
    if text in OFF:
        return None
    if text.startswith("conf:"):
        raise Refused(
            f"{VERIFY_CAP}: expected a number of drafts, found {text!r}: a cap by draft confidence is the engine's own "
            "SGLANG_RAGGED_VERIFY_MODE=cap-accept, which the rules here follow"
        )
    if not text.isdecimal():
        raise Refused(f"{VERIFY_CAP}: expected a number of drafts, found {text!r}")
    return int(text)


def request_policy(custom_params: Any) -> Policy | None:
    """The policy a request carries in `custom_params.specaccept`, or None. Raises PolicyError naming the field."""
    if not isinstance(custom_params, Mapping) or CUSTOM_PARAM not in custom_params:
        return None
    try:
        return Policy.from_json(custom_params[CUSTOM_PARAM])
    except PolicyError as error:
        raise PolicyError(f"sampling_params.custom_params.{CUSTOM_PARAM}: {error}") from None


def serving_rule(policy: Policy, sampled: bool) -> tuple[str, str | None]:
    """The rule that serves a request, and why it is not the policy's own where it is not.

    sampled: temperature > 0. The rules are exact only for the kind of request they are written for.
    """
    if (policy.rule in GREEDY_RULES) == (not sampled):
        return policy.rule, None
    return ("chain", SAMPLED_REQUEST) if sampled else ("strict", GREEDY_REQUEST)
