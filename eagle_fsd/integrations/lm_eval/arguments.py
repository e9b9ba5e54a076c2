"""What lm-eval's two sets of arguments mean here: --model_args and --gen_kwargs. Needs no lm-eval."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.hub.resolve import DEFAULT_TARGET
from eagle_fsd.integrations.lm_eval.answers import Ending

logger = logging.getLogger(__name__)

AUTO = "auto"
MODELS = ("base_model", "ea_model", "dtype", "head_dtype", "device", "device_map", "attn_implementation")
SWITCHES = ("trust_remote_code", "pack", "graphs", "full_vocabulary")
RULE = tuple(field.name for field in dataclasses.fields(Fuzzy))
TREE = tuple(field.name for field in dataclasses.fields(TreeConfig))
COUNTS = {"batch_size": 1, "max_gen_toks": 1, "seed": 0}  # and the least that each may be

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm-eval's order
GEN_KWARGS = ("until", *LENGTHS, "do_sample", "temperature", "top_p", "top_k")
IDLE = {"num_beams": 1}  # tasks set it to what changes nothing


@dataclass(frozen=True)
class Settings:
    """What --model_args say. models: arguments of EagleFSD.from_pretrained. max_gen_toks: where a task names
    no length. seed: of all draws."""

    models: Mapping[str, Any]
    rule: AcceptanceRule
    tree: TreeConfig | AutoTree
    batch_size: int = 1
    max_gen_toks: int = 256
    seed: int = 0


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """Read --model_args. ValueError for a name or a value that is not there.

    The names are those of EagleFSD.from_pretrained, Fuzzy (without a threshold it is 0, lossless) and
    TreeConfig, whose total_tokens may be "auto". top_k is the tree's; that of sampling is in --gen_kwargs.
    `rule` names any other rule in a word, such as cactus:0.1.
    """
    known = (*MODELS, *SWITCHES, *RULE, "rule", *TREE, *COUNTS)
    for name in arguments:
        if name not in known:
            raise ValueError(
                f"model_args has {name!r}: eagle_fsd takes {', '.join(known)}; check its spelling"
            )
    # lm-eval reads what looks like a number as one, and `none` as None: not given.
    given = {name: value for name, value in arguments.items() if value is not None}
    models = {name: str(given[name]) for name in MODELS if name in given}
    models.setdefault("base_model", DEFAULT_TARGET)
    for name in SWITCHES:
        if name in given:
            if not isinstance(given[name], bool):
                raise ValueError(f"{name} is {given[name]!r}: it must be true or false; choose one")
            models[name] = given[name]
    counts = {name: whole(given[name]) for name in COUNTS if name in given}
    for name, value in counts.items():
        require_integer(name, value, COUNTS[name], "there is no automatic choice; give a number")
    return Settings(
        models=models,
        rule=rule_of({name: given[name] for name in (*RULE, "rule") if name in given}),
        tree=tree_of({name: given[name] for name in TREE if name in given}),
        **counts,
    )


def rule_of(given: Mapping[str, Any]) -> AcceptanceRule:
    """Return the rule of a word, or Fuzzy with these fields."""
    if "rule" not in given:
        return Fuzzy(**{"threshold": 0.0, **given})
    if len(given) > 1:
        others = ", ".join(given.keys() - {"rule"})
        raise ValueError(
            f"rule is {given['rule']!r} beside {others}: it says all, as in js:0.3:paper; drop the others"
        )
    return parse_rule(str(given["rule"]))


def tree_of(sizes: Mapping[str, Any]) -> TreeConfig | AutoTree:
    """Return the tree of these sizes; with total_tokens "auto" those that are not given are measured."""
    if sizes.get("total_tokens") == AUTO:
        return AutoTree(**{name: size for name, size in sizes.items() if name != "total_tokens"})
    return TreeConfig(**sizes)


def whole(value: object) -> object:
    """Read a decimal string as a number: lm-eval's own flags come as strings."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def ending_of(gen_kwargs: Mapping[str, Any], max_gen_toks: int) -> Ending:
    """Read a request's generation arguments as lm-eval means them. ValueError for what is not there.

    max_gen_toks: where they name no length. Without do_sample a temperature above 0 samples; do_sample
    without a temperature samples at 1; do_sample false is greedy whatever else is set.
    """
    for name, value in gen_kwargs.items():
        if name not in GEN_KWARGS and (name not in IDLE or value != IDLE[name]):
            raise ValueError(
                f"gen_kwargs has {name}={value!r}: eagle_fsd takes {', '.join(GEN_KWARGS)}; leave it out, or "
                "change the task"
            )
    given = {name: value for name, value in gen_kwargs.items() if value is not None}
    lengths = {name: given[name] for name in LENGTHS if name in given}
    if len(lengths) > 1:
        logger.warning("of the lengths %s in gen_kwargs the first counts", lengths)
    name, length = next(iter(lengths.items()), ("max_gen_toks", max_gen_toks))
    require_integer(name, length, 1, "ask for at least one token")
    return Ending(stop_strings(given.get("until", ())), int(length), sampling_of(given))


def stop_strings(until: object) -> tuple[str, ...]:
    """Return `until` as a tuple: it may be one string or several."""
    stops = (until,) if isinstance(until, str) else until
    if not isinstance(stops, Sequence) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"until is {until!r}: it must be a string or a list of strings; quote them")
    return tuple(stops)


def sampling_of(given: Mapping[str, Any]) -> SamplingConfig:
    """Return temperature, top-k and top-p of generation arguments."""
    do_sample = given.get("do_sample", given.get("temperature", 0) != 0)
    if not isinstance(do_sample, bool):
        raise ValueError(f"do_sample is {do_sample!r}: it must be true or false; choose one")
    wanted = SamplingConfig(
        given.get("temperature", 1.0 if do_sample else 0.0), given.get("top_k", 0), given.get("top_p", 1.0)
    )
    if not do_sample and not wanted.greedy:
        logger.warning("temperature is %s, but do_sample is false: greedy", wanted.temperature)
    return wanted if do_sample and not wanted.greedy else SamplingConfig()


def seeds(base: int, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[int]:
    """Return a seed for every request (context, gen_kwargs).

    It depends on the base seed, the request and how often that was made before, and so neither on its place
    nor on the other tasks of a run.
    """
    made: dict[str, int] = {}
    found = []
    for context, gen_kwargs in requests:
        request = json.dumps([base, context, gen_kwargs], sort_keys=True, default=str)
        made[request] = made.get(request, 0) + 1
        digest = hashlib.sha256(f"{made[request]} {request}".encode()).digest()
        found.append(int.from_bytes(digest[:8], "big") >> 1)  # below 2**63
    return found
