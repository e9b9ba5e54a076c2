"""What a generation did and how long it took, per row. Knows nothing about models or text.

A step is one round of draft, verify and accept. `record` is called once per step with what that step really
emitted, after truncation at an end token or at max_new_tokens, so that always
    sum(accept_histogram) == steps    and    sum(k * accept_histogram[k]) == new_tokens.
tau = new_tokens / steps counts the target's own token of every step: plain decoding has tau 1.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from eagle_fsd.core.tree import HEAD, SOURCES

PHASES = ("prefill", "draft", "verify", "accept", "keep")
TARGET = "target"  # the source of a token that was not drafted


class Stopwatch:
    """Seconds per phase, wall clock: `with watch("draft"): ...` adds to watch.seconds["draft"].

    On an accelerator work is queued, so time shows up in the phase that waits. `synchronize` (such as
    torch.cuda.synchronize) is called at both ends of every phase and attributes the time exactly, at the
    price of slower steps. Phases may nest; each then counts its own full time.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._synchronize = synchronize

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - start

    def since(self, before: Mapping[str, float]) -> "Stopwatch":
        """Return a watch with what was added since its seconds were these."""
        watch = Stopwatch()
        watch.seconds = {phase: now - before.get(phase, 0.0) for phase, now in self.seconds.items()}
        return watch

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


@dataclasses.dataclass
class GenerationStats:
    """Counts and seconds of one row. `seconds` is the whole call; the phases need not add up to it.

    steps: verified trees. new_tokens: an end token included. exact_accepts, fuzzy_accepts: emitted draft
    tokens that equal the target's own draw, and those that the rule let through although they do not.
    reused_tokens: the first tokens of its prompt that were taken from a kept text. accept_histogram: [k] is
    the number of steps that emitted k tokens. accepted_of: accepts by the source of their draft; see
    `sources`. finish_reason: "stop", "length", "interrupted", "cancelled" or "failed"; None while the text is
    being made, and for a total of texts with several.
    """

    steps: int = 0
    new_tokens: int = 0
    exact_accepts: int = 0
    fuzzy_accepts: int = 0
    reused_tokens: int = 0
    accept_histogram: list[int] = dataclasses.field(default_factory=list)
    accepted_of: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    keep_seconds: float = 0.0
    finish_reason: str | None = None

    @property
    def tau(self) -> float:
        """Tokens emitted per step, the target's own included; 0.0 before the first step."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """new_tokens / seconds, prefill included; 0.0 before any time was recorded."""
        return self.new_tokens / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def sources(self) -> dict[str, int]:
        """Where the new tokens come from: accepted ones by the source of their draft, others the target."""
        return {TARGET: self.new_tokens - sum(self.accepted_of.values()), **self.accepted_of}

    def record(self, emitted: int, exact: int, fuzzy: int, sources: Sequence[int] | None = None) -> None:
        """Count one step: how many tokens it emitted, and how many of them were exact and fuzzy accepts.

        sources: of each accepted token, as a place in SOURCES; None: all from a head.
        """
        if emitted < 1 or exact < 0 or fuzzy < 0 or exact + fuzzy > emitted:
            raise ValueError(
                f"a step with emitted={emitted}, exact={exact}, fuzzy={fuzzy}: a step emits at least "
                "one token and accepts no more than it emits; count after truncation"
            )
        self.steps += 1
        self.new_tokens += emitted
        self.exact_accepts += exact
        self.fuzzy_accepts += fuzzy
        for source in [HEAD] * (exact + fuzzy) if sources is None else sources:
            self.accepted_of[SOURCES[source]] += 1
        self.accept_histogram.extend([0] * (emitted + 1 - len(self.accept_histogram)))
        self.accept_histogram[emitted] += 1

    def set_times(self, watch: Stopwatch, seconds: float) -> None:
        """Set the total, and the seconds of all PHASES from the watch."""
        self.seconds = seconds
        for phase in PHASES:
            setattr(self, f"{phase}_seconds", watch.seconds.get(phase, 0.0))

    def to_dict(self) -> dict[str, object]:
        """Return all fields and the derived numbers, ready for JSON."""
        fields = dataclasses.asdict(self)
        fields["sources"] = self.sources  # says what accepted_of says, and more
        del fields["accepted_of"]
        return {**fields, "tau": self.tau, "tokens_per_second": self.tokens_per_second}

    @classmethod
    def total(cls, parts: Iterable["GenerationStats"], concurrent: bool = False) -> "GenerationStats":
        """Add up several records; finish_reason is the common one, else None.

        Seconds add up too, as for calls one after the other. With `concurrent`, as for the rows of one batch,
        the longest time counts.
        """
        parts = list(parts)
        whole = cls()
        for name in ("steps", "new_tokens", "exact_accepts", "fuzzy_accepts", "reused_tokens"):
            setattr(whole, name, sum(getattr(part, name) for part in parts))
        for name in ("seconds", *(f"{phase}_seconds" for phase in PHASES)):
            values = [getattr(part, name) for part in parts]
            setattr(whole, name, max(values, default=0.0) if concurrent else sum(values))
        for source in SOURCES:
            whole.accepted_of[source] = sum(part.accepted_of[source] for part in parts)
        width = max((len(part.accept_histogram) for part in parts), default=0)
        whole.accept_histogram = [0] * width
        for part in parts:
            for emitted, count in enumerate(part.accept_histogram):
                whole.accept_histogram[emitted] += count
        reasons = {part.finish_reason for part in parts}
        whole.finish_reason = reasons.pop() if len(reasons) == 1 else None
        return whole
