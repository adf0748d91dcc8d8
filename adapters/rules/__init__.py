"""Acceptance rules: which draft tokens of a verified block are committed, and the token that follows them."""

from adapters.rules import (
    asd,
    block,
    chain,
    entropy,
    relaxed_ratio,
    relaxed_topk,
    rowstats,
    strict,
    thresholds,
    typical,
)
from adapters.rules.common import Accepted, RuleError

__all__ = [
    "Accepted",
    "RuleError",
    "asd",
    "block",
    "chain",
    "entropy",
    "relaxed_ratio",
    "relaxed_topk",
    "rowstats",
    "strict",
    "thresholds",
    "typical",
]
