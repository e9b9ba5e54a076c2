"""Outlines of targets: what decoding asks of a model whose graphs are kept, as a small file beside them.

With one, neither transformers' models nor the layers' weights are needed at a start; see kept_model.py.
Nothing here is an error for the user: without a usable outline the whole model is loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from eagle_fsd.files.atomic import read_records, write_atomically
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.files.kept_folders import is_enabled
from eagle_fsd.runtime.openvino.kept.graph_store import GRAPH, GRAPHS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

VERSION = 3  # of the files
NONE = "none"  # the only field of a file for a target without an outline


@dataclass(frozen=True)
class KeptGraphs:
    """Where a target's graphs are kept, and what they take. All fields have a JSON form.

    decoder, lm_head: names of folders. kinds: of masks, in order. members: of the cache; see BlockCache.
    cache: the name of its class. window: of sliding layers, 0 without one.
    """

    decoder: str
    lm_head: str
    kinds: Sequence[str]
    members: Sequence[Sequence[int]]
    cache: str
    window: int


@dataclass(frozen=True)
class Outline:
    """All that decoding asks of a model whose graphs are kept. All fields have a JSON form.

    config, generation: the fields of its config and of its generation_config, if it has one. attention: its
    attn_implementation. digest: of its weights; see files.fingerprints. shapes: of each weight. layers: the
    names of the classes of its modules. embeddings, lm_head, bias: their names among its weights; None: the
    lm_head has the embeddings' weight, or no bias. scale: what the model multiplies its embeddings by.
    tokenizer: the name of its tokenizer's class in transformers.
    """

    config: dict[str, Any]
    generation: dict[str, Any] | None
    attention: str
    digest: str
    shapes: Sequence[Sequence[int]]
    layers: Sequence[str]
    embeddings: str
    lm_head: str | None
    bias: str | None
    scale: float
    tokenizer: str
    graphs: KeptGraphs


def outline_of(model: PreTrainedModel, graphs: KeptGraphs, digest: str, tokenizer: str) -> Outline | None:
    """Return a model's outline; None if no KeptModel could stand for it. digest, tokenizer: see Outline."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    scale = scale_of(embeddings)
    if scale is None or type(head) is not nn.Linear:
        return None
    if model.config.get_text_config(decoder=True) is not model.config:
        return None
    defaults = getattr(model, "generation_config", None)
    names = {id(weight): name for name, weight in model.named_parameters()}  # a tied one by its first name
    return Outline(
        # Some classes have other names for what all have.
        config=model.config.to_dict()
        | {name: getattr(model.config, name) for name in model.config.attribute_map},
        generation=defaults and defaults.to_dict(),
        attention=model.config._attn_implementation,
        digest=digest,
        shapes=[list(weight.shape) for weight in model.parameters()],
        layers=class_names(model),
        embeddings=names[id(embeddings.weight)],
        lm_head=None if head.weight is embeddings.weight else names[id(head.weight)],
        bias=None if head.bias is None else names[id(head.bias)],
        scale=scale,
        tokenizer=tokenizer,
        graphs=graphs,
    )


@torch.inference_mode()
def scale_of(embeddings: nn.Module) -> float | None:
    """Return what embeddings are multiplied by, 1 in most models; None if they are made in another way."""
    if not isinstance(embeddings, nn.Embedding):
        return None
    scale = float(getattr(embeddings, "embed_scale", 1.0))  # Gemma's name
    tokens = torch.arange(min(embeddings.num_embeddings, 256), device=embeddings.weight.device)
    plain = embeddings.weight[tokens]
    return scale if torch.equal(embeddings(tokens), plain * plain.new_tensor(scale)) else None


def class_names(model: nn.Module) -> list[str]:
    """Return the names of the classes of all modules."""
    return sorted({type(layer).__name__ for layer in model.modules()})


def read_outline(made_of: object) -> Outline | None:
    """Return the outline that was kept for a target; None if there is none whose graphs are still there.

    made_of: all that the target and its graphs depend on, with a JSON form.
    """
    if not is_enabled():
        return None
    with contextlib.suppress(OSError, RuntimeError, TypeError, KeyError):
        found = from_record(read_records(file_of(made_of)))
        if all(
            (GRAPHS.root() / name / GRAPH).is_file() for name in (found.graphs.decoder, found.graphs.lm_head)
        ):
            return found
    return None


def from_record(record: dict[str, Any]) -> Outline:
    """Return the outline that a JSON record holds. Raises TypeError or KeyError if it holds none."""
    return Outline(**{**record, "graphs": KeptGraphs(**record["graphs"])})


def keep_outline(outline: Outline | None, made_of: object) -> None:
    """Keep the outline of a target for the next start. None: note that it has none that would do."""
    if is_enabled():
        with contextlib.suppress(OSError, RuntimeError):
            record = {NONE: True} if outline is None else asdict(outline)
            write_atomically(file_of(made_of), json.dumps(record) + "\n")


def has_none(made_of: object) -> bool:
    """Return whether it was noted that a target has no outline that would do."""
    with contextlib.suppress(OSError, RuntimeError):
        return NONE in read_records(file_of(made_of))
    return False


def file_of(made_of: object) -> Path:
    return GRAPHS.root() / f"target-{digest_json(VERSION, made_of)}.json"
