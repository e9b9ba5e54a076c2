"""Every target on a pretended GPU: what the CPU writes, and no wait in a step that is not the model's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.every_family import known_kinds, tiny_family
from support.gpu_twins import LEVELS, LISTS, TREE, Twins
from support.media_families import media_kinds, tiny_media_model
from support.media_prompts import BY_AXES, PLACES, with_images
from support.tiny_models import attention_of, tiny_model
from transformers import Cache, PreTrainedModel

from eagle_fsd import EagleFSD, PromptCache
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.padding import pad_left
from eagle_fsd.target.media.reading import read_media
from eagle_fsd.target.model import TargetModel

# A text that repeats itself, and one of more than two windows.
PROMPTS = [[5, 9, 33, 7, 5, 9, 33, 7, 5], list(range(1, 30))]
# Windows and a soft-cap, chunks, experts, MLA, recurrent layers that run a tree at once or level by level.
CHOSEN = ("gemma2", "llama4", "gpt_oss", "deepseek_v3", "qwen3_5", "falcon_h1", "jamba")
# tests/target/test_every_family.py says which classes are not built, or refused, and why.
NOT_THERE = (ValueError, ImportError, AttributeError, TypeError, KeyError, RuntimeError, AssertionError)
# These models' own forwards wait for the device, in transformers' code.
WAITING = {"dbrx", "falcon", "jetmoe", "longcat_flash", "phimoe", "step3p7"}
RECURRENT = ("qwen3_5", "falcon_h1", "jamba")
NEEDS_STATES = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="transformers is older than 5.22"
)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=NEEDS_STATES if one in RECURRENT else ()) for one in CHOSEN]
)
def test_a_step_of_a_family_waits_for_its_verdict_and_its_lists(family: str) -> None:
    both = Twins(partial(tiny_model, family, attention_of(family)))
    both.steps(LISTS | LEVELS, PROMPTS, max_new_tokens=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "build"),
    [
        *((kind, tiny_family) for kind in known_kinds()),
        *((kind, tiny_media_model) for kind in media_kinds()),
    ],
)
def test_so_does_one_of_every_class(kind: str, build: Callable[[str], PreTrainedModel]) -> None:
    try:
        model = build(kind)
        TargetModel(model)
    except NOT_THERE as error:
        pytest.skip(f"not built, or refused: {one_line(error)}")
    both = Twins(lambda: model, waits=kind in WAITING)
    if both.waits:
        both.same(lambda engine: generate(engine, PROMPTS))
    else:
        both.steps(LISTS | LEVELS, PROMPTS)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(one, marks=() if one in ("llava", "qwen3_vl") else pytest.mark.slow)
        for one in (*BY_AXES, *PLACES)
    ],
)
def test_prompts_with_images_are_read_and_do_not_make_a_step_wait(kind: str) -> None:
    model = tiny_media_model(kind)
    both = Twins(lambda: model)
    asked = [with_images(model), with_images(model, (1, 2))]

    def texts(engine: EagleFSD) -> object:
        prompts, cache = [read_media(engine.target, one) for one in asked], PromptCache(3000)
        found = [generate(engine, prompts)]
        for _ in range(2):
            found.append(generate(engine, prompts[1:], prompt_cache=cache))
        many = engine.generate_many(prompts, batch_size=1, max_new_tokens=5, tree=TREE)
        return found, sorted((one.number, one.new_tokens) for one in many), prompts

    *_, prompts = both.same(texts)
    both.steps(LISTS, prompts)


def generate(engine: EagleFSD, prompts: list[list[int]], **options: object) -> list[list[int]]:
    ids, mask = pad_left([list(one) for one in prompts], 0)
    return engine.generate(ids, mask, max_new_tokens=6, tree=TREE, **options).new_tokens


def test_prompts_with_images_may_come_from_the_gpu() -> None:
    """A processor may have put its tensors there."""
    model = tiny_media_model("llava")
    both = Twins(lambda: model)
    ids = read_media(both.plain.target, with_images(model))
    with both.there():
        far = {name: one.to(torch.device("cuda")) for name, one in with_images(model).items()}
        assert read_media(both.target, far) == ids
