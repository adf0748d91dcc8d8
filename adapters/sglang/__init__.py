"""SGLang runtime adapter: DSPARK requests accept by an acceptance policy, through the engine's own plugin mechanism.

`plugin.register` is the entry point of the group `sglang.srt.plugins`; nothing here imports the engine before it runs.
"""

from __future__ import annotations

from adapters.policy import REFERENCE_ONLY, REFERENCE_RULES


def unsupported_rule(rule: str) -> str | None:
    """Why no version of this engine serves a rule of adapters.policy; None: it can, or a server says so itself."""
    return REFERENCE_ONLY if rule in REFERENCE_RULES else None
