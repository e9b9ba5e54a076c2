"""A tiny engine for every way to draft, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from eagle_fsd import EagleFSD
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.drafter import DrafterSpec, NoDrafter
from eagle_fsd.drafting.lookup.lookup_drafter import LookupSpec
from eagle_fsd.drafting.lookup.merged_drafter import MergedSpec
from eagle_fsd.drafting.lookup.text_memory import Sources
from eagle_fsd.drafting.specs import spec_for
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.target.model import TargetModel
from support.eagle3 import eagle3_head
from support.tiny_models import VOCAB, tiny_head, tiny_model


@cache
def target(runtime: str = "torch") -> TargetModel:
    if runtime == "torch":
        return TargetModel(tiny_model())
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    return TargetModel(tiny_model(), runtime=OpenVINO("float32"))


def eagle(runtime: str = "torch") -> DrafterSpec:
    spec = spec_for(tiny_head(4), target(runtime), torch.float32)
    assert spec is not None
    return spec


def eagle3() -> DrafterSpec:
    spec = spec_for(eagle3_head(4), target(), torch.float32)
    assert spec is not None
    return spec


# With all sources, the lists of the target's next tokens are shown to both.
DRAFTERS: dict[str, Callable[[], DrafterSpec]] = {
    "none": lambda: NoDrafter(VOCAB),
    "eagle": eagle,
    "eagle3": eagle3,
    "draft model": lambda: DraftModelSpec.for_target(TargetModel(tiny_model("mistral", seed=5)), target()),
    "lookup": lambda: LookupSpec.for_target(target(), worth=0.0),
    "merged": lambda: MergedSpec.for_target(eagle(), target(), Sources()),
    "openvino": lambda: eagle("openvino"),
}
# Graphs take seconds to compile.
slowest = {"openvino": pytest.mark.slow}
every_drafter = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slowest.get(name, ())) for name in DRAFTERS]
)


@cache
def engine(name: str) -> EagleFSD:
    return EagleFSD(target("openvino" if name == "openvino" else "torch"), DRAFTERS[name]())
