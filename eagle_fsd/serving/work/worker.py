"""One thread that owns the scheduler: it takes texts in, runs steps, and hands on what they emit.

Whoever submits a text gets its news by calls from this thread, which must not wait. So a slow reader holds
nobody up: what it has not read yet is kept for it, which its text's limit bounds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.devices import release_freed_memory
from eagle_fsd.core.process.streams import tell
from eagle_fsd.core.stats import GenerationStats, Stopwatch
from eagle_fsd.decoding.on_ranks.following import FAREWELL, HEARTBEAT, Leader
from eagle_fsd.decoding.request import Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.decoding.steps.failures import NonFiniteLogits
from eagle_fsd.decoding.steps.origins import TokenOrigins
from eagle_fsd.serving.choices import Limits
from eagle_fsd.serving.errors import SERVER, ApiError, of_failure, queue_full, wrong_value
from eagle_fsd.serving.work.jobs import Job, News
from eagle_fsd.serving.work.learning import IdleLearning, Learner
from eagle_fsd.serving.work.line import Line
from eagle_fsd.serving.work.scheduling import new_scheduler
from eagle_fsd.serving.work.tree import ServedTree
from eagle_fsd.text.stop_strings import make_stopper

if TYPE_CHECKING:
    from eagle_fsd.engine import EagleFSD

logger = logging.getLogger(__name__)
RELEASE_EVERY = 32  # texts
CLOSED = "the server is shutting down: try again later"


class Watcher(Protocol):
    """Is told what the worker does: the server's metrics."""

    def started(self, job: Job) -> None: ...

    def emitted(self, job: Job, tokens: int, now: float) -> None: ...

    def ended(self, job: Job, reason: str) -> None: ...


class Worker:
    """Serves texts with one engine.

    tree: of every text, measured while there is none to serve. limits: how many texts it decodes and lets
    wait, and what their caches may take. learner: learns from the texts while there is none to serve; whoever
    comes then waits for the end of an update.
    """

    def __init__(
        self,
        model: EagleFSD,
        tree: ServedTree,
        limits: Limits,
        watcher: Watcher,
        learner: Learner | None,
    ) -> None:
        self._learning = IdleLearning(learner)
        self.model, self.tree, self.limits, self.watcher = model, tree, limits, watcher
        self._origins, self._watch = TokenOrigins(), Stopwatch()
        self._leader = Leader(model.target.ranks)
        self._scheduler = self._new_scheduler()
        self._texts: dict[Text, Job] = {}
        self._number, self._ended, self.line = 0, 0, Line(limits.max_rows)
        self._inbox: list[Job] = []
        self._open, self._closing = 0, False  # open: jobs that have not ended
        self._lost = False  # whether contact with the other ranks is lost
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="eagle-fsd-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Let all texts end with an error after the step in hand, and the thread with them; do not wait."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def close(self) -> None:
        """End all texts and stop the thread. A thread that waits for other ranks is left after FAREWELL."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(FAREWELL if self._leader.ranks.several else None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """How many texts have a place: they are decoded, or will be from the next step on."""
        if self.limits.cache_tokens is None:  # else texts wait for room too, as only a step finds out
            return min(self._open, self.limits.max_rows)
        return sum(job.clock.started is not None for job in list(self._texts.values()))

    @property
    def waiting(self) -> int:
        """How many texts wait for a place."""
        return max(0, self._open - self.running)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take in the texts of one request. Raises ApiError if they find no room."""
        now = time.perf_counter()
        with self._wake:
            if self._closing:
                raise ApiError(503, CLOSED, code="closing", kind=SERVER)
            if self._open + len(jobs) > self.limits.most_texts:
                raise queue_full(self.waiting, self.line.turn(len(jobs), now))
            self._open += len(jobs)
            for job in jobs:
                job.clock.submitted = now
            self._inbox += jobs
            self._wake.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End texts that nobody wants any more. Nothing is told of them after this."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            self._wake.notify()

    def phase_seconds(self, phase: str) -> float:
        """Return how long the steps' phases of this name took in all."""
        return self._watch.seconds.get(phase, 0.0)

    # -- the thread ----------------------------------------

    def _run(self) -> None:
        try:
            going = True
            while going:
                try:
                    going = self._take_in()
                    if going:
                        self._work()
                except Exception as error:  # noqa: BLE001  # memory may end anywhere: the thread lives on
                    self._recover(error, set(self._scheduler.waiting))
        finally:  # nobody may wait for a thread that has ended
            with self._wake:
                self._closing = True
            for job in [*self._texts.values(), *self._inbox]:
                with contextlib.suppress(Exception):
                    self._end(job, News(error=ApiError(503, CLOSED, code="closing", kind=SERVER)))
            if not self._lost:
                self._leader.stop()

    def _work(self) -> None:
        """Run one step, and hand on what it emitted."""
        before = set(self._scheduler.waiting)
        begun, read = time.perf_counter(), self.phase_seconds("prefill")
        try:
            self._leader.step()
            emitted = self._scheduler.step()
        except Exception as error:  # noqa: BLE001
            self._recover(error, before)
            return
        now = time.perf_counter()
        for text in before.difference(self._scheduler.waiting):
            self._start(text, begun, read)
        for text, tokens in emitted.items():
            if (tokens or text.failure is not None) and text in self._texts:
                self._try_to_hand_on(text, tokens, now)
        self._origins.clear()

    def _take_in(self) -> bool:
        """Wait until there is something to do, and admit what has come. Return False at the end."""
        while self._learning.ready and not self._asked():
            self._learn()
        while not self._wait():
            if self._leader.ranks.several:
                self._leader.send()
            elif self.tree.measure(self._asked):
                self._change_tree()
        if self._closing:
            return False
        for text, job in list(self._texts.items()):
            if job.cancelled:
                self._retire(text, job)
        while self._inbox:
            with self._wake:
                job = self._inbox.pop(0)
            if job.cancelled:
                self._end(job, News(finish_reason="cancelled"))
            else:
                self._admit(job)
        wanted = any(job.wants_origins for job in self._texts.values())
        self._scheduler.observer = self._origins if wanted else None
        return True

    def _asked(self) -> bool:
        """Whether there is something to do."""
        return bool(self._inbox or self._scheduler.busy or self._closing)

    def _wait(self) -> bool:
        """Wait until there is something to do; return False if something else has its turn before."""
        patience = HEARTBEAT if self._leader.ranks.several else self.tree.pause
        with self._wake:
            return self._wake.wait_for(self._asked, patience)

    def _change_tree(self) -> None:
        """Serve with the tree that was measured."""
        tell(f"the draft tree is {self.tree.size} from now on")
        self._scheduler = self._new_scheduler()
        release_freed_memory()

    def _learn(self) -> None:
        """Let the head learn. What is kept of it in caches is of no use to another head, so they go."""
        if self._learning.learn():
            self._scheduler = self._new_scheduler()

    def _admit(self, job: Job) -> None:
        self._number += 1
        job.stats = GenerationStats()
        text = Text(self._number, job.limit, job.terms, job.stats, job.prompt, job.stream, job.top_logprobs)
        try:
            if job.stopping is not None:
                text.stopper = make_stopper(job.written.tokenizer, *job.stopping)
            self._scheduler.admit(text)
            self._leader.admit(text, job.stopping)
        except ValueError as error:  # it may need more of the caches than there is
            said = one_line(error).replace(f"prompt {text.number} ", "the prompt ", 1)  # not the client's
            self._end(job, News(error=wrong_value(said)))
            return
        except Exception as error:
            self._end(job, News(error=of_failure(error)))
            raise
        self._texts[text] = job

    def _start(self, text: Text, begun: float, read: float) -> None:
        job = self._texts[text]
        if job.clock.started is None:
            job.clock.started, job.clock.prompt = begun, -read  # what was read before is not this prompt
            self.watcher.started(job)

    def _try_to_hand_on(self, text: Text, tokens: list[int], now: float) -> None:
        try:
            self._hand_on(text, tokens, now)
        except Exception as error:  # a text that cannot be shown ends alone
            job = self._texts.get(text)
            logger.exception("a text could not be handed on: %s", job.request_id if job else "it has ended")
            if job is not None:
                self._retire(text, job, News(error=of_failure(error)))

    def _hand_on(self, text: Text, tokens: list[int], now: float) -> None:
        job = self._texts[text]
        origins = self._origins.take(text.number) if job.wants_origins else []
        done = job.written.tokens  # a text that started over emits these once more
        place = job.stats.new_tokens - len(tokens)
        if (skipped := min(len(tokens), done - place)) > 0:
            if tokens[:skipped] != job.token_ids[place : place + skipped]:
                raise RuntimeError("the text changed when it was made again")
            tokens, origins = tokens[skipped:], origins[skipped:]
        pieces = job.written.add(tokens, origins)
        taken = job.written.tokens - done
        logprobs = text.logprobs[len(job.token_ids) : len(job.token_ids) + taken]
        job.token_ids += tokens[:taken]
        if job.clock.first is None and tokens:
            job.clock.first = now
            job.clock.prompt += self.phase_seconds("prefill")
        self.watcher.emitted(job, taken, now)
        job.clock.last = now
        if job.written.stopped:
            self._retire(text, job, News(pieces, logprobs, "stop"))
        elif text.failure is not None:
            if pieces := [*pieces, *job.written.finish()]:
                job.tell(News(pieces, logprobs))
            self._retire(text, job, News(error=of_failure(text.failure)))
        elif text.done:
            del self._texts[text]
            pieces = [*pieces, *job.written.finish()]
            self._end(job, News(pieces, logprobs, text.stats.finish_reason))
        elif pieces or logprobs:
            job.tell(News(pieces, logprobs))

    def _retire(self, text: Text, job: Job, news: News | None = None) -> None:
        self._scheduler.retire(text)
        self._leader.retire(text)
        del self._texts[text]
        self._end(job, news or News(finish_reason="cancelled"))

    def _end(self, job: Job, news: News) -> None:
        if job.ended:
            return
        job.ended = True
        try:
            self._count(job, news)
        finally:  # somebody waits for it
            with self._wake:
                self._open -= 1
            if not job.cancelled:
                job.tell(news)

    def _count(self, job: Job, news: News) -> None:
        """Note that a text has ended: what it taught, how long it took."""
        if max(job.prompt, default=0) < self.model.target.vocab_size:  # a head sees no images
            self._learning.note(job.prompt, job.token_ids, news.finish_reason)
        self._ended += 1
        if self._ended % RELEASE_EVERY == 0:
            release_freed_memory()
        if job.clock.started is not None:
            with self._wake:  # other threads ask for turns
                self.line.note(job.clock.started, time.perf_counter())
        self.watcher.ended(job, "error" if news.error is not None else str(news.finish_reason))

    def _recover(self, error: Exception, before: set[Text]) -> None:
        """Go on after an error, of a step or beside it. The batch is lost; texts that still waited are not.

        Logits that are not finite belong to one text. The others of the batch start over, on the same random
        numbers, and what they emitted already is not shown again.
        """
        expected = isinstance(error, NonFiniteLogits)
        logger.error("a step, or what is beside it, failed: %s", one_line(error), exc_info=not expected)
        untouched = before.intersection(self._scheduler.waiting)
        if untouched.issuperset(self._texts):  # the next one is to blame, or it would go on for ever
            untouched -= set(list(self._scheduler.waiting)[:1])
        if self._leader.ranks.several and not expected:
            # Nobody knows where the other ranks are: the server ends, and with it all of them.
            untouched, self._closing, self._lost = set(), True, True
            os.kill(os.getpid(), signal.SIGTERM)
        self._scheduler = self._new_scheduler()
        self._leader.renew()
        self._origins.clear()
        for text, job in list(self._texts.items()):
            del self._texts[text]  # now: what could not begin anew is still among those that must be told
            guilty = not isinstance(error, NonFiniteLogits) or error.row == text.number
            if text not in untouched and guilty:
                logger.error("that ended a text of %s", job.request_id)
                self._end(job, News(error=of_failure(error)))
            else:
                self._admit(job)

    def _new_scheduler(self) -> Scheduler:
        made = new_scheduler(self.model, self.tree.size, self.limits)
        made.watch = self._watch  # times go on where the last one's ended
        return made
