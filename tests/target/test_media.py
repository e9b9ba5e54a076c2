"""Images in prompts: the text is that of the model's own `generate`, on every tree and in every batch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from support.media_families import tiny_media_model
from support.media_prompts import AFTER, BEFORE, BY_AXES, END, PLACE, PLACES, with_images, written
from support.tiny_models import KnowingEngine, greedy_alone, tiny_head
from torch import Tensor
from transformers import Cache, PreTrainedModel

from eagle_fsd import EagleFSD, PromptCache, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.processing import Processing
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.target.media import reading
from eagle_fsd.target.media.reading import read_media
from eagle_fsd.target.media.table import MediaTable
from eagle_fsd.target.model import TargetModel

QUICK = ("llava", "qwen2_5_vl", "qwen3_5", "qwen3_vl")
HYBRID = pytest.param(
    "qwen3_5",
    marks=pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.22"),
)
KINDS = [
    HYBRID if kind == "qwen3_5" else pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
    for kind in (*BY_AXES, *PLACES)
]
NEW_TOKENS = 16
TREE = TreeConfig(12, 4, 3)


@functools.cache
def model_of(kind: str) -> PreTrainedModel:
    return tiny_media_model(kind)


def engine_of(kind: str, **options: Any) -> EagleFSD:
    return EagleFSD(TargetModel(model_of(kind)), None, lookup=True, **options)


def asked(kind: str) -> list[dict[str, Tensor]]:
    """Return prompts with one image, with two, and with one that ends the prompt's beginning."""
    model = model_of(kind)
    return [
        with_images(model),
        with_images(model, (1, 2)),
        with_images(model, (3,), before=(), after=(8, 4, 8)),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_models_own(kind: str) -> None:
    """Greedy, alone and in a ragged batch with a prompt of text, with lookup and on trees that know it."""
    model, engine = model_of(kind), engine_of(kind)
    prompts = [read_media(engine.target, inputs) for inputs in asked(kind)]
    wanted = [written(model, inputs, NEW_TOKENS) for inputs in asked(kind)]
    by_layer = [bool(one.by_layer) for one in engine.target.media.of_prompt(prompts[0])]
    assert by_layer == [kind == "qwen3_vl"]  # its first layers are told of images as well
    for prompt, text in zip(prompts, wanted, strict=True):
        assert engine.generate([prompt], max_new_tokens=NEW_TOKENS, tree=TREE).new_tokens == [text]
    assert len({tuple(text) for text in wanted}) == len(wanted)
    prompts.append([5, 9, 33, 7, 5, 9])
    wanted += greedy_alone(model, prompts[-1:], NEW_TOKENS)
    ids, mask = pad_left(prompts, 0)
    assert engine.generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=TREE).new_tokens == wanted
    output = KnowingEngine(engine.target, wanted).generate(
        ids, mask, max_new_tokens=NEW_TOKENS, tree=TreeConfig(16, 5, 3)
    )
    assert output.new_tokens == wanted
    assert all(stats.tau > 2 for stats in output.stats)


@pytest.mark.parametrize("kind", KINDS)
def test_another_image_is_another_prompt(kind: str) -> None:
    engine, model = engine_of(kind), model_of(kind)
    one, other = (read_media(engine.target, with_images(model, (seed,))) for seed in (0, 1))
    assert one == read_media(engine.target, with_images(model, (0,))) != other
    texts = engine.generate([one, other], max_new_tokens=NEW_TOKENS).new_tokens
    assert texts[0] != texts[1]
    output = engine.generate([one, other], max_new_tokens=4)
    assert output.sequences[0, : len(one)].tolist() == with_images(model)["input_ids"][0].tolist()


@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen3_5", marks=pytest.mark.slow), "qwen3_vl"])
def test_prompts_are_read_in_slices_and_join_a_batch(kind: str) -> None:
    """Also where a slice ends within an image."""
    engine = engine_of(kind)
    inputs = asked(kind)
    wanted = [written(model_of(kind), one, NEW_TOKENS) for one in inputs]
    scheduler = Scheduler(engine.target, engine.drafter, TREE, 2, slice_tokens=3)
    texts = [
        Text(number, NEW_TOKENS, Terms(()), prompt=read_media(engine.target, one))
        for number, one in enumerate(inputs)
    ]
    for text in texts:
        scheduler.admit(text)
    list(scheduler.run())
    assert [text.new_tokens for text in texts] == wanted


def test_images_of_a_text_that_waits_stay() -> None:
    """Others drop them from those that are kept; a text that comes too late is refused alone."""
    engine, inputs = engine_of("llava"), asked("llava")
    target, options = TargetModel(model_of("llava")), {"no_repeat_ngram_size": 2}
    target.media.limit = 1
    scheduler = Scheduler(target, engine.drafter, TREE, 1)
    terms = Terms((), processing=Processing(**options))
    texts = []
    for one in inputs:
        texts.append(Text(0, NEW_TOKENS, terms, prompt=read_media(target, one)))
        scheduler.admit(texts[-1])
    copy = list(read_media(target, with_images(model_of("llava"), (7,))))  # which holds nothing
    late = Text(0, 1, terms, prompt=copy)
    read_media(target, inputs[0])
    with pytest.raises(ValueError, match="stands for no image or sound that is kept"):
        scheduler.admit(late)
    list(scheduler.run())
    assert [text.new_tokens for text in texts] == [
        written(model_of("llava"), one, NEW_TOKENS, **options) for one in inputs
    ]


def test_images_of_texts_of_generate_many_stay() -> None:
    engine, inputs = EagleFSD(TargetModel(model_of("llava")), None, lookup=True), asked("llava")
    prompts = [read_media(engine.target, one) for one in inputs]
    stream = engine.generate_many(prompts, max_new_tokens=NEW_TOKENS, tree=TREE, batch_size=1)
    engine.target.media.limit = 1
    read_media(engine.target, with_images(model_of("llava"), (7,)))
    texts = {text.number: text.new_tokens for text in stream}
    assert [texts[number] for number in range(len(inputs))] == [
        written(model_of("llava"), one, NEW_TOKENS) for one in inputs
    ]


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_the_next_turn_goes_on_behind_an_image(kind: str) -> None:
    """The towers do not read it again, and neither does the target; another image is read."""
    model, cache = model_of(kind), PromptCache()
    target = TargetModel(model)
    engine = EagleFSD(target, tiny_head(hidden_size=target.hidden_size, vocab_size=target.vocab_size))
    options = {"max_new_tokens": NEW_TOKENS, "tree": TREE, "prompt_cache": cache}
    before = [*BEFORE] * 8
    prompt = read_media(engine.target, with_images(model, before=before))
    (answer,) = engine.generate([prompt], suppress_tokens=[PLACE], **options).new_tokens
    more = [*AFTER, *answer, 44, 12, 31]
    turn = with_images(model, before=before, after=more)
    output = engine.generate([read_media(engine.target, turn)], **options)
    assert output.stats[0].reused_tokens > len(prompt)
    assert output.new_tokens == [written(model, turn, NEW_TOKENS)]
    other = with_images(model, (1,), before=before, after=more)
    output = engine.generate([read_media(engine.target, other)], **options)
    assert output.stats[0].reused_tokens == len(before) + 1
    assert output.new_tokens == [written(model, other, NEW_TOKENS)]


def test_a_shared_image_is_read_once_in_a_batch() -> None:
    engine, model = engine_of("qwen2_5_vl"), model_of("qwen2_5_vl")
    long = [*range(3, 40), *range(3, 40)]
    inputs = [with_images(model, before=long, after=after) for after in ((7, 8), (9,), (11, 12, 13))]
    prompts = [read_media(engine.target, one) for one in inputs]
    ids, mask = pad_left(prompts, 0)
    output = engine.generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=TREE)
    assert output.new_tokens == [written(model, one, NEW_TOKENS) for one in inputs]


def test_penalties_count_placeholders_as_hugging_face_does() -> None:
    engine, model = engine_of("llava"), model_of("llava")
    inputs = with_images(model)
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    wanted = written(model, inputs, NEW_TOKENS, **options)
    made = engine.generate(
        [read_media(engine.target, inputs)], max_new_tokens=NEW_TOKENS, tree=TREE, **options
    )
    assert made.new_tokens == [wanted] != [written(model, inputs, NEW_TOKENS)]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", HYBRID])
def test_a_head_drafts_behind_an_image(kind: str) -> None:
    target = TargetModel(model_of(kind))
    engine = EagleFSD(target, tiny_head(hidden_size=target.hidden_size, vocab_size=target.vocab_size))
    inputs = with_images(model_of(kind))
    made = engine.generate([read_media(engine.target, inputs)], max_new_tokens=NEW_TOKENS, tree=TREE)
    assert made.new_tokens == [written(model_of(kind), inputs, NEW_TOKENS)]


def test_the_towers_read_a_list_of_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = engine_of("qwen2_5_vl"), model_of("qwen2_5_vl")
    first = read_media(engine.target, with_images(model))
    monkeypatch.setattr(reading, "run_towers", lambda *_: pytest.fail("they read it again"))
    again = read_media(engine.target, with_images(model, before=[44], after=[45, 46]))
    assert [token for token in again if token >= 96] == [token for token in first if token >= 96]


def test_images_are_known_by_their_order_too() -> None:
    """An image and a video may hold the same numbers."""
    engine, model = engine_of("qwen2_5_vl"), model_of("qwen2_5_vl")
    both = with_images(model, (3, 3))
    ids, kinds = both["input_ids"], both["mm_token_type_ids"]
    half, of_pixels, words = int((ids == END).int().argmax()), len(both["pixel_values"]) // 2, []
    for video in (torch.arange(ids.shape[1]) <= half, torch.arange(ids.shape[1]) > half):
        at = (ids == PLACE) & video
        inputs = {
            "input_ids": ids.masked_fill(at, PLACE + 1),
            "mm_token_type_ids": kinds.masked_fill(at, 2),
            "attention_mask": both["attention_mask"],
            "pixel_values": both["pixel_values"][:of_pixels],
            "pixel_values_videos": both["pixel_values"][:of_pixels] * 2,
            "image_grid_thw": both["image_grid_thw"][:1],
            "video_grid_thw": both["image_grid_thw"][:1],
        }
        words.append(written(model, inputs, NEW_TOKENS))
        prompt = read_media(engine.target, inputs)
        assert engine.generate([prompt], max_new_tokens=NEW_TOKENS).new_tokens == words[-1:]
    assert words[0] != words[1]


def test_changed_weights_read_an_image_anew() -> None:
    model = tiny_media_model("llava")
    engine, inputs = EagleFSD(TargetModel(model), None, lookup=True), with_images(model)
    before = read_media(engine.target, inputs)
    with torch.no_grad():
        model.model.multi_modal_projector.linear_2.weight.mul_(-3)
    prompt = read_media(engine.target, inputs)
    assert prompt != before
    text = engine.generate([prompt], max_new_tokens=NEW_TOKENS).new_tokens
    assert text == [written(model, inputs, NEW_TOKENS)]


def test_a_copy_of_a_target_knows_the_images() -> None:
    engine, model = engine_of("llava"), model_of("llava")
    inputs = with_images(model)
    prompt = read_media(engine.target, inputs)
    again = EagleFSD(copy.deepcopy(engine.target), None, lookup=True)
    text = again.generate([prompt], max_new_tokens=NEW_TOKENS).new_tokens
    assert text == [written(model, inputs, NEW_TOKENS)]


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_a_model_that_is_spread_over_devices_reads_images(kind: str) -> None:
    """accelerate binds its hooks to each module."""
    accelerate = pytest.importorskip("accelerate", reason="a device_map needs it")
    model = accelerate.dispatch_model(tiny_media_model(kind), {"": "cpu"}, force_hooks=True)
    engine, inputs = EagleFSD(TargetModel(model), None, lookup=True), with_images(model)
    for one in (inputs, with_images(model, (1, 2))):  # the first is read to its end
        text = engine.generate([read_media(engine.target, one)], max_new_tokens=NEW_TOKENS).new_tokens
        assert text == [written(model, one, NEW_TOKENS)]


def test_the_least_used_images_go_first() -> None:
    table = MediaTable(96, limit=100)
    parts = [torch.full((2,), PLACE), torch.ones(2, 4), torch.zeros(2, 1).long(), torch.zeros(2).long()]
    one = table.add("a", *parts)
    two = table.add("b", *parts)
    assert (one.first, two.first, table.end) == (96, 98, 100)
    assert table.words(torch.tensor([3, 96, 99])).tolist() == [3, PLACE, PLACE]
    assert table.add("b", *parts) is two  # another thread read it at the same time
    table.find("a")
    table.add("c", *parts), table.add("d", *parts)
    assert table.find("b") is two  # somebody holds it
    del two
    table.find("a"), table.add("e", *parts), table.add("f", *parts)
    assert table.find("b") is None
    with pytest.raises(ValueError, match="holds 98, which stands for no image or sound that is kept"):
        table.words(torch.tensor([98]))


@pytest.mark.parametrize("kind", ["aya_vision", "qwen2_5_vl"])
def test_the_model_stays_as_it_is(kind: str) -> None:
    """transformers notes hidden states by hooks, which a copy must not add to the model's own modules."""
    used, unused = tiny_media_model(kind), model_of(kind)
    engine = EagleFSD(TargetModel(used), None)
    for seed in range(3):
        read_media(engine.target, with_images(used, (seed,)))
    found, wanted = (
        one(**with_images(one), output_hidden_states=True, use_cache=False) for one in (used, unused)
    )
    assert len(found.hidden_states) == len(wanted.hidden_states) == 5
    assert torch.equal(found.logits, wanted.logits)


def test_what_cannot_be_read_is_refused_in_one_line() -> None:
    engine, model = engine_of("qwen2_5_vl"), model_of("qwen2_5_vl")
    inputs = with_images(model)
    ids = inputs["input_ids"]
    for changed, words in (
        ({"input_ids": ids.repeat(2, 1)}, r"\[2, 17\]: images are read with one prompt at a time"),
        ({"attention_mask": torch.zeros_like(ids)}, "one prompt at a time"),
        ({"input_ids": ids + 90}, r"token ids must be in 0..95"),
        ({"pixel_values": torch.zeros(3, 7)}, "does not read these inputs"),
        ({"pixel_values": None, "image_grid_thw": None}, "no place for an image"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            read_media(
                engine.target, {name: one for name, one in {**inputs, **changed}.items() if one is not None}
            )
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="have no input_ids"):
        read_media(engine.target, {})
    with pytest.raises(ValueError, match=r"token ids must be in 0\.\.\d+"):
        engine.generate([[5, 200]], max_new_tokens=1)
    with pytest.raises(ValueError, match="which the target alone does not read"):
        engine.target_alone([read_media(engine.target, inputs)], max_new_tokens=1)
    with pytest.raises(ValueError, match="ends with an image or a sound: its last token must be one of text"):
        engine.generate([read_media(engine.target, inputs)[:-8]], max_new_tokens=1)


def test_a_model_whose_images_look_ahead_is_refused() -> None:
    model = tiny_media_model("gemma3")
    ids = torch.tensor([[5, 9, *[PLACE] * 4, 7, 8]])
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 3, 28, 28),
        "token_type_ids": (ids == PLACE).int(),
    }
    model.model.multi_modal_projector.tokens_per_side = 2
    model.model.multi_modal_projector.avg_pool = torch.nn.AvgPool2d(1, 1)
    engine = EagleFSD(TargetModel(model), None)
    with pytest.raises(ValueError, match="lets the places of an image attend to those that follow"):
        read_media(engine.target, inputs)


def test_a_reading_that_differs_from_the_whole_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = engine_of("llava"), model_of("llava")
    monkeypatch.setattr(MediaTable, "_embedded", lambda *_: {})
    monkeypatch.setattr(MediaTable, "arguments", lambda self, tokens, *_: {"input_ids": self.words(tokens)})
    for _ in range(2):
        with pytest.raises(ValueError, match="reads a prompt with images otherwise than its own forward"):
            read_media(engine.target, with_images(model))
    assert not engine.target.media.admitted
