"""HeadAdapter: what a head learns while it drafts, and that no lossless text ever changes by it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.media_families import tiny_media_model
from support.media_prompts import with_images
from support.tiny_models import prompts_of, simple_model, tiny_head, young_head

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.hub.resolve import load_head
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.packed_linear import PackedLinear, pack_linears
from eagle_fsd.target.media.reading import read_media
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.batching import Batch, collate
from eagle_fsd.training.data.shards import FeatureSequence
from eagle_fsd.training.online import adapter as adapter_module
from eagle_fsd.training.online.adapter import AdaptConfig, HeadAdapter

TREE = TreeConfig(8, 3, 3)
QUICK = AdaptConfig(every=24, learning_rate=0.02)
PROMPTS = prompts_of([6] * 8, seed=5)
Texts = list[tuple[list[int], list[int]]]


def engine(lookup: bool = False, runtime: OpenVINO | None = None) -> EagleFSD:
    return EagleFSD(TargetModel(simple_model(), runtime=runtime), young_head(), lookup=lookup)


def answer(model: EagleFSD, prompt: list[int], **options: object) -> list[int]:
    made = model.generate([prompt], max_new_tokens=24, tree=TREE, **options)
    return made.new_tokens[0]


def adapt(model: EagleFSD, most_used: int = 99) -> HeadAdapter:
    """Let a model answer the prompts twice, and its head learn in between.

    most_used: end when so many updates were used.
    """
    adapter = HeadAdapter(model, QUICK)
    for prompt in PROMPTS * 2:
        adapter.add(prompt, answer(model, prompt))
        adapter.update()
        if sum(one.used for one in adapter.updates) == most_used:
            break
    return adapter


def teach(adapter: HeadAdapter, texts: Texts) -> None:
    """Give an adapter texts that were made before, and let it learn after each."""
    for text in texts:
        adapter.add(*text)
        adapter.update()


def texts_and_steps(model: EagleFSD, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    made = [model.generate([one], max_new_tokens=24, tree=TREE) for one in prompts]
    return [one.new_tokens[0] for one in made], sum(one.stats[0].steps for one in made)


@pytest.fixture(scope="module")
def texts() -> Texts:
    """The prompts with the texts that the target writes, whatever drafts them."""
    model = engine()
    return [(prompt, answer(model, prompt)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def adapted(texts: Texts) -> tuple[EagleFSD, HeadAdapter]:
    """An engine whose head has learned from three rounds of the prompts. Never change it in a test."""
    model = engine()
    adapter = HeadAdapter(model, QUICK)
    teach(adapter, texts * 3)
    assert adapter.adapted
    return model, adapter


@pytest.mark.covering(1)
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_the_head_drafts_better_and_no_lossless_text_changes(lookup: bool, runtime: str) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino", reason="this needs the extra openvino")
    model = engine(lookup, OpenVINO("float32") if runtime == "openvino" else None)
    thorough = not lookup and runtime == "torch"  # copies of a short text leave little to a head
    prompts = PROMPTS if thorough else PROMPTS[:3]
    texts, before = texts_and_steps(model, prompts)
    # A graph of the head is made for each update that is used, which takes a second.
    adapter = adapt(model) if thorough else adapt(model, most_used=1)
    used = [one for one in adapter.updates if one.used]
    assert used and all(one.after > one.before for one in used)
    again, after = texts_and_steps(model, prompts)
    assert again == texts
    if thorough:
        assert after < before


def test_sampled_texts_are_those_of_their_seed_with_the_head_as_it_then_is(
    adapted: tuple[EagleFSD, HeadAdapter],
) -> None:
    """The head that is saved gives the same sampled texts in another engine, so nothing else has changed."""
    model, adapter = adapted
    other = EagleFSD(TargetModel(simple_model()), young_head())
    other.draft_with(adapter._live.state_dict())
    options = {"temperature": 1.0, "seed": 3}
    assert answer(model, PROMPTS[0], **options) == answer(other, PROMPTS[0], **options)


def test_a_copy_that_does_worse_is_dropped_and_never_drafts(texts: Texts) -> None:
    model = engine()
    adapter = HeadAdapter(model, QUICK)
    teach(adapter, texts * 3)
    learned = {name: value.clone() for name, value in model.head.state_dict().items()}
    best = adapter.updates[-1].before
    adapter.config = replace(QUICK, learning_rate=1.0)  # far too large
    for text in texts * 3:
        adapter.add(*text)
        report = adapter.update()
        if report is not None and report.dropped:
            break
    assert adapter.updates[-1].dropped and adapter.updates[-1].after < best
    assert all(torch.equal(value, learned[name]) for name, value in model.head.state_dict().items())
    copied = adapter._copy.state_dict()  # it begins again from the head that drafts
    assert all(torch.equal(value, learned[name]) for name, value in copied.items())


def test_a_loss_that_is_not_finite_teaches_nothing(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine()
    adapter = HeadAdapter(model, QUICK)
    before = {name: value.clone() for name, value in adapter._copy.state_dict().items()}

    def broken(head: torch.nn.Module, *_: object) -> tuple[torch.Tensor, None]:
        return sum(one.sum() for one in head.parameters()) * math.nan, None

    monkeypatch.setattr("eagle_fsd.training.online.adapter.head_loss", broken)
    teach(adapter, texts)
    assert adapter.updates and not adapter.updates[-1].used
    assert all(torch.equal(value, before[name]) for name, value in adapter._copy.state_dict().items())


def test_texts_of_other_lengths_are_learned_apart_to_the_same_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text does not pad the short ones, and all have the weight that they have in one batch."""
    gradients, shapes = [], []
    sizes: list[int] = []

    def counted(lesson: list[FeatureSequence]) -> Batch:
        sizes.append(len(lesson))
        return collate(lesson)

    monkeypatch.setattr(adapter_module, "collate", counted)
    for most in (2048, 40):
        monkeypatch.setattr(adapter_module, "LONGEST", 2048)  # which also cuts texts that are added
        model = engine()
        adapter = HeadAdapter(model, replace(QUICK, every=60, unroll=1))
        for number, prompt in enumerate(prompts_of([6, 30, 4], seed=5)):
            adapter.add(prompt, answer(model, prompt)[: 24 - number])
        lesson = adapter._sort_in()
        monkeypatch.setattr(adapter_module, "LONGEST", most)
        sizes.clear()
        adapter._learn(lesson)
        gradients.append([one.grad for one in adapter._copy.parameters()])
        shapes.append(list(sizes))
    assert len(shapes[0]) == 1 < len(shapes[1]) and sum(shapes[0]) == sum(shapes[1])
    torch.testing.assert_close(*gradients)


def test_held_back_texts_are_never_learned_from(texts: Texts) -> None:
    adapter = HeadAdapter(engine(), QUICK)
    teach(adapter, texts)
    learned = {tuple(one.tokens.tolist()) for one in adapter._memory}
    held_back = {tuple(one.text.sequences[0].tokens.tolist()) for one in adapter._held_back}
    assert adapter._texts == len(PROMPTS) and len(held_back) == 2 and len(learned) == 6
    assert not held_back & learned


@pytest.mark.parametrize("held_back", [4, 1000])
def test_the_memory_is_bounded(texts: Texts, held_back: int) -> None:
    """Also while no text is held back, and texts are only collected."""
    adapter = HeadAdapter(engine(), AdaptConfig(every=40, memory=100, kept=1, held_back=held_back))
    teach(adapter, texts)
    assert 0 < sum(len(one.tokens) for one in adapter._memory) <= 100
    assert len(adapter._held_back) == (held_back == 4) and adapter._texts == 8


def test_what_waits_is_learned_in_parts_and_is_bounded(texts: Texts) -> None:
    """A server may be busy for long: one update of all its texts would take minutes, and all its memory."""
    adapter = HeadAdapter(engine(), replace(QUICK, every=40))
    for text in texts * 2:
        adapter.add(*text)
    learned, seen = [], 0
    while adapter.ready:
        before = adapter._texts
        adapter.update()
        learned.append(adapter._texts - before)
    assert set(learned) == {2} and len(learned) == 8  # two answers of 24 tokens make an update of 40
    for text in texts * 10:
        adapter.add(*text)
        seen = max(seen, sum(sum(one.learn) for one in adapter._new))
    assert seen <= 16 * 40 and adapter.ready


def test_other_engines_keep_their_head(texts: Texts) -> None:
    """Two engines may share one head; the one that adapts takes a copy."""
    target, head = TargetModel(simple_model()), young_head()
    mine, other = EagleFSD(target, head), EagleFSD(target, head)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    adapter = HeadAdapter(mine, QUICK)
    teach(adapter, texts * 2)
    assert adapter.adapted
    assert other.head is head and mine.head is not head
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_packed_layers_are_packed_anew() -> None:
    target, head = TargetModel(simple_model()), tiny_head()
    packed = EagleFSD(target, pack_linears(tiny_head()))
    if not any(isinstance(layer, PackedLinear) for layer in packed.head.modules()):
        pytest.skip("this machine packs no layers")
    weights = tiny_head(seed=9).state_dict()
    plain = EagleFSD(target, head)
    for one in (packed, plain):
        one.draft_with(weights)
    assert any(isinstance(layer, PackedLinear) for layer in packed.head.modules())
    options = {"temperature": 1.0, "seed": 1}
    assert answer(packed, PROMPTS[0], **options) == answer(plain, PROMPTS[0], **options)
    assert packed.drafter.identity == plain.drafter.identity


def test_a_calibration_is_void_once_the_head_has_changed(tmp_path: Path) -> None:
    model = engine()
    model.settler.folder = tmp_path
    before = model.identity()
    model.draft_with(tiny_head(seed=9).state_dict())
    assert model.identity() != before
    with pytest.raises(ValueError, match="calibration"):
        model.calibration(SamplingConfig(1.0))


def test_weights_that_do_not_fit_leave_the_head_as_it_is() -> None:
    model, wrong = engine(), tiny_head().state_dict()
    wrong.popitem()
    before = model.head, model.identity()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.draft_with(wrong)
    assert (model.head, model.identity()) == before
    with pytest.raises(ValueError, match="there is no EAGLE-1/2 head"):
        EagleFSD(model.target, None).draft_with(wrong)


def test_the_adapted_head_is_saved_as_a_checkpoint(
    adapted: tuple[EagleFSD, HeadAdapter], tmp_path: Path
) -> None:
    model, adapter = adapted
    folder = adapter.save(tmp_path / "adapted")
    again = load_head(str(folder), model.target.hidden_size, model.target.vocab_size)
    saved = again.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in adapter._live.state_dict().items())
    assert [answer(EagleFSD(model.target, again), one) for one in PROMPTS[:3]] == [
        answer(model, one) for one in PROMPTS[:3]
    ]


@pytest.mark.parametrize(
    ("prompt", "answer", "line"),
    [
        ([], [1], "prompt has an empty sequence"),
        ("hi", [1], "prompt has 'hi': a token id is an integer"),
        ([1], "ho", "answer has 'ho': a token id is an integer"),
        ([1], [1, 999_999], r"a text has the token 999999: the target's tokens are 0\.\.\d+; give its"),
    ],
)
def test_what_is_no_text_is_refused_when_it_is_added(prompt: Any, answer: Any, line: str) -> None:
    """And not at a later update, which would end a program in the middle of something else."""
    adapter = HeadAdapter(engine())
    with pytest.raises(ValueError, match=f"^{line}"):
        adapter.add(prompt, answer)
    adapter.add(torch.tensor([1, 2]), np.array([3, 4, 5]))
    assert adapter._new[0].tokens[:2] == [1, 2] and len(adapter._new) == 1


def test_what_cannot_adapt_is_named() -> None:
    target = TargetModel(simple_model())
    with pytest.raises(ValueError, match="the drafter is none"):
        HeadAdapter(EagleFSD(target, None))
    with pytest.raises(ValueError, match="the drafter is lookup"):
        HeadAdapter(EagleFSD(target, None, lookup=True))


@pytest.mark.parametrize(
    ("setting", "named"),
    [({"every": 0}, "every is 0"), ({"replay": 1.0}, "replay is 1.0"), ({"held_back": 1}, "held_back is 1")],
)
def test_wrong_settings_are_named(setting: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AdaptConfig(**setting)


def test_a_text_with_images_is_left_out() -> None:
    target = TargetModel(tiny_media_model("llava"))
    head = tiny_head(hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    adapter = HeadAdapter(EagleFSD(target, head), QUICK)
    prompt = read_media(target, with_images(target.model))
    adapter.add(prompt, [5] * QUICK.every)
    assert not adapter.ready
    adapter.add(target.media.words_of(prompt), [5] * QUICK.every)
    assert adapter.ready
    with pytest.raises(ValueError, match="a text has the token 200"):
        adapter.add([200], [5])
