"""What /metrics shows, in Prometheus's format. Names follow vLLM's, with this package's prefix."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eagle_fsd.core.stats import PHASES

if TYPE_CHECKING:
    from eagle_fsd.serving.work.jobs import Job
    from eagle_fsd.serving.work.worker import Worker

PREFIX = "eagle_fsd_"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKENS_A_STEP = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)


class Metrics:
    """The counters of one server. A worker tells them what it does."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

        self.requests = counter("http_requests", "Answers by route and status", ("route", "status"))
        self.texts = counter("request_success", "Texts that ended, by reason", ("finished_reason",))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, with those of kept texts")
        self.reused_tokens = counter("prefix_cache_hits", "Tokens of prompts that kept texts began with")
        self.new_tokens = counter("generation_tokens", "New tokens that were handed on")
        self.steps = counter("spec_decode_num_drafts", "Steps of texts: one draft tree each")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self.fuzzy = counter("spec_decode_num_fuzzy_tokens", "Those that were accepted by the rule alone")
        self.tau = histogram("spec_decode_tokens_per_step", "tau of a text: tokens per step", TOKENS_A_STEP)
        self.queued = histogram("request_queue_time_seconds", "From arrival to a place in the batch", SECONDS)
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self.between = histogram("inter_token_latency_seconds", "From a token to the next one", BETWEEN)
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to a text's end", SECONDS)

    def watch(self, worker: Worker) -> None:
        """Show how many texts this worker has, and how long its steps took by phase."""
        for name, text, read in (
            ("num_requests_running", "Texts that are decoded", lambda: worker.running),
            ("num_requests_waiting", "Texts that wait for a place", lambda: worker.waiting),
        ):
            Gauge(PREFIX + name, text, registry=self.registry).set_function(read)
        phases = Gauge(PREFIX + "step_seconds", "Time by phase of a step", ("phase",), registry=self.registry)
        for phase in PHASES:
            phases.labels(phase).set_function(functools.partial(worker.phase_seconds, phase))

    def started(self, job: Job) -> None:
        self.queued.observe(max(0.0, (job.clock.started or 0.0) - job.clock.submitted))
        self.prompt_tokens.inc(len(job.prompt))

    def emitted(self, job: Job, tokens: int, now: float) -> None:
        self.new_tokens.inc(tokens)
        if job.clock.last is None:
            self.first.observe(now - job.clock.submitted)
        else:  # a step's tokens come together
            for _ in range(tokens):
                self.between.observe((now - job.clock.last) / tokens)

    def ended(self, job: Job, reason: str) -> None:
        stats = job.stats
        self.reused_tokens.inc(stats.reused_tokens)
        self.texts.labels(reason).inc()
        self.whole.observe(time.perf_counter() - job.clock.submitted)
        self.steps.inc(stats.steps)
        self.accepted.inc(stats.exact_accepts + stats.fuzzy_accepts)
        self.fuzzy.inc(stats.fuzzy_accepts)
        if stats.steps:
            self.tau.observe(stats.tau)

    def answered(self, route: str, status: int) -> None:
        self.requests.labels(route, str(status)).inc()

    def page(self) -> bytes:
        return bytes(generate_latest(self.registry))
