"""The text as a store of continuations: where its end occurred before, and which tokens followed there.

A match is an earlier place whose last tokens are the last tokens of the text, or of the text and a drafted
path. The longer the match, the likelier is its continuation. This is the idea of prompt lookup and of
suffix decoding (SuffixDecoding, arXiv 2411.04975); no suffix tree is kept, since the places of one token are
few enough to compare them one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 16  # tokens of a match that are compared; longer matches are as good as this one
RECENT = 256  # places of a token that are looked at, the latest ones
ALONE = 32  # how many of these places may count where only this one token is the same

Match = tuple[int, int]  # the place of a match's last token in the text, and the length of the match
Continuation = tuple[int, bool]  # its longest match, and whether at least half of the matches disagree


class SuffixStore:
    """One text, prompt and answer, by the places of its tokens."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self.places: dict[int, list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.places.setdefault(token, []).append(len(self.text))
            self.text.append(token)

    def copy(self) -> SuffixStore:
        """Return a store of the same text that grows on its own."""
        return SuffixStore(self.text)

    def matches(self) -> list[Match]:
        """Return the matches of the end of the text among the RECENT places of its last token.

        Matches of this token alone are only those among the latest ALONE places.
        """
        text, end = self.text, len(self.text) - 1
        places = self.places[text[end]][-RECENT - 1 : -1]
        before, found = text[end - 1] if end else -1, []
        for place in places:
            if not place or text[place - 1] != before:
                continue
            length, most = 2, min(LONGEST, place + 1)
            while length < most and text[place - length] == text[end - length]:
                length += 1
            found.append((place, length))
        longer = {place for place, _ in found}
        alone = [(place, 1) for place in places[-ALONE:] if place not in longer]
        return sorted(found + alone) if alone else found

    def follow(self, matches: Sequence[Match], token: int) -> list[Match]:
        """Return the matches of a path that goes on with a token, given the matches of the path so far.

        Where no match goes on like this, the token alone is matched.
        """
        text, last = self.text, len(self.text) - 1
        found = [
            (place + 1, length + 1 if length < LONGEST else length)
            for place, length in matches
            if text[place + 1] == token and place + 1 < last
        ]
        return found or [(place, 1) for place in self.places.get(token, ())[-ALONE:] if place < last]

    def continuations(self, matches: Sequence[Match], most: int) -> dict[int, Continuation]:
        """Return the `most` best tokens that followed matches: longest match first, then the latest place.

        A token's place is the latest of all its matches, whichever of them is the longest. Whether a token is
        contested is counted among the matches that are about as long as its own: all of three tokens and more
        count as equally long.
        """
        text = self.text
        if len(matches) == 1:
            place, length = matches[0]
            return {text[place + 1]: (length, False)}
        longest: dict[int, int] = {}
        votes: tuple[dict[int, int], ...] = ({}, {}, {})  # by match length: 1, 2, more
        for place, length in reversed(matches):
            token = text[place + 1]
            if length > longest.get(token, 0):
                longest[token] = length
            of_length = votes[length - 1 if length < 3 else 2]
            of_length[token] = of_length.get(token, 0) + 1
        # The sort is stable, and tokens were met from the latest place on.
        best = sorted(longest, key=lambda token: -longest[token])[:most]
        totals = [sum(of_length.values()) for of_length in votes]
        found = {}
        for token in best:
            level = min(longest[token], 3) - 1
            mine = sum(of_length.get(token, 0) for of_length in votes[level:])
            found[token] = longest[token], 2 * mine <= sum(totals[level:])
        return found
