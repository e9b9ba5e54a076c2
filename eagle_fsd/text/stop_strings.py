"""Stop strings end a text before its model does.

A text ends once it contains a stop string, and is cut before that string. Of several stop strings, the one
that is complete first counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from eagle_fsd.text.detokenizer import Detokenizer


class TextUntilStop:
    """The text of one row as its tokens arrive, cut before the first complete stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, until: Sequence[str]) -> None:
        self.text = ""
        self.stopped = False
        self._stops = [stop for stop in until if stop]
        self._overlap = max(map(len, self._stops), default=1) - 1
        self._detokenizer = Detokenizer(tokenizer)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add a step's tokens; those after the end are dropped."""
        if not self.stopped:
            self._show(self._detokenizer.add(token_ids))

    def finish(self) -> str:
        """Return the whole text after the last token."""
        if not self.stopped:
            self._show(self._detokenizer.finish())
        return self.text

    def _show(self, piece: str) -> None:
        start = max(0, len(self.text) - self._overlap)
        self.text += piece
        # The one complete first does not depend on the text that follows. On a tie the longest counts.
        found = [
            (place + len(stop), place) for stop in self._stops if (place := self.text.find(stop, start)) >= 0
        ]
        if found:
            self.text = self.text[: min(found)[1]]
            self.stopped = True
