"""Hugging Face's `generate(custom_generate=...)`: the model decodes through this package, with a draft head.

A repository with a folder `custom_generate/`, see eagle_fsd/training/run, is named in the call:

    model.generate(**inputs, custom_generate="owner/EAGLE-head", trust_remote_code=True, threshold=0.3)

The arguments are those of `generate`, and threshold, divergence, rule, tree, seed and ea_model beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.autotune.head_reading import settle_head
from eagle_fsd.core.checks import format_value
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.padding import as_ids, infer_mask
from eagle_fsd.decoding.outputs import GenerationOutput
from eagle_fsd.decoding.request import end_token_ids
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.engine import EagleFSD
from eagle_fsd.hub.resolve import load_any_head
from eagle_fsd.target.model import TargetModel

ENGINES = "_eagle_fsd_engines"  # a model's engines, by the name of their head, so that they go with it

# Arguments of `generate` that GenerationOptions has too, by its name for them.
SAME = {
    name: name
    for name in (
        *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "eos_token_id", "repetition_penalty"),
        *("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "min_new_tokens", "logits_processor"),
        *("stop_strings", "num_return_sequences", "seed"),
    )
} | {"sequence_bias": "logit_bias"}
# What None in a call does in `generate`: the model's own is off.
OFF: dict[str, Any] = {
    **{"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0, "eos_token_id": []},
    **{"bad_words_ids": [], "suppress_tokens": [], "sequence_bias": {}},
}
# What else it takes.
OTHERS = {
    *("do_sample", "max_length", "pad_token_id", "return_dict_in_generate", "streamer", "generation_config"),
    *("threshold", "divergence", "rule", "tree", "inputs", "input_ids", "attention_mask", "tokenizer"),
}
# Values that ask for nothing. bos_token_id matters only without a prompt.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("synced_gpus", "output_scores", "output_logits"), (False,)),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "token_healing"), (False,)),
    **{"num_beams": (1,), "num_beam_groups": (1,), "use_cache": (True,), "early_stopping": (False,)},
    **{"stopping_criteria": ([],), "typical_p": (1.0,), "length_penalty": (1.0,), "min_length": (0,)},
}
WITHOUT_EFFECT = {"bos_token_id", "transformers_version", "cache_implementation", "use_model_defaults"}


class Engines(dict[str, tuple[object, EagleFSD]]):
    """A model's engines, and what each was made from. A copy of the model makes its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Engines:
        return Engines()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()  # whoever loads a saved model may not have this package


def generate_with_head(
    model: PreTrainedModel, ea_model: str, inputs: Tensor | None = None, **arguments: Any
) -> Tensor | GenerationOutput:
    """Generate as `model.generate` does, by draft trees of a head.

    model: a causal language model. ea_model: the head, or "none" for drafts that are looked up. inputs, or
    input_ids: [B, L]. arguments: those of `generate`; and threshold and divergence (default: 0, lossless), or
    rule, an acceptance rule or its words, such as "js:0.6:min_gain=0.7"; tree, a TreeConfig or its words;
    seed. Returns sequences [B, L + new], or with return_dict_in_generate a GenerationOutput. max_new_tokens
    is 256 unless an argument or the model's generation_config says how long a text may be. Raises ValueError
    for an argument that is not supported.
    """
    called = {name: OFF.get(name) if value is None else value for name, value in arguments.items()}
    given = {name: value for name, value in called.items() if value is not None}
    config = given.pop("generation_config", None)
    if config is not None:
        given = {**settings_of(config), **given}
    require_known(given)
    ids = inputs if inputs is not None else given.get("input_ids")
    if ids is None:
        raise ValueError("input_ids is missing: this generation continues a prompt; give one")
    options = options_of(model, given, ids.shape[-1])
    engine = engine_for(model, ea_model, given.get("tokenizer"))
    ends = end_token_ids(engine.target, given.get("eos_token_id"))
    pad = given.get("pad_token_id", engine.target.pad_token_id)
    if (mask := given.get("attention_mask")) is None:
        mask = infer_mask(as_ids(ids), pad, ends)
        mask = torch.ones_like(ids) if mask is None else mask  # else the model's own pad tokens would count
    made = engine.generate(ids, mask, streamer=given.get("streamer"), **options)
    # Where nothing names a pad token, `generate` fills short rows with the first end token in force.
    fill = next((one for one in (pad, *ends) if one is not None), engine.pad_token_id)
    sequences = GenerationOutput.of(ids, made.new_tokens, made.stats, fill).sequences
    return replace(made, sequences=sequences) if given.get("return_dict_in_generate") else sequences


def settings_of(config: GenerationConfig) -> dict[str, Any]:
    """Return what a generation_config says beyond its class's defaults."""
    return {name: value for name, value in config.to_diff_dict().items() if value is not None}


def require_known(given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that asks for what is not supported."""
    for name, value in given.items():
        if name in SAME or name in OTHERS or name in WITHOUT_EFFECT or name.startswith("_"):
            continue
        if not any(is_same(value, one) for one in NEUTRAL.get(name, ())):
            raise ValueError(
                f"{name} is {format_value(value)}: eagle_fsd does not do that; leave it out, or generate "
                "without custom_generate"
            )


def is_same(value: object, neutral: object) -> bool:
    """Return whether a value is this one, though of another class, as 1 and 1.0 are; True is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def options_of(model: PreTrainedModel, given: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return the keywords of `EagleFSD.generate` for arguments of `generate` and a prompt of this length."""
    options = {mine: given[name] for name, mine in SAME.items() if name in given}
    own = getattr(model, "generation_config", None)
    options["do_sample"] = bool(given.get("do_sample", getattr(own, "do_sample", None)))
    options.setdefault("num_return_sequences", getattr(own, "num_return_sequences", None) or 1)
    if not options["do_sample"]:
        options.pop("temperature", None)  # has no effect there, as in `generate`
    new, most = (given.get(name, getattr(own, name, None)) for name in ("max_new_tokens", "max_length"))
    if new is None and most is not None:
        new = int(most) - length
        if new < 1:
            raise ValueError(
                f"max_length is {most}: the prompt has {length} tokens, and one must be left for the answer; "
                "raise it, or give max_new_tokens"
            )
    if new is not None:
        options["max_new_tokens"] = new
    rule = given.get("rule")
    if rule is None:
        rule = f"{given.get('divergence', 'js')}:{given.get('threshold', 0)}"
    elif "threshold" in given or "divergence" in given:
        raise ValueError("threshold and divergence belong to the rule fuzzy: leave them out beside a rule")
    options["rule"] = parse_rule(rule) if isinstance(rule, str) else rule
    tree = given.get("tree")
    options["tree"] = TreeConfig.parse(tree) if isinstance(tree, str) else tree
    return options


def engine_for(
    model: PreTrainedModel, ea_model: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> EagleFSD:
    """Return the engine of a model and a head, made at the first call and kept with the model.

    It is made again when the model has moved or has other modules, as with an adapter that was loaded since,
    or the head's folder has other files.
    """
    engines = model.__dict__.get(ENGINES)
    if not isinstance(engines, Engines):
        engines = model.__dict__[ENGINES] = Engines()
    # The engine keeps the modules that it was made with, so no other module can have one's id.
    state = (model.device, model.dtype, list(map(id, model.modules())), stamps(Path(ea_model)))
    if ea_model not in engines or engines[ea_model][0] != state:
        engines.pop(ea_model, None)
        target = TargetModel(model)  # without CUDA graphs: its owner may move it or change its weights
        head = None
        if ea_model != "none":
            sizes = (target.hidden_size, target.vocab_size, target.config.num_hidden_layers)
            head = load_any_head(ea_model, *sizes, target.dtype, target.device)
        if isinstance(head, Eagle3Head):
            settle_head(head, target, tokenizer)
        engines[ea_model] = state, EagleFSD(target, head, ea_model=ea_model, lookup=head is None)
    engine = engines[ea_model][1]
    if tokenizer is not None:
        engine.tokenizer = engine.settler.tokenizer = tokenizer
    return engine


def stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, time and size of a folder's files; nothing if there is no such folder."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [(one.name, one.stat().st_mtime_ns, one.stat().st_size) for one in files]
