"""What surrounds the steps, on a pretended GPU: batches that change, kept texts, and heads that change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_twins import DRAFTERS, LISTS, PROMPTS, TREE, Twins, head
from support.tiny_models import VOCAB, prompts_of, simple_model, tiny_head, tiny_model, young_head

from eagle_fsd import AutoTree, EagleFSD, Fuzzy, Lossless, PromptCache, SamplingConfig
from eagle_fsd.autotune import step_costs, tree_chooser
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.processing import Processing
from eagle_fsd.decoding import workspace
from eagle_fsd.decoding.request import FAILED, Terms, Text
from eagle_fsd.decoding.scheduler import CANCELLED, Scheduler
from eagle_fsd.decoding.steps.origins import TokenOrigins
from eagle_fsd.runtime.step_recorder import Graphs
from eagle_fsd.training.online.adapter import AdaptConfig, HeadAdapter

IDS, MASK = pad_left(PROMPTS, 0)


def twins(drafter: str, family: str = "llama", **overrides: object) -> Twins:
    return Twins(lambda: tiny_model(family, **overrides), DRAFTERS[drafter][0])


def texts(engine: EagleFSD, new_tokens: int = 8, **options: Any) -> list[list[int]]:
    options = {"tree": TREE, "seed": 1, **options}
    return engine.generate(IDS, MASK, max_new_tokens=new_tokens, **options).new_tokens


def many(engine: EagleFSD, prompts: list[list[int]], **options: Any) -> list[tuple[int, list[int]]]:
    options = {"max_new_tokens": 5, "tree": TREE, "seed": 1, "batch_size": 3, **options}
    return sorted((one.number, one.new_tokens) for one in engine.generate_many(prompts, **options))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=() if one in ("merged", "eagle3") else pytest.mark.slow)
        for one in DRAFTERS
        if one != "lookup"
    ],
)
def test_texts_join_and_leave(name: str) -> None:
    prompts = prompts_of([4, 9, 1, 30, 2])
    twins(name).same(lambda engine: many(engine, prompts, temperature=0.8))


@pytest.mark.parametrize("name", ["near", pytest.param("merged", marks=pytest.mark.slow)])
def test_texts_of_one_batch_have_rules_and_options_of_their_own(name: str) -> None:
    """In a scheduler, as in the server; one text is retired, and one can get no token."""
    terms = [
        Terms((), Lossless(), SamplingConfig(1.0)),
        Terms((), Fuzzy(0.5), SamplingConfig(0.8, top_k=20)),
        Terms((3, 40), processing=Processing.of(repetition_penalty=1.3, logit_bias={(3,): 2.0})),
        Terms((), processing=Processing.of(suppress_tokens=range(VOCAB))),
        Terms(()),
    ]

    def call(engine: EagleFSD) -> object:
        origins, texts = TokenOrigins(), list[Text]()
        scheduler = Scheduler(engine.target, engine.drafter, TREE, 3, observer=origins)
        for number, prompt in enumerate(prompts_of([4, 9, 1, 30, 2])):
            stream = (7, number)
            text = Text(number, 8, terms[number], prompt=prompt, stream=stream, top_logprobs=2)
            texts.append(text)
            scheduler.admit(text)
        for number, _ in enumerate(scheduler.run()):
            if number == 4:
                scheduler.retire(texts[1])
        reasons = [text.stats.finish_reason for text in texts]
        assert reasons[1] == CANCELLED and reasons[3] == FAILED
        shown = [[(one.token, [token for token, _ in one.top]) for one in text.logprobs] for text in texts]
        return reasons, shown, [text.new_tokens for text in texts], [origins.take(one) for one in range(5)]

    twins(name).same(call)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("jamba", marks=pytest.mark.slow)])
def test_texts_with_states_part_from_what_is_kept(family: str) -> None:
    shared = prompts_of([80])[0]
    prompts = [shared + end for end in prompts_of([3, 5, 7], seed=1)]

    def call(engine: EagleFSD) -> object:
        cache = PromptCache(4000)
        made = [
            engine.generate([prompt], max_new_tokens=5, tree=TREE, prompt_cache=cache) for prompt in prompts
        ]
        assert made[-1].stats[0].reused_tokens
        return [one.new_tokens for one in made], many(engine, prompts)

    twins("lookup", family).same(call)


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one == "eagle" else pytest.mark.slow) for one in DRAFTERS],
)
def test_a_chat_goes_on_from_what_is_kept(name: str) -> None:
    def call(engine: EagleFSD) -> object:
        cache, ids, found = PromptCache(2000), prompts_of([30])[0], []
        for _ in range(3):
            made = engine.generate([ids], max_new_tokens=5, tree=TREE, prompt_cache=cache)
            found.append((made.new_tokens, made.stats[0].reused_tokens))
            ids = [*ids, *made.new_tokens[0], 3, 4]
        return found

    assert twins(name).same(call)[-1][1] or DRAFTERS[name][1] >= LISTS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "eagle3", "near"])
def test_long_prompts_are_read_in_slices(name: str) -> None:
    prompt = prompts_of([1500])[0]
    twins(name, max_position_embeddings=4096).same(
        lambda engine: (
            engine.generate([prompt], max_new_tokens=5, tree=TREE).new_tokens,
            many(engine, [prompt[:600], prompt[:4], prompt[5:300]], batch_size=2),
        )
    )


def test_caches_grow_and_batches_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are kept from one batch to the next, dropped with their memory, and made again."""
    monkeypatch.setattr(workspace, "AHEAD", 2)
    monkeypatch.setattr(workspace, "LEAST", 4)
    monkeypatch.setattr(Graphs, "view", 16)

    def call(engine: EagleFSD) -> object:
        found = [texts(engine, 20), texts(engine, 20)]
        engine.free_memory()
        found.append(texts(engine))
        assert all(one["cache_bytes"] for one in engine.memory())
        return found

    twins("eagle").same(call)


def test_other_weights_draft_from_the_next_text_on() -> None:
    other = tiny_head(9).state_dict()

    def call(engine: EagleFSD) -> object:
        found = [texts(engine, rule=Fuzzy(0.5))]
        engine.draft_with(other)
        origins = TokenOrigins()
        found.append(texts(engine, rule=Fuzzy(0.5), observer=origins))
        return found, origins.take(0), origins.take(1)

    twins("all tokens").same(call)


@pytest.mark.slow
def test_a_head_learns_from_the_texts_it_drafts_for() -> None:
    def call(engine: EagleFSD) -> object:
        adapter, found = HeadAdapter(engine, AdaptConfig(every=24, learning_rate=0.02)), []
        for prompt in prompts_of([6] * 8, seed=5) * 2:
            made = engine.generate([prompt], max_new_tokens=24, tree=TREE).new_tokens[0]
            adapter.add(prompt, made)
            adapter.update()
            found.append(made)
        assert adapter.adapted
        return found, [one.used for one in adapter.updates]

    Twins(simple_model, lambda target, put: head(target, put(young_head()))).same(call)


@pytest.mark.slow
def test_a_tree_is_measured_and_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is the device's own affair; a lossless text does not depend on it."""
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    monkeypatch.setattr(tree_chooser, "BUSY", float("inf"))
    monkeypatch.setattr(step_costs, "WIDTHS", step_costs.WIDTHS[:3])
    twins("all tokens").same(lambda engine: texts(engine, tree=AutoTree(depth=2, top_k=3)))


def test_a_baseline_is_hugging_faces() -> None:
    twins("near").same(lambda engine: engine.target_alone(IDS, MASK, max_new_tokens=4).new_tokens)


def test_prompts_may_come_from_the_gpu() -> None:
    both = twins("near")
    wanted = both.plain.generate(IDS, MASK, max_new_tokens=4, tree=TREE)
    with both.there():
        ids, mask = (one.to(torch.device("cuda")) for one in (IDS, MASK))
        found = both.far.generate(ids, mask, max_new_tokens=4, tree=TREE)
        assert found.sequences.device.type == "cuda"
        assert found.sequences.tolist() == wanted.sequences.tolist()
