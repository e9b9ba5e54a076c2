"""Many prompts, some at a time: each text is what its prompt gives alone, whoever is decoded beside it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.tiny_models import prompts_of, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import AutoTree, EagleFSD, Fuzzy, GenerationOptions, TreeConfig
from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.core.padding import pad_left
from eagle_fsd.decoding.many import FinishedText
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

PROMPTS = prompts_of((5, 13, 1, 9, 13, 30, 2))
TREE = TreeConfig(8, 3, 3)
LONG = 16


@functools.cache
def engine() -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model()), tiny_head(), tiny_tokenizer())


def alone(number: int, **options: Any) -> tuple[list[int], Any]:
    made = engine().generate([PROMPTS[number]], **{"max_new_tokens": LONG, "tree": TREE, **options})
    return made.new_tokens[0], made.stats[0]


def many(batch_size: int, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> list[FinishedText]:
    """Return the texts by number."""
    keywords = {"max_new_tokens": LONG, "tree": TREE, **options}
    found = list(engine().generate_many(prompts, batch_size=batch_size, **keywords))
    assert len({text.number for text in found}) == len(found)
    return sorted(found, key=lambda text: text.number)


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rule": Fuzzy(0.4)},
        {"temperature": 0.9, "top_k": 12},
        {"temperature": 0.9, "rule": Fuzzy(0.5, mode="paper"), "repetition_penalty": 1.3},
    ],
    ids=["greedy", "fuzzy", "sampled", "penalised"],
)
def test_a_text_is_what_its_prompt_gives_alone(batch_size: int, options: dict[str, Any]) -> None:
    found = many(batch_size, seed=3, **options)
    assert [text.number for text in found] == list(range(len(PROMPTS)))
    for text in found:
        tokens, stats = alone(text.number, seed=[(3, text.number)], **options)
        assert text.new_tokens == tokens and text.failure is None and text.logprobs is None
        counted = ("steps", "new_tokens", "exact_accepts", "fuzzy_accepts", "accept_histogram", "sources")
        assert all(getattr(text.stats, name) == getattr(stats, name) for name in counted)
        assert text.stats.finish_reason == "length"


def test_options_reach_every_text() -> None:
    """Copies of a prompt, streams of their own, end tokens, stop strings and log-probabilities."""
    stop = alone(1, temperature=0.8, seed=[(7, 2)])[0][8]
    sampled = {"temperature": 0.8, "eos_token_id": stop, "logprobs": 2}
    found = many(3, num_return_sequences=2, seed=7, **sampled)
    assert len(found) == 2 * len(PROMPTS)
    for text in found:
        wanted = engine().generate(
            [PROMPTS[text.number // 2]], seed=[(7, text.number)], tree=TREE, max_new_tokens=LONG, **sampled
        )
        assert text.new_tokens == wanted.new_tokens[0] and wanted.logprobs is not None
        assert [one.token for one in text.logprobs or []] == text.new_tokens
        assert text.stats.finish_reason == wanted.stats[0].finish_reason
    assert {text.stats.finish_reason for text in found} == {"stop", "length"}
    whole = engine().tokenizer.decode(alone(1)[0])
    (cut,) = many(2, PROMPTS[1:2], stop_strings=[whole[5:7]])
    assert engine().tokenizer.decode(cut.new_tokens) == whole[: whole.index(whole[5:7]) + 2]


def test_a_tensor_is_padded_as_for_generate_and_lists_are_text() -> None:
    """Its pad tokens are padding unless the caller ends texts with them; those of a list never are."""
    ids, mask = pad_left(PROMPTS, 0)
    assert (ids == 0).equal(mask == 0) and engine().target.pad_token_id == 0
    plain = [text.new_tokens for text in many(3)]
    for padded in (ids, ids.numpy()):
        assert [text.new_tokens for text in many(3, padded)] == plain
    wanted = engine().generate(ids, torch.ones_like(ids), max_new_tokens=LONG, tree=TREE).new_tokens
    assert [text.new_tokens for text in many(3, ids.tolist())] == wanted != plain
    assert [text.new_tokens for text in many(3, ids, eos_token_id=0)] == wanted


def test_texts_come_when_they_end_and_give_their_places_on() -> None:
    """The short ones first; and no step has more rows than were asked for."""
    widest: list[int] = []

    def watch(verified: Verified, verdict: Verdict, emitted: dict[int, int]) -> None:
        widest.append(len(emitted))

    ends = [alone(number)[0][2] for number in range(3)]
    found = [
        text.number
        for text in engine().generate_many(
            PROMPTS[:3], batch_size=2, max_new_tokens=LONG, tree=TREE, eos_token_id=ends[1:2], observer=watch
        )
    ]
    assert set(found) == {0, 1, 2} and found[0] == 1 and max(widest) == 2
    assert widest.count(2) > widest.count(1)


def test_what_prompts_begin_with_alike_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = prompts_of([80])[0]
    prompts = [[*shared, *prompt] for prompt in PROMPTS]
    wanted = [engine().generate([prompt], max_new_tokens=6, tree=TREE).new_tokens[0] for prompt in prompts]
    usual, read = TargetSession.prefill, []

    def count(self: TargetSession, tokens: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        read.append(sum(counts))
        return usual(self, tokens, counts)

    monkeypatch.setattr(TargetSession, "prefill", count)
    found = many(2, prompts, max_new_tokens=6)
    assert [text.new_tokens for text in found] == wanted
    assert sum(read) < 80 + 80 + sum(map(len, PROMPTS))  # the first two at most are read beside each other


def test_ending_early_keeps_what_was_made() -> None:
    texts = engine().generate_many(PROMPTS, batch_size=2, max_new_tokens=LONG, tree=TREE)
    assert texts.busy and texts.step() == []
    texts.step()
    ended = texts.end()
    assert [text.number for text in ended] == [0, 1] and not texts.busy and list(texts) == []
    for text in ended:
        tokens = alone(text.number)[0]
        assert 0 < len(text.new_tokens) < LONG and tokens[: len(text.new_tokens)] == text.new_tokens
        assert text.stats.finish_reason == "interrupted"
    assert texts.total.new_tokens == sum(len(text.new_tokens) for text in ended)


@pytest.mark.parametrize("last", range(1, 30, 4))
def test_ending_after_a_step_that_raised_loses_no_token(last: int) -> None:
    """As a Ctrl-C does in the middle of a step."""
    steps: list[int] = []

    def press(verified: Verified, verdict: Verdict, emitted: dict[int, int]) -> None:
        steps.append(sum(emitted.values()))
        if len(steps) == last:
            raise KeyboardInterrupt

    texts = engine().generate_many(PROMPTS, batch_size=3, max_new_tokens=LONG, tree=TREE, observer=press)
    found: list[FinishedText] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(texts)
    found += texts.end()
    assert not texts.busy and list(texts) == texts.end() == []
    assert len({text.number for text in found}) == len(found) >= 3
    for text in found:
        made, whole = text.new_tokens, alone(text.number)[0]
        assert made == whole[: len(made)] and text.stats.new_tokens == len(made)
        assert text.stats.finish_reason == ("length" if made == whole else "interrupted")
    assert sum(len(text.new_tokens) for text in found) == sum(steps)


def test_a_text_that_can_have_no_token_ends_alone() -> None:
    banned = PROMPTS[1][0]
    assert all(prompt[0] != banned for place, prompt in enumerate(PROMPTS) if place not in (1, 4))

    def forbid(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill((ids[:, 0] == banned)[:, None], -torch.inf)

    found = many(3, logits_processor=forbid)
    failed = [text.number for text in found if text.failure is not None]
    assert failed == [place for place, prompt in enumerate(PROMPTS) if prompt[0] == banned]
    for text in found:
        if text.number in failed:
            assert text.stats.finish_reason == "failed" and text.new_tokens == []
        else:
            assert text.new_tokens == alone(text.number)[0]


def test_statistics_add_up() -> None:
    texts = engine().generate_many(PROMPTS, batch_size=3, max_new_tokens=LONG, tree=TREE)
    found = list(texts)
    total = texts.total
    for name in ("steps", "new_tokens", "exact_accepts"):
        assert getattr(total, name) == sum(getattr(text.stats, name) for text in found)
    assert total.finish_reason == "length" and total.tokens_per_second > 0
    assert all(0 < text.stats.seconds <= total.seconds for text in found)
    for phase in ("prefill", "draft", "verify"):
        name = f"{phase}_seconds"
        assert all(0 < getattr(text.stats, name) <= getattr(total, name) for text in found)


def test_only_a_default_tree_shrinks() -> None:
    """And only where any tree gives the same text."""

    def widest(**options: Any) -> int:
        nodes: list[int] = []
        list(
            engine().generate_many(
                PROMPTS * 2,
                batch_size=8,
                max_new_tokens=4,
                observer=lambda verified, *_: nodes.append(verified.tree.tokens.shape[1]),
                **options,
            )
        )
        return min(nodes)

    assert widest() < 5 and widest(tree=TREE) == 8 and widest(rule=Fuzzy(0.3)) == 16


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty: give the token ids of one at least"),
        ([[1, 2], []], {}, r"prompt 1: input_ids has shape \[1, 0\]"),
        ([[1, 2], [1, 10**6]], {}, "prompt 1: input_ids holds 1..1000000: token ids must be in 0..95"),
        ([[1, 2], "text"], {}, "prompt 1: input_ids is a list, not a tensor of token ids"),
        ([[1], [1] * 300], {}, "prompt 1 has 300 tokens: the target has 256 positions"),
        ([torch.tensor([[1, 2]])], {}, r"prompt 0: it has shape \[1, 2\]: it must be the token ids"),
        (torch.tensor([1, 2]), {}, r"input_ids has shape \[2\]: it must be \[B, L\]"),
        ({"input_ids": [[1, 2]]}, {}, "prompts is a dict: it must hold the token ids of each prompt"),
        ("text", {}, "prompts is a str: it must hold the token ids of each prompt"),
        (None, {}, "prompts is a NoneType: it must hold the token ids of each prompt"),
        ([[1]], {"batch_size": 0}, "batch_size is 0: it must be an integer of at least 1; 8 suits a CPU"),
        ([[1]], {"batch_size": "8", "tree": AutoTree()}, "batch_size is '8': it must be an integer"),
        ([[1], [2]], {"seed": [1], "temperature": 1.0}, "seed has 1 values for 2 rows"),
        ([[1]], {"threshold": 0.3}, "threshold is not an option"),
    ],
)
def test_mistakes_are_named(prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine().generate_many(prompts, **options)


def test_options_may_be_an_object() -> None:
    options = GenerationOptions(max_new_tokens=5, tree=TREE)
    found = {text.number: text.new_tokens for text in engine().generate_many(PROMPTS, options)}
    assert found == {number: alone(number)[0][:5] for number in range(len(PROMPTS))}
