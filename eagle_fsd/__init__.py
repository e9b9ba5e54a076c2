"""EAGLE-2 dynamic draft trees, verified by Fuzzy Speculative Decoding, on stock Hugging Face models.

The names below are loaded on first use, so that `import eagle_fsd` and `--help` take no time.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from eagle_fsd.version import __version__

if TYPE_CHECKING:
    from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
    from eagle_fsd.acceptance.fuzzy import Fuzzy
    from eagle_fsd.acceptance.other_rules import Typical
    from eagle_fsd.core.config import AutoThreshold, AutoTree, SamplingConfig, TreeConfig
    from eagle_fsd.core.stats import GenerationStats
    from eagle_fsd.decoding.options import GenerationOptions
    from eagle_fsd.decoding.outputs import GenerationOutput
    from eagle_fsd.decoding.prompts.prompt_cache import PromptCache
    from eagle_fsd.decoding.steps.failures import NonFiniteLogits
    from eagle_fsd.drafting.eagle_config import HeadConfig
    from eagle_fsd.drafting.eagle_head import DraftHead
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.hub.loading.options import LoadOptions

# Torch's threads wait busily for their next piece of work: by default for milliseconds, which stalls every
# step where another program runs. This is read when torch is imported, and tens of microseconds are enough.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

_HOMES = {
    "AcceptanceRule": "acceptance.accept",
    "AutoThreshold": "core.config",
    "AutoTree": "core.config",
    "DraftHead": "drafting.eagle_head",
    "EagleFSD": "engine",
    "Fuzzy": "acceptance.fuzzy",
    "GenerationOutput": "decoding.outputs",
    "GenerationOptions": "decoding.options",
    "GenerationStats": "core.stats",
    "HeadConfig": "drafting.eagle_config",
    "LoadOptions": "hub.loading.options",
    "Lossless": "acceptance.accept",
    "NonFiniteLogits": "decoding.steps.failures",
    "PromptCache": "decoding.prompts.prompt_cache",
    "SamplingConfig": "core.config",
    "TreeConfig": "core.config",
    "Typical": "acceptance.other_rules",
}
__all__ = [
    "AcceptanceRule",
    "AutoThreshold",
    "AutoTree",
    "DraftHead",
    "EagleFSD",
    "Fuzzy",
    "GenerationOptions",
    "GenerationOutput",
    "GenerationStats",
    "HeadConfig",
    "LoadOptions",
    "Lossless",
    "NonFiniteLogits",
    "PromptCache",
    "SamplingConfig",
    "TreeConfig",
    "Typical",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'eagle_fsd' has no attribute {name!r}")
    return getattr(import_module(f"eagle_fsd.{_HOMES[name]}"), name)
