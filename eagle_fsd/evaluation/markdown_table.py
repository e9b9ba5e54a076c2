"""The Markdown tables of all measures and reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table from its titles and cells; a bar inside a cell is escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def filled_columns(rows: Sequence[Mapping[str, str]], titles: Iterable[str] = ()) -> str:
    """Write a table of rows by title; columns that would be empty are left out. titles: in another order."""
    filled = [title for title in titles or rows[0] if any(row.get(title) for row in rows)]
    return markdown_table(filled, ([row.get(title, "") for title in filled] for row in rows))
