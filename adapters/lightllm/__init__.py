"""ASD in LightLLM's MTP verification, armed from outside the engine. README.md has seams and launch commands."""

from __future__ import annotations

from adapters.policy import REFERENCE_ONLY, REFERENCE_RULES

SERVED_RULES = ("strict", "asd")
ARGMAX_DRAFTS = "argmax drafts"


def unsupported_rule(rule: str) -> str | None:
    """Why this engine cannot serve a rule of adapters.policy; None: it can."""
    if rule in SERVED_RULES:
        return None
    if rule in REFERENCE_RULES:
        return REFERENCE_ONLY
    if rule.partition("-")[0] == "block":
        return ARGMAX_DRAFTS  # one-hot drafts: block verification equals the token rule, so it cannot gain
    if rule == "chain":
        return "the sampled id is compared with the draft, without q"
    return f"LightLLM serves {' and '.join(SERVED_RULES)}"
