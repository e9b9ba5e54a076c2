"""What the head is taught: pairs, masks, the unrolled forward against a slow twin, the loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.stubs import causal_attention
from support.tiny_models import tiny_model
from support.training_world import (
    VOCAB,
    WIDTH,
    Oracle,
    lm_head,
    noise,
    sequences,
    tiny_head,
)
from torch import Tensor

from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.target.architecture import LogitsTransform
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training import loss as loss_module
from eagle_fsd.training.batching import (
    collate,
)
from eagle_fsd.training.data.shards import FeatureSequence
from eagle_fsd.training.loss import (
    LossWeights,
    head_loss,
    learn_masks,
    pair,
    rows_at_once,
    soft_cross_entropy,
    target_probabilities,
    unroll,
)
from eagle_fsd.training.readout import Readout

BOTH = LossWeights(regression=0.5)  # of EAGLE-1's losses


def test_pairing_is_feature_j_with_token_j_plus_1_and_goal_feature_j_plus_1() -> None:
    tokens = torch.arange(5)[None]
    features = torch.arange(5.0)[None, :, None].expand(1, 5, WIDTH)
    batch = pair(tokens, features, torch.tensor([[False, False, True, True, False]]))
    assert batch.features[0, :, 0].tolist() == [0, 1, 2, 3]
    assert batch.next_tokens[0].tolist() == [1, 2, 3, 4]
    assert batch.goals[0, :, 0].tolist() == [1, 2, 3, 4]
    assert batch.learn[0].tolist() == [False, True, True, False]


def test_an_oracle_head_has_no_regression_loss_and_a_shifted_one_has() -> None:
    batch = collate(sequences(4))
    only_features = LossWeights(regression=1.0, cross_entropy=0.0)
    right, _ = head_loss(Oracle(), batch, lm_head(), Readout(lm_head()), 1.0, 2, only_features)
    shifted = replace(batch, next_tokens=torch.roll(batch.next_tokens, 1, dims=1))
    wrong, _ = head_loss(Oracle(), shifted, lm_head(), Readout(lm_head()), 1.0, 2, only_features)
    assert right.item() < 1e-9 < 1e-3 < wrong.item()


def test_a_draft_is_taught_from_its_root_to_the_answers_end() -> None:
    learn = torch.tensor([[False, False, True, True, True, False, True]])
    drawn = ["".join("x" if flag else "." for flag in mask[0].tolist()) for mask in learn_masks(learn, 3)]
    assert drawn == ["..xxx.x", "...xx..", "....x.."]


def test_padding_changes_neither_loss_nor_gradient() -> None:
    head, one = tiny_head(), sequences(1)
    longer = FeatureSequence(torch.arange(20), torch.zeros(20, dtype=torch.bool), noise(20, WIDTH))
    results = []
    for data in (one, [*one, longer]):
        head.zero_grad()
        loss, _ = head_loss(head, collate(data), lm_head(), Readout(lm_head()), 1.0, 3, BOTH)
        loss.backward()
        results.append((loss.item(), head.fc.weight.grad.clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-3, rtol=1e-3)


def draft_sequentially(
    head: DraftHead, features: Tensor, embeddings: Tensor, start: int, steps: int
) -> list[Tensor]:
    """What a drafter does: run true pairs 0..start, then feed each prediction back at the next position.

    Past the longest text of its training a head sees half as far back, and the first four pairs.
    """
    longest = head.config.longest_trained
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        seen_k, seen_v = torch.cat(keys, 2), torch.cat(values, 2)
        groups = q.shape[1] // k.shape[1]
        scores = q @ seen_k.repeat_interleave(groups, 1).transpose(2, 3) * q.shape[-1] ** -0.5
        last = len(keys) - 1
        if last >= longest:
            scores[..., 4 : last - longest // 2 + 1] = -torch.inf
        return scores.softmax(-1) @ seen_v.repeat_interleave(groups, 1)

    made: list[Tensor] = []
    for position in range(start + steps):
        feature = features[:, position : position + 1] if position <= start else made[-1]
        row = head(
            feature, embeddings[:, position : position + 1], torch.full((len(features), 1), position), attend
        )
        if position >= start:
            made.append(row)
    return made


@pytest.mark.parametrize("scores", [loss_module.SCORES, 2 * 4 * 18 * 3], ids=["at once", "in blocks"])
@pytest.mark.parametrize(("trained", "length"), [(None, 7), (10, 18)])
def test_unroll_equals_drafting_one_position_at_a_time(
    trained: int | None, length: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "SCORES", scores)
    head, steps = tiny_head(trained=trained), 4
    features, embeddings = noise(2, length, WIDTH), noise(2, length, WIDTH, seed=1)
    with torch.no_grad():
        predictions = unroll(head, features, embeddings, steps)
        for start in range(length - steps + 1):
            slow = draft_sequentially(head, features, embeddings, start, steps)
            for step in range(steps):
                torch.testing.assert_close(
                    predictions[step][:, start + step], slow[step][:, 0], atol=2e-3, rtol=1e-3
                )


@pytest.mark.parametrize("scores", [1, 2 * 4 * 11, 2 * 4 * 11 * 4, 2 * 4 * 11 * 10])
def test_attention_in_blocks_equals_attention_at_once_with_its_gradients(
    monkeypatch: pytest.MonkeyPatch, scores: int
) -> None:
    """Blocks of 1, 1, 4 and 10 of 11 queries."""
    head, features, embeddings = tiny_head(), noise(2, 11, WIDTH), noise(2, 11, WIDTH, seed=1)
    results = []
    for most in (loss_module.SCORES, scores):
        monkeypatch.setattr(loss_module, "SCORES", most)
        head.zero_grad()
        predictions = torch.stack(unroll(head, features, embeddings, 4))
        (predictions * noise(4, 2, 11, WIDTH, seed=2)).sum().backward()
        results.append([predictions, *(parameter.grad for parameter in head.parameters())])
    for once, blocks in zip(*results, strict=True):
        assert (blocks - once).abs().max() < 3e-5 * once.abs().max()


def test_a_long_sequence_never_keeps_all_its_attention_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor for the gradient: n * n scores of each head at every step would be gigabytes."""
    length = 300
    head, features, embeddings = tiny_head(), noise(1, length, WIDTH), noise(1, length, WIDTH, seed=1)
    kept: list[int] = []

    def largest(most: int) -> int:
        kept.clear()
        monkeypatch.setattr(loss_module, "SCORES", most)
        watch = (lambda one: kept.append(one.numel()) or one, lambda one: one)
        with torch.autograd.graph.saved_tensors_hooks(*watch):
            unroll(head, features, embeddings, 3)
        return max(kept)

    assert largest(loss_module.SCORES) >= 4 * length**2
    assert largest(16 * 4 * length) <= 2 * length * WIDTH


def test_the_first_step_is_plain_causal_attention() -> None:
    head, features, embeddings = tiny_head(), noise(2, 6, WIDTH), noise(2, 6, WIDTH, seed=1)
    plain = head(features, embeddings, torch.arange(6).expand(2, 6), causal_attention)
    torch.testing.assert_close(unroll(head, features, embeddings, 1)[0], plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("scale", "cap"), [(1.0, None), (0.25, None), (7.0, None), (1.0, 2.0), (1.0, 30.0), (7.0, 3.0)]
)
def test_blockwise_cross_entropy_equals_the_plain_one_with_its_gradient(
    scale: float, cap: float | None, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "ON_A_CPU", 4)
    weight, bias = lm_head(), noise(VOCAB, seed=2) if biased else torch.zeros(VOCAB)
    readout = Readout(weight, bias if biased else None, LogitsTransform(scale, cap))

    def logits(features: Tensor) -> Tensor:
        scaled = (features @ weight.T + bias) * scale
        return scaled if cap is None else torch.tanh(scaled / cap) * cap

    goals, predicted = noise(11, WIDTH), noise(11, WIDTH, seed=1).requires_grad_()
    p = target_probabilities(goals, readout)
    torch.testing.assert_close(p, logits(goals).softmax(-1), atol=1e-6, rtol=1e-5)
    plain = -(p * logits(predicted).log_softmax(-1)).sum(-1).mean()
    (expected,) = torch.autograd.grad(2 * plain, predicted)
    blockwise = soft_cross_entropy(predicted, p, readout)
    (found,) = torch.autograd.grad(2 * blockwise, predicted)
    assert blockwise.item() == pytest.approx(plain.item(), abs=1e-5)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_gradients_reach_the_head_and_nothing_else() -> None:
    head = tiny_head()
    batch = collate(sequences(3))
    constants = [lm_head(), lm_head(), noise(VOCAB), batch.features.clone(), batch.goals.clone()]
    embedding, weight, bias, features, goals = (constant.requires_grad_() for constant in constants)
    batch = replace(batch, features=features, goals=goals)
    loss, _ = head_loss(head, batch, embedding, Readout(weight, bias), 1.0, 3, BOTH)
    loss.backward()
    assert [constant.grad for constant in constants] == [None] * 5
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_nothing_to_learn_is_no_loss_and_no_error() -> None:
    one = sequences(1)[0]
    batch = collate([replace(one, learn=torch.zeros_like(one.learn))])
    loss, entropies = head_loss(tiny_head(), batch, lm_head(), Readout(lm_head()), 1.0, 2, BOTH)
    assert loss.item() == 0 and entropies.isnan().all()


def test_the_loss_is_the_weighted_mean_of_its_parts_over_the_steps() -> None:
    """EAGLE-1's two losses step by step, each over the positions that a walk from every root reaches."""
    head, data, std = tiny_head(), sequences(4), 2.5
    batch = collate([replace(one, learn=torch.ones_like(one.learn)) for one in data])
    gaps = torch.rand(batch.learn.shape, generator=torch.Generator().manual_seed(2)) < 0.8
    batch = replace(batch, learn=batch.learn & gaps)
    weight = lm_head()[:20]
    found, entropies = head_loss(
        head,
        batch,
        lm_head(),
        Readout(weight),
        std,
        3,
        LossWeights(regression=0.3, cross_entropy=0.7, decay=0.5),
    )
    predictions = unroll(head, batch.features, F.embedding(batch.next_tokens, lm_head()), 3)
    total = torch.zeros(())
    plain_entropies = []
    for step, prediction in enumerate(predictions):
        rows, columns = [], []
        for row, learn in enumerate(batch.learn.tolist()):
            for root in range(len(learn) - step):
                if all(learn[root : root + step + 1]):
                    rows.append(row)
                    columns.append(root + step)
        predicted, goals = prediction[rows, columns], batch.goals[rows, columns]
        p = (goals @ weight.T).softmax(-1)
        cross_entropy = -(p * (predicted @ weight.T).log_softmax(-1)).sum(-1).mean()
        plain_entropies.append(cross_entropy.item())
        total = total + 0.5**step * (
            0.7 * cross_entropy + 0.3 * F.smooth_l1_loss(predicted / std, goals / std)
        )
    assert found.item() == pytest.approx(total.item() / 1.75, rel=1e-4)
    assert entropies.tolist() == pytest.approx(plain_entropies, rel=1e-4)
    first, _ = head_loss(head, batch, lm_head(), Readout(weight), std, 3, LossWeights(decay=0.0))
    assert first.item() == pytest.approx(plain_entropies[0], rel=1e-4)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["regression", "cross_entropy", "decay"])
def test_weights_of_the_loss_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}: .*change --{name.replace('_', '-')}"):
        LossWeights(**{name: value})


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3", "granite", "cohere", "gptj", "phi"])
def test_what_is_taught_is_the_targets_own_distribution(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales, soft-caps and biases included; over all tokens and over some."""
    monkeypatch.setattr(loss_module, "ON_A_CPU", 3)
    model = tiny_model(family, "eager")
    readout, tokens = Readout.from_target(TargetModel(model)), torch.arange(1, 9)[None]
    some = torch.tensor([40, 3, 95, 7])
    with torch.no_grad():
        features, logits = model.get_decoder()(tokens).last_hidden_state[0], model(tokens).logits[0]
    for found, wanted in ((readout, logits), (readout.restrict(some), logits[:, some])):
        p = target_probabilities(features, found)
        torch.testing.assert_close(p, wanted.softmax(-1), atol=1e-5, rtol=1e-4)


def test_a_gpu_takes_as_many_rows_as_fit_together() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert rows_at_once(cpu, 8192) == 256 and rows_at_once(gpu, 8192) == 4096
    assert rows_at_once(gpu, 300_000) == 256
