"""What a user reads of an error."""

from __future__ import annotations

import pytest

from eagle_fsd.core.checks import one_line


@pytest.mark.parametrize(
    ("said", "limit", "wanted"),
    [
        (ValueError("two\n  lines"), None, "two lines"),
        (MemoryError(), None, "MemoryError"),
        ("", None, ""),  # a program's output, which has no type to name
        ("a b\tc", 5, "a b c"),
        ("a long text", 7, "a lo..."),
    ],
)
def test_an_error_is_one_line(said: object, limit: int | None, wanted: str) -> None:
    assert one_line(said, limit) == wanted
