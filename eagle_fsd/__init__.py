"""EAGLE-2 dynamic draft trees, verified by Fuzzy Speculative Decoding, on stock Hugging Face models.

The names below are loaded on first use, so that `import eagle_fsd` and `--help` take no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from eagle_fsd.version import __version__

if TYPE_CHECKING:
    from eagle_fsd.acceptance import AcceptanceRule, Lossless
    from eagle_fsd.config import AutoThreshold, AutoTree, SamplingConfig, TreeConfig
    from eagle_fsd.decoding import NonFiniteLogits
    from eagle_fsd.eagle_config import HeadConfig
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.fuzzy import Fuzzy
    from eagle_fsd.head import DraftHead
    from eagle_fsd.outputs import GenerationOutput
    from eagle_fsd.relaxed import Typical
    from eagle_fsd.stats import GenerationStats

_HOMES = {
    "AcceptanceRule": "acceptance",
    "AutoThreshold": "config",
    "AutoTree": "config",
    "DraftHead": "head",
    "EagleFSD": "engine",
    "Fuzzy": "fuzzy",
    "GenerationOutput": "outputs",
    "GenerationStats": "stats",
    "HeadConfig": "eagle_config",
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
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'eagle_fsd' has no attribute {name!r}")
    return getattr(import_module(f"eagle_fsd.{_HOMES[name]}"), name)
