"""What processors make of chats with images, for the tiny models of media_families; no image is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

PLACE, BEGIN, END = 94, 92, 93  # the placeholder, and the tokens around an image
BY_AXES = ("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl")  # positions of images have three axes
PLACES = {"aya_vision": 1, "internvl": 1, "llava": 4}  # of one image of 28 x 28 pixels
BEFORE, BETWEEN, AFTER = [5, 9], [60, 61], [33, 7, 5, 9, 33, 7, 5]


def with_images(
    model: PreTrainedModel,
    seeds: Sequence[int] = (0,),
    before: Sequence[int] = BEFORE,
    after: Sequence[int] = AFTER,
    grid: Sequence[int] = (1, 4, 6),
) -> dict[str, Tensor]:
    """Return a processor's output for a chat with one random image for each seed, between words.

    grid: of patches, in models whose images have any size.
    """
    kind = model.config.model_type
    pixels, ids = [], list(before)
    for place, seed in enumerate(seeds):
        random = torch.Generator().manual_seed(seed)
        if kind in BY_AXES:
            vision = model.config.vision_config
            size = 3 * vision.temporal_patch_size * vision.patch_size**2
            count = grid[0] * grid[1] * grid[2]
            pixels.append(torch.randn(count, size, generator=random))
            places = count // vision.spatial_merge_size**2
        else:
            pixels.append(torch.randn(1, 3, 28, 28, generator=random))
            places = PLACES[kind]
        ids += [*(BETWEEN if place else ()), BEGIN, *[PLACE] * places, END]
    made: dict[str, Any] = {"input_ids": torch.tensor([[*ids, *after]])}
    made["attention_mask"] = torch.ones_like(made["input_ids"])
    made["pixel_values"] = torch.cat(pixels)
    if kind in BY_AXES:
        made["image_grid_thw"] = torch.tensor([list(grid)] * len(pixels))
        made["mm_token_type_ids"] = (made["input_ids"] == PLACE).int()
    return made


@torch.no_grad()
def written(
    model: PreTrainedModel, inputs: dict[str, Tensor], max_new_tokens: int, **options: Any
) -> list[int]:
    """Return Hugging Face's greedy text."""
    made = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, **options)
    tokens: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens
