"""On a GPU: no tensors of both devices together, and a step that waits for the device only where it must."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.eagle3 import eagle3_head
from support.pretended_gpu import Again, PretendedGPU, moved_there, pretended_gpu
from support.tiny_models import prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.drafting.specs import spec_for, with_lookup
from eagle_fsd.runtime.step_recorder import Graphs
from eagle_fsd.target.model import TargetModel

TREE = TreeConfig(8, 3, 3)
VERDICT = "decoding/steps/emission.py:to_host"


def there(module: torch.nn.Module) -> torch.nn.Module:
    return moved_there(copy.deepcopy(module))


def listed(target: TargetModel) -> DrafterSpec | None:
    """A head with a list of tokens, beside which each text has some of its own."""
    return spec_for(there(tiny_head(4).restrict(torch.arange(0, 96, 4), 8)), target, torch.float32)


# How to draft, and where a step waits beside the verdict: where it reads drafts, or the target's own lists.
DRAFTERS: dict[str, tuple[Callable[[TargetModel], DrafterSpec | None], set[str]]] = {
    "eagle": (listed, set()),
    "eagle3": (lambda target: spec_for(there(eagle3_head(4)), target, torch.float32), set()),
    "draft model": (
        lambda target: DraftModelSpec.for_target(
            TargetModel(there(tiny_model("mistral", seed=5)), target.stepper), target
        ),
        set(),
    ),
    "lookup": (lambda target: with_lookup(None, target), {"drafting/lookup/lookup_drafter.py:lists_of"}),
    "merged": (
        lambda target: with_lookup(listed(target), target),
        {
            "drafting/lookup/merged_drafter.py:to_host",
            "drafting/lookup/merged_drafter.py:__call__",  # the head's probability of a copied token
            "drafting/lookup/packing.py:__init__",  # which tokens the texts have of their own
        },
    ),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGPU:
    with pretended_gpu(monkeypatch) as gpu:
        yield gpu


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_step_waits_for_its_verdict_alone(gpu: PretendedGPU, name: str) -> None:
    """Recorded or not, and in a batch. The text is that of plain decoding."""
    make, elsewhere = DRAFTERS[name]
    target = TargetModel(there(tiny_model()), Graphs(Again(gpu)))
    model = EagleFSD(target, make(target))
    ids, mask = pad_left([prompts_of([4])[0] * 3, prompts_of([3])[0]], 0)
    plain = EagleFSD(TargetModel(tiny_model()), None)
    wanted = plain.generate(ids, mask, max_new_tokens=8, tree=TreeConfig(1))
    with model.stream_batch(ids, mask, max_new_tokens=8, tree=TREE) as started:
        found = next(started.steps)
        gpu.waits.clear()
        steps = 0
        for steps, chunks in enumerate(started.steps, 1):  # noqa: B007
            found = [row + chunk for row, chunk in zip(found, chunks, strict=True)]
    assert found == wanted.new_tokens and target.stepper.records
    waits = Counter(one.split(" ")[0] for one in gpu.waits)
    assert steps > 3 and waits.pop(VERDICT) == steps
    assert set(waits) <= elsewhere


def test_the_stand_in_notices_what_a_gpu_does(gpu: PretendedGPU) -> None:
    one = torch.arange(3).to("cuda", non_blocking=True)
    both = one + torch.arange(3, device="cuda")
    assert one.device.type == "cuda" and not gpu.waits
    for waits in (
        lambda: both.tolist(),
        lambda: bool(both[0] > 0),
        lambda: both.cpu(),
        lambda: both[both > 1],
        lambda: both.nonzero(),
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: torch.arange(3).to(both.device),
        lambda: one.copy_(torch.arange(3)),
    ):
        gpu.waits.clear()
        waits()
        assert len(gpu.waits) == 1
    assert (one + 1).tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="both devices"):
        one + torch.arange(3)
    with pytest.raises(RuntimeError, match="within a recording"):
        Again(gpu)(lambda: both.tolist(), True)
