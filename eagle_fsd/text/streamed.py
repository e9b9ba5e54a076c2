"""Text as its tokens arrive, which never shows a part of a stop string, in pieces that know their origins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from eagle_fsd.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Piece(NamedTuple):
    """A part of a text. origin: how its token came, such as "drafted"; "" where nobody asked."""

    text: str
    origin: str = ""


class StreamedText:
    """Turns a text's tokens into pieces that may be shown at once.

    stops: the text ends before the first of these strings that is complete; of several that end in the same
    place, the longest counts, and empty ones are none. One that is a special token, which has no text, ends
    the text where that token comes. Characters that may still become the beginning of a stop string are held
    back, and so are tokens that hold half a character. context: token ids that the text continues.

    text: all that was shown. tokens: how many tokens were taken; those after a stop string are not. stop: the
    stop string that ended the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.context = tokenizer, context
        self.stop: str | None = None
        self.tokens = 0
        self.text = ""
        self.stops = tuple(stop for stop in stops if stop)
        self._ends = special_tokens(tokenizer, self.stops)
        self._reach = max(map(len, self.stops), default=1) - 1
        self._held: list[Piece] = []
        self._origin = ""  # of the last token
        self._detokenizer = Detokenizer(tokenizer, context)

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def add(self, token_ids: Sequence[int], origins: Sequence[str] = ()) -> list[Piece]:
        """Take tokens, up to the one that completes a stop string, and return what may be shown now.

        origins: of each token, or none at all. A character of several tokens has the origin of the last.
        """
        shown: list[Piece] = []
        for place, token in enumerate(token_ids):
            if self.stopped:
                break
            self.tokens += 1
            if token in self._ends:
                shown += self.finish()
                self.stop = self.stop or self._ends[token]
                break
            self._origin = origin = origins[place] if origins else ""
            shown += self._take(Piece(self._detokenizer.add([token]), origin))
            if self.stops and not self.stopped and self._detokenizer.waits:
                shown += self._take(Piece(self._detokenizer.whole_characters(), origin), waits=True)
        return merged(shown)

    def finish(self) -> list[Piece]:
        """Return what was held back, after the last token; nothing after a stop string."""
        if self.stopped:
            return []
        shown = self._take(Piece(self._detokenizer.finish(), self._origin))
        if not self.stopped:
            shown += self._show(sum(len(piece.text) for piece in self._held))
        return merged(shown)

    def _take(self, piece: Piece, waits: bool = False) -> list[Piece]:
        """Return what may be shown with a piece. waits: it comes again, unless a stop string ends in it."""
        if not piece.text:
            return []
        before = sum(len(held.text) for held in self._held)
        held = [*self._held, piece]
        whole = "".join(one.text for one in held)
        # Nothing before `before` is complete, so a stop string ends within the new piece.
        start = max(0, before - self._reach)
        found = [
            (place + len(stop), place, stop) for stop in self.stops if (place := whole.find(stop, start)) >= 0
        ]
        if waits and not found:
            return []
        self._held = held
        if found:
            _, place, self.stop = min(found)
            return self._show(place)
        return self._show(len(whole) - self._length_of_beginning(whole))

    def _length_of_beginning(self, text: str) -> int:
        """Return the length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._reach, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0

    def _show(self, count: int) -> list[Piece]:
        """Release the first characters of those that are held."""
        shown: list[Piece] = []
        while count > 0:
            piece = self._held.pop(0)
            if len(piece.text) > count:
                self._held.insert(0, Piece(piece.text[count:], piece.origin))
                piece = Piece(piece.text[:count], piece.origin)
            count -= len(piece.text)
            shown.append(piece)
        self.text += "".join(piece.text for piece in shown)
        return shown


def special_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> dict[int, str]:
    """Return the special tokens that are written like one of these texts: their texts by their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) if texts else {}
    return {
        place: token.content for place, token in added.items() if token.special and token.content in texts
    }


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Join neighbours of the same origin."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].origin == piece.origin:
            found[-1] = Piece(found[-1].text + piece.text, piece.origin)
        else:
            found.append(piece)
    return found
