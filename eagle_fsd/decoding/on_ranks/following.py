"""A scheduler on several ranks: rank 0 tells the others what its own is told, and they do the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.decoding.request import Stopper, Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.decoding.steps.failures import NonFiniteLogits
from eagle_fsd.runtime.ranks import Ranks

ADMIT, RETIRE, RENEW, STEP, STOP = "admit", "retire", "renew", "step", "stop"
HEARTBEAT = 60.0  # seconds after which rank 0 tells the others that it is still there
FAREWELL = 30.0  # seconds for the last step at the end: one that waits for a lost rank never ends


@dataclass
class Leader:
    """Rank 0's end. What the scheduler is told is told here as well, and goes out before its next step.

    All is done by one thread. Without other ranks this does nothing.
    """

    ranks: Ranks
    _told: list[tuple[Any, ...]] = field(default_factory=list)

    def admit(self, text: Text, stopping: object = None) -> None:
        """Tell that a text was admitted. Its rule and processing are not told: only rank 0 accepts.

        But every rank drafts, and all must draft alike: so they are told the sampling of a text whose draft
        knows its noise. And all must end it alike. stopping: what the other ranks make its stopper of.
        """
        prompt, ends = [int(token) for token in text.prompt], text.terms.eos_token_ids
        sampling = text.terms.sampling if text.terms.shares_noise else SamplingConfig()
        self._tell(
            ADMIT, text.number, text.limit, Terms(ends, sampling=sampling), prompt, text.stream, stopping
        )

    def retire(self, text: Text) -> None:
        self._tell(RETIRE, text.number)

    def renew(self) -> None:
        """Tell that a new scheduler has taken the old one's place."""
        self._tell(RENEW)

    def step(self) -> None:
        """Send what was told, and that a step comes."""
        self._tell(STEP)
        self.send()

    def stop(self) -> None:
        """Send that no step will come any more."""
        self._tell(STOP)
        self.send()

    def send(self) -> None:
        """Send the queued commands. An empty list is a heartbeat: it says that rank 0 is alive."""
        told, self._told = self._told, []
        if self.ranks.several:
            self.ranks.lead(told)

    def _tell(self, *command: Any) -> None:
        if self.ranks.several:
            self._told.append(command)


def follow(
    ranks: Ranks, new_scheduler: Callable[[], Scheduler], new_stopper: Callable[[Any], Stopper] | None = None
) -> None:
    """Do on this rank what rank 0's scheduler is told, until it stops.

    new_stopper: makes a text's stopper of what Leader.admit was told.
    """
    scheduler, texts = new_scheduler(), dict[int, Text]()
    while True:
        for name, *rest in ranks.lead(list[Any]()):
            if name == ADMIT:
                number, limit, terms, prompt, stream, stopping = rest
                texts[number] = Text(number, limit, terms, prompt=prompt, stream=stream)
                if stopping is not None and new_stopper is not None:
                    texts[number].stopper = new_stopper(stopping)
                scheduler.admit(texts[number])
            elif name == RETIRE:
                if (text := texts.pop(rest[0], None)) is not None:  # else it is done
                    scheduler.retire(text)
            elif name == RENEW:
                scheduler, texts = new_scheduler(), {}
            elif name == STOP:
                return
            else:
                with contextlib.suppress(NonFiniteLogits):  # rank 0 has them too, and renews the scheduler
                    scheduler.step()
                texts = {number: text for number, text in texts.items() if not text.done}
