"""Errors as a user reads them: one line."""

from __future__ import annotations


def one_line(error: object, limit: int | None = None) -> str:
    """An error or a text on one line, an empty error by its type's name; cut at `limit` characters."""
    text = " ".join(str(error).split())
    if not text and isinstance(error, BaseException):
        text = type(error).__name__
    return text if limit is None or len(text) <= limit else text[: limit - 3] + "..."
