"""The images in requests, from data: URLs. Nothing is fetched, and no file is read."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle_fsd.core.checks import format_value, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_IMAGES = 32  # of one request
MOST_PIXELS = 2**26  # of all of them: a body can hold a thousand times as many bytes of pixels
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # those of OpenAI's API; others have decoders that few look after
HEAD = re.compile(r"data:image/[\w.+-]{1,64};base64,", re.IGNORECASE)
LONGEST_HEAD = 100


def read_images(urls: Sequence[str]) -> list[Image]:
    """Return the images of data: URLs, in RGB. Raises ValueError for one that is none, or too large."""
    if len(urls) > MOST_IMAGES:
        raise ValueError(f"there are {len(urls)} images: at most {MOST_IMAGES} are taken; leave some out")
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ValueError(
            'images need pillow, which the server lacks: run pip install "eagle-fsd[images]" there, or leave '
            "images out"
        ) from error
    found: list[Image] = []
    pixels = 0
    for number, url in enumerate(urls, 1):
        name = f"image {number}"
        made = opened(name, bytes_of(name, url))
        pixels += made.width * made.height
        if pixels > MOST_PIXELS:
            raise too_many_pixels(name, pixels)
        found.append(decoded(name, made))
    return found


def bytes_of(name: str, url: str) -> bytes:
    """Return the bytes in a data: URL of an image. name: of the image, for errors."""
    head = HEAD.match(url[:LONGEST_HEAD])
    if head is None:
        raise ValueError(
            f"{name} is {format_value(url[:LONGEST_HEAD])}: this server fetches nothing, so an image must be "
            "in the request; send a URL that begins with data:image/png;base64, and so on"
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} is not base64 ({one_line(error, 100)}): encode the file's bytes") from error


def opened(name: str, data: bytes) -> Image:
    """Return an image whose size is known, and whose pixels are yet to be read."""
    from PIL import Image, UnidentifiedImageError

    remedy = f"send a whole file in {', '.join(FORMATS)}"
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise too_many_pixels(name) from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is not an image of a known format: {remedy}") from error
    except Exception as error:  # decoders' errors have no common base
        raise ValueError(f"{name} cannot be read ({one_line(error, 100)}): {remedy}") from error


def decoded(name: str, image: Image) -> Image:
    """Return an image's pixels in RGB, upright, as transformers reads them from a file."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise ValueError(f"{name} is broken ({one_line(error, 100)}): send the whole file") from error


def too_many_pixels(name: str, pixels: int | None = None) -> ValueError:
    said = "more pixels" if pixels is None else f"{pixels} pixels with those before it"
    return ValueError(
        f"{name} has {said}: a request's images may have {MOST_PIXELS} pixels in all; send smaller images"
    )
