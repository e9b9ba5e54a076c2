"""Stop strings: where a text ends although its model goes on.

A text ends where a stop string is complete, and what is kept ends before that string; of several the one that
is complete first counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from eagle_fsd.text.detokenizer import Detokenizer


class TextUntilStop:
    """The text of one row as its tokens come, cut before the first stop string that is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, until: Sequence[str]) -> None:
        self.text = ""
        self.stopped = False
        self._stops = [stop for stop in until if stop]
        self._overlap = max(map(len, self._stops), default=1) - 1
        self._detokenizer = Detokenizer(tokenizer)

    def add(self, token_ids: Sequence[int]) -> None:
        """Take a step's tokens; those after the end are dropped."""
        if not self.stopped:
            self._show(self._detokenizer.add(token_ids))

    def finish(self) -> str:
        """The whole text, once no token comes any more."""
        if not self.stopped:
            self._show(self._detokenizer.finish())
        return self.text

    def _show(self, piece: str) -> None:
        start = max(0, len(self.text) - self._overlap)
        self.text += piece
        # What is complete first does not change with the text that follows; on a tie the longest counts.
        found = [
            (place + len(stop), place) for stop in self._stops if (place := self.text.find(stop, start)) >= 0
        ]
        if found:
            self.text = self.text[: min(found)[1]]
            self.stopped = True
