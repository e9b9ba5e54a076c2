"""A tiny engine with a tokenizer, whose drafter is near its target: tokens come in all ways."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.target.model import TargetModel
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

TREE = TreeConfig(8, 3, 3)
NAME = "tiny"
CHAT = [{"role": "user", "content": "Hi"}]


def near_model(**overrides: object) -> PreTrainedModel:
    """Return the tiny model with some noise, which drafts for it so that tokens come in all ways."""
    return shaken(tiny_model(**overrides))


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model with some noise."""
    near, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return near


def save_near_models(folder: Path, **overrides: object) -> list[str]:
    """Save the tiny model and the near one below a folder, and return the flags that name them."""
    for name, model in (("target", tiny_model(**overrides)), ("draft", near_model(**overrides))):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return ["--base-model", f"{folder}/target", "--draft-model", f"{folder}/draft"]


def new_engine() -> EagleFSD:
    """Return an engine whose drafter is the target with some noise, so that tokens come in all ways."""
    near = near_model()
    target = TargetModel(tiny_model())
    drafter = DraftModelSpec.for_target(TargetModel(near), target)
    return EagleFSD(target, drafter, tiny_tokenizer(), base_model=NAME)


tiny_engine = cache(new_engine)  # one for all tests


def chat_ids(messages: Sequence[dict[str, str]] = CHAT) -> list[int]:
    """Return the token ids of a chat that waits for its answer."""
    ids = tiny_engine().tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(ids["input_ids"])


def text_alone(ids: Sequence[int], **options: Any) -> str:
    """Return the text that the engine gives for this prompt on its own."""
    model = tiny_engine()
    made = model.generate([list(ids)], tree=TREE, **options).new_tokens[0]
    return model.tokenizer.decode(made, skip_special_tokens=True, clean_up_tokenization_spaces=False)
