"""A head that goes on learning while a server has nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eagle_fsd.training.online.surfaces import update_between

FINISHED = ("stop", "length")  # reasons of texts that are whole


class Report(Protocol):
    """What came of an update. used: the head drafts with other weights now."""

    @property
    def used(self) -> bool: ...


class Learner(Protocol):
    """What learns from texts: the adapter of a head."""

    @property
    def ready(self) -> bool:
        """Whether enough text has come for an update."""
        ...

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None: ...

    def update(self) -> Report | None: ...


class IdleLearning:
    """Collects the texts that ended, and lets a learner learn from them when it is asked to.

    learner: None for a head that stays as it is. An update that fails ends the learning and nothing else.
    """

    def __init__(self, learner: Learner | None) -> None:
        self._learner = learner

    @property
    def ready(self) -> bool:
        return self._learner is not None and self._learner.ready

    def note(self, prompt: Sequence[int], answer: Sequence[int], reason: str | None) -> None:
        """Take in a text that has ended for this reason, if it is whole."""
        if self._learner is not None and reason in FINISHED:
            self._learner.add(prompt, answer)

    def learn(self) -> bool:
        """Run an update, and return whether the head drafts with other weights now."""
        self._learner, report = update_between(self._learner)
        return report is not None and report.used
