"""Texts that are served, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.decoding.request import Terms, TokenLogprob
from eagle_fsd.serving.errors import ApiError
from eagle_fsd.text.streamed import Piece, StreamedText

Stopping = tuple[Sequence[str], Sequence[int]]  # stop strings, and the token ids that the text continues


@dataclass(frozen=True)
class News:
    """What has happened to a text: pieces that may be shown, and at the end why it ended, or an error.

    logprobs: of the tokens that were taken, some of whose text may still be held back.
    """

    pieces: Sequence[Piece] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    error: ApiError | None = None


@dataclass
class Clock:
    """When things happened to a text, in seconds of time.perf_counter; prompt: seconds of reading it."""

    submitted: float = 0.0
    started: float | None = None
    first: float | None = None
    last: float | None = None
    prompt: float = 0.0


@dataclass(eq=False)
class Job:
    """One text that is served.

    prompt: token ids. stream: of random numbers. written: what was shown of it. tell: called in the worker's
    thread for all news. wants_origins: whether pieces say how their tokens came. request_id: for the log.
    """

    prompt: Sequence[int]
    limit: int
    terms: Terms
    stream: tuple[int, int]
    written: StreamedText
    tell: Callable[[News], None]
    wants_origins: bool = False
    top_logprobs: int | None = None  # see Text
    request_id: str = ""
    stats: GenerationStats = field(default_factory=GenerationStats)
    clock: Clock = field(default_factory=Clock)
    token_ids: list[int] = field(default_factory=list)
    ended: bool = False
    cancelled: bool = False

    @property
    def stopping(self) -> Stopping | None:
        """Where the text ends early, for the decoder; None without stop strings."""
        return (self.written.stops, self.written.context) if self.written.stops else None
