"""Counts a .gguf file's norms and biases: transformers leaves out those that a model has no place for."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable

import transformers

from eagle_fsd.hub.loading.gguf_positions import FACTORS

BLOCK = re.compile(r"blk\.(\d+)\.")


def check_vectors(model: transformers.PreTrainedModel, path: str, name: str) -> None:
    """Raise ValueError if a .gguf file has more norms and biases than the model that was read of it.

    No field of a file says whether its layers have biases: the class of its architecture decides.
    name: of the target.
    """
    import gguf

    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    held: collections.Counter[str] = collections.Counter()
    for tensor in gguf.GGUFReader(path).tensors:
        block = BLOCK.match(tensor.name)
        beyond = block is not None and int(block[1]) >= layers  # such as a layer that predicts further tokens
        if is_vector(tensor.shape) and tensor.name not in FACTORS and not beyond:
            held[BLOCK.sub("", tensor.name)] += 1
    taken = sum(is_vector(weight.shape) for weight in model.state_dict().values())
    if (found := sum(held.values())) > taken:
        raise ValueError(
            f"target {name!r} has {found} norms and biases ({', '.join(sorted(held))}), and "
            f"{type(model).__name__} a place for {taken}: texts would be wrong; name the model's folder or "
            "Hub id"
        )


def is_vector(shape: Iterable[int]) -> bool:
    """Return whether a weight has one axis, but for axes of size 1."""
    return sum(size > 1 for size in shape) <= 1
