"""Counts what a target reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from eagle_fsd.target.session import TargetSession


class ReadTokens:
    """Counts the tokens that the target reads of prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, plain = 0, TargetSession.prefill

        def counted(session: TargetSession, tokens: Any, counts: Sequence[int]) -> Any:
            self.count += sum(counts)
            return plain(session, tokens, counts)

        monkeypatch.setattr(TargetSession, "prefill", counted)

    def take(self) -> int:
        count, self.count = self.count, 0
        return count
