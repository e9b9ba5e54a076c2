"""GenerationOptions: the keywords of a generation, written once and checked first."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy
import pytest
import torch
from support.tiny_models import VOCAB, prompts_of, tiny_head, tiny_model

from eagle_fsd import (
    AutoThreshold,
    AutoTree,
    EagleFSD,
    Fuzzy,
    GenerationOptions,
    LoadOptions,
    SamplingConfig,
    TreeConfig,
    Typical,
)
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble, FLy, PublishedFSD, RelaxedTopK, SGLang
from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.core.processing import Processing
from eagle_fsd.decoding.request import end_token_ids
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.online.adapter import AdaptConfig

TREE = TreeConfig(8, 3, 3)


def engine() -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model()), tiny_head())


def test_options_and_keywords_are_one() -> None:
    """They work as an object, as keywords, and as both, where the keywords win."""
    model, prompt = engine(), prompts_of([5])
    keywords = {
        "max_new_tokens": 9,
        "temperature": 0.8,
        "top_k": 9,
        "seed": 4,
        "rule": Fuzzy(0.4),
        "tree": TREE,
    }
    options = GenerationOptions(**keywords)
    wanted = model.generate(prompt, **keywords).new_tokens
    assert model.generate(prompt, options=options).new_tokens == wanted
    assert model.generate(prompt, options=dataclasses.replace(options, seed=5), seed=4).new_tokens == wanted
    assert [token for chunk in model.stream(prompt, options=options) for token in chunk] == wanted[0]
    with model.stream_batch(prompt, options=options) as batch:
        assert [token for (chunk,) in batch.steps for token in chunk] == wanted[0]
    with pytest.raises(ValueError, match="options is a dict: it must be GenerationOptions; give its entries"):
        model.generate(prompt, options=keywords)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0}, "top_p is 0"),
        ({"tree": 16}, "tree is 16"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample is False and temperature is 0.5"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample is True and temperature is 0.0"),
    ],
)
def test_wrong_values_are_named_before_anything_runs(keywords: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GenerationOptions(**keywords)
    with pytest.raises(ValueError, match=named):
        engine().generate(prompts_of([5]), **keywords)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", list(range(4, 50))),
        ("bad_words_ids", [[token] for token in range(4, 50)]),
        ("logit_bias", [(token, -100.0) for token in range(4, 50)]),
        ("stop_strings", ["a", "bc"]),
        ("logits_processor", [lambda ids, logits: logits.roll(1, -1)]),
    ],
)
def test_what_can_be_read_once_is_kept(name: str, value: list[Any]) -> None:
    """Also inside a list."""
    model, prompt = engine(), prompts_of([5])
    options = GenerationOptions(max_new_tokens=9, tree=TREE, **{name: value})
    inner = [iter(one) if isinstance(one, list) else one for one in value]
    once = GenerationOptions(max_new_tokens=9, tree=TREE, **{name: iter(inner)})
    assert (once.processing, once.stops) == (options.processing, options.stops)
    assert dataclasses.replace(once, max_new_tokens=7).processing == options.processing
    if name == "stop_strings":  # this engine has no tokenizer for them
        assert options.stops == ("a", "bc")
        return
    wanted = model.generate(prompt, options=options).new_tokens
    assert model.generate(prompt, options=once).new_tokens == wanted
    assert model.generate(prompt, max_new_tokens=9, tree=TREE).new_tokens != wanted
    assert Processing.of(**{name: iter(value)}) == options.processing


def test_do_sample_is_hugging_faces() -> None:
    """It says whether to sample; how is the model's own to say, then Hugging Face's defaults."""
    model, prompt = engine(), prompts_of([5])
    shared = {"max_new_tokens": 12, "seed": 3, "tree": TREE}
    wanted = model.generate(prompt, temperature=1.0, top_k=50, **shared).new_tokens
    assert model.generate(prompt, do_sample=True, **shared).new_tokens == wanted
    own = GenerationOptions(do_sample=True).with_defaults({"temperature": 0.3, "top_k": 7})
    assert (own.sampling.temperature, own.sampling.top_k) == (0.3, 7)
    hugging_face = model.target.model
    hugging_face.generation_config.update(
        temperature=0.4, top_k=3
    )  # it names them, and does not ask for them
    named = model.generate(prompt, temperature=0.4, top_k=3, **shared).new_tokens
    assert model.generate(prompt, do_sample=True, **shared).new_tokens == named != wanted
    assert GenerationOptions(max_new_tokens=8).with_defaults({"min_new_tokens": 20}).min_new_tokens == 8
    for no in (False, 0, numpy.False_):
        greedy = GenerationOptions(do_sample=no).with_defaults({"temperature": 0.3, "top_k": 7})
        assert greedy.sampling.greedy


@pytest.mark.parametrize(
    ("kind", "whole", "real"),
    [
        (TreeConfig, ("total_tokens", "depth", "top_k"), ("min_confidence",)),
        (AutoTree, ("depth", "top_k"), ("min_confidence",)),
        (SamplingConfig, ("top_k",), ("temperature", "top_p", "min_p")),
        (AutoThreshold, (), ("quality_budget", "min_gain", "price")),
        (
            GenerationOptions,
            ("max_new_tokens", "top_k", "seed", "eos_token_id", "logprobs"),
            ("temperature",),
        ),
        (Fuzzy, ("max_consecutive", "exact_prefix"), ("threshold", "min_p", "max_overshoot", "min_gain")),
        (Typical, ("max_consecutive", "exact_prefix"), ("epsilon", "delta")),
        (RelaxedTopK, ("candidates", "max_consecutive", "exact_prefix"), ("margin",)),
        (SGLang, (), ("single", "acc")),
        (Cactus, (), ("delta",)),
        (Ensemble, (), ("weight",)),
        (FLy, ("window",), ("entropy",)),
        (PublishedFSD, (), ("threshold",)),
        (LoadOptions, ("draft_layers",), ()),
        (AdaptConfig, ("every", "memory"), ("learning_rate", "replay")),
    ],
)
def test_numbers_of_numpy_become_plain(kind: Any, whole: tuple[str, ...], real: tuple[str, ...]) -> None:
    """JSON has no others, and a shown tree is not of np.int64(3)."""
    given: dict[str, Any] = {name: numpy.int64(3) for name in whole}
    given |= {name: numpy.float32(0.5) for name in real}
    made = kind(**given)
    assert {name: type(getattr(made, name)) for name in given} == {
        **dict.fromkeys(whole, int),
        **dict.fromkeys(real, float),
    }
    assert made == kind(**dict.fromkeys(whole, 3), **dict.fromkeys(real, 0.5)) and "np." not in repr(made)
    json.dumps({name: getattr(made, name) for name in given})
    assert dataclasses.replace(made) == made


def test_sequences_alone_are_returned_where_no_dict_is_asked_for() -> None:
    model, prompt = engine(), prompts_of([5, 5])
    output = model.generate(prompt, max_new_tokens=6, tree=TREE)
    alone = model.generate(prompt, max_new_tokens=6, tree=TREE, return_dict_in_generate=False)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, output.sequences)


def test_an_unknown_keyword_is_named() -> None:
    """And the option that is written most like it."""
    model, prompt = engine(), prompts_of([5])
    named = {"max_tokens": "max_new_tokens", "max_length": "max_new_tokens", "topk": "top_k"}
    named["stopping_criteria"] = "stop_strings"  # json_schema is written more like it
    for name, meant in named.items():
        with pytest.raises(
            ValueError, match=rf"^{name} is not an option: .*; write {meant}, or leave it out$"
        ):
            model.generate(prompt, **{name: 5})
    for name in ("pad_token_id", "use_cache", "generation_config"):  # no option does what these do
        with pytest.raises(
            ValueError, match=rf"^{name} is not an option: the .* GenerationOptions; leave it"
        ):
            model.generate(prompt, **{name: 5})
    with pytest.raises(ValueError, match=r"^streamer is not an option: the .* GenerationOptions; leave it"):
        model.stream(prompt, streamer=None)
    for call in (model.generate, model.stream, model.stream_batch, model.target_alone):
        with pytest.raises(ValueError, match=r"^num_beams is not an option: .*; leave it out$"):
            call(prompt, num_beams=2)


@pytest.mark.parametrize("value", [5, 0.5, ["a", 3], [""]])
def test_stop_strings_are_strings(value: object) -> None:
    with pytest.raises(ValueError, match=r"^stop_strings (is|has) .*; fix it$"):
        GenerationOptions(stop_strings=value)


def test_end_tokens_come_as_lists_tensors_and_arrays() -> None:
    model = engine()
    for one in (4, [4], {4}, range(4, 5), torch.tensor(4), torch.tensor([4]), numpy.array([4])):
        assert end_token_ids(model.target, one) == (4,)
    assert end_token_ids(model.target, None) == model.target.eos_token_ids
    for wrong in (True, "4", b"4", [4.0], -1, {4: 4}):
        with pytest.raises(ValueError, match=r"^eos_token_id has .*: a token id is an integer of at least 0"):
            end_token_ids(model.target, wrong)
    with pytest.raises(ValueError, match=f"^eos_token_id has {VOCAB}: the target's tokens are 0"):
        end_token_ids(model.target, [4, VOCAB])


def test_the_target_alone_takes_the_seeds_that_texts_take() -> None:
    """Greedy text takes none, and leaves torch's own generator where it is."""
    model, state = engine(), torch.get_rng_state()
    assert model.target_alone(prompts_of([5]), max_new_tokens=3, temperature=0.0).seed is None
    assert torch.equal(torch.get_rng_state(), state)
    assert model.target_alone(prompts_of([5]), max_new_tokens=3, temperature=1.0, seed=2**63 - 1).seed > 0
    with pytest.raises(ValueError, match=f"^seed is {2**63}: it must be an integer between 0 and"):
        model.target_alone(prompts_of([5]), max_new_tokens=3, temperature=1.0, seed=2**63)


def test_the_target_alone_has_no_end_tokens_or_observers_of_its_own() -> None:
    with pytest.raises(ValueError, match="eos_token_id is not supported for the target alone"):
        engine().target_alone(prompts_of([5]), max_new_tokens=3, eos_token_id=4)


@pytest.mark.parametrize("none", [[], "", None])
def test_the_target_alone_takes_no_stop_strings_and_a_list_of_none(none: object) -> None:
    assert len(engine().target_alone(prompts_of([5]), max_new_tokens=3, stop_strings=none).new_tokens) == 1
    with pytest.raises(ValueError, match="stop_strings is not supported for the target alone"):
        engine().target_alone(prompts_of([5]), max_new_tokens=3, stop_strings=["a"])


def test_flags_become_options() -> None:
    """Every rule's flags reach its fields; fields that are not given keep the rule's defaults."""
    parse = build_parser().parse_args
    given = generation_options(
        parse(
            [
                "x",
                "--threshold",
                "0.4",
                "--divergence",
                "tv",
                "--fuzzy-min-p",
                "0.1",
                "--seed",
                "3/2",
                "--top-k",
                "5",
            ]
        )
    )
    assert given.rule == Fuzzy(0.4, "tv", min_p=0.1) and given.seed == [(3, 2)] and given.top_k == 5
    rules = {
        ("typical", "--epsilon", "0.2", "--delta", "0.3"): "Typical(epsilon=0.2, delta=0.3",
        ("relaxed_topk", "--candidates", "5", "--margin", "0.1"): "RelaxedTopK(candidates=5, margin=0.1",
        ("sglang", "--single", "0.4", "--acc", "0.9"): "SGLang(single=0.4, acc=0.9",
        ("cactus", "--delta", "0.2"): "Cactus(delta=0.2",
        ("ensemble", "--weight", "0.7"): "Ensemble(weight=0.7",
        ("fly", "--entropy", "0.2", "--window", "2"): "FLy(entropy=0.2, window=2",
        ("lossless",): "Lossless(share_noise=True)",
    }
    for (name, *flags), shown in rules.items():
        assert repr(generation_options(parse(["x", "--rule", name, *flags])).rule).startswith(shown)
