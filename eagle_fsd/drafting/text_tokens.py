"""The tokens of a text itself, which are drafted beside a list of frequent ones.

A draft vocabulary lacks the names and the rare words of a text, and these are the very tokens that the text
has again. So each text of a batch has its own ones drafted too: those of its prompt and of its answer so far
that the list lacks, the latest `most` of them. Their rows of lm_head are few. But every text of a batch is
multiplied with those of all, so that they cost little in small batches only.
Shapes: B rows, d hidden size, K tokens of the list, E tokens that any of the texts has beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from eagle_fsd.core.padding import on_device
from eagle_fsd.drafting.draft_vocabulary import DraftVocabulary, OwnTokens

LEAST = 64  # of E where few shapes may occur


class TextTokens:
    """Remembers which tokens the texts of a batch have had that a draft vocabulary lacks.

    most: how many each text has drafted. fixed: whether few shapes may occur.
    """

    def __init__(
        self, vocabulary: DraftVocabulary, vocab_size: int, rows: int, most: int, fixed: bool = False
    ) -> None:
        self.vocabulary, self.vocab_size, self.most, self.fixed = vocabulary, vocab_size, most, fixed
        self._rows: list[dict[int, None]] = [{} for _ in range(rows)]  # the latest token is last
        self._known: OwnTokens | None = None
        self._stale = True

    def add(self, texts: Sequence[Iterable[int]]) -> None:
        """Read the next tokens of every row."""
        for row, tokens in zip(self._rows, texts, strict=True):
            for token in tokens:
                if token not in self.vocabulary.listed:
                    self._stale |= token not in row
                    row.pop(token, None)
                    row[token] = None
            for token in list(islice(row, max(len(row) - self.most, 0))):
                del row[token]

    def load_row(self, row: int, tokens: Sequence[int]) -> None:
        """Let a row hold a text's first tokens."""
        self._rows[row], self._stale = {}, True
        self.add([tokens if number == row else () for number in range(len(self._rows))])

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        # A row may be there twice, and its texts go on each by itself.
        self._rows, self._stale = [dict(self._rows[row]) for row in rows], True

    def replace(self, rows: Sequence[int], other: TextTokens) -> None:
        """Replace these rows, one by one, by those of another batch."""
        for row, tokens in zip(rows, other._rows, strict=True):
            self._rows[row] = dict(tokens)
        self._stale = True

    def reset(self, rows: int) -> None:
        """Forget the texts, and make ready for as many new ones as there are rows."""
        self._rows, self._stale = [{} for _ in range(rows)], True

    def drafts(self, row: int, token: int) -> bool:
        """Return whether a token is drafted for a text."""
        return token in self.vocabulary.listed or token in self._rows[row]

    def now(self) -> OwnTokens | None:
        """Return the texts' own tokens at this time; None if there are none."""
        if self._stale:
            self._known, self._stale = self._make(), False
        return self._known

    def _make(self) -> OwnTokens | None:
        tokens = sorted({token for row in self._rows for token in row})
        if self.fixed:
            tokens += self._others(tokens)
        if not tokens:
            return None
        listed, missing = self.vocabulary.token_ids, None
        ids = on_device(tokens, listed.device)
        if self.fixed or any(len(row) < len(tokens) for row in self._rows):
            places = {token: place for place, token in enumerate(tokens)}
            rows = [number for number, row in enumerate(self._rows) for _ in row]
            columns = [places[token] for row in self._rows for token in row]
            missing = torch.ones(len(self._rows), len(tokens), dtype=torch.bool, device=listed.device)
            missing[on_device(rows, listed.device), on_device(columns, listed.device)] = False
        return OwnTokens(torch.cat((listed, ids)), missing, *self.vocabulary.rows_of(ids))

    def _others(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens that no text has, to fill up the next of few numbers: LEAST, or twice another one."""
        wanted = LEAST
        while wanted < len(tokens):
            wanted *= 2
        taken, listed = set(tokens), self.vocabulary.listed
        # From the end: rare tokens, which no list has.
        free = (one for one in reversed(range(self.vocab_size)) if one not in taken and one not in listed)
        return list(islice(free, wanted - len(tokens)))
