"""A tiny engine that reads images as well, with a processor of transformers."""

from __future__ import annotations

import base64
import io
from functools import cache
from pathlib import Path

import torch
from PIL import Image
from transformers import LlavaProcessor, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from eagle_fsd import EagleFSD
from eagle_fsd.target.model import TargetModel
from support.media_families import tiny_media_model
from support.media_prompts import PLACE
from support.tiny_engine import NAME
from support.tiny_tokenizer import tiny_tokenizer

# As tiny_tokenizer's own for messages of text.
TEMPLATE = (
    "{{ bos_token }}{% if mood %}{{ mood }}\n{% endif %}{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_processor() -> ProcessorMixin:
    """Return a processor that writes four places for an image of any size, and its tokenizer."""
    tokenizer = tiny_tokenizer(PLACE, "<image>")
    tokenizer.chat_template = TEMPLATE
    size = {"height": 28, "width": 28}
    return LlavaProcessor(
        CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def save_llava(folder: Path) -> Path:
    """Save the model with all that is beside it in a repository, and return its folder."""
    tiny_media_model("llava").save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    return folder


def new_media_engine() -> EagleFSD:
    processor = tiny_processor()
    target = TargetModel(tiny_media_model("llava", max_position_embeddings=1024))
    return EagleFSD(target, None, processor.tokenizer, NAME, lookup=True, processor=processor)


media_engine = cache(new_media_engine)  # one for all tests


def picture(seed: int = 0, size: tuple[int, int] = (28, 28)) -> Image.Image:
    """Return a picture of random dots."""
    width, height = size
    dots = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(dots.to(torch.uint8).numpy())


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    """Return an image in a data: URL."""
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
