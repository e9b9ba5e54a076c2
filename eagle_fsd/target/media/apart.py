"""The images of a prompt one by one, so that a chat which brings another image has that one read alone.

Processors put all images of a prompt into the same arrays. Arrays are taken apart where it is known which
part is whose; otherwise all images of a prompt stay together. Shapes: L tokens, n places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AROUND = ("mm_token_type_ids", "token_type_ids")  # of what towers are given, what tells of the text as well
PIXELS, GRID, SIZES = "pixel_values", "image_grid_thw", "image_sizes"


@dataclass(frozen=True)
class Piece:
    """One image of a prompt among the prompt's text, or all its media.

    tokens: [1, L], without the places of other images. given: what towers are given for it. of_prompt: which
    tokens of the prompt these are, bool; places: which of them are places of the image, as far as known.
    """

    tokens: Tensor
    given: Mapping[str, Any]
    of_prompt: Tensor
    places: Tensor

    def in_prompt(self, places: Tensor) -> Tensor:
        """Return places of the piece as places [1, L] of its prompt."""
        return self.of_prompt.masked_scatter(self.of_prompt, places)


def whole_piece(tokens: Tensor, given: Mapping[str, Any], places: Tensor) -> Piece:
    """Return all media of a prompt together. places: [1, L] bool."""
    return Piece(tokens, given, torch.ones_like(places), places)


def begins_of(places: Tensor) -> Tensor:
    """Return which places [1, L] bool follow no other."""
    begins = places & ~places.roll(1)
    begins[:, 0] = places[:, 0]
    return begins


def is_several(places: Tensor) -> bool:
    """Return whether places [1, L] are of several images, as far as that can be seen."""
    return int(begins_of(places).sum()) > 1


def images_of(tokens: Tensor, given: Mapping[str, Any], places: Tensor) -> list[Piece]:
    """Return the images of a prompt one by one, or all its media as one piece."""
    runs = begins_of(places).cumsum(1) * places  # [1, L], the number of each place's image, from 1
    count = int(runs.max())
    parts = parts_of({name: one for name, one in given.items() if name not in AROUND}, count)
    if parts is None:
        return [whole_piece(tokens, given, places)]
    pieces = []
    for number, own in enumerate(parts, 1):
        kept = (runs == 0) | (runs == number)
        around = {name: given[name][kept.to(given[name].device)][None] for name in AROUND if name in given}
        pieces.append(Piece(tokens[kept][None], {**own, **around}, kept, (runs == number)[kept][None]))
    return pieces


def parts_of(arrays: Mapping[str, Any], count: int) -> Sequence[dict[str, Tensor]] | None:
    """Return each image's part of the arrays of `count` images; None if it is not known."""
    known = PIXELS in arrays and arrays.keys() <= {PIXELS, GRID, SIZES}
    if count < 2 or not known or not all(isinstance(one, Tensor) for one in arrays.values()):
        return None
    rows = {name: [1] * count for name in arrays}
    if GRID in arrays:  # patches of all images in a row
        rows[PIXELS] = arrays[GRID].prod(-1).flatten().tolist()
    if any(len(rows[name]) != count or sum(rows[name]) != len(one) for name, one in arrays.items()):
        return None
    split = {name: one.split(rows[name]) for name, one in arrays.items()}
    return [{name: one[number] for name, one in split.items()} for number in range(count)]
