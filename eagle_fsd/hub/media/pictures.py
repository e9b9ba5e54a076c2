"""Opens pictures with pillow, which is loaded where one is asked about."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from eagle_fsd.core.checks import one_line

EXTRA = 'run pip install "eagle-fsd[images]"'


def open_picture(source: Path | IO[bytes], name: str) -> Any:
    """Return a picture in RGB, upright, as transformers reads it from a file. name: what an error calls it.

    Raises ValueError for what is none, or too large for pillow's limit, and where pillow is missing.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ValueError(f"{name} needs pillow: {EXTRA}") from error
    try:
        with Image.open(source) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{name} is no picture that can be read ({one_line(error, 100)}): it must be a PNG or JPEG file, "
            "or such; convert it"
        ) from error
