"""The second start of a .gguf target that OpenVINO computes: without transformers' models and most weights.

What the target is was noted beside its graphs at an earlier start (see outline.py); its embeddings come from
the cache of converted weights. Whatever is missing or has changed leads back to the usual way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eagle_fsd.core.checks import one_line
from eagle_fsd.hub.kept.weights_cache import Origin, find
from eagle_fsd.hub.target_loader import TargetSource, find_gguf_origin
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.kept.kept_model import KeptModel
from eagle_fsd.runtime.openvino.kept.outline import keep_outline, read_outline
from eagle_fsd.target.model import TargetModel
from eagle_fsd.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class SecondStart:
    """Finds and keeps what a start leaves to the next one, for a .gguf target in one weight format.

    origin: of its file. made_of: all that target and graphs depend on.
    """

    source: TargetSource
    origin: Origin
    made_of: object

    @classmethod
    def of(
        cls, source: TargetSource, weight_format: str, attn_implementation: str | None
    ) -> SecondStart | None:
        """Return that of a source; None if it is no .gguf file, or nothing is to be kept."""
        origin = None if source.gguf_file is None else find_gguf_origin(source)
        if origin is None:
            return None
        releases = [__version__, torch.__version__, library.version()]
        return cls(
            source, origin, [origin.digest, origin.made, weight_format, attn_implementation, *releases]
        )

    def find(self, load: Callable[[], PreTrainedModel]) -> tuple[KeptModel, PreTrainedTokenizerBase] | None:
        """Return what stands for the target, and its tokenizer; None if it must be loaded. load: loads it."""
        outline = read_outline(self.made_of)
        folder = None if outline is None else find(self.origin, (str(torch.float32),))
        if outline is None or folder is None:
            return None
        try:
            generation = None
            if (folder / transformers.utils.GENERATION_CONFIG_NAME).is_file():
                generation = GenerationConfig.from_pretrained(folder)
            model = KeptModel(outline, generation, folder / WEIGHTS, load)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            logger.info("%s is loaded whole: %s", self.source.name, one_line(error, 200))
            return None
        model.config._name_or_path = tokenizer.name_or_path = str(self.source.folder)
        return model, tokenizer

    def keep(self, target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Keep a target's outline, if its graphs and its tokenizer can be found again."""
        outline = target.outline if type(tokenizer) is PreTrainedTokenizerFast else None
        if outline is not None:
            keep_outline(outline, self.made_of)
