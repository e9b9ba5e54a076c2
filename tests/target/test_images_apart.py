"""Images are read one by one where a model allows it, so that a chat with one more image reads that alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.media_families import tiny_media_model
from support.media_prompts import PLACE, with_images, written
from support.tiny_models import tiny_head
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd import EagleFSD, PromptCache, TreeConfig
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.target.media import reading
from eagle_fsd.target.media.reading import read_media
from eagle_fsd.target.model import TargetModel

NEW_TOKENS = 12
TREE = TreeConfig(12, 4, 3)
LONG = [*range(3, 30)]


@functools.cache
def model_of(kind: str) -> PreTrainedModel:
    return tiny_media_model(kind)


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many places each call of the towers was about."""
    calls, run = list[int](), reading.run_towers

    def count(target: TargetModel, tokens: Tensor, *rest: Any) -> Any:
        calls.append(int((tokens == PLACE).sum()))
        return run(target, tokens, *rest)

    monkeypatch.setattr(reading, "run_towers", count)
    return calls


@pytest.mark.parametrize("kind", ["internvl", "llava", "qwen2_5_vl", "qwen3_vl"])
def test_a_turn_with_another_image_reads_only_what_is_new(kind: str, towers: list[int]) -> None:
    model, target, cache = model_of(kind), TargetModel(model_of(kind)), PromptCache()
    engine = EagleFSD(target, tiny_head(0, target.hidden_size, target.vocab_size))
    options = {"max_new_tokens": NEW_TOKENS, "tree": TREE, "prompt_cache": cache}
    turns = [with_images(model, range(count), before=LONG) for count in (1, 2, 3)]
    one = int((turns[0]["input_ids"] == PLACE).sum())
    read = len(LONG)  # tokens of the turn before which the next one has as well
    for number, (turn, expected) in enumerate(zip(turns, ([one], [2 * one, one], [one]), strict=True)):
        towers.clear()
        prompt = read_media(target, turn)
        assert towers == expected  # the first with several is read whole as well, as a test
        output = engine.generate([prompt], **options)
        assert output.new_tokens == [written(model, turn, NEW_TOKENS)]
        assert not number or output.stats[0].reused_tokens > read
        read = len(prompt) - 8  # all but the words behind the last image
    assert target.media.apart


def test_an_image_has_its_ids_wherever_it_stands(towers: list[int]) -> None:
    model, target = model_of("llava"), TargetModel(model_of("llava"))
    places = [
        [token for token in read_media(target, with_images(model, seeds)) if token >= target.vocab_size]
        for seeds in ((0, 1), (1, 0), (0,), (1, 0, 1), (0, 0))
    ]
    both = places[0]
    zero, one = both[:4], both[4:]
    assert places == [zero + one, one + zero, zero, one + zero + one, zero + zero]
    assert towers == [8, 4, 4, 4]  # the last one is the test of the first prompt with one image


def test_images_that_depend_on_one_another_stay_together() -> None:
    model = tiny_media_model("llava")
    model.model.multi_modal_projector.register_forward_hook(
        lambda _module, _args, made: made - made.mean(0, keepdim=True) * 0.5
    )
    target = TargetModel(model)
    engine = EagleFSD(target, None, lookup=True)
    prompts = list[list[int]]()
    for seeds in ((0,), (0, 1), (0, 1, 2)):
        inputs = with_images(model, seeds)
        prompts.append(read_media(target, inputs))
        text = engine.generate([prompts[-1]], max_new_tokens=NEW_TOKENS).new_tokens
        assert text == [written(model, inputs, NEW_TOKENS)]
    assert target.media.apart is False
    assert not set(prompts[0]) & set(prompts[1]) & set(range(target.vocab_size, target.media.end))


def test_the_first_prompts_with_one_and_with_several_images_are_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tested, check = list[int](), reading.check_reading

    def note(target: TargetModel, ids: list[int], wanted: Tensor) -> None:
        tested.append(sum(token >= target.vocab_size for token in ids))
        check(target, ids, wanted)

    monkeypatch.setattr(reading, "check_reading", note)
    target = TargetModel(model_of("llava"))
    for seeds in ((0,), (1,), (0, 1), (0, 1, 2), (2,)):
        read_media(target, with_images(target.model, seeds))
    assert tested == [4, 8]


def cut(prompt: Sequence[int], kind: str) -> list[int]:
    places = [place for place, token in enumerate(prompt) if token >= 96]
    return {
        "the image's end is missing": [*prompt[: places[2]], *prompt[-3:]],
        "its beginning is missing": prompt[places[2] :],
        "its places are in another order": [*prompt[: places[0]], *prompt[places[3] : places[0] : -1]],
        "the image ends it": prompt[: places[3] + 1],
    }[kind]


CUT = ["the image's end is missing", "its beginning is missing", "its places are in another order"]


@pytest.mark.parametrize("kind", [*CUT, "the image ends it"])
def test_prompts_with_parts_of_images_are_refused_before_anything_is_measured(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(model_of("llava"))
    engine = EagleFSD(target, None, lookup=True)
    whole = read_media(target, with_images(target.model))
    bad = cut(whole, kind)
    words = (
        "ends with an image or a sound" if kind == "the image ends it" else "places of an image or a sound"
    )
    monkeypatch.setattr(engine.settler, "request", lambda *_: pytest.fail("a tree is chosen"))
    scheduler = Scheduler(target, engine.drafter, TREE, 1)
    for name, start in (
        ("row 0 of the batch", lambda: engine.generate([bad], max_new_tokens=1)),
        ("row 0 of the batch", lambda: engine.stream([bad], max_new_tokens=1)),
        ("prompt 1", lambda: engine.generate_many([whole, bad], max_new_tokens=1)),
        ("prompt 7", lambda: scheduler.admit(Text(7, 1, Terms(()), prompt=bad))),
    ):
        with pytest.raises(ValueError, match=f"{name} (has|ends)") as caught:
            start()
        assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not scheduler.busy


def test_a_prompt_may_have_an_image_twice() -> None:
    model, target = model_of("llava"), TargetModel(model_of("llava"))
    inputs = with_images(model, (3, 3))
    prompt = read_media(target, inputs)
    text = EagleFSD(target, None, lookup=True).generate([prompt], max_new_tokens=NEW_TOKENS).new_tokens
    assert text == [written(model, inputs, NEW_TOKENS)]
    assert len({token for token in prompt if token >= 96}) == 4
    assert torch.equal(target.media.words(torch.tensor([prompt])), inputs["input_ids"])
