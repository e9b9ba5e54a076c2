"""How each token of a text came: drafted and drawn by the target, let through by the rule, or the target's.

A `TokenOrigins` is an observer. It works with `GenerationOptions(observer=...)` and with a batch of a
scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.core.devices import fetch

EXACT = "drafted"  # drafted, and equal to the target's own draw
FUZZY = "fuzzy"  # drafted, and accepted by the rule although the target drew another token
TARGET = "target"  # the target's own token, which ends a step


class TokenOrigins:
    """Notes the origins of every token that a step emits, by the number of its text, until they are taken."""

    def __init__(self) -> None:
        self._noted: dict[int, list[str]] = {}

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        """Note a step. `emitted` names the rows of the verdict in their order."""
        fuzzy, lengths = (part.tolist() for part in fetch(verdict.fuzzy[:, 1:], verdict.length))
        for (number, count), flags, length in zip(emitted.items(), fuzzy, lengths, strict=True):
            accepted = min(count, length - 1)  # the last token of a step is the target's own
            found = [FUZZY if flag else EXACT for flag in flags[:accepted]]
            self._noted.setdefault(number, []).extend(found + [TARGET] * (count - accepted))

    def take(self, number: int = 0) -> list[str]:
        """Return the origins of a text's tokens since this was last called, and forget them."""
        return self._noted.pop(number, [])

    def clear(self) -> None:
        """Forget what nobody took."""
        self._noted.clear()
