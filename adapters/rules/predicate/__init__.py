"""What the rules that judge every draft by itself share. README.md has the table."""

from adapters.rules.predicate.span import inside, relaxing
from adapters.rules.predicate.walk import (
    block_stats,
    by_argmax,
    by_residual,
    check_relaxed,
    drafted,
    length_of,
    numbers,
)

__all__ = [
    "block_stats",
    "by_argmax",
    "by_residual",
    "check_relaxed",
    "drafted",
    "inside",
    "length_of",
    "numbers",
    "relaxing",
]
