"""The log-probabilities of tokens, as OpenAI's API writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle_fsd.decoding.request import TokenLogprob
from eagle_fsd.text.spelling import Spelling

LEAST = -9999.0  # a log-probability: JSON has no -inf


class LogprobTables:
    """Writes the log-probabilities of tokens in OpenAI's forms: as chats have them, or plain completions.

    decode: returns a token's text on its own.
    """

    def __init__(self, decode: Callable[[int], str], chat: bool) -> None:
        self.decode, self.chat = decode, chat

    def __call__(self, logprobs: Sequence[TokenLogprob], spelling: Spelling) -> dict[str, Any]:
        """Return a choice's `logprobs`. spelling: of the text before these tokens; it takes them in."""
        if self.chat:
            content = []
            for one in logprobs:
                top = [self._entry(token, value, spelling) for token, value in one.top]
                content.append({**self._entry(one.token, one.logprob, spelling), "top_logprobs": top})
                spelling.add(one.token)
            return {"content": content, "refusal": None}
        tokens, tops, starts = [], [], []
        for one in logprobs:
            likeliest: dict[str, float] = {}
            for token, value in one.top:  # parts of characters may look the same
                text, _ = self._spell(token, spelling)
                likeliest[text] = max(value, likeliest.get(text, LEAST))
            tokens.append(self._spell(one.token, spelling)[0])
            likeliest.setdefault(tokens[-1], max(one.logprob, LEAST))  # OpenAI's have the token in any case
            tops.append(likeliest)
            starts.append(spelling.characters)
            spelling.add(one.token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(one.logprob, LEAST) for one in logprobs],
            "top_logprobs": tops,
            "text_offset": starts,
        }

    def _entry(self, token: int, logprob: float, spelling: Spelling) -> dict[str, Any]:
        text, raw = self._spell(token, spelling)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}

    def _spell(self, token: int, spelling: Spelling) -> tuple[str, bytes]:
        """Return the text and the bytes of a token that may come next."""
        raw = spelling.raw(token)
        if raw is not None:
            return raw.decode(errors="replace"), raw
        text = self.decode(token)
        return text, text.encode(errors="replace")
