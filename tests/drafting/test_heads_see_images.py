"""Heads read the embeddings of images as the target does: they draft like a plain twin that is given them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.eagle3 import Eagle3Twin, eagle3_config
from support.media_families import tiny_media_model
from support.media_prompts import AFTER, with_images, written
from support.op_recorder import OpRecorder
from support.stubs import causal_attention
from support.tiny_models import randomize, tiny_head
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.core.padding import pad_left, pad_right
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.prompts.prefill import PromptReader, prefill
from eagle_fsd.decoding.prompts.prefix_cache import PrefixCache
from eagle_fsd.drafting.drafter import Drafter
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.drafting.specs import spec_for
from eagle_fsd.runtime.step_recorder import Graphs
from eagle_fsd.target.media.reading import read_media
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(8, 3, 2)
SHORT = [5, 9, 33, 7, 5]
LONG = [*range(3, 40)]
HEADS: dict[str, Callable[[TargetModel], DraftHead | Eagle3Head]] = {
    "eagle": lambda target: head_of(target),
    "some tokens": lambda target: head_of(target).restrict(torch.arange(4, 60), text_tokens=8),
    "eagle3": lambda target: eagle3_of(target),
    "own embeddings": lambda target: eagle3_of(target, embeddings=True),
    "another width": lambda target: eagle3_of(target, embeddings=True, hidden_size=24),
}


def head_of(target: TargetModel) -> DraftHead:
    return tiny_head(2, target.hidden_size, target.vocab_size)


def eagle3_of(target: TargetModel, **fields: Any) -> Eagle3Head:
    usual = {"hidden_size": target.hidden_size, "target_size": target.hidden_size}
    sizes = {"vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size}
    head = Eagle3Head(eagle3_config(**{**usual, **sizes, **fields})).eval()
    randomize(head, 3)
    return head


@functools.cache
def target_of(kind: str) -> TargetModel:
    return TargetModel(tiny_media_model(kind))


class Twin:
    """A head on a whole text, of whose images the embeddings were merged by the model itself."""

    def __init__(
        self, model: PreTrainedModel, inputs: dict[str, Tensor], head: DraftHead | Eagle3Head
    ) -> None:
        self.head, self.model, given = head, model, dict[str, Tensor]()
        hook = model.get_decoder().register_forward_pre_hook(
            lambda _module, _args, kwargs: given.update(kwargs), with_kwargs=True
        )
        states = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        hook.remove()
        self.merged = given["inputs_embeds"][0, 1:]
        self.words = inputs["input_ids"][0, 1:]
        taps = head.config.taps if isinstance(head, Eagle3Head) else ()
        layers = [states[tap] for tap in taps] or [states[-1]]
        self.features = torch.cat(layers, dim=-1)[0, :-1]

    def log_q(self, path: Sequence[int], images: bool = True) -> Tensor:
        """Return the draft after the text and a path. images: whether the head sees them."""
        tokens = torch.cat((self.words, torch.tensor(path, dtype=torch.int64)))
        own = self.head.embed_tokens if isinstance(self.head, Eagle3Head) else None
        embeddings = (own or self.model.get_input_embeddings())(tokens)
        plain = self.model.get_input_embeddings()(self.words)
        if images and embeddings.shape[1] == self.merged.shape[1]:
            at = (plain != self.merged).any(-1).nonzero()[:, 0]
            assert len(at)
            embeddings[at] = self.merged[at]
        return self.read(embeddings, len(path))

    def read(self, embeddings: Tensor, drafted: int) -> Tensor:
        start, positions = len(self.features), list(range(len(embeddings)))
        if isinstance(self.head, Eagle3Head):
            twin = Eagle3Twin(self.head)
            states = twin.start(self.features)
            for end in range(start, start + drafted + 1):
                made = twin.run(states, embeddings[:end], positions[:end])[-1:]
                states = torch.cat((states, made))
            return twin.logits(made[0]).log_softmax(-1)
        features = self.features
        for end in range(start, start + drafted + 1):
            places = torch.arange(end)[None]
            made = self.head(features[None], embeddings[None, :end], places, causal_attention)[0, -1:]
            features = torch.cat((features, made))
        logits = self.model.lm_head(made[0]).float()
        drafts = self.head.draft_tokens
        return F.log_softmax(logits if drafts is None else logits[drafts], dim=-1)


def check(tree: DraftTree, twin: Twin, row: int = 0) -> None:
    """Every distribution of the tree is the twin's, and not that of a head which sees placeholders."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append(() if parent < 0 else (*paths[parent], token))
    owned = [(place, owner) for place, owner in enumerate(tree.owners[row].tolist()) if owner >= 0]
    assert len(owned) > 2
    for place, owner in owned:
        wanted = twin.log_q(paths[owner])
        found = tree.log_q[row, place, : len(wanted)]  # a text's own tokens stand behind a list
        torch.testing.assert_close(found - found.logsumexp(-1), wanted, atol=2e-3, rtol=2e-3)
    blind = twin.log_q((), images=False)
    assert (float((blind - twin.log_q(())).abs().max()) > 0.05) == sees(twin.head)


def sees(head: DraftHead | Eagle3Head) -> bool:
    return not isinstance(head, Eagle3Head) or head.config.hidden_size == head.config.target_size


def begun(target: TargetModel, head: DraftHead | Eagle3Head, rows: int = 1) -> tuple[TargetSession, Drafter]:
    spec = spec_for(head, target, torch.float32)
    assert spec is not None
    drafter = spec.make(rows, 64, TREE)
    return TargetSession(target, rows, 64, drafter.needs.taps), drafter


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_drafts_are_those_of_a_twin_that_reads_the_embeddings(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ragged batch, read in chunks that end within an image."""
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", 4)
    target = target_of(kind)
    head, inputs = HEADS[name](target), [with_images(target.model), with_images(target.model, (1, 2))]
    prompts = [*(read_media(target, one) for one in inputs), SHORT]
    session, drafter = begun(target, head, 3)
    roots = prefill(pad_right(prompts, 0), list(map(len, prompts)), session, drafter)
    tree = drafter.draft(roots, TREE)
    for row, one in enumerate(inputs):
        check(tree, Twin(target.model, one, head), row)


@pytest.mark.parametrize("name", ["eagle", pytest.param("own embeddings", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_the_same_in_parts_and_behind_what_was_kept(name: str) -> None:
    """A part may end within an image, and a kept text with its image."""
    target = target_of("qwen2_5_vl")
    head = HEADS[name](target)
    inputs = with_images(target.model, before=LONG)
    prompt, twin = read_media(target, inputs), Twin(target.model, inputs, head)
    session, drafter = begun(target, head)
    reader = PromptReader(torch.tensor([prompt]), session, drafter)
    while reader.left:
        reader.read(3)
    check(drafter.draft(torch.tensor(prompt[-1:]), TREE), twin)
    cache = PrefixCache(1000)
    cut = prompt[: -len(AFTER) + 1]  # a text of which the next part begins with words
    session, drafter = begun(target, head)
    cache.read(cut, session, drafter)
    cache.keep(cut, len(cut), 1000, session, drafter, 0)
    session, drafter = begun(target, head)
    root, reused = cache.read(prompt, session, drafter)
    assert reused == len(cut)
    check(drafter.draft(root, TREE), twin)


@pytest.mark.covering(1)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_texts_stay_exact(name: str, recorded: bool) -> None:
    """Also where steps are recorded, and with lookup, which sees placeholders."""
    model = target_of("llava").model
    target = TargetModel(model, *([Graphs(OpRecorder())] if recorded else []))
    engine = EagleFSD(target, HEADS[name](target), lookup=True)
    inputs = [with_images(model), with_images(model, (1, 2))]
    prompts = [read_media(target, one) for one in inputs]
    made = engine.generate(*pad_left(prompts, 0), max_new_tokens=12, tree=TREE)
    assert made.new_tokens == [written(model, one, 12) for one in inputs]
