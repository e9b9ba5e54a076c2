"""EAGLE-2 dynamic draft trees, verified by Fuzzy Speculative Decoding, on stock Hugging Face models.

The names below are loaded on first use, so that `import eagle_fsd` and `--help` take no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle_fsd.acceptance import AcceptanceRule, Fuzzy, Lossless
    from eagle_fsd.config import AutoThreshold, AutoTree, HeadConfig, SamplingConfig, TreeConfig
    from eagle_fsd.decoding import NonFiniteLogits
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.head import DraftHead
    from eagle_fsd.outputs import GenerationOutput
    from eagle_fsd.relaxed import Typical
    from eagle_fsd.stats import GenerationStats

__version__ = "0.1.0"

_HOMES = {
    "AcceptanceRule": "acceptance",
    "AutoThreshold": "config",
    "AutoTree": "config",
    "DraftHead": "head",
    "EagleFSD": "engine",
    "Fuzzy": "acceptance",
    "GenerationOutput": "outputs",
    "GenerationStats": "stats",
    "HeadConfig": "config",
    "Lossless": "acceptance",
    "NonFiniteLogits": "decoding",
    "SamplingConfig": "config",
    "TreeConfig": "config",
    "Typical": "relaxed",
}
__all__ = [
    "AcceptanceRule",
    "AutoThreshold",
    "AutoTree",
    "DraftHead",
    "EagleFSD",
    "Fuzzy",
    "GenerationOutput",
    "GenerationStats",
    "HeadConfig",
    "Lossless",
    "NonFiniteLogits",
    "SamplingConfig",
    "TreeConfig",
    "Typical",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'eagle_fsd' has no attribute {name!r}")
    return getattr(import_module(f"eagle_fsd.{_HOMES[name]}"), name)
