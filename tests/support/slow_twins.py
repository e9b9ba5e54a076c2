"""Slow, plain versions of what the package does fast."""

from __future__ import annotations

from collections.abc import Sequence


def cut(text: str, until: Sequence[str]) -> str:
    """Cut the text: read a character at a time until a stop string, the longest first, is complete."""
    for end in range(len(text) + 1):
        for stop in sorted(filter(None, until), key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text
