"""An engine on the CPU and one like it on a pretended GPU: the same texts, and where the steps wait."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.randomness import streams
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.drafting.lookup.lookup_drafter import LookupSpec
from eagle_fsd.drafting.lookup.merged_drafter import MergedSpec
from eagle_fsd.drafting.lookup.text_memory import Sources
from eagle_fsd.drafting.specs import spec_for
from eagle_fsd.runtime.step_recorder import EAGER, Graphs, Stepper
from eagle_fsd.target.first_layers import first_layers
from eagle_fsd.target.model import TargetModel
from support.eagle3 import eagle3_head
from support.pretended_gpu import Again, PretendedGPU, moved_there, pretended_gpu
from support.tiny_engine import near_model
from support.tiny_models import prompts_of, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

Put = Callable[[nn.Module], nn.Module]  # moves a module to where an engine is
Make = Callable[[TargetModel, Put], DrafterSpec | None]

TREE = TreeConfig(8, 3, 3)
PROMPTS = [prompts_of([4])[0] * 3, prompts_of([3])[0]]
# Where any step waits, once.
VERDICT = "decoding/steps/emission.py:to_host"
# Where a step waits beside it, at most once: where it reads drafts, or the target's own lists.
LISTS = {"drafting/lookup/lookup_drafter.py:lists_of"}
MERGED = {
    "drafting/lookup/merged_drafter.py:to_host",
    "drafting/lookup/packing.py:__init__",  # which tokens the texts have of their own, when they are new
}
OPTIONS = {"decoding/logits/processing.py:process"}  # options follow the paths of the drafted tokens
LOGPROBS = {"decoding/steps/emission.py:note_logprobs"}
LEVELS = {"target/states/tree_plan.py:_by_depth"}  # layers that run a tree level by level
# The head's probability of a copied token, which few trees ask for: any number of times.
ANY_NUMBER = "drafting/lookup/merged_drafter.py:__call__"


def head(target: TargetModel, made: Any) -> DrafterSpec:
    found = spec_for(made, target, torch.float32)
    assert found is not None
    return found


def listed(target: TargetModel, put: Put) -> DrafterSpec:
    """A head with a list of tokens, beside which each text has some of its own."""
    return head(target, put(tiny_head(4).restrict(torch.arange(0, 96, 4), 8)))


def model_spec(target: TargetModel, model: Any) -> DrafterSpec:
    return DraftModelSpec.for_target(TargetModel(model, target.stepper), target)


# How to draft, and where a step then waits.
DRAFTERS: dict[str, tuple[Make, set[str]]] = {
    "eagle": (listed, set()),
    "all tokens": (lambda target, put: head(target, put(tiny_head(4))), set()),
    "short": (lambda target, put: head(target, put(tiny_head(4, trained_positions=14))), set()),
    "eagle3": (lambda target, put: head(target, put(eagle3_head(4, draft_vocab_size=12))), set()),
    "eagle3 of all tokens": (lambda target, put: head(target, put(eagle3_head(4))), set()),
    "near": (lambda target, put: model_spec(target, put(near_model())), set()),
    "first layers": (lambda target, put: model_spec(target, first_layers(target.model, 1)), set()),
    "recurrent": (lambda target, put: model_spec(target, put(tiny_model("qwen3_5"))), set()),
    "Mamba-1": (lambda target, put: model_spec(target, put(tiny_model("jamba"))), set()),
    "lookup": (lambda target, put: LookupSpec.for_target(target, worth=0.0), LISTS),
    "merged": (lambda target, put: MergedSpec.for_target(listed(target, put), target), MERGED),
    "merged with lists": (
        lambda target, put: MergedSpec.for_target(listed(target, put), target, Sources()),
        MERGED | LISTS,
    ),
    "merged with a model": (
        lambda target, put: MergedSpec.for_target(model_spec(target, put(near_model())), target),
        MERGED,
    ),
    "merged with eagle3": (
        lambda target, put: MergedSpec.for_target(DRAFTERS["eagle3"][0](target, put), target),
        MERGED,
    ),
}


def there(module: nn.Module) -> nn.Module:
    return moved_there(copy.deepcopy(module))


def draw_as_a_gpu(
    random: streams.RowRandom, first: Sequence[int], count: int, size: int, rows: Sequence[bool]
) -> Tensor:
    """Draw the noise of a GPU on any device, so that warm texts can be compared."""
    keys = [stream.key if some else None for stream, some in zip(random._rows, rows, strict=True)]
    return streams.noise_on(random.device, keys, first, count, size)


class Twins:
    """An engine on the CPU, and one on a pretended GPU whose steps are recorded.

    model: returns a target's model. make: returns what drafts. tokenizer: of both. waits: whether the model's
    own forward waits for the device, so that no step can be recorded. target: the GPU's.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        make: Make = DRAFTERS["lookup"][0],
        tokenizer: Any = None,
        waits: bool = False,
    ) -> None:
        self.gpu, self.tokenizer, self.waits = PretendedGPU(), tokenizer or tiny_tokenizer(), waits
        self.plain = self.engine(model(), make, lambda module: module, EAGER)
        with self.there():
            self.far = self.engine(there(model()), make, there, Graphs(Again(self.gpu)))
        self.target = self.far.target

    def engine(self, model: Any, make: Make, put: Put, stepper: Stepper) -> EagleFSD:
        target = TargetModel(model, stepper)
        return EagleFSD(target, make(target, put), self.tokenizer, base_model="tiny")

    @contextmanager
    def there(self) -> Iterator[None]:
        """Let torch have the GPU inside the block."""
        with pytest.MonkeyPatch.context() as patch, pretended_gpu(patch, self.gpu):
            yield

    def same(self, call: Callable[[EagleFSD], Any]) -> Any:
        """Return what a call of the GPU's engine returns, which must be what the other's does."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams.RowRandom, "noise", draw_as_a_gpu)
            wanted = call(self.plain)
            with self.there():
                found = call(self.far)
        assert found == wanted
        assert self.target.stepper.records != (self.waits or self.target.recurrent)
        return found

    def steps(
        self, allowed: set[str], prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
    ) -> dict[str, float]:
        """Return where the GPU's steps wait, and how often each. The texts must be the CPU's.

        allowed: where a step may wait once beside its verdict. options: of `stream_batch`.
        """
        ids, mask = pad_left(prompts, 0)
        options = {"max_new_tokens": 8, "tree": TREE, "seed": 1, **options}
        waits, counts = Counter[str](), []

        def call(model: EagleFSD) -> Any:
            with model.stream_batch(ids, mask, **options) as started:
                texts = next(started.steps)
                self.gpu.waits.clear()
                for chunks in started.steps:
                    texts = [row + chunk for row, chunk in zip(texts, chunks, strict=True)]
                    counts.append(1 if model is self.far else 0)
            if model is self.far:
                waits.update(one.split(" ")[0] for one in self.gpu.waits)
            logprobs = [[one.token for one in row] for row in started.logprobs or ()]
            return texts, logprobs

        self.same(call)
        steps = sum(counts)
        assert steps, "all ended in the first step"
        assert waits[VERDICT] == steps and set(waits) <= {VERDICT, *allowed, ANY_NUMBER}
        assert all(waits[place] <= steps for place in allowed)
        return {place: count / steps for place, count in waits.items()}
