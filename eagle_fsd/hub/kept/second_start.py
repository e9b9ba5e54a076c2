"""The second start of a target that OpenVINO computes: without transformers' models and most weights.

What the target is was noted beside its graphs at an earlier start (see target/kept/outline.py). Its
embeddings come from its own files, or from the cache of converted weights. Whatever is missing or has changed
leads back to the usual way.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle_fsd.core.checks import one_line
from eagle_fsd.hub.download import SAFETENSORS_INDEX
from eagle_fsd.hub.head_checkpoint import SAFETENSORS_NAME
from eagle_fsd.hub.kept.weights_cache import Origin, find, is_settled, read_stamp
from eagle_fsd.hub.resolve import TargetSource
from eagle_fsd.hub.target_loader import CONVERTER, find_gguf_origin
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.backend import operators_of
from eagle_fsd.target.architecture import facts
from eagle_fsd.target.kept.kept_model import KeptModel
from eagle_fsd.target.kept.outline import Outline, from_record, has_none, keep_outline, read_outline
from eagle_fsd.target.model import TargetModel
from eagle_fsd.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SecondStart:
    """Finds and keeps what a start leaves to the next one, for a target in one weight format.

    made_of: all that target and graphs depend on; code that comes with a model is not among it. origin: of a
    .gguf file; None for a folder.
    """

    source: TargetSource
    made_of: object
    origin: Origin | None = None

    @classmethod
    def of(
        cls, source: TargetSource, weight_format: str, attn_implementation: str | None
    ) -> SecondStart | None:
        """Return that of a source; None if nothing is to be kept of it, or its files are still changing."""
        origin, files = None, None
        if source.gguf_file is not None:
            if (origin := find_gguf_origin(source)) is None:
                return None
            files = [origin.digest, origin.made]
        elif (files := stamps_of(source.folder)) is None:
            return None
        releases = [__version__, torch.__version__, library.version(), operators_of(weight_format), CONVERTER]
        return cls(source, [files, weight_format, attn_implementation, *releases], origin)

    def find(self, load: Callable[[], PreTrainedModel]) -> tuple[KeptModel, PreTrainedTokenizerBase] | None:
        """Return what stands for the target, and its tokenizer; None if it must be loaded. load: loads it."""
        outline = read_outline(self.made_of)
        try:
            return None if outline is None else self._stand_in(outline, load)
        except Exception as error:  # noqa: BLE001  # readers' errors have no common base
            logger.info("%s is loaded whole: %s", self.source.name, one_line(error, 200))
            return None

    def keep(self, target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Keep a target's outline, if what it leads to is the same; it is not kept before that is known.

        If it is not the same, that is noted. What may be otherwise next time, as a full disk, is not.
        """
        kind = type(tokenizer).__name__
        if has_none(self.made_of) or getattr(transformers, kind, None) is not type(tokenizer):
            return
        outline = None
        try:
            if (outline := target.outline(kind)) is None:
                return
            outline = from_record(json.loads(json.dumps(asdict(outline))))  # as the next start reads it
            model, its_tokenizer = self._stand_in(outline, lambda: target.model)
            if not (stands_for(model, target.model) and same_tokenizer(its_tokenizer, tokenizer)):
                raise ValueError("its files do not say all")
        except (OSError, MemoryError) as error:
            logger.info("%s has no second start yet: %s", self.source.name, one_line(error, 200))
            return
        except Exception as error:  # noqa: BLE001  # as above; the target itself is loaded and well
            logger.info("%s will be loaded whole: %s", self.source.name, one_line(error, 200))
            outline = None
        keep_outline(outline, self.made_of)

    def _stand_in(
        self, outline: Outline, load: Callable[[], PreTrainedModel]
    ) -> tuple[KeptModel, PreTrainedTokenizerBase]:
        """Return what an outline leads to. Raises any error if something is missing."""
        folder = self.source.folder
        if self.origin is not None:
            kept = find(self.origin, (str(torch.float32),))
            if kept is None:
                raise FileNotFoundError("its converted weights are not kept")
            folder = kept
        model = KeptModel(outline, lambda name: read_weight(folder, name), load)
        tokenizer = getattr(transformers, outline.tokenizer).from_pretrained(folder)
        model.config._name_or_path = tokenizer.name_or_path = str(self.source.folder)
        return model, tokenizer


def stamps_of(folder: Path) -> dict[str, list[int]] | None:
    """Return the stamps of a folder's files; None if one is so new that a change might not show in them."""
    try:
        stamps = {path.name: read_stamp(path) for path in sorted(folder.iterdir()) if path.is_file()}
    except OSError:
        return None
    return {str(folder.resolve()): [], **stamps} if all(map(is_settled, stamps.values())) else None


def read_weight(folder: Path, name: str) -> Tensor:
    """Return one weight of a folder in float32. Raises KeyError or safetensors' errors if it is not there."""
    file = SAFETENSORS_NAME
    if (folder / SAFETENSORS_INDEX).is_file():
        file = json.loads((folder / SAFETENSORS_INDEX).read_text(encoding="utf-8"))["weight_map"][name]
    with safe_open(folder / file, framework="pt") as found:
        return found.get_tensor(name).float()


def stands_for(kept: KeptModel, model: PreTrainedModel) -> bool:
    """Return whether all that a KeptModel has is as the whole model has it."""
    parts = (kept.get_input_embeddings().weight, kept.get_output_embeddings().weight, kept.lm_head.bias)
    head = model.get_output_embeddings()
    theirs = (model.get_input_embeddings().weight, head.weight, head.bias)
    same = all(mine is its is None or torch.equal(mine, its) for mine, its in zip(parts, theirs, strict=True))
    defaults = [one and one.to_dict() for one in (kept.generation_config, model.generation_config)]
    return same and defaults[0] == defaults[1] and facts(kept.config) == facts(model.config)


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Return whether two tokenizers of one class do the same."""
    marks = ("chat_template", "special_tokens_map", "model_max_length", "padding_side", "truncation_side")
    if any(getattr(one, name, None) != getattr(other, name, None) for name in marks):
        return False
    backends = [getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (one, other)]
    if None in backends:
        return False
    return backends[0].to_str() == backends[1].to_str()
