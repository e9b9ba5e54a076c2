"""Errors as a user reads them: one line."""

from __future__ import annotations


def one_line(error: object, limit: int | None = None) -> str:
    """An error's message on one line, its type's name where it says nothing; cut at `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if limit is None or len(text) <= limit else text[: limit - 3] + "..."
