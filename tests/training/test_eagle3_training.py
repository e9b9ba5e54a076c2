"""Training EAGLE-3 heads: the unrolled forward and the loss against slow twins, resuming, whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle3 import VARIANTS, eagle3_head
from support.stubs import generator
from support.tiny_models import HIDDEN, VOCAB, greedy_alone, prompts_of, tiny_model
from support.training_world import FAST, InMemory, require_exact_resume
from torch import Tensor

from eagle_fsd.drafting.eagle3.config import usual_taps
from eagle_fsd.drafting.eagle3.drafter import Eagle3Predictor, Eagle3Vocabulary
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training import loss as loss_module
from eagle_fsd.training.batching import collate, input_sizes
from eagle_fsd.training.data.examples import Example
from eagle_fsd.training.data.features import Extraction, OnlineFeatures
from eagle_fsd.training.data.shards import FeatureSequence, StoredFeatures
from eagle_fsd.training.eagle3.loss import best_drafted, drafted_probabilities, eagle3_loss
from eagle_fsd.training.eagle3.new_head import (
    START,
    choose_taps,
    default_taps,
    last_norm,
    make_trainable,
    new_head,
)
from eagle_fsd.training.held_out import evaluate, hold_out
from eagle_fsd.training.loss import LossWeights, embed, unroll
from eagle_fsd.training.optimizer import HeadOptimizer
from eagle_fsd.training.readout import Readout
from eagle_fsd.training.trainer import Trainer

TAPS = (1, 2, 2)
TARGET = TargetModel(tiny_model())
WEIGHTS = LossWeights(decay=0.8)
WHO = {"name": "tiny", "weights": "0", "dtype": "float32"}


def texts(count: int, seed: int = 0) -> list[Example]:
    """Return the target's own greedy texts, of 12 to 20 tokens, taught from the fourth token on."""
    prompts = [prompts_of([4], seed=seed + number)[0] for number in range(count)]
    rows = [p + greedy_alone(TARGET.model, [p], 8 + n % 9)[0] for n, p in enumerate(prompts)]
    return [Example(row, [False] * 3 + [True] * (len(row) - 3)) for row in rows]


EXAMPLES = texts(14)
DATA = OnlineFeatures(TARGET.decoder, EXAMPLES, taps=TAPS).read(range(14))
READOUT = Readout.from_target(TARGET)
TABLE = TARGET.model.get_input_embeddings().weight.detach()


def trainable(head: Eagle3Head) -> Eagle3Head:
    make_trainable(head)
    return head


# --- what is computed ---


@pytest.mark.parametrize("name", ["plain", "eagle3.1", "another width", "two layers", "target's lm_head"])
@torch.no_grad()
def test_unroll_is_what_the_drafter_computes_token_by_token(name: str) -> None:
    """The drafting code itself is the slow twin: pairs are committed, then levels of one node are read."""
    head, sequence, steps = eagle3_head(3, **VARIANTS[name]), DATA[0], 4
    tokens = sequence.tokens[None]
    predictions = unroll(head, sequence.inputs[None, :-1], embed(head, tokens[:, 1:], TABLE), steps)
    for start in range(len(sequence.tokens) - steps):
        cache = KVCache(1, start + 1 + steps, TARGET.device)
        predictor = Eagle3Predictor(head, Eagle3Vocabulary(head, TARGET), cache)
        state = predictor.commit_pairs(
            sequence.inputs[None, : start + 1], tokens[:, 1 : start + 2], [start + 1], first=True
        )[:, None]
        for step in range(steps):
            if step:
                cache.reserve(1, offset=step - 1)
                cache.place(1, offset=step - 1)
                visible = torch.ones(1, 1, start + 1 + step, dtype=torch.bool)
                state = predictor.step(tokens[:, start + step + 1, None], state, step, visible)
            torch.testing.assert_close(predictions[step][:, start + step], state[:, 0], atol=2e-3, rtol=1e-3)


def plain_loss(head: Eagle3Head, data: list[FeatureSequence], steps: int, decay: float) -> Tensor:
    """The loss position by position, over the draft vocabulary, from logits that autograd goes through."""
    drafted = torch.arange(VOCAB) if head.draft_tokens is None else head.draft_tokens
    sums = [torch.zeros(()) for _ in range(steps)]
    counts = [0] * steps
    for one in data:
        tokens = one.tokens[None]
        states = unroll(head, one.inputs[None, :-1], embed(head, tokens[:, 1:], TABLE), steps)
        for root in range(len(one.tokens) - 1):
            for step in range(min(steps, len(one.tokens) - 1 - root)):
                index = root + step
                if not one.learn[root + 1 : index + 2].all():
                    continue
                wanted = TARGET.logits(one.features[index + 1])
                if wanted.argmax() not in drafted:
                    continue
                p = wanted[drafted].softmax(-1).detach()
                logits = head.lm_head(head.readout(states[step][0, index])) * head.config.logit_scale
                sums[step] = sums[step] - (p * logits.log_softmax(-1)).sum()
                counts[step] += 1
    parts = [(decay**k, sums[k] / counts[k]) for k in range(steps) if counts[k]]
    return sum(w * part for w, part in parts) / sum(w for w, _ in parts)


@pytest.mark.parametrize(
    "name", ["plain", "norm_output", "logit_scale", "whole vocabulary", "own embeddings"]
)
def test_the_loss_and_its_gradient_are_those_of_the_plain_twin(name: str) -> None:
    head = trainable(eagle3_head(5, **VARIANTS[name]))
    gaps = [replace(one, learn=one.learn & (torch.arange(len(one.learn)) % 7 != 5)) for one in DATA[:4]]
    found, entropies = eagle3_loss(head, collate(gaps), TABLE, READOUT, 4, WEIGHTS)
    wanted = plain_loss(head, gaps, 4, 0.8)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4) and entropies.shape == (4,)
    names, parameters = zip(*[(n, p) for n, p in head.named_parameters() if p.requires_grad], strict=True)
    gradients = [torch.autograd.grad(3 * loss, parameters) for loss in (found, wanted)]
    for key, mine, its in zip(names, *gradients, strict=True):
        assert its.abs().max() > 0, key
        assert (mine - its).abs().max() <= 1e-3 * its.abs().max() + 1e-5, key
    if head.embed_tokens is not None:
        assert not head.embed_tokens.weight.requires_grad


def test_positions_whose_best_token_is_not_drafted_have_no_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "ON_A_CPU", 5)
    features = torch.cat([one.features for one in DATA])
    drafted = eagle3_head(5).draft_tokens
    p, kept = drafted_probabilities(features, READOUT, drafted)
    logits = TARGET.logits(features)
    assert torch.equal(kept.bool(), torch.isin(logits.argmax(-1), drafted)) and 0 < kept.mean() < 1
    torch.testing.assert_close(p, logits[:, drafted].softmax(-1), atol=1e-5, rtol=1e-4)
    head = trainable(eagle3_head(5))
    outside = [replace(DATA[0], learn=torch.zeros_like(DATA[0].learn))]
    loss, entropies = eagle3_loss(head, collate(outside), TABLE, READOUT, 3, WEIGHTS)
    loss.backward()  # of processes that share a step, one may have nothing to learn
    assert loss.item() == 0 and entropies.isnan().all() and head.lm_head.weight.grad is not None


def test_padding_changes_neither_loss_nor_gradient() -> None:
    results = []
    short, long = sorted(DATA[:2], key=lambda one: len(one.tokens))
    for data in ([short], [short, replace(long, learn=torch.zeros_like(long.learn))]):
        head = trainable(eagle3_head(5))
        loss, _ = eagle3_loss(head, collate(data), TABLE, READOUT, 3, WEIGHTS)
        loss.backward()
        results.append([loss, head.lm_head.weight.grad, head.fc.weight.grad])
    for alone, padded in zip(*results, strict=True):
        torch.testing.assert_close(alone, padded, atol=1e-4, rtol=1e-3)


def test_held_out_accuracy_is_counted_in_the_targets_tokens() -> None:
    """Top 1 at the first step, by hand: a token that the head does not know is a miss."""
    head = eagle3_head(5)
    held = replace(hold_out(DATA[:3], READOUT, best=best_drafted(head)), depth=2)
    hits = total = 0
    for one in DATA[:3]:
        with torch.no_grad():
            states = unroll(head, one.inputs[None, :-1], embed(head, one.tokens[None, 1:], TABLE), 1)[0][0]
            drafted = head.draft_tokens[head.lm_head(head.readout(states)).argmax(-1)]
        right = drafted == TARGET.logits(one.features[1:]).argmax(-1)
        hits, total = hits + int(right[one.learn[1:]].sum()), total + int(one.learn[1:].sum())
    assert evaluate(head, held, TABLE)["top1"][0] == pytest.approx(hits / total, abs=1e-4)
    drafted = len(head.draft_tokens)
    of_all, of_more = evaluate(head, held, TABLE, k=drafted), evaluate(head, held, TABLE, k=drafted + 3)
    assert of_more[f"top{drafted + 3}"] == of_all[f"top{drafted}"]


# --- the trainer ---


def trainer_for(folder: Path, head: Eagle3Head | None = None, **changes: Any) -> Trainer:
    head = trainable(head or new_head(TARGET, TAPS, torch.arange(0, VOCAB, 2), 0))
    config = replace(FAST, loss=WEIGHTS, unroll=3, unroll_after=0.0, **changes)
    drafted = torch.arange(VOCAB) if head.draft_tokens is None else head.draft_tokens
    data, held = InMemory(DATA[2:]), DATA[:2]
    return Trainer(head, data, range(12), held, TABLE, READOUT, drafted, config, folder)


def test_a_run_measures_its_head_by_the_tokens_that_it_drafts(tmp_path: Path) -> None:
    """By its own lm_head, and not by the target's, which reads features."""
    trainer = trainer_for(tmp_path)
    states = torch.randn(6, HIDDEN, generator=generator(0))
    ranked = trainer.held_out.best(states, 3)
    assert ranked.equal(best_drafted(trainer.head)(states, 3)) and (ranked % 2 == 0).all()


def test_a_resumed_run_is_to_the_bit_one_that_was_not_stopped(tmp_path: Path) -> None:
    require_exact_resume(trainer_for, tmp_path)


@pytest.mark.parametrize(
    ("head", "field"),
    [
        (new_head(TARGET, TAPS, torch.arange(1, VOCAB, 2), 0), "common"),
        (new_head(TARGET, (1, 1, 2), torch.arange(0, VOCAB, 2), 0), "head.taps"),
        (new_head(TARGET, TAPS, torch.arange(0, VOCAB, 2), 1), "start"),
    ],
)
def test_a_checkpoint_of_another_head_is_refused(tmp_path: Path, head: Eagle3Head, field: str) -> None:
    trainer_for(tmp_path, epochs=0.3).run()
    with pytest.raises(ValueError, match=rf"is of another run \(.*{field} was .*; name another --output"):
        trainer_for(tmp_path, head).run()


def test_features_without_the_heads_taps_are_refused(tmp_path: Path) -> None:
    head, config = new_head(TARGET, (2,), None, 0), replace(FAST, loss=WEIGHTS)
    with pytest.raises(ValueError, match="features are 96 wide, head 32"):
        Trainer(
            head, InMemory(DATA), range(9), DATA[:2], TABLE, READOUT, torch.arange(VOCAB), config, tmp_path
        )


def test_lm_head_learns_by_adam_at_the_pace_of_its_size() -> None:
    head = trainable(new_head(TARGET, TAPS, None, 0))
    before = head.lm_head.weight.detach().clone()
    sizes = input_sizes(DATA, None)
    assert len(sizes) == 3 * HIDDEN and torch.equal(sizes[HIDDEN : 2 * HIDDEN], sizes[2 * HIDDEN :])
    optimizer = HeadOptimizer(head, 0.0, sizes)
    for parameter in head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator(0))
    optimizer.step(0.01)
    moved = (head.lm_head.weight.detach() - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01 * before.square().mean().sqrt().item()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gpt2"])
@torch.no_grad()
def test_a_new_head_begins_as_a_reader_of_the_highest_tap(family: str) -> None:
    """`fc` passes on the highest tap; norm and lm_head are the target's, its scale included, but quieter."""
    model = tiny_model(family, "eager")
    target = TargetModel(model)
    head = new_head(target, (1, 2), None, 0)
    states = torch.randn(5, HIDDEN, generator=generator(1))
    features = torch.cat((torch.zeros(5, HIDDEN), states), dim=1)
    torch.testing.assert_close(head.project(features), states)
    scaled = states / states.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(head.readout(states), scaled * last_norm(target), atol=1e-3, rtol=1e-3)
    rows = target.lm_head.weight * target.logits_transform.scale
    torch.testing.assert_close(head.lm_head.weight, rows.float() * START)
    if family != "gpt2":
        norm = target.decoder.norm
        torch.testing.assert_close(norm(states), scaled * last_norm(target), atol=1e-3, rtol=1e-3)


# --- taps in the shards ---


def test_taps_of_shards_are_the_targets_hidden_states(tmp_path: Path) -> None:
    extraction = Extraction(TARGET.decoder, WHO, dtype=torch.float32, shard_examples=4, taps=(1, 2))
    cost = extraction.estimate({tmp_path: EXAMPLES})
    extraction.write({tmp_path: EXAMPLES})
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert cost.tokens == sum(len(one.tokens) for one in EXAMPLES)
    assert cost.size == cost.tokens * (3 * HIDDEN * 4 + 5) <= written < cost.size + 4000
    stored = StoredFeatures([tmp_path], WHO, (1, 2)).read([3, 0])
    for number, one in zip([3, 0], stored, strict=True):
        ids = torch.tensor([EXAMPLES[number].tokens])
        with torch.no_grad():
            plain = TARGET.model(ids, output_hidden_states=True)
            last = TARGET.decoder(ids).last_hidden_state[0]
        torch.testing.assert_close(one.inputs[:, :HIDDEN], plain.hidden_states[1][0], atol=1e-4, rtol=1e-4)
        normed = TARGET.decoder.norm(one.inputs[:, HIDDEN:])  # tap n, of which entry n of theirs is the norm
        torch.testing.assert_close(normed, last, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.features, last, atol=1e-4, rtol=1e-4)
    (plain_one,) = StoredFeatures([tmp_path], WHO).read([3])  # for an EAGLE-1/2 head
    assert plain_one.taps is None and torch.equal(plain_one.features, stored[0].features)
    with pytest.raises(ValueError, match=r"have the taps \[1, 2\]: .*needs these; .*--taps 2,2$"):
        StoredFeatures([tmp_path], WHO, (2, 2))
    with pytest.raises(ValueError, match=r"\(taps was \[1, 2\], now None\); .* with --shards .* heads learn"):
        replace(extraction, taps=()).write({tmp_path: EXAMPLES})
    with pytest.raises(ValueError, match=r"\(taps was \[1, 2\], now \[2, 2\]\); remove .* name another$"):
        replace(extraction, taps=(2, 2)).write({tmp_path: EXAMPLES})
    Extraction(TARGET.decoder, WHO).write({tmp_path / "plain": EXAMPLES})
    with pytest.raises(
        ValueError, match=r"now \[1, 2\]\); .*; an EAGLE-3 head needs the taps, which these lack$"
    ):
        Extraction(TARGET.decoder, WHO, taps=(1, 2)).write({tmp_path / "plain": EXAMPLES})
    with pytest.raises(ValueError, match=r"\(count was \d+, now 1, .* taps was None, .* or name another$"):
        Extraction(TARGET.decoder, WHO, taps=(1, 2)).write({tmp_path / "plain": EXAMPLES[:1]})
    with pytest.raises(ValueError, match=r"have no taps: an EAGLE-3 head that reads the taps \[1, 2\]"):
        StoredFeatures([tmp_path / "plain"], WHO, (1, 2))
    path = tmp_path / "shard_00000.safetensors"
    whole = load_file(path)
    save_file({name: part[: 9 if name == "taps" else None].clone() for name, part in whole.items()}, path)
    with pytest.raises(ValueError, match=r"no whole feature shard \(taps has \[9\] rows, tokens"):
        StoredFeatures([tmp_path], WHO, (1, 2))


def test_few_layers_have_three_taps_too() -> None:
    """Low, middle and high, each once; more layers have those that every engine assumes."""
    assert [default_taps(layers) for layers in (3, 4, 5, 6)] == [(1, 2, 3), *[(2, 3, 4)] * 3]
    assert all(default_taps(layers) == usual_taps(layers) for layers in (1, 2, *range(7, 99)))
    assert choose_taps(TargetModel(tiny_model("llama", num_hidden_layers=6)), None) == (2, 3, 4)


def test_the_usual_taps_and_those_that_are_not_there() -> None:
    deep = TargetModel(tiny_model("llama", num_hidden_layers=8))
    assert choose_taps(deep, None) == (2, 4, 5) and choose_taps(deep, [1, 8]) == (1, 8)
    with pytest.raises(ValueError, match=r"^the usual taps are 2,1,-1: .* between 1 and .* \(2\); .*--taps"):
        choose_taps(TARGET, None)
