"""Answers up to stop strings: where a text is cut, and that no batch, tree or order changes it."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from support.slow_twins import cut
from support.tiny_models import greedy_alone, prompts_of, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.engine import EagleFSD
from eagle_fsd.integrations.lm_eval.requests import Ask, Ending, answers, end_tokens, text_of
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.streamed import StreamedText

PROMPTS = prompts_of((5, 13, 1, 9, 13))
NEW_TOKENS = 24
GREEDY = SamplingConfig()


@functools.cache
def engine() -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model()), tiny_head(), tiny_tokenizer())


@functools.cache
def greedy() -> list[list[int]]:
    return greedy_alone(engine().target.model, PROMPTS, NEW_TOKENS)


def decode(token_ids: Sequence[int]) -> str:
    return engine().tokenizer.decode(token_ids, skip_special_tokens=True)


class Answer(NamedTuple):
    text: str
    stats: GenerationStats


def answer_all(
    asks: Sequence[Ask],
    rule: AcceptanceRule | None = None,
    tree: TreeConfig | None = None,
    batch_size: int = 2,
    model: EagleFSD | None = None,
) -> list[Answer]:
    model = model or engine()
    found: dict[int, Answer] = {}
    for places, stream in answers(model, asks, rule or Lossless(), tree or TreeConfig(16, 5, 8), batch_size):
        for text in stream:
            place = places[text.number]
            assert place not in found
            found[place] = Answer(text_of(model, text.new_tokens, asks[place].ending.until), text.stats)
    return [found[place] for place in range(len(asks))]


def asks_of(ending: Ending, seed: int = 0) -> list[Ask]:
    return [Ask(tuple(prompt), ending, seed + row) for row, prompt in enumerate(PROMPTS)]


def stops() -> tuple[str, ...]:
    """Two characters out of the middle of some of the greedy texts, and strings that never come."""
    texts = [decode(tokens) for tokens in greedy()]
    return (texts[0][6:8], "", texts[1][11:13], "never said")


# --- where a text is cut ---


@pytest.mark.parametrize("seed", range(5))
def test_a_text_is_cut_before_the_stop_string_that_is_complete_first(seed: int) -> None:
    """In whatever pieces it comes, and whatever comes after it."""
    draw, tokenizer = random.Random(seed), tiny_tokenizer()
    for _ in range(60):
        text = "".join(draw.choices("abc", k=draw.randint(0, 30)))
        until = ["".join(draw.choices("abc", k=draw.randint(0, 4))) for _ in range(draw.randint(0, 3))]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = StreamedText(tokenizer, until)
        while ids:
            size = draw.randint(1, 6)
            found.add(ids[:size])
            ids = ids[size:]
        found.finish()
        assert found.text == cut(text, until)
        assert found.stopped == any(stop and stop in text for stop in until)


def test_tokens_after_the_end_are_dropped() -> None:
    tokenizer = tiny_tokenizer()
    text = StreamedText(tokenizer, ["."])
    for piece in ("one.two", "three."):
        text.add(tokenizer(piece, add_special_tokens=False)["input_ids"])
    text.finish()
    assert text.text == "one"


# --- batches ---


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch_size", [1, 2, 5, 9])
@pytest.mark.parametrize("tree", [TreeConfig(16, 5, 8), TreeConfig(8, 2, 4), TreeConfig(1)], ids=str)
def test_lossless_answers_are_the_targets_own_cut_at_the_stop_strings(
    batch_size: int, tree: TreeConfig
) -> None:
    found = answer_all(asks_of(Ending(stops(), NEW_TOKENS, GREEDY)), tree=tree, batch_size=batch_size)
    whole = [decode(tokens) for tokens in greedy()]
    expected = [cut(text, stops()) for text in whole]
    assert [answer.text for answer in found] == expected
    assert 2 <= sum(text != all_of_it for text, all_of_it in zip(expected, whole, strict=True)) < len(whole)
    for answer, text, all_of_it in zip(found, expected, whole, strict=True):
        assert answer.stats.finish_reason == ("length" if text == all_of_it else "stop")


def test_a_text_takes_no_step_after_its_end() -> None:
    """Its stats, too, count what it took alone, though others go on beside it."""
    ending = Ending(stops(), NEW_TOKENS, GREEDY)
    together = answer_all(asks_of(ending), batch_size=5)
    for answer, alone in zip(together, answer_all(asks_of(ending), batch_size=1), strict=True):
        if answer.stats.finish_reason == "stop":
            assert answer.stats.new_tokens <= len(answer.text) + 2 + 5 < NEW_TOKENS  # a stop and a depth
        counted = (answer.stats.steps, answer.stats.accept_histogram, answer.stats.exact_accepts)
        assert counted == (alone.stats.steps, alone.stats.accept_histogram, alone.stats.exact_accepts)
        assert answer.stats.seconds > 0


def test_a_batch_ends_with_its_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is not asked any more once every text has ended."""
    texts = [decode(tokens) for tokens in greedy()]
    ending = Ending(tuple(text[3:5] for text in texts), 200, GREEDY)
    verified: list[int] = []
    usual = GenerationStats.record
    monkeypatch.setattr(
        GenerationStats, "record", lambda self, *counts: (verified.append(1), usual(self, *counts))
    )
    found = answer_all(asks_of(ending), batch_size=5)
    assert all(answer.stats.finish_reason == "stop" for answer in found)
    assert len(verified) <= len(PROMPTS) * max(answer.stats.steps for answer in found) < 200


@pytest.mark.parametrize("rule", [Lossless(), Fuzzy(0.6), Fuzzy(math.inf, mode="paper")], ids=str)
def test_sampled_answers_do_not_depend_on_their_batch(rule: AcceptanceRule) -> None:
    ending = Ending((), NEW_TOKENS, SamplingConfig(0.9, 40, 0.95))
    texts = [
        [answer.text for answer in answer_all(asks_of(ending, seed=7), rule, batch_size=size)]
        for size in (1, 2, 5)
    ]
    assert texts[0] == texts[1] == texts[2]
    other = answer_all(asks_of(ending, seed=70), rule)
    assert [answer.text for answer in other] != texts[0]


def test_only_what_shares_an_ending_is_answered_together() -> None:
    endings = [Ending((), 4 + row % 2, GREEDY) for row in range(len(PROMPTS))]
    asks = [Ask(tuple(prompt), ending) for prompt, ending in zip(PROMPTS, endings, strict=True)]
    found = answer_all(asks, batch_size=5)
    assert [answer.stats.new_tokens for answer in found] == [4, 5, 4, 5, 4]
    assert [answer.text for answer in found] == [
        decode(tokens[: ending.max_new_tokens]) for tokens, ending in zip(greedy(), endings, strict=True)
    ]


def test_the_longest_prompts_come_first() -> None:
    asks = asks_of(Ending((), 2, GREEDY))
    ((order, _),) = answers(engine(), asks, Lossless(), TreeConfig(1), 2)
    assert order == [1, 4, 3, 0, 2]


# --- end tokens ---


def test_a_special_token_among_the_stop_strings_ends_a_text() -> None:
    """It is not shown in a text, so a search for it there would miss it."""
    stop = greedy()[1][9]
    model = EagleFSD(engine().target, engine().head, tiny_tokenizer(special=stop))
    found = answer_all(asks_of(Ending(("<stop>",), NEW_TOKENS, GREEDY)), model=model)
    for answer, tokens in zip(found, greedy(), strict=True):
        kept = tokens[: tokens.index(stop)] if stop in tokens else tokens
        assert answer.text == model.tokenizer.decode(kept, skip_special_tokens=True)
        assert answer.stats.finish_reason == ("stop" if stop in tokens else "length")


def test_the_models_own_end_tokens_count_beside_them() -> None:
    stop = greedy()[0][7]
    target = TargetModel(tiny_model())
    target.model.generation_config.eos_token_id = [stop]
    model = EagleFSD(target, engine().head, tiny_tokenizer(special=50))
    assert end_tokens(model, ["<stop>", ".", "<s>"]) == tuple(sorted((1, 50, stop)))
    assert end_tokens(model, []) == (stop,)
    ending = Ending(("never said",), NEW_TOKENS, GREEDY)
    (answer,) = answer_all([Ask(tuple(PROMPTS[0]), ending)], model=model)
    kept = greedy()[0][: greedy()[0].index(stop) + 1]
    assert answer.stats.new_tokens == len(kept)
    assert answer.text == model.tokenizer.decode(kept, skip_special_tokens=True)
