"""A tiny LLaVA in a folder with tokenizer and processor, as a repository has them; it needs pillow alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from support.media_families import tiny_media_model
from support.media_prompts import PLACE
from support.tiny_tokenizer import tiny_tokenizer

IMAGE = "<image>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def image_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return the tiny tokenizer with <image> in the place of a character, and a template that writes it."""
    tokenizer = tiny_tokenizer(special=PLACE, word=IMAGE)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def image_processor() -> Any:
    """Return a processor of images of any size, which are brought to 28 x 28 pixels."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"height": 28, "width": 28}
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
    return transformers.LlavaProcessor(
        images,
        image_tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def save_llava(folder: Path) -> Path:
    """Save the model with all that is beside it, and return its folder."""
    tiny_media_model("llava").save_pretrained(folder)
    image_processor().save_pretrained(folder)
    return folder
