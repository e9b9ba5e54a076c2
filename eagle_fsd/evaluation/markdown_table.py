"""A Markdown table from its titles and cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table_lines(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of the table; a bar inside a cell is escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
