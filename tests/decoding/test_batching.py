"""Prompts in slices, kept texts and the budget of the caches: none of them changes a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from support.eagle3 import eagle3_head
from support.tiny_models import VOCAB, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.decoding import prefill as prefill_module
from eagle_fsd.decoding import prefix_cache
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import CANCELLED, Scheduler
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.drafter import DrafterSpec, NoDrafter
from eagle_fsd.drafting.lookup.lookup_drafter import LookupSpec
from eagle_fsd.drafting.lookup.merged_drafter import MergedSpec
from eagle_fsd.drafting.lookup.text_memory import Sources
from eagle_fsd.drafting.specs import spec_for
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(8, 3, 3)
TERMS = (
    Terms((), Lossless()),
    Terms((), Fuzzy(0.5), SamplingConfig(0.8, top_k=20)),
    Terms((3, 40), Lossless(), SamplingConfig(1.0)),
    Terms((), Fuzzy(0.4, "tv"), SamplingConfig(0.7)),
)


@cache
def target(runtime: str = "torch") -> TargetModel:
    if runtime == "torch":
        return TargetModel(tiny_model())
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    return TargetModel(tiny_model(), runtime=OpenVINO("float32"))


def eagle(runtime: str = "torch") -> DrafterSpec:
    spec = spec_for(tiny_head(4), target(runtime), torch.float32)
    assert spec is not None
    return spec


def eagle3() -> DrafterSpec:
    spec = spec_for(eagle3_head(4), target(), torch.float32)
    assert spec is not None
    return spec


# With all sources, the lists of the target's next tokens are shown to both.
DRAFTERS: dict[str, Callable[[], DrafterSpec]] = {
    "none": lambda: NoDrafter(VOCAB),
    "eagle": eagle,
    "eagle3": eagle3,
    "draft model": lambda: DraftModelSpec.for_target(TargetModel(tiny_model("mistral", seed=5)), target()),
    "lookup": lambda: LookupSpec.for_target(target()),
    "merged": lambda: MergedSpec.for_target(eagle(), target(), Sources()),
    "openvino": lambda: eagle("openvino"),
}
every_drafter = pytest.mark.parametrize("name", DRAFTERS)


@cache
def engine(name: str) -> EagleFSD:
    return EagleFSD(target("openvino" if name == "openvino" else "torch"), DRAFTERS[name]())


def text(number: int, prompt: Sequence[int], limit: int) -> Text:
    return Text(number, limit, TERMS[number % len(TERMS)], prompt=prompt, stream=(7, number))


def alone(name: str, one: Text) -> list[int]:
    """Return the engine's tokens for the text on its own."""
    sampling = one.terms.sampling
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "rule": one.terms.rule}
    ids = torch.tensor([list(one.prompt)])
    made = engine(name).generate(
        ids,
        torch.ones_like(ids),  # a turn's tokens may be the pad token's, which is no padding here
        max_new_tokens=one.limit,
        tree=TREE,
        seed=[one.stream],
        eos_token_id=one.terms.eos_token_ids,
        **options,
    )
    return made.new_tokens[0]


def scheduler_of(name: str, rows: int = 4, **options: int | None) -> Scheduler:
    model = engine(name)
    return Scheduler(model.target, model.drafter, TREE, rows, **options)


def held(scheduler: Scheduler) -> int:
    """Return the slots that all caches of a scheduler have been given."""
    sessions = [] if scheduler.batch is None else [scheduler.batch.target]
    if scheduler.reading is not None:
        sessions.append(scheduler.reading.workspace.session)
    return sum(one.cache.rows * one.cache.capacity for one in sessions) + scheduler.prefixes.slots


class Counted:
    """Counts the prompt tokens that targets read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[int] = []
        read = TargetSession.prefill

        def counted(session: TargetSession, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
            self.parts.append(tokens.numel())
            return read(session, tokens, lengths)

        monkeypatch.setattr(TargetSession, "prefill", counted)

    def take(self) -> list[int]:
        """Return how many tokens each forward read since the last call."""
        parts, self.parts = self.parts, []
        return parts


def drain(scheduler: Scheduler, found: dict[Text, list[int]]) -> None:
    for one, tokens in scheduler.run():
        found.setdefault(one, []).extend(tokens)


# --- random arrivals ---


def random_run(name: str, seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Let texts come and go at random; return how many were retired, and how many tokens not read."""
    monkeypatch.setattr(prefix_cache, "LEAST", 4)
    monkeypatch.setattr(prefill_module, "LISTED", 3)
    monkeypatch.setattr("eagle_fsd.decoding.scheduler.LISTED", 3)
    rng, counter = random.Random(f"{name}/{seed}"), Counted(monkeypatch)
    limit = rng.choice([None, 500]) if name != "openvino" else rng.choice([None, 2000])
    scheduler = scheduler_of(
        name,
        rows=rng.randint(1, 4),
        group=rng.randint(1, 2),
        slice_tokens=rng.choice([1, 3, 8, 20, None]),
        cache_tokens=limit,
        prefix_tokens=rng.choice([200, 1000]) if name != "openvino" else 1024,
    )
    found: dict[Text, list[int]] = {}
    texts: list[Text] = []
    saved = 0
    starts: list[int] = []
    load = TargetSession.load_row
    monkeypatch.setattr(TargetSession, "load_row", lambda *given: (starts.append(given[3]), load(*given))[1])
    while len(texts) < count or scheduler.busy:
        if len(texts) < count and rng.random() < 0.4:
            prompt = prompts_of([rng.choice([1, 2, 5, 9, 14, 30, 50])], seed=len(texts))[0]
            if texts and rng.random() < 0.7:  # a next turn, or another end of a prompt
                before = rng.choice([one for one in texts if one.done] or texts)
                history = [*before.prompt, *found[before]]
                prompt = (history[: rng.choice([len(history), rng.randint(1, len(history))])] + prompt)[:70]
            texts.append(text(len(texts), prompt, rng.randint(1, 24)))
            found[texts[-1]] = []
            scheduler.admit(texts[-1])
        if texts and rng.random() < 0.08:
            scheduler.retire(rng.choice(texts))
        for one, tokens in scheduler.step().items():
            found[one] += tokens
        assert limit is None or held(scheduler) <= limit
        assert scheduler.prefixes.slots <= scheduler.prefixes.limit
    assert scheduler.batch is None and scheduler.reading is None and not scheduler._tokens
    saved = sum(starts)
    counter.take()
    monkeypatch.setattr(TargetSession, "load_row", load)
    cancelled = 0
    for one in texts:
        whole, mine = alone(name, one), found[one]
        if one.stats.finish_reason == CANCELLED:
            cancelled += 1
            assert mine == whole[: len(mine)], f"text {one.number} of seed {seed}"
        else:
            assert mine == whole, f"text {one.number} of seed {seed}"
    return cancelled, saved


@every_drafter
def test_texts_that_come_and_go_are_those_that_they_are_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = saved = 0
    for seed in range(2):
        with monkeypatch.context() as patched:
            found = random_run(name, seed, 10, patched)
        cancelled, saved = cancelled + found[0], saved + found[1]
    assert saved > 10, "no text went on from a kept one"


@pytest.mark.slow
@every_drafter
def test_many_more_texts_that_come_and_go(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = saved = 0
    for seed in range(100, 120):
        with monkeypatch.context() as patched:
            found = random_run(name, seed, 25, patched)
        cancelled, saved = cancelled + found[0], saved + found[1]
    assert saved > 1000 and cancelled > 20
