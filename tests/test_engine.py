"""The contract of EagleFSD: arguments, outputs, padding, streams, the baseline; bad input is one line."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import math
import subprocess
import sys
import threading
import time
import typing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.drafters import feed
from support.eagle3 import eagle3_head, save_eagle3
from support.tiny_models import (
    FAMILIES,
    VOCAB,
    KnowingEngine,
    greedy_alone,
    prompts_of,
    tiny_head,
    tiny_model,
)

from eagle_fsd import EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig, Typical, hub
from eagle_fsd.core.padding import pad_left, pad_right
from eagle_fsd.core.randomness.streams import fresh_seed
from eagle_fsd.drafting import eagle_drafter
from eagle_fsd.files import fingerprints
from eagle_fsd.files.kept_folders import OFF
from eagle_fsd.hub import save_head
from eagle_fsd.runtime.matmul_backends import backend_for
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.packed_linear import PackedLinear
from eagle_fsd.target.model import TargetModel

LENGTHS = (5, 13, 1, 9)
PROMPTS = prompts_of(LENGTHS)
NEW_TOKENS = 18
TREE = TreeConfig(16, 5, 3)
PAD = 77


@functools.cache
def engine() -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model("llama")), tiny_head())


@functools.cache
def gpt2() -> EagleFSD:
    """Learned positions: the first one past the end is an index error, were it ever used."""
    return EagleFSD(TargetModel(tiny_model("gpt2", n_positions=32)), tiny_head())


@functools.cache
def texts() -> list[list[int]]:
    return greedy_alone(engine().target.model, PROMPTS, NEW_TOKENS)


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    if side == "left":
        return pad_left(PROMPTS, pad=PAD)
    lengths = torch.tensor(LENGTHS)[:, None]
    return pad_right(PROMPTS, PAD), (torch.arange(max(LENGTHS)) < lengths).long()


def padded_on_both_sides() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = padded("left")
    edge = torch.full((len(ids), 2), PAD)
    return torch.cat((edge, ids, edge), dim=1), torch.cat((0 * edge, mask, 0 * edge), dim=1)


# --- outputs ---


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_sequences_are_the_input_as_given_and_the_new_tokens(side: str) -> None:
    ids, mask = padded_on_both_sides() if side == "both" else padded(side)
    before = ids.clone(), mask.clone()
    out = engine().generate(ids, mask, max_new_tokens=NEW_TOKENS)
    assert torch.equal(ids, before[0]) and torch.equal(mask, before[1])
    assert out.new_tokens == texts()
    assert out.sequences.dtype == torch.int64
    assert torch.equal(out.sequences, torch.cat((ids, torch.tensor(texts())), dim=1))
    assert len(out.stats) == len(PROMPTS)


def test_an_output_can_be_compared_and_be_a_key() -> None:
    first, second = (engine().generate([[1, 2]], max_new_tokens=2) for _ in range(2))
    assert first == first and first != second and len({first: 1, second: 2}) == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not keep overloads")
def test_the_type_of_what_is_returned_follows_from_the_argument() -> None:
    kinds = [inspect.signature(one) for one in typing.get_overloads(EagleFSD.generate)]
    told = {one.parameters["return_dict_in_generate"].annotation: one.return_annotation for one in kinds}
    assert told == {"Literal[True]": "GenerationOutput", "Literal[False]": "Tensor"}
    assert isinstance(engine().generate([[1]], max_new_tokens=1, return_dict_in_generate=False), torch.Tensor)


@pytest.mark.parametrize("head", ["org/head", TargetModel, 3])
def test_what_drafts_must_be_a_head_or_a_spec(head: Any) -> None:
    with pytest.raises(ValueError, match=r"^head is .*: it must be a DraftHead, .* loads one by name"):
        EagleFSD(engine().target, head)


def test_an_engine_says_what_it_is() -> None:
    named = EagleFSD(engine().target, tiny_head(), base_model="org/target")
    assert repr(named) == "<EagleFSD 'org/target', drafts eagle, float32 on torch, cpu>"
    assert "drafts none" in repr(EagleFSD(engine().target, None))


def test_short_rows_are_padded_on_the_right_with_the_pad_token() -> None:
    ids, mask = padded("left")
    ends = [texts()[0][3], texts()[1][7]]
    out = engine().generate(ids, mask, max_new_tokens=NEW_TOKENS, eos_token_id=ends)
    width = max(map(len, out.new_tokens))
    assert out.sequences.shape == (4, ids.shape[1] + width)
    for row, text in enumerate(out.new_tokens):
        added = out.sequences[row, ids.shape[1] :].tolist()
        assert added == text + [engine().pad_token_id] * (width - len(text))
        assert out.stats[row].finish_reason == ("stop" if text[-1] in ends else "length")
        assert not set(ends) & set(text[:-1])
    assert len({len(text) for text in out.new_tokens}) > 1


def test_without_a_mask_pad_tokens_are_padding_unless_they_end_the_texts_of_this_call() -> None:
    """As in Hugging Face's generate; the model's own end tokens do not count where a call names others."""
    model, padded = tiny_model(), torch.tensor([[0, 0, 0, 7, 8], [5, 6, 7, 8, 9]])
    for own, ends in (({}, 0), ({"eos_token_id": 0}, 5), ({"eos_token_id": 0}, None), ({}, None)):
        model.generation_config = transformers.GenerationConfig(pad_token_id=0, **own)
        asked = {"max_new_tokens": 8, **({} if ends is None else {"eos_token_id": ends})}
        wanted = model.generate(padded, do_sample=False, **asked)[:, 5:].tolist()
        made = EagleFSD(TargetModel(model), tiny_head()).generate(padded, **asked)
        width = max(map(len, made.new_tokens))
        assert [row + [0] * (width - len(row)) for row in made.new_tokens] == wanted, (own, ends)


def test_the_pad_token_is_the_tokenizers_else_the_models_else_an_end_token_else_zero() -> None:
    class Tokenizer:
        pad_token_id = 41

    model = tiny_model("llama")
    plain = EagleFSD(TargetModel(model), None)
    assert plain.pad_token_id == model.generation_config.pad_token_id == 0
    model.generation_config.pad_token_id = None
    assert plain.pad_token_id == 0
    model.generation_config.eos_token_id = [9, 12]
    assert plain.pad_token_id == 9
    model.generation_config.pad_token_id = 11
    assert plain.pad_token_id == 11
    assert EagleFSD(plain.target, None, tokenizer=Tokenizer()).pad_token_id == 41


def test_lists_are_taken_like_tensors() -> None:
    out = engine().generate([PROMPTS[0]], max_new_tokens=6)
    assert out.new_tokens == [texts()[0][:6]]
    assert out.sequences.tolist() == [PROMPTS[0] + texts()[0][:6]]
    ids, mask = padded("right")
    assert engine().generate(ids.tolist(), mask.tolist(), max_new_tokens=6).new_tokens == [
        t[:6] for t in texts()
    ]
    assert engine().generate(ids.int(), mask.bool(), max_new_tokens=6).new_tokens == [t[:6] for t in texts()]


def test_the_default_rule_is_lossless_and_rules_are_taken() -> None:
    known = KnowingEngine(engine().target, texts())
    ids, mask = padded("left")
    for rule in (None, Lossless(), Fuzzy(threshold=0)):
        assert (
            known.generate(ids, mask, max_new_tokens=NEW_TOKENS, rule=rule, tree=TREE).new_tokens == texts()
        )
    loose = engine().generate(ids, mask, max_new_tokens=NEW_TOKENS, rule=Fuzzy(threshold=math.inf))
    assert loose.new_tokens != texts()
    assert all(row.tau > 3 and row.fuzzy_accepts > 0 for row in loose.stats)
    assert engine().generate(ids, mask, max_new_tokens=5, rule=Typical()).stats[0].new_tokens == 5


def test_the_models_own_end_tokens_are_the_default() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [texts()[0][4], texts()[0][9]]
    own = EagleFSD(TargetModel(model), tiny_head())
    wanted = greedy_alone(model, PROMPTS[:1], NEW_TOKENS)
    assert len(wanted[0]) <= 5
    out = own.generate([PROMPTS[0]], max_new_tokens=NEW_TOKENS)
    assert out.new_tokens == wanted
    assert out.stats[0].finish_reason == "stop"
    for none in ([], (), 95 if 95 not in texts()[0] else 94):
        out = own.generate([PROMPTS[0]], max_new_tokens=NEW_TOKENS, eos_token_id=none)
        assert out.new_tokens == texts()[:1]
    out = own.generate([PROMPTS[0]], max_new_tokens=NEW_TOKENS, eos_token_id=texts()[0][0])
    assert out.new_tokens == [texts()[0][:1]]


def test_sampling_is_seeded_by_row() -> None:
    ids, mask = padded("left")
    settings = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 50, "top_p": 0.9}
    batch = engine().generate(ids, mask, seed=11, **settings)
    state = torch.random.get_rng_state()
    again = engine().generate(ids, mask, seed=[(11, row) for row in range(4)], **settings)
    assert torch.equal(torch.random.get_rng_state(), state), "torch's global numbers are not ours to draw"
    assert again.new_tokens == batch.new_tokens
    for row, prompt in enumerate(PROMPTS):
        alone = engine().generate([prompt], seed=[(11, row)], **settings)
        assert alone.new_tokens[0] == batch.new_tokens[row]
    assert engine().generate(ids, mask, seed=99, **settings).new_tokens != batch.new_tokens


def test_stats_hold_counts_and_seconds() -> None:
    ids, mask = padded("left")
    known = KnowingEngine(engine().target, texts(), reach=None)
    out = known.generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=TREE)
    for stats in out.stats:
        assert (stats.steps, stats.new_tokens, stats.tau) == (3, 18, 6.0)
        assert stats.accept_histogram == [0] * 6 + [3]
        phases = [stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds, stats.accept_seconds]
        assert all(seconds > 0 for seconds in (*phases, stats.keep_seconds, stats.tokens_per_second))
        assert sum(phases) + stats.keep_seconds <= stats.seconds
        assert stats.to_dict()["finish_reason"] == "length"


def test_a_tree_of_one_node_needs_no_head() -> None:
    plain = EagleFSD(engine().target, None)
    out = plain.generate([PROMPTS[1]], max_new_tokens=NEW_TOKENS, tree=TreeConfig(1))
    assert out.new_tokens == texts()[1:2]
    assert out.stats[0].tau == 1.0


# --- streams ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_is_generate_step_by_step(temperature: float) -> None:
    settings = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "seed": 5}
    whole = engine().generate([PROMPTS[1]], **settings)
    stream = engine().stream([PROMPTS[1]], **settings)
    seen: list[int] = []
    for chunk in stream:
        assert chunk and all(isinstance(token, int) for token in chunk)
        seen += chunk
        assert stream.stats.new_tokens == len(seen)
        assert stream.stats.seconds > 0
    assert [seen] == whole.new_tokens
    assert stream.stats.steps == whole.stats[0].steps
    assert stream.stats.accept_histogram == whole.stats[0].accept_histogram
    assert stream.stats.finish_reason == "length"
    assert list(stream) == [], "a stream is read once"


def test_a_stream_of_several_texts_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_return_sequences is 2: a stream gives one text"):
        engine().stream([PROMPTS[1]], num_return_sequences=2, temperature=1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batchs_stream_is_generate_step_by_step(temperature: float) -> None:
    ids, mask = pad_left(PROMPTS, PAD)
    settings = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "seed": 5, "tree": TREE}
    whole = engine().generate(ids, mask, **settings)
    stream = engine().stream_batch(ids, mask, **settings)
    seen: list[list[int]] = [[] for _ in PROMPTS]
    for chunks in stream.steps:
        for row, chunk in enumerate(chunks):
            seen[row] += chunk
            assert stream.stats[row].new_tokens == len(seen[row])
    assert seen == whole.new_tokens and stream.tree == TREE
    for live, total in zip(stream.stats, whole.stats, strict=True):
        assert (live.accept_histogram, live.finish_reason) == (total.accept_histogram, total.finish_reason)


def test_a_streams_seconds_are_its_own() -> None:
    """What the caller does between two chunks does not count."""
    stream = engine().stream([PROMPTS[1]], max_new_tokens=NEW_TOKENS)
    time.sleep(0.2)
    for _ in stream:
        time.sleep(0.05)
    phases = ("prefill", "draft", "verify", "accept", "keep")
    busy = sum(getattr(stream.stats, f"{phase}_seconds") for phase in phases)
    assert busy <= stream.stats.seconds < busy + 0.2


def test_a_stream_that_is_read_in_parts_counts_all_its_seconds() -> None:
    """As of a caller that takes the first tokens to time them; a second look at it adds nothing."""
    stream = engine().stream([PROMPTS[1]], max_new_tokens=NEW_TOKENS)
    first = next(chunks := iter(stream))
    before = stream.stats.seconds
    assert before >= stream.stats.prefill_seconds > 0
    rest = [token for chunk in stream for token in chunk]
    assert [*first, *rest] == texts()[1] and stream.stats.seconds > before
    whole = stream.stats.seconds
    assert not list(stream) and not list(chunks)
    assert stream.stats.seconds == pytest.approx(whole, abs=0.05)


def test_a_stream_that_another_thread_closes_ends_after_its_step() -> None:
    inside, told = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        assert told.wait(60)

    stream = engine().stream([PROMPTS[1]], max_new_tokens=NEW_TOKENS, observer=wait)
    made: list[list[int]] = []
    reader = threading.Thread(target=lambda: made.extend(stream))
    reader.start()
    assert inside.wait(60)
    stream.close()
    told.set()
    reader.join(60)
    assert len(made) == 1 and stream.stats.finish_reason == "interrupted"


def test_a_batch_that_another_thread_closes_ends_after_its_step() -> None:
    inside, told = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        assert told.wait(60)

    batch = engine().stream_batch(PROMPTS[:1] * 2, max_new_tokens=NEW_TOKENS, observer=wait)
    steps: list[list[list[int]]] = []
    reader = threading.Thread(target=lambda: steps.extend(batch.steps))
    reader.start()
    assert inside.wait(60)
    batch.close()
    told.set()
    reader.join(60)
    assert len(steps) == 1 and [row.finish_reason for row in batch.stats] == ["interrupted"] * 2


def test_a_baseline_and_drawn_seeds_do_not_disturb_each_other() -> None:
    """Both draw from torch's one generator, which the baseline sets and puts back."""
    model, options = engine(), {"max_new_tokens": 30, "temperature": 1.0}
    wanted = model.target_alone(torch.tensor([PROMPTS[1]]), seed=7, **options).new_tokens
    seeds: list[int] = []
    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set():
            seeds.append(fresh_seed())

    other = threading.Thread(target=draw)
    other.start()
    found = [model.target_alone(torch.tensor([PROMPTS[1]]), seed=7, **options).new_tokens for _ in range(3)]
    ended.set()
    other.join()
    assert found == [wanted] * 3 and len(set(seeds)) == len(seeds) > 3


def test_a_stream_that_is_left_counts_what_was_made() -> None:
    stream = engine().stream([PROMPTS[1]], max_new_tokens=NEW_TOKENS)
    seen: list[int] = []
    for chunk in stream:
        seen += chunk
        if len(seen) >= 5:
            break
    assert stream.stats.finish_reason == "interrupted"
    assert stream.stats.new_tokens == len(seen) < NEW_TOKENS
    assert seen == texts()[1][: len(seen)]
    assert stream.stats.tokens_per_second > 0


def test_a_stream_interrupted_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C lands anywhere: what was yielded is counted, and the reason is told."""
    stream = engine().stream([PROMPTS[1]], max_new_tokens=NEW_TOKENS)
    seen: list[int] = []
    verify = engine().target.features
    calls = []

    def pressed(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return verify(*args, **kwargs)

    monkeypatch.setattr(engine().target, "features", pressed)
    with pytest.raises(KeyboardInterrupt):
        for chunk in stream:
            seen += chunk
    assert seen and seen == texts()[1][: len(seen)]
    assert stream.stats.new_tokens == len(seen)
    assert stream.stats.finish_reason == "interrupted"


LEFT = """
import sys
sys.path.insert(0, {tests!r})
import torch
from support.tiny_models import prompts_of, tiny_head, tiny_model
from eagle_fsd import EagleFSD
from eagle_fsd.target import TargetModel
engine = EagleFSD(TargetModel(tiny_model("llama")), tiny_head())
batch = engine.stream_batch(prompts_of((5, 5)), max_new_tokens=40)
next(batch.steps)
stream = engine.stream(prompts_of((5,)), max_new_tokens=40)
chunks = iter(stream)
next(chunks)
for chunk in (other := engine.stream(prompts_of((5,)), max_new_tokens=40)):
    break
print("left")
"""


def test_streams_that_are_left_say_nothing_when_the_interpreter_exits() -> None:
    code = LEFT.format(tests=str(Path(__file__).parent))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "left\n", "")


@pytest.mark.parametrize("way", ["close", "with", "break", "forget"])
def test_a_stream_that_is_left_frees_its_texts(way: str) -> None:
    stream = engine().stream([PROMPTS[1]], max_new_tokens=NEW_TOKENS)
    steps = weakref.ref(stream._started.steps)
    if way == "with":
        with stream:
            next(iter(stream))
    else:
        for _ in stream:
            break
    if way == "close":
        stream.close()
    assert list(stream) == []
    if way == "forget":
        del stream
        gc.collect()
        assert steps() is None
    batch = engine().stream_batch([PROMPTS[1]], max_new_tokens=NEW_TOKENS)
    with batch:
        next(batch.steps)
    assert list(batch.steps) == [] and batch.stats[0].finish_reason == "interrupted"


def test_a_stream_takes_padding_and_stops() -> None:
    ids, mask = pad_left([PROMPTS[0], PROMPTS[1]], pad=PAD)
    end = texts()[0][6]
    chunks = list(engine().stream(ids[:1], mask[:1], max_new_tokens=NEW_TOKENS, eos_token_id=end))
    wanted = texts()[0][: texts()[0].index(end) + 1]
    assert [token for chunk in chunks for token in chunk] == wanted


# --- the baseline ---


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_target_alone_is_generate_of_hugging_face(side: str) -> None:
    ids, mask = padded_on_both_sides() if side == "both" else padded(side)
    out = engine().target_alone(ids, mask, max_new_tokens=NEW_TOKENS)
    assert out.new_tokens == texts()
    assert torch.equal(out.sequences, torch.cat((ids, torch.tensor(texts())), dim=1))
    for stats in out.stats:
        assert (stats.steps, stats.new_tokens, stats.tau) == (NEW_TOKENS, NEW_TOKENS, 1.0)
        assert (stats.accept_histogram, stats.finish_reason) == ([0, NEW_TOKENS], "length")
        assert stats.seconds > 0


def test_target_alone_stops_and_cuts_like_ours() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [texts()[0][3], texts()[1][7]]
    own = EagleFSD(TargetModel(model), tiny_head())
    ids, mask = padded("left")
    ours = own.generate(ids, mask, max_new_tokens=NEW_TOKENS)
    alone = own.target_alone(ids, mask, max_new_tokens=NEW_TOKENS)
    assert alone.new_tokens == ours.new_tokens
    assert torch.equal(alone.sequences, ours.sequences)
    assert [row.finish_reason for row in alone.stats] == [row.finish_reason for row in ours.stats]


def test_target_alone_samples_by_its_seed_and_leaves_torchs_alone() -> None:
    settings = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 50, "top_p": 0.9}
    state = torch.random.get_rng_state()
    first, again, other = (engine().target_alone([PROMPTS[0]], seed=s, **settings) for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.new_tokens == again.new_tokens != other.new_tokens


def test_target_alone_has_the_law_of_ours_whatever_the_repository_prefers() -> None:
    """A default that is not applied would make the baseline another text."""
    model = tiny_model("llama")
    preferred = transformers.GenerationConfig(
        encoder_repetition_penalty=0.1,
        begin_suppress_tokens=[texts()[0][0]],
        exponential_decay_length_penalty=(1, 9.0),
    )
    model.generation_config = preferred
    own = EagleFSD(TargetModel(model), tiny_head())
    ids, mask = padded("left")
    assert own.target_alone(ids, mask, max_new_tokens=NEW_TOKENS).new_tokens == texts()
    assert model.generation_config is preferred


# --- what a user of Hugging Face expects ---


def with_defaults(**defaults: Any) -> EagleFSD:
    model = tiny_model("llama")
    model.generation_config = transformers.GenerationConfig(**defaults)
    return EagleFSD(TargetModel(model), tiny_head())


def test_what_a_models_defaults_ask_and_do_not_get_is_said_once_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = with_defaults(typical_p=0.5, begin_suppress_tokens=[3, 4], do_sample=True, temperature=0.6)
    own.generate([PROMPTS[0]], max_new_tokens=4)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "asks for typical_p=0.5, begin_suppress_tokens=[3, 4], which is not supported here" in said
    assert own.target.ignored_defaults == {"typical_p": 0.5, "begin_suppress_tokens": [3, 4]}


@pytest.mark.parametrize(
    "defaults",
    [
        {},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 5, "max_length": 9},
        {"repetition_penalty": 1.0, "num_beams": 1, "min_length": 0, "no_repeat_ngram_size": 0},
    ],
    ids=["none", "sampling", "neutral"],
)
def test_defaults_that_ask_for_nothing_else_are_no_warning(
    defaults: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert with_defaults(**defaults).target.ignored_defaults == {}
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_every_processor_that_a_generation_config_makes_is_known(caplog: pytest.LogCaptureFixture) -> None:
    """Each default that changes Hugging Face's greedy text is applied, or one that the warning names."""
    prompt, changed = torch.tensor([PROMPTS[1]]), []
    for name, value in {
        "repetition_penalty": 5.0,
        "encoder_repetition_penalty": 0.1,
        "no_repeat_ngram_size": 1,
        "bad_words_ids": [[token] for token in texts()[1]],
        "suppress_tokens": texts()[1],
        "begin_suppress_tokens": texts()[1][:1],
        "forced_eos_token_id": 5,
        "sequence_bias": [[[texts()[1][0]], -50.0]],
        "min_new_tokens": 9,
        "exponential_decay_length_penalty": (1, 50.0),
    }.items():
        own = with_defaults(**{name: value}, eos_token_id=texts()[1][8], pad_token_id=PAD)
        alone = own.target.model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        if alone[0, prompt.shape[1] :].tolist() != texts()[1][:9]:
            changed.append(name)
            ours = own.generate(prompt, max_new_tokens=NEW_TOKENS).new_tokens[0]
            applied = ours == alone[0, prompt.shape[1] :].tolist()
            assert list(own.target.ignored_defaults) == ([] if applied else [name])
    assert len(changed) >= 8, changed


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_pad_tokens_without_a_mask_are_padding_as_in_hugging_face(side: str) -> None:
    ids, _ = padded_on_both_sides() if side == "both" else padded(side)
    own = with_defaults(pad_token_id=PAD)
    assert own.generate(ids, max_new_tokens=NEW_TOKENS).new_tokens == texts()
    alone = own.target.model.generate(padded("left")[0], max_new_tokens=NEW_TOKENS, do_sample=False)
    assert alone[:, -NEW_TOKENS:].tolist() == texts()
    assert own.target_alone(ids, max_new_tokens=NEW_TOKENS).new_tokens == texts()


@pytest.mark.parametrize("defaults", [{}, {"pad_token_id": PAD, "eos_token_id": PAD}], ids=["none", "end"])
def test_pad_tokens_are_text_where_hugging_face_takes_them_for_it(defaults: dict[str, int]) -> None:
    """A model without a pad token, or with one that also ends texts, says nothing about padding."""
    ids = torch.tensor([[PAD, PAD, *PROMPTS[0]]])
    own = with_defaults(**defaults)
    alone = own.target.model.generate(ids, max_new_tokens=9, do_sample=False)[:, ids.shape[1] :]
    assert own.generate(ids, max_new_tokens=9).new_tokens == alone.tolist()
    assert own.generate(ids, max_new_tokens=9).new_tokens != greedy_alone(own.target.model, [PROMPTS[0]], 9)


def test_tokens_masked_inside_a_prompt_are_left_out_as_in_hugging_face() -> None:
    ids = torch.tensor(prompts_of((12, 12), seed=8))
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1], [1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]])
    model = engine().target.model
    alone = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert engine().generate(ids, mask, max_new_tokens=9).new_tokens == alone[:, 12:].tolist()


def test_without_a_seed_every_call_draws_another_and_names_it() -> None:
    settings = {"max_new_tokens": 12, "temperature": 1.0}
    first, second = (engine().generate([PROMPTS[0]], **settings) for _ in range(2))
    assert first.new_tokens != second.new_tokens and first.seed != second.seed
    assert engine().generate([PROMPTS[0]], seed=first.seed, **settings).new_tokens == first.new_tokens
    streamed = engine().stream([PROMPTS[0]], **settings)
    text = [token for chunk in streamed for token in chunk]
    assert engine().generate([PROMPTS[0]], seed=streamed.seed, **settings).new_tokens == [text]
    state = torch.random.get_rng_state()
    assert engine().generate([PROMPTS[0]], max_new_tokens=2).seed is None  # greedy: nothing was drawn
    assert torch.equal(torch.random.get_rng_state(), state)


def test_torchs_manual_seed_rules_a_call_without_a_seed() -> None:
    """As it rules Hugging Face's `generate`."""
    made, model = [], engine()  # which draws its weights
    with torch.random.fork_rng():
        for _ in range(2):
            torch.manual_seed(4)
            made.append(model.generate([PROMPTS[0]], max_new_tokens=12, temperature=1.0).new_tokens)
    assert made[0] == made[1]


@contextlib.contextmanager
def torch_default(value: torch.dtype | str) -> Iterator[None]:
    """Let torch make tensors in this dtype, or on this device, inside the block, where it is not told."""
    try:
        torch.set_default_device(value) if isinstance(value, str) else torch.set_default_dtype(value)
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@functools.cache
def heads() -> list[tuple[Any, bool]]:
    """Return heads, and whether drafts are looked up beside."""
    return [(tiny_head(), True), (eagle3_head(2), False), (None, True)]


def texts_of_drafters(runtime: str) -> list[list[list[int]]]:
    """Return texts with several drafters on a runtime, whose target is admitted anew."""
    graphs = OpenVINO("float32") if runtime == "openvino" else None
    target = TargetModel(engine().target.model, runtime=graphs)
    ids, mask = (part[:2].tolist() for part in padded("left"))
    settings = {"max_new_tokens": 10, "seed": 3, "rule": Fuzzy(0.5), "tree": TREE}
    return [
        EagleFSD(target, head, lookup=lookup).generate(ids, mask, temperature=t, **settings).new_tokens
        for head, lookup in heads()
        for t in (0.0, 1.0)
    ]


wanted_texts = functools.cache(texts_of_drafters)


@pytest.mark.parametrize(
    ("runtime", "default"),
    [
        ("torch", torch.bfloat16),
        ("torch", torch.float64),
        ("torch", "meta"),  # where there is no data, so that one tensor made there would end the call
        *(
            pytest.param("openvino", dtype, marks=pytest.mark.slow)
            for dtype in (torch.bfloat16, torch.float64)
        ),
        ("openvino", "meta"),
    ],
)
def test_texts_do_not_follow_torchs_defaults(
    runtime: str, default: torch.dtype | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are made, a target is admitted and texts are drafted under the default."""
    if runtime == "openvino":
        pytest.importorskip("openvino", reason="the extra openvino is not installed")
    monkeypatch.setenv(OFF, "1")  # graphs that are kept would not be made and tested again
    wanted = wanted_texts(runtime)
    with torch_default(default):
        assert texts_of_drafters(runtime) == wanted


@pytest.mark.parametrize("default", [torch.bfloat16, "meta"])
def test_models_are_loaded_without_torchs_defaults(default: torch.dtype | str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "target")
    save_head(tiny_head(), tmp_path / "head")
    save_eagle3(eagle3_head(2), tmp_path / "eagle3")
    with torch_default(default):
        loaded = [
            EagleFSD.from_pretrained(tmp_path / "target", tmp_path / name, dtype="float32", device="cpu")
            for name in ("head", "eagle3")
        ]
        made = [one.generate([PROMPTS[0]], max_new_tokens=NEW_TOKENS).new_tokens for one in loaded]
    assert made == [texts()[:1]] * 2
    found, wanted = loaded[0].head.state_dict(), tiny_head().state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


# --- what belongs to somebody else ---


def test_two_engines_of_two_dtypes_share_a_head() -> None:
    head = tiny_head().restrict(torch.arange(0, VOCAB, 2))
    first = EagleFSD(TargetModel(tiny_model("llama")), head)
    wanted = first.generate([PROMPTS[0]], max_new_tokens=NEW_TOKENS)
    second = EagleFSD(TargetModel(tiny_model("llama").to(torch.bfloat16)), head)
    third = EagleFSD(TargetModel(tiny_model("llama")), head, head_dtype=torch.float64)
    assert head.fc.weight.dtype == torch.float32 and first.head is head
    assert (second.head.fc.weight.dtype, third.head.fc.weight.dtype) == (torch.bfloat16, torch.float64)
    for other in (second, third):
        assert other.draft_vocab_size == VOCAB // 2
        other.generate([PROMPTS[0]], max_new_tokens=4)
    again = first.generate([PROMPTS[0]], max_new_tokens=NEW_TOKENS)
    assert again.new_tokens == wanted.new_tokens and again.stats[0].steps == wanted.stats[0].steps


def test_a_head_in_training_stays_there() -> None:
    head = tiny_head().train()
    EagleFSD(TargetModel(tiny_model("llama")), head)
    assert head.training


# --- the ends of positions ---


@pytest.mark.parametrize("drafting", ["head", "knowing"])
def test_a_text_ends_where_the_positions_do(drafting: str) -> None:
    prompts = prompts_of((20, 31, 4))
    wanted = [greedy_alone(gpt2().target.model, [prompt], 32 - len(prompt))[0] for prompt in prompts]
    ids, mask = pad_left(prompts, pad=0)
    maker = gpt2() if drafting == "head" else KnowingEngine(gpt2().target, wanted, reach=None)
    out = maker.generate(ids, mask, max_new_tokens=100, tree=TREE)
    assert out.new_tokens == wanted
    assert [len(text) for text in out.new_tokens] == [12, 1, 28]
    assert [stats.finish_reason for stats in out.stats] == ["length"] * 3
    alone = gpt2().target_alone([prompts[0]], max_new_tokens=100)
    assert alone.new_tokens == wanted[:1]


def test_a_head_past_its_trained_positions_stays_correct(caplog: pytest.LogCaptureFixture) -> None:
    ids, mask = padded("left")
    for sizes in ({"max_position_embeddings": 8}, {"trained_positions": 8}):
        short = EagleFSD(engine().target, tiny_head(**sizes))
        with caplog.at_level(logging.WARNING, logger="eagle_fsd"):
            assert short.generate(ids, mask, max_new_tokens=NEW_TOKENS).new_tokens == texts()
        assert not caplog.records, "there is nothing to warn of"


# --- bad input ---


def generate(**options: Any) -> Callable[[], object]:
    return lambda: engine().generate(**{"input_ids": [[1, 2, 3]], "max_new_tokens": 2, **options})


BAD = {
    "negative threshold": (lambda: Fuzzy(threshold=-0.1), r"threshold is -0.1: .* at least 0; 0 is lossless"),
    "NaN threshold": (lambda: Fuzzy(threshold=math.nan), "threshold is nan: .* 0 is lossless"),
    "threshold of text": (lambda: Fuzzy(threshold="0.3"), "threshold is '0.3': it must be a number"),
    "unknown divergence": (lambda: Fuzzy(divergence="kl"), "divergence .*'kl'.*reverse_kl"),
    "unknown mode": (lambda: Fuzzy(mode="both"), "mode is 'both': it must be one of hybrid, paper"),
    "unknown child": (lambda: Fuzzy(child="q"), "child is 'q': it must be one of draft, likeliest, target"),
    "min_p above 1": (lambda: Fuzzy(min_p=1.5), "min_p is 1.5: .* between 0 and 1; 0 turns"),
    "negative overshoot": (lambda: Fuzzy(max_overshoot=-1.0), "max_overshoot is -1.0: .* inf turns"),
    "negative gain": (lambda: Fuzzy(min_gain=-0.5), "min_gain is -0.5: .* 0 turns"),
    "negative in a row": (lambda: Fuzzy(max_consecutive=-1), "max_consecutive is -1: .* None turns"),
    "endless prefix": (lambda: Fuzzy(exact_prefix=10**21), "exact_prefix is 1000.*: it must be .* between"),
    "endless in a row": (lambda: Fuzzy(max_consecutive=2**31), "max_consecutive is 2147483648: it must be"),
    "half a prefix": (lambda: Fuzzy(exact_prefix=1.5), "exact_prefix is 1.5: it must be an integer"),
    "tree of nothing": (lambda: TreeConfig(0), "total_tokens is 0: .* at least 1; 1 drafts nothing"),
    "tree without depth": (lambda: TreeConfig(16, 0, 8), "depth is 0: it must be an integer of at least 1"),
    "tree without width": (lambda: TreeConfig(16, 5, 0), "top_k of the tree is 0: it must be an integer"),
    "tree too large": (lambda: TreeConfig(60, 1, 8), "total_tokens is 60: .* at most 9 nodes; lower"),
    "tree of halves": (lambda: TreeConfig(16.0, 5, 8), "total_tokens is 16.0: it must be an integer"),
    "a confidence of 2": (
        lambda: TreeConfig(16, 5, 8, 2),
        "min_confidence is 2: it must be a number between 0",
    ),
    "tree of three parts": (
        lambda: TreeConfig.parse("16/5"),
        "tree is '16/5': it must be .*; 16/5/8 is one, 16/8/4/0.05 another",
    ),
    "a confidence of text": (
        lambda: TreeConfig.parse("16/5/8/x"),
        "tree is '16/5/8/x': it must be total_tok",
    ),
    "tree wider than the vocabulary": (
        generate(tree=TreeConfig(16, 2, VOCAB + 1)),
        "top_k of the tree is 97: the vocabulary has 96 tokens; lower top_k",
    ),
    "no prompt": (generate(input_ids=[]), r"input_ids has shape \[0\]: .* tokenize a prompt"),
    "empty prompt": (generate(input_ids=[[]]), r"input_ids has shape \[1, 0\]: .* at least one token"),
    "prompt without batch": (
        generate(input_ids=[1, 2]),
        r"input_ids has shape \[2\]: it must be \[B, L\], .*; write \[ids\] for one prompt",
    ),
    "stream of a prompt without batch": (lambda: engine().stream([1, 2]), r"shape \[2\]: .* write \[ids\]"),
    "ragged lists": (
        generate(input_ids=[[1, 2], [3]]),
        "input_ids has rows of 2 and 1 tokens: all must have one length; pad them, and say with attention_ma",
    ),
    "ragged tensors": (
        generate(input_ids=[torch.tensor([1, 2]), torch.tensor([3])]),
        "input_ids has rows of 2 and 1 tokens",
    ),
    "empty row": (
        generate(input_ids=[[1, 2], [3, 4]], attention_mask=torch.tensor([[1, 1], [0, 0]])),
        "row 1 of the batch is empty: .* drop the row",
    ),
    "mask of another shape": (
        generate(attention_mask=torch.ones(1, 2)),
        r"attention_mask has shape \[1, 2\]: .* \[1, 3\]",
    ),
    "mask of other numbers": (
        generate(attention_mask=[[1, 2, 1]]),
        r"attention_mask holds 2: it must be \[B, L\], 1 where a token is text and 0 where .*; fix it",
    ),
    "mask of text": (
        generate(attention_mask="x", num_return_sequences=2, temperature=1),
        "attention_mask is a str, not a tensor .* 0 where it is padding",
    ),
    "observer that cannot be called": (
        generate(observer=3),
        "observer is 3: it must be a function .*; leave",
    ),
    "streamer of a number": (generate(streamer=3), "streamer is 3: it must have put and end, .*; leave it"),
    "sampling by a word": (generate(do_sample="x"), "do_sample is 'x': it must be True or False; leave it"),
    "base_model of a number": (
        lambda: EagleFSD.from_pretrained(3),
        "base_model is 3: it must be a Hub id, or the path .*; name one",
    ),
    "no base_model": (lambda: EagleFSD.from_pretrained(None), "base_model is None: it must be a Hub id"),
    "ea_model of a number": (lambda: EagleFSD.from_pretrained(ea_model=3), "ea_model is 3: it must be a Hub"),
    "draft_model of bytes": (lambda: EagleFSD.from_pretrained(draft_model=b"x"), "draft_model is b'x': it"),
    "token past the vocabulary": (
        generate(input_ids=[[1, VOCAB]]),
        "input_ids holds 1..96: .* 0..95; use the target's own tokenizer",
    ),
    "negative token": (generate(input_ids=[[-1, 3]]), "input_ids holds -1..3: .* 0..95"),
    "prompt as long as the positions": (
        lambda: gpt2().generate(prompts_of((32,))),
        "row 0 of the batch has 32 tokens: the target has 32 positions.*; shorten the prompt",
    ),
    "prompt past the positions": (lambda: gpt2().generate(prompts_of((50,))), "row 0 .* has 50 tokens"),
    "no new tokens": (generate(max_new_tokens=0), "max_new_tokens is 0: .* at least 1; ask for at least one"),
    "negative new tokens": (generate(max_new_tokens=-5), "max_new_tokens is -5"),
    "half a token": (generate(max_new_tokens=1.5), "max_new_tokens is 1.5: it must be an integer"),
    "NaN temperature": (generate(temperature=math.nan), "temperature is nan: .* 0 is greedy"),
    "negative temperature": (generate(temperature=-1), "temperature is -1: .* between 0 and .*; 0 is greedy"),
    "infinite temperature": (generate(temperature=math.inf), r"temperature is inf: .* 0 and 1e\+10; 0 is"),
    "a temperature beyond float32": (generate(temperature=1e39), r"temperature is 1e\+39: .* 0 and 1e\+10"),
    "negative top_k": (generate(top_k=-1), "top_k is -1: .* at least 0; 0 keeps every token"),
    "top_p of 0": (generate(top_p=0.0), "top_p is 0: it must be above 0 and at most 1"),
    "top_p above 1": (generate(top_p=1.2), "top_p is 1.2: .* between 0 and 1; 1 keeps every token"),
    "NaN top_p": (generate(top_p=math.nan), "top_p is nan"),
    "negative seed": (generate(seed=-1), r"seed -1 must be an int in \[0, 2\*\*63\)"),
    "half a seed": (generate(seed=1.5), "seed 1.5 must be an int"),
    "a truth for an end token": (
        generate(eos_token_id=True),
        "eos_token_id has True: a token id is an integer",
    ),
    "two seeds for a row": (
        generate(seed=[1, 2]),
        r"seed has 2 values for 1 rows: give one int or one per row, which may be .* \[\(seed, row\)\]",
    ),
    "a bare pair for a seed": (generate(seed=(1, 0)), r"seed has 2 values .* as in \[\(seed, row\)\]"),
    "a seed of text": (
        generate(seed="ab"),
        r"seed 'ab' must be an int in .*, or a list with an int or a pair \(seed, row\) for every row;",
    ),
    "head of another width": (
        lambda: EagleFSD(engine().target, tiny_head(hidden_size=64)),
        "the head's hidden_size is 64 and the target's is 32: .* choose the head of this target",
    ),
    "head of another vocabulary": (
        lambda: EagleFSD(engine().target, tiny_head(vocab_size=97)),
        "the head's vocab_size is 97 and the target's is 96",
    ),
    "a tree and no head": (
        lambda: EagleFSD(engine().target, None).generate([[1]]),
        r"there is no draft head to draft a tree with: .* TreeConfig\(1\)",
    ),
    "stream of a batch": (
        lambda: engine().stream([[1], [2]]),
        r"input_ids has shape \[2, 1\]: a stream takes one prompt",
    ),
    "stream of bad options": (lambda: engine().stream([[1]], top_p=2.0), "top_p is 2.0"),
    "baseline of no prompt": (lambda: engine().target_alone([[]]), r"input_ids has shape \[1, 0\]"),
    "baseline of no tokens": (lambda: engine().target_alone([[1]], max_new_tokens=0), "max_new_tokens is 0"),
    "baseline past the positions": (lambda: gpt2().target_alone(prompts_of((32,))), "row 0 .* has 32"),
    "baseline of a negative seed": (lambda: engine().target_alone([[1]], seed=-1), "seed is -1"),
    "baseline of a foreign token": (lambda: engine().target_alone([[VOCAB]]), "input_ids holds 96..96"),
    "rule of text": (generate(rule="fuzzy"), "rule is 'fuzzy': it must be a rule, such as Fuzzy"),
    "rule without a mode": (
        generate(rule=SimpleNamespace(chances=None, exact_prefix=0)),
        r"rule is namespace\(.*\): it has no mode, max_consecutive; give it what an AcceptanceRule has",
    ),
    "rule of an unknown mode": (
        generate(rule=SimpleNamespace(chances=None, exact_prefix=0, max_consecutive=None, mode="hybrd")),
        "mode is 'hybrd': it must be one of hybrid, paper, swap, first-failure",
    ),
    "rule that is a class": (generate(rule=Fuzzy), "rule is <class .*: it must be a rule, such as Fuzzy"),
    "tree of text": (generate(tree="16/5/8"), "tree is '16/5/8': it must be a TreeConfig, such as"),
    "no tree": (generate(tree=()), r"tree is \(\): it must be a TreeConfig"),
    "divergence of a list": (
        lambda: Fuzzy(divergence=["js"]),
        r"divergence is \['js'\]: it must be one of reverse_kl",
    ),
    "ids of text": (
        generate(input_ids="hello"),
        "input_ids is a str, not a tensor of token ids .*; tokenize",
    ),
    "no ids": (generate(input_ids=None), "input_ids is a NoneType, not a tensor .*; tokenize a prompt"),
    "ids of halves": (
        generate(input_ids=[[1.7, 2.2]]),
        "input_ids holds torch.float32: .* integers; tokenize",
    ),
    "ids in an object": (generate(input_ids=[{}]), "input_ids is a list, not a tensor .*; tokenize a prompt"),
    "all that a tokenizer returns": (
        generate(input_ids=transformers.BatchEncoding({"input_ids": torch.tensor([[1, 2]])})),
        r"^input_ids is a BatchEncoding, not a .*; pass what a tokenizer returns as \*\*encoded, or its enc",
    ),
    "end token of halves": (generate(eos_token_id=2.5), "eos_token_id has 2.5: a token id is an integer"),
    "end token of text": (generate(eos_token_id="</s>"), "eos_token_id has '</s>'"),
    "end token past the vocabulary": (
        generate(eos_token_id=-1),
        "eos_token_id has -1: a token id is an integer of at least 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_value_error_with_name_value_rule_and_remedy(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("error")
def test_rows_may_be_tensors_or_arrays_and_a_mask_truth_values() -> None:
    wanted = engine().generate([[1, 2, 3]], max_new_tokens=3).new_tokens
    for row in (torch.tensor([1, 2, 3]), np.array([1, 2, 3])):
        assert engine().generate([row], max_new_tokens=3).new_tokens == wanted
    padded_row = torch.tensor([[5, 1, 2, 3]])
    ones = [0, 1, 1, 1]
    for mask in (padded_row < 5, (padded_row < 5).float(), [ones], [torch.tensor(ones)], [np.array(ones)]):
        made = engine().generate(
            padded_row, mask, max_new_tokens=3, num_return_sequences=2, temperature=1.0, seed=[1, 1]
        )
        assert made.new_tokens[0] == made.new_tokens[1]
        assert engine().generate(padded_row, mask, max_new_tokens=3).new_tokens == wanted


def test_bad_input_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by `stream`, which starts lazily."""
    monkeypatch.setattr(engine().target, "features", lambda *_: pytest.fail("a forward was run"))
    for options in (
        {"temperature": -1},
        {"seed": -1},
        {"max_new_tokens": 0},
        {"tree": TreeConfig(16, 2, 97)},
        {"observer": 3},
    ):
        with pytest.raises(ValueError):
            engine().stream([[1, 2]], **options)
        with pytest.raises(ValueError):
            engine().generate([[1, 2]], **options)


# --- loading ---


def test_from_pretrained_loads_a_folder_and_its_head(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "target")
    save_head(tiny_head(), tmp_path / "head")
    loaded = EagleFSD.from_pretrained(str(tmp_path / "target"), str(tmp_path / "head"), device="cpu")
    assert (loaded.base_model, loaded.ea_model) == (str(tmp_path / "target"), str(tmp_path / "head"))
    assert (loaded.dtype, loaded.device, loaded.tokenizer) == (torch.float32, torch.device("cpu"), None)
    ids, mask = padded("left")
    out, wanted = (e.generate(ids, mask, max_new_tokens=NEW_TOKENS) for e in (loaded, engine()))
    assert out.new_tokens == wanted.new_tokens == texts()
    assert [stats.steps for stats in out.stats] == [stats.steps for stats in wanted.stats], (
        "the head is that head"
    )
    half = EagleFSD.from_pretrained(
        str(tmp_path / "target"), str(tmp_path / "head"), dtype="bfloat16", attn_implementation="eager"
    )
    assert half.dtype == torch.bfloat16 == next(half.head.parameters()).dtype
    assert half.target.model.config._attn_implementation == "eager"
    assert half.generate(ids, mask, max_new_tokens=3).stats[0].new_tokens == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_from_a_folder(family: str, tmp_path: Path) -> None:
    """Names and paths; some configs say things of themselves (`is_decoder`) that only loading looks at."""
    model = tiny_model(family, "eager")
    model.save_pretrained(tmp_path / "target")
    save_head(tiny_head(), tmp_path / "head")
    loaded = EagleFSD.from_pretrained(
        tmp_path / "target", tmp_path / "head", dtype="float32", device="cpu", attn_implementation="eager"
    )
    assert loaded.generate([PROMPTS[1]], max_new_tokens=8).new_tokens == greedy_alone(model, PROMPTS[1:2], 8)
    assert (loaded.base_model, loaded.ea_model) == (str(tmp_path / "target"), str(tmp_path / "head"))


def test_weights_are_packed_and_a_list_of_tokens_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "target")
    save_head(tiny_head().restrict(torch.arange(9)), tmp_path / "head")
    places = (tmp_path / "target", tmp_path / "head")
    usual = EagleFSD.from_pretrained(*places, device="cpu")
    other = EagleFSD.from_pretrained(*places, device="cpu", pack=False, full_vocabulary=True)
    assert (usual.draft_vocab_size, other.draft_vocab_size) == (9, None)
    for loaded, packed in ((usual, backend_for(torch.zeros(1, 1)) is not None), (other, False)):
        layers = [*loaded.target.model.modules(), *loaded.head.modules()]
        assert any(isinstance(layer, PackedLinear) for layer in layers) == packed
        assert isinstance(loaded.target.lm_head, PackedLinear) == packed
        found = loaded.generate([PROMPTS[1]], max_new_tokens=12).new_tokens
        assert found == greedy_alone(model, PROMPTS[1:2], 12)
    with pytest.raises(ValueError, match=r"or draft over all tokens \(full_vocabulary"):
        usual.generate([[1, 2]], rule=Fuzzy(0.3, "forward_kl"))
    other.generate([[1, 2]], max_new_tokens=2, rule=Fuzzy(0.3, "forward_kl"))


@pytest.mark.parametrize("drafted", [None, 40])
def test_a_head_in_bfloat16_drafts_for_a_target_in_float32(tmp_path: Path, drafted: int | None) -> None:
    """Its forwards and its copy of lm_head are bfloat16's; lossless text is the target's, drafts are good."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "target")
    save_head(tiny_head().restrict(None if drafted is None else torch.arange(drafted)), tmp_path / "head")
    names = (tmp_path / "target", tmp_path / "head")
    engine = EagleFSD.from_pretrained(*names, head_dtype="bfloat16")
    same = EagleFSD.from_pretrained(*names)
    assert (engine.dtype, engine.head.fc.weight.dtype) == (torch.float32, torch.bfloat16)
    assert same.head.fc.weight.dtype == torch.float32
    if drafted:
        assert engine.drafter.vocabulary.lm_head.weight.dtype == torch.bfloat16
    prompts = prompts_of([4, 9])
    for prompt in prompts:
        (text,) = greedy_alone(model, [prompt], 16)
        assert engine.generate([prompt], max_new_tokens=16, tree=TreeConfig(8, 3, 3)).new_tokens == [text]
    trees = []
    for one in (engine, same):
        drafter = one.drafter.make(1, 64, TreeConfig(16, 5, 8))
        with torch.inference_mode():
            features = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
            feed(drafter, features, torch.tensor([[5, 6, 7]]), [3])
            trees.append(drafter.draft(torch.tensor([7]), TreeConfig(8, 3, 3)))
    rounded, exact = (tree.log_q[0, 0] for tree in trees)
    assert 0 < (rounded - exact).abs().max() < 0.05 * (exact.max() - exact.min())
    with pytest.raises(ValueError, match="dtype 'float8' is not there"):
        EagleFSD.from_pretrained(*names, head_dtype="float8")


@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 300])
def test_names_that_are_no_paths(name: str) -> None:
    for resolve, kind in (
        (hub.resolve_target, "target"),
        (lambda n: hub.resolve_head(n, ""), "draft head"),
    ):
        with pytest.raises(ValueError, match=f"{kind} '{name}' is not a path .* or a Hub id; check it"):
            resolve(name)


def test_the_folder_of_a_calibration_may_be_named_as_text(tmp_path: Path) -> None:
    made = EagleFSD(TargetModel(tiny_model("llama")), tiny_head(), head_folder=str(tmp_path))
    assert made.head_folder == tmp_path
    with pytest.raises(ValueError, match=r"there is no calibration\.json beside the head"):
        made.calibration(SamplingConfig())


def test_arguments_of_loading_are_checked_first(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    save_head(tiny_head(), tmp_path / "head")
    for options, message in (
        (
            {"attn_implementation": "flash_attention_2"},
            "attn_implementation is .* of sdpa, eager; choose",
        ),
        ({"device_map": "nonsense"}, "device_map is 'nonsense': it must be one of auto, .*; choose one"),
        (
            {"device": "cpu", "device_map": "auto"},
            "device is 'cpu' with a device_map: .*leave one of them out",
        ),
        ({"head_dtype": "float8", "device_map": "nonsense"}, "dtype 'float8' is not there"),
    ):
        with pytest.raises(ValueError, match=message):
            EagleFSD.from_pretrained(str(tmp_path), str(tmp_path / "head"), **options)


def test_from_pretrained_refuses_a_head_that_does_not_fit(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "target")
    save_head(tiny_head(hidden_size=64), tmp_path / "wide")
    save_head(tiny_head(vocab_size=97), tmp_path / "many")
    for name in ("wide", "many"):
        with pytest.raises(ValueError, match=name) as caught:
            EagleFSD.from_pretrained(str(tmp_path / "target"), str(tmp_path / name), device="cpu")
        assert "\n" not in str(caught.value)


def test_the_identity_is_read_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quality budget asks for it in every call, and reading a large head takes seconds."""
    model = EagleFSD(TargetModel(tiny_model()), tiny_head(4))
    read, digest = [], fingerprints.digest_weights
    monkeypatch.setattr(fingerprints, "digest_weights", lambda weights: read.append(1) or digest(weights))
    monkeypatch.setattr(eagle_drafter, "digest_weights", fingerprints.digest_weights)
    first = model.identity()
    once = len(read)
    model.generate([[1, 2, 3]], max_new_tokens=4)
    assert model.identity() == first and len(read) == once > 0
    model.identity()["head"] = "changed by its reader"
    assert model.identity() == first
    assert model.head is not None
    with torch.no_grad():
        next(model.head.parameters()).mul_(2)
    changed = model.identity()
    assert changed["head"] != first["head"] and changed["target"] == first["target"]
    target = model.target.model
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight * 2)
    assert model.identity()["target"] != first["target"]
    with torch.no_grad():
        next(model.head.parameters()).div_(2)
    assert model.identity()["head"] == first["head"]
