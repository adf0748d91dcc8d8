"""Acceptance rules: which draft tokens of a verified block are committed, and the token that follows them."""

from adapters.rules import asd, block, chain, strict
from adapters.rules.common import Accepted, RuleError

__all__ = ["Accepted", "RuleError", "asd", "block", "chain", "strict"]
