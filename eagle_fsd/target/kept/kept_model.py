"""What stands for a model whose layers run as graphs that are kept on disk: its embeddings and lm_head.

Importing transformers' models takes longer than all else at a start, and reading the layers' weights takes
its time, too. Both wait here until somebody asks for the whole model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from eagle_fsd.files.fingerprints import target_identity
from eagle_fsd.target.kept.outline import Outline

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ScaledEmbedding(nn.Embedding):
    """Embeddings [V, d] that a model multiplies by a number."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        super().__init__(*weight.shape, _weight=weight, _freeze=True)
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        found = super().forward(tokens)
        return found if self.scale == 1 else found * found.new_tensor(self.scale)


class KeptModel(nn.Module):
    """Stands for a model in float32 on the CPU.

    read: returns a weight by its name; those of the embeddings [V, d] and of the lm_head [V, d] are read.
    load: returns the whole model.
    """

    def __init__(
        self,
        outline: Outline,
        read: Callable[[str], Tensor],
        load: Callable[[], PreTrainedModel],
    ) -> None:
        super().__init__()
        self.outline = outline
        self.config = PreTrainedConfig.from_dict(outline.config)
        self.config._attn_implementation = outline.attention
        defaults = outline.generation
        self.generation_config = None if defaults is None else GenerationConfig.from_dict(defaults)
        self.embeddings = ScaledEmbedding(read(outline.embeddings), outline.scale)
        shared = self.embeddings.weight
        weight = shared if outline.lm_head is None else fixed(read(outline.lm_head))
        bias = None if outline.bias is None else fixed(read(outline.bias))
        self.lm_head = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        self.lm_head.weight, self.lm_head.bias = weight, bias
        self._load = load
        self._loaded: list[PreTrainedModel] = []  # a list, since it is no part of this module
        self._loading = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    @property
    def parameter_count(self) -> int:
        """The number of weights that a forward reads: all but embeddings that are not the lm_head's."""
        unread = 0 if self.outline.lm_head is None else self.embeddings.weight.numel()
        return sum(map(math.prod, self.outline.shapes)) - unread

    def identity(self, name: str) -> dict[str, str]:
        """Return what files.fingerprints.target_identity would of the whole model."""
        return {"name": name, "weights": self.outline.digest, "dtype": "float32"}

    def whole(self) -> PreTrainedModel:
        """Return the whole model, which is loaded the first time.

        Raises ValueError if it is not the one that the graphs were made of.
        """
        with self._loading:
            if not self._loaded:
                model = self._load()
                if target_identity("", model)["weights"] != self.outline.digest:
                    raise ValueError(
                        "the target's files have changed since it was started: its graphs are of others; "
                        "start again"
                    )
                self._loaded.append(model)
            return self._loaded[0]


def whole(model: PreTrainedModel | KeptModel) -> PreTrainedModel:
    """Return the whole model, if only a part of it is in memory."""
    return model.whole() if isinstance(model, KeptModel) else model


def shapes_of(model: PreTrainedModel | KeptModel) -> list[list[int]]:
    """Return the shapes of all weights of the whole model."""
    if isinstance(model, KeptModel):
        return [list(shape) for shape in model.outline.shapes]
    return [list(weight.shape) for weight in model.parameters()]


def fixed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
