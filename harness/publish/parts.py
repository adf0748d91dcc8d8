"""What a cell holds: text, or text and links. Each page writes them in its own way."""

from __future__ import annotations

from typing import NamedTuple

from markupsafe import Markup, escape


class Link(NamedTuple):
    """href: relative to results/."""

    text: str
    href: str


Cell = str | Link | tuple[str | Link, ...]


def parts(cell: Cell) -> tuple[str | Link, ...]:
    return (cell,) if isinstance(cell, str | Link) else cell


def plain(cell: Cell) -> str:
    return "".join(part.text if isinstance(part, Link) else part for part in parts(cell))


def markdown(cell: Cell) -> str:
    return "".join(f"[{part.text}]({part.href})" if isinstance(part, Link) else part for part in parts(cell))


def html(cell: Cell, root: str = "../") -> Markup:
    """Escaped. root: where results/ is from the page. An empty cell is a mistake of the caller."""
    if not plain(cell).strip():
        raise ValueError("cell: expected a value or the word that says why there is none, found nothing")
    made = (
        Markup('<a href="{}">{}</a>').format(root + part.href, part.text) if isinstance(part, Link) else escape(part)
        for part in parts(cell)
    )
    return Markup("").join(made)
