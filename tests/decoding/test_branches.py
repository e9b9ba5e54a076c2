"""Where prompts with recurrent states part, what they share is kept and not read again; no text changes."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import transformers
from support.read_tokens import ReadTokens
from support.tiny_models import RECURRENT, attention_of, greedy_alone, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Fuzzy, Lossless, PromptCache, SamplingConfig, TreeConfig
from eagle_fsd.decoding.prompts import prefix_cache
from eagle_fsd.decoding.prompts.prefix_cache import LEAST, SHARED, PrefixCache
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.lookup.lookup_drafter import LookupSpec
from eagle_fsd.runtime.ranks import Ranks
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.Cache, "get_conv_state"), reason="transformers is older than 5.22"
)
TREE = TreeConfig(8, 3, 3)
# Delta rule; convolution alone; attention and Mamba-2 in one layer; a Mamba that reads no prompt in parts.
ALWAYS = ("qwen3_5", "lfm2", "falcon_h1", "jamba")
SYSTEM, *QUESTIONS = prompts_of([100, 5, 9, 3, 12], seed=2)
PROMPTS = [[*SYSTEM, *question] for question in QUESTIONS]
KEPT = len(SYSTEM) - LEAST
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "rule": Fuzzy(0.4)},
]


@functools.cache
def engine(name: str) -> EagleFSD:
    """Return an engine of which the target, or the draft model alone, has recurrent layers."""
    if name == "draft model":
        target = TargetModel(tiny_model())
        return EagleFSD(target, DraftModelSpec.for_target(TargetModel(tiny_model("lfm2", seed=5)), target))
    family = "qwen3_5" if name == "lookup" else name
    target = TargetModel(tiny_model(family, attention_of(family)))
    return EagleFSD(target, LookupSpec.for_target(target, worth=0.0) if name == "lookup" else tiny_head(4))


every_family = pytest.mark.parametrize(
    "name",
    [
        *[pytest.param(one, marks=() if one in ALWAYS else pytest.mark.slow) for one in RECURRENT],
        "draft model",
        "lookup",
    ],
)


def answer(
    name: str, prompt: Sequence[int], kept: PromptCache | None, **options: Any
) -> tuple[list[int], int]:
    """Return the new tokens, and how many of the prompt's were not read."""
    options = {"max_new_tokens": 8, "tree": TREE, "seed": 4, **options}
    made = engine(name).generate([prompt], [[1] * len(prompt)], prompt_cache=kept, **options)
    return made.new_tokens[0], made.stats[0].reused_tokens


@every_family
def test_the_third_prompt_with_a_beginning_does_not_read_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = greedy_alone(engine(name).target.model, PROMPTS[:3], 8)
    kept, read = PromptCache(), ReadTokens(monkeypatch)
    for prompt, text, reused in zip(PROMPTS, wanted, (0, 0, KEPT), strict=False):
        assert answer(name, prompt, kept) == (text, reused)
        assert read.take() == len(prompt) - max(reused, 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", WAYS, ids=["greedy", "lossless", "fuzzy"])
@pytest.mark.parametrize("name", ["qwen3_5", "draft model"])
def test_a_seed_gives_the_text_that_it_gives_without_a_cache(name: str, options: dict[str, Any]) -> None:
    kept = PromptCache()
    for prompt, reused in zip(PROMPTS, (0, 0, KEPT), strict=False):
        wanted, _ = answer(name, prompt, None, **options)
        assert answer(name, prompt, kept, **options) == (wanted, reused)


def test_drafts_are_as_good_behind_a_kept_beginning() -> None:
    """A draft model that is the target drafts what it says, if its states are those of the text."""
    target = TargetModel(tiny_model("lfm2"))
    model = EagleFSD(target, DraftModelSpec.for_target(target, target))
    kept, steps = PromptCache(), []
    for prompt in PROMPTS[:3]:
        made = model.generate([prompt], [[1] * len(prompt)], prompt_cache=kept, max_new_tokens=12, tree=TREE)
        steps.append(made.stats[0].steps)
    assert made.stats[0].reused_tokens == KEPT and steps == [12 // TREE.depth] * 3


def test_what_two_questions_have_in_common_by_chance_is_not_kept_with_their_beginning() -> None:
    kept = PromptCache()
    prompts = [[*SYSTEM, *end] for end in ([5, 6, 7, 8], [5, 6, 7, 9], [4, 1], [5, 6, 7, 8, 3])]
    assert [answer("lfm2", prompt, kept)[1] for prompt in prompts] == [0, 0, KEPT + 3, KEPT + 3]
    again = PromptCache()
    ends = ([*range(5, 5 + LEAST), 9], [*range(5, 5 + LEAST), 8], [4, 1])
    assert [answer("lfm2", [*SYSTEM, *end], again)[1] for end in ends] == [0, 0, len(SYSTEM)]


def test_a_prompt_that_comes_again_is_kept_before_its_end() -> None:
    kept = PromptCache()
    reused = [answer("lfm2", PROMPTS[0], kept)[1] for _ in range(3)]
    assert reused == [0, 0, len(PROMPTS[0]) - LEAST]
    assert len(kept._texts.texts) == 2, "the text, which ends alike each time, and its beginning"


def test_a_short_beginning_is_read_anew() -> None:
    """A forward more would cost more than it saves."""
    kept = PromptCache()
    for prompt in PROMPTS:
        assert answer("lfm2", prompt[-SHARED + 1 - len(prompt) + len(SYSTEM) :], kept)[1] == 0
    short = [[*SYSTEM[: SHARED - 1], number] for number in range(3)]
    assert [answer("lfm2", prompt, kept)[1] for prompt in short] == [0, 0, 0]


def test_a_beginning_inside_a_beginning_is_kept_too() -> None:
    kept, first = PromptCache(), prompts_of([90], seed=8)[0]
    document = [*SYSTEM, *first]
    prompts = [[*document, 5], [*document, 6], [*SYSTEM, 7, 1], [*SYSTEM, 8, 1], [*document, 9]]
    reused = [answer("lfm2", prompt, kept)[1] for prompt in prompts]
    assert reused == [0, 0, 0, KEPT, len(document) - LEAST]


def test_ranks_part_where_all_of_them_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may have lacked the memory to keep a text; its forwards must be those of the others."""
    kept = PromptCache()
    answer("lfm2", PROMPTS[0], kept)
    with monkeypatch.context() as patched:
        patched.setattr(Ranks, "gather", lambda _, mine: [mine, (0, 0)])
        assert answer("lfm2", PROMPTS[1], kept)[1] == 0
    assert [answer("lfm2", prompt, kept)[1] for prompt in PROMPTS[2:]] == [0, KEPT]


# --- many texts ---


def run(name: str, prompts: Sequence[Sequence[int]], **options: Any) -> tuple[list[Text], Scheduler]:
    """Return the texts of prompts that come at once, all done."""
    scheduler = Scheduler(engine(name).target, engine(name).drafter, TREE, prefix_tokens=4096, **options)
    texts = [Text(row, 8, Terms(()), prompt=prompt, stream=(0, row)) for row, prompt in enumerate(prompts)]
    for text in texts:
        scheduler.admit(text)
    while scheduler.busy:
        scheduler.step()
    return texts, scheduler


@pytest.mark.covering(1)
@pytest.mark.parametrize("slice_tokens", [None, 30, 120])
@pytest.mark.parametrize("name", ["lfm2", "draft model"])
def test_of_prompts_that_wait_together_the_second_goes_on_too(
    name: str, slice_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [answer(name, prompt, None)[0] for prompt in PROMPTS]
    read = ReadTokens(monkeypatch)
    texts, _ = run(name, PROMPTS, rows=4, slice_tokens=slice_tokens)
    reused = [text.stats.reused_tokens for text in texts]
    if slice_tokens is None:  # all are read in one go, which reads their beginning once
        assert read.take() == len(SYSTEM) + sum(map(len, QUESTIONS)) - 4 and reused == [0] * 4
    else:
        assert reused == [0, KEPT, KEPT, KEPT]
        assert read.take() == sum(map(len, PROMPTS)) - 1 - 3 * KEPT
    assert [text.new_tokens for text in texts] == wanted


def test_texts_that_are_decoded_now_tell_where_a_prompt_parts() -> None:
    """Two prompts fit into a slice and are read together; the third is read for itself."""
    wanted = [answer("lfm2", prompt, None)[0] for prompt in PROMPTS]
    texts, _ = run("lfm2", PROMPTS, rows=4, slice_tokens=230)
    assert [text.stats.reused_tokens for text in texts] == [0, 0, 0, KEPT]
    assert [text.new_tokens for text in texts] == wanted


def test_with_attention_alone_no_prompt_is_read_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, plain = [], PrefixCache.keep

    def noted(cache: PrefixCache, tokens: Sequence[int], *rest: Any) -> None:
        kept.append(len(tokens))
        plain(cache, tokens, *rest)

    monkeypatch.setattr(PrefixCache, "keep", noted)
    texts, scheduler = run("llama", PROMPTS, rows=4, slice_tokens=120)
    assert [text.stats.reused_tokens for text in texts] == [0, 100, 100, 100]
    # The first prompt is kept for those that wait, and each text when it has ended.
    assert len(kept) == 5 and all(count >= len(PROMPTS[0]) for count in kept)
    assert not scheduler.prefixes.whole


def test_a_text_whose_states_find_no_room_makes_no_other_leave() -> None:
    kept = PromptCache()
    answer("qwen3_5", PROMPTS[0], kept)
    (text,) = kept._texts.texts
    states = text.slots - len(text.tokens)
    assert states > 0
    small = PrefixCache(states + 60)
    small.texts = [text]  # as if it had been smaller
    session = TargetSession(engine("qwen3_5").target, 1, 200)
    drafter = engine("qwen3_5").drafter.make(1, 200, TREE)
    for _ in range(2):
        session.cache.reset()
        drafter.reset(200, TREE)
        small.read(PROMPTS[1], session, drafter)
        small.keep(PROMPTS[1], len(PROMPTS[1]), small.limit, session, drafter, 0)
    assert small.texts == [text] and small.branch(PROMPTS[1], 0) == 0


@pytest.mark.parametrize(
    ("name", "limit", "seeds"),
    [
        ("lfm2", 900, 1),
        ("draft model", None, 1),
        pytest.param("qwen3_5", 900, 12, marks=pytest.mark.slow),
        pytest.param("draft model", 900, 12, marks=pytest.mark.slow),
    ],
)
def test_texts_that_come_and_go_are_those_that_they_are_alone(
    name: str, limit: int | None, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "LEAST", 4)
    monkeypatch.setattr(prefix_cache, "SHARED", 10)
    lossless, fuzzy = (Lossless(), SamplingConfig(1.0)), (Fuzzy(0.4), SamplingConfig(0.7))
    terms = (Terms(()), Terms((), *lossless), Terms((), *fuzzy))
    saved = 0
    for seed in range(seeds):
        rng, starts = random.Random(f"{name}/{limit}/{seed}"), prompts_of([40, 25, 60], seed=seed)
        starts.append([*starts[0], *starts[1]])
        sizes = (rng.randint(1, 4), rng.randint(1, 2))
        scheduler = Scheduler(
            engine(name).target,
            engine(name).drafter,
            TREE,
            *sizes,
            slice_tokens=rng.choice([3, 8, 20, 60, None]),
            cache_tokens=limit,
            prefix_tokens=rng.choice([150, 400]),
        )
        texts: list[Text] = []
        while len(texts) < 10 or scheduler.busy:
            if len(texts) < 10 and rng.random() < 0.6:
                prompt = [*rng.choice(starts), *prompts_of([rng.randint(0, 9)], seed=len(texts))[0]]
                number, limit_of = len(texts), rng.randint(1, 14)
                texts.append(Text(number, limit_of, terms[number % 3], prompt=prompt, stream=(7, number)))
                scheduler.admit(texts[-1])
            if texts and rng.random() < 0.05:
                scheduler.retire(rng.choice(texts))
            scheduler.step()
            assert scheduler.prefixes.slots <= scheduler.prefixes.limit
        saved += sum(text.stats.reused_tokens for text in texts)
        for text in texts:
            sampling = text.terms.sampling
            options = {"temperature": sampling.temperature, "rule": text.terms.rule, "seed": [text.stream]}
            wanted, _ = answer(name, text.prompt, None, max_new_tokens=text.limit, **options)
            assert text.new_tokens == wanted[: len(text.new_tokens)], (seed, text.number)
            assert text.stats.finish_reason == "cancelled" or len(text.new_tokens) == text.limit
    assert saved > 60 * seeds
