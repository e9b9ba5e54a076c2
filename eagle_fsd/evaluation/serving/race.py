"""A race of servers: clients that ask at once and read streams, and what they saw of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from eagle_fsd.evaluation.serving.client import Client, delta_text
from eagle_fsd.evaluation.serving.soak_requests import CHAT

Count = Callable[[str], int]


@dataclass(frozen=True)
class Seen:
    """One answer as its client saw it: seconds since it asked.

    prompt: its number. first: until the first text. last: until the last one. gaps: between chunks of text.
    """

    prompt: int
    first: float
    last: float
    gaps: list[float]
    text: str


def ask(client: Client, prompt: str, number: int, max_tokens: int, fields: Mapping[str, Any]) -> Seen:
    """Ask for a greedy answer as a stream. Raises ValueError if it is not a whole one."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0.0}
    streamed = client.stream(CHAT, {**body, **fields})
    if streamed.refusal is not None:
        said = streamed.refusal.body.decode(errors="replace")[:300]
        raise ValueError(f"{client.url} refused a request with status {streamed.refusal.status}: {said}")
    told = [(seconds, delta_text(chunk).get(0, "")) for seconds, chunk in streamed.chunks]
    times = [seconds for seconds, text in told if text]
    # transformers' server sends no [DONE], only the reason of the end.
    ended = any(one.get("finish_reason") for _, chunk in streamed.chunks for one in chunk.get("choices", ()))
    if not (streamed.whole or ended) or not times:
        raise ValueError(f"{client.url} broke an answer off after {len(times)} chunks: see its log")
    gaps = [later - sooner for sooner, later in pairwise(times)]
    return Seen(number, times[0], times[-1], gaps, "".join(text for _, text in told))


def heat(
    client: Client, prompts: Sequence[str], clients: int, max_tokens: int, fields: Mapping[str, Any]
) -> tuple[float, list[Seen]]:
    """Let clients ask these prompts, each the next one as soon as it has its answer.

    Returns the seconds from the first request to the last answer, and what was seen.
    """

    def answer(number: int) -> Seen:
        return ask(client, prompts[number], number, max_tokens, fields)

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(answer, range(len(prompts))))
    return time.perf_counter() - start, found


def row_of(
    server: str, clients: int, turn: int, seconds: float, seen: Sequence[Seen], count: Count
) -> dict[str, Any]:
    """Return the row of a heat. count: the tokens of a text, by one tokenizer for all servers."""
    answers = [{**asdict(one), "tokens": count(one.text)} for one in seen]
    return {
        "server": server,
        "clients": clients,
        "turn": turn,
        "seconds": seconds,
        "tokens": sum(one["tokens"] for one in answers),
        "answers": answers,
    }
