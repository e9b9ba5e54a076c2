"""A soak: clients that come, go, break off and send nonsense for a long time, and what became of each.

Every answer is compared with the answer that the same request got alone, from the same server while it was
quiet. With rounding, the kernels of a batch may decide a near-tie the other way; `judge` tells such a token
from a wrong one by the target's own log-probabilities.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from eagle_fsd.evaluation.serving.client import Client, Reply
from eagle_fsd.evaluation.serving.soak_requests import (
    CHAT,
    HOSTILE,
    NO_HTTP,
    PLAIN,
    Asked,
    Hostile,
    head,
    is_clear,
    texts_of,
    texts_of_chunks,
)

EXAMPLES = 20  # faults of each kind that are shown in full
TOP = 5  # tokens that a place in a text is judged by
ACTIONS = {"whole": 30, "stream": 30, "leave": 15, "vanish": 5, "hostile": 17, "no_http": 3}  # out of 100
LOST, WRONG, UNCLEAR = "lost", "different", "unclear error"


@dataclass(frozen=True)
class Difference:
    """An answer that is not the one the request got alone. number: of the request."""

    number: int
    place: int
    found: str
    expected: str
    cut: bool = False  # the client left before its end


@dataclass
class Findings:
    """What all clients met: they add to its lists at once. seconds: of whole answers, and to first tokens."""

    outcomes: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # the kinds of the answers that were compared
    faults: dict[str, list[str]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)

    def fault(self, kind: str, text: str) -> str:
        examples = self.faults.setdefault(kind, [])
        if len(examples) < EXAMPLES:
            examples.append(text[:500])
        return kind


def answers_alone(client: Client, requests: Sequence[Asked]) -> list[list[str]]:
    """Ask every request on its own, and return its texts. Raises ValueError for one that is refused."""
    found = []
    for asked in requests:
        reply = client.post(asked.path, asked.body)
        if reply.status != 200:
            raise ValueError(f"the request {dict(asked.body)} is refused: {reply.body.decode()[:300]}")
        found.append(texts_of(reply.data()))
    return found


def soak(
    client: Client, requests: Sequence[Asked], expected: Sequence[Sequence[str]], clients: int, seconds: float
) -> Findings:
    """Let clients send random ones of these requests, and nonsense, at once for some seconds."""
    found, stopped = Findings(), threading.Event()
    first = SoakClient(client, requests, expected, random.Random(), found)
    for sent in HOSTILE:  # each once at least, and before memory is weighed: long ones need some for good
        found.outcomes.append(first.refused(sent))
    end = time.monotonic() + seconds

    def one(seed: int) -> None:
        mine = SoakClient(client, requests, expected, random.Random(seed), found)
        while time.monotonic() < end and not stopped.is_set():
            mine.act()

    with ThreadPoolExecutor(clients) as pool:
        try:
            for _ in pool.map(one, range(clients)):
                pass
        finally:  # Ctrl-C does not wait for the end
            stopped.set()
    return found


@dataclass
class SoakClient:
    """One client. Every action returns its outcome."""

    client: Client
    requests: Sequence[Asked]
    expected: Sequence[Sequence[str]]
    draw: random.Random
    found: Findings = field(default_factory=Findings)

    def act(self) -> None:
        """Do something at random, and note its outcome."""
        action = self.draw.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        number = self.draw.randrange(len(self.requests))
        run: Callable[[int], str] = getattr(self, action)
        try:
            outcome = run(number)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            what = f"{action} {dict(self.requests[number].body)}: {type(error).__name__} {error}"
            outcome = self.found.fault(LOST, what)
        self.found.outcomes.append(outcome)

    def whole(self, number: int) -> str:
        asked = self.requests[number]
        start = time.perf_counter()
        reply = self.client.post(asked.path, asked.body)
        if reply.status != 200:
            return self._refused(reply, asked)
        self.found.whole.append(time.perf_counter() - start)
        return self._compare(number, texts_of(reply.data()), "answered")

    def stream(self, number: int) -> str:
        asked = self.requests[number]
        streamed = self.client.stream(asked.path, asked.body)
        if streamed.refusal is not None:
            return self._refused(streamed.refusal, asked)
        chunks = [chunk for _, chunk in streamed.chunks]
        if not streamed.whole or not chunks or any("error" in chunk for chunk in chunks):
            return self.found.fault(LOST, f"a stream of {dict(asked.body)} ended with {chunks[-1:]}")
        self.found.first.append(streamed.chunks[0][0])
        self.found.whole.append(streamed.chunks[-1][0])
        texts = texts_of_chunks(chunks, len(self.expected[number]))
        return self._compare(number, texts, "streamed")

    def leave(self, number: int) -> str:
        """Leave in the middle of a stream: what was read is the beginning of the answer."""
        asked = self.requests[number]
        streamed = self.client.stream(asked.path, asked.body, leave_after=self.draw.randint(0, 5))
        if streamed.refusal is not None:
            return self._refused(streamed.refusal, asked)
        texts = texts_of_chunks([chunk for _, chunk in streamed.chunks], len(self.expected[number]))
        return self._compare(number, texts, "left in a stream", cut=not streamed.whole)

    def vanish(self, number: int) -> str:
        """Leave before the answer, or before the whole request was sent."""
        body = json.dumps(self.requests[number].body).encode()
        self.client.raw(head(len(body)) + body[: self.draw.choice((0, 5, len(body)))], waits=False)
        return "left before the answer"

    def hostile(self, _number: int) -> str:
        return self.refused(self.draw.choice(HOSTILE))

    def refused(self, sent: Hostile) -> str:
        """Send what must be refused."""
        reply = self.client.post(sent.path, sent.body, sent.method)
        if reply.status not in sent.statuses or not is_clear(reply):
            said = reply.body[:200].decode(errors="replace")
            return self.found.fault(UNCLEAR, f"{sent.name}: status {reply.status}, {said}")
        return "refused"

    def no_http(self, _number: int) -> str:
        answer = self.client.raw(self.draw.choice(NO_HTTP), waits=True)
        top, _, body = answer.partition(b"\r\n\r\n")
        if answer and not (top.startswith(b"HTTP/1.1 4") and is_clear(Reply(400, {}, body))):
            return self.found.fault(UNCLEAR, f"no HTTP: {answer[:200].decode(errors='replace')}")
        return "refused"

    def _refused(self, reply: Reply, asked: Asked) -> str:
        """A request that is in order may be refused for one reason: there is no room for it now."""
        if not is_clear(reply):
            return self.found.fault(
                UNCLEAR, f"status {reply.status}, {reply.body[:200].decode(errors='replace')}"
            )
        if reply.status == 429 and int(reply.headers.get("retry-after", 0)) > 0:
            return "busy"
        return self.found.fault(LOST, f"{dict(asked.body)}: {reply.status}, {reply.body[:300].decode()}")

    def _compare(self, number: int, texts: Sequence[str], outcome: str, cut: bool = False) -> str:
        self.found.asked.append(self.requests[number].kind)
        for place, (text, right) in enumerate(zip(texts, self.expected[number], strict=True)):
            if not (right.startswith(text) if cut else text == right):
                self.found.differences.append(Difference(number, place, text, right, cut))
                return WRONG
        return outcome


def judge(client: Client, asked: Asked, difference: Difference) -> float | None:
    """Return by how much the target prefers the expected text where the found one departs from it.

    In nats, for a plain request; near 0 it is a near-tie. None: it cannot be told, or the token that was
    found is none of the target's first ones.
    """
    if asked.kind != PLAIN:
        return None
    wanted: dict[str, Any] = (
        {"logprobs": True, "top_logprobs": TOP} if asked.path == CHAT else {"logprobs": TOP}
    )
    reply = client.post(asked.path, {**asked.body, **wanted})
    if reply.status != 200 or texts_of(reply.data())[difference.place] != difference.expected:
        return None
    return gap(scored_tokens(reply.data()["choices"][difference.place]["logprobs"]), difference)


def scored_tokens(logprobs: Mapping[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    """Return each token's text, its log-probability and those of the likeliest tokens there."""
    if "content" in logprobs:
        return [
            (one["token"], one["logprob"], {top["token"]: top["logprob"] for top in one["top_logprobs"]})
            for one in logprobs["content"]
        ]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))


def gap(tokens: Sequence[tuple[str, float, Mapping[str, float]]], difference: Difference) -> float | None:
    """Return the smallest preference for a token of the expected text over one that the found text has there.

    Texts are compared, since answers have no token ids: so a token that begins with another one is looked at
    as well, and the place may be before the first character that differs.
    """
    found, start, gaps = difference.found, 0, []
    for text, logprob, others in tokens:
        rest = found[start:]
        for other, value in others.items():
            # A text that ends here departs by an end token, whose text is not part of it.
            fits = rest.startswith(other) if rest else not difference.expected[start:].startswith(other)
            if other and other != text and fits:
                gaps.append(max(0.0, logprob - value))
        start += len(text)
        if not found.startswith(difference.expected[:start]):
            break
    return min(gaps, default=None)
