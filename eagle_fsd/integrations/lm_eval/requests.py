"""What lm-eval asks, and the answers: --model_args, --gen_kwargs, stop strings and seeds. Needs no lm-eval.

What is decoded beside a text never changes it. Stop strings that are special tokens of the
tokenizer end a text as end tokens do, for they are not shown in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.decoding.many import TextStream
from eagle_fsd.engine import EagleFSD
from eagle_fsd.hub.resolve import DEFAULT_TARGET
from eagle_fsd.text.chat import require_tokenizer
from eagle_fsd.text.streamed import StreamedText, special_tokens

MODELS = (
    *("base_model", "ea_model", "draft_model", "dtype", "head_dtype"),
    *("device", "draft_device", "device_map", "attn_implementation", "runtime", "weight_format"),
)
SWITCHES = ("trust_remote_code", "pack", "graphs", "full_vocabulary", "lookup")
DRAFT_LAYERS = "draft_layers"
RULE = ("rule", *(field.name for field in fields(Fuzzy)))
TREE = tuple(field.name for field in fields(TreeConfig))
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


@dataclass(frozen=True)
class Ending:
    """How a text is made and where it ends; only what shares it is answered together."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: SamplingConfig


@dataclass(frozen=True)
class Ask:
    """One prompt (token ids) to answer. seed: of its own draws."""

    prompt: tuple[int, ...]
    ending: Ending
    seed: int = 0


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """Read --model_args. Raises ValueError for a name or a value that is not there.

    The names are MODELS, SWITCHES and DRAFT_LAYERS, as of EagleFSD.from_pretrained; those of Fuzzy (without a
    threshold it is 0, lossless); and those of TreeConfig, whose total_tokens may be "auto". top_k is the
    tree's; that of sampling is in --gen_kwargs. `rule` names any other rule in a word, such as cactus:0.1.
    """
    known = (*MODELS, *SWITCHES, DRAFT_LAYERS, *RULE, *TREE, *COUNTS)
    for name in arguments:
        if name not in known:
            raise ValueError(
                f"model_args has {name!r}: eagle_fsd takes {', '.join(known)}; check its spelling"
            )
    # lm-eval reads what looks like a number as one, and `none` as None: not given.
    given = {name: value for name, value in arguments.items() if value is not None}
    models: dict[str, Any] = {"base_model": DEFAULT_TARGET}
    models |= {name: str(given[name]) for name in MODELS if name in given}
    for name in SWITCHES:
        if name in given:
            models[name] = require_switch(name, given[name])
    if DRAFT_LAYERS in given:
        models[DRAFT_LAYERS] = given[DRAFT_LAYERS]
    counts = {name: given[name] for name in COUNTS if name in given}
    for name, value in counts.items():
        if isinstance(value, str) and value.isdecimal():  # lm-eval's own flags come as strings
            counts[name] = int(value)
        require_integer(name, counts[name], COUNTS[name], "there is no automatic choice; give a number")
    rule = {name: given[name] for name in RULE if name in given}
    sizes = {name: given[name] for name in TREE if name in given}
    if "rule" in rule and len(rule) > 1:
        others = ", ".join(rule.keys() - {"rule"})
        raise ValueError(
            f"rule is {rule['rule']!r} beside {others}: it says all, as in js:0.3:paper; drop the others"
        )
    auto = sizes.get("total_tokens") == "auto" and sizes.pop("total_tokens")
    asked = parse_rule(str(rule["rule"])) if "rule" in rule else Fuzzy(**{"threshold": 0.0, **rule})
    idle = [name for name in rule if name not in ("rule", "threshold")]
    if idle and not rule.get("threshold"):
        raise ValueError(
            f"{idle[0]} is {rule[idle[0]]!r} without a threshold above 0: nothing is followed then, and it "
            "would have no effect; give a threshold, inf for a plan alone"
        )
    return Settings(
        models=models,
        rule=asked,
        tree=AutoTree(**sizes) if auto else TreeConfig(**sizes),
        **counts,
    )


def require_switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be true or false; choose one")
    return value


def ending_of(gen_kwargs: Mapping[str, Any], max_gen_toks: int) -> Ending:
    """Read a request's generation arguments as lm-eval means them. Raises ValueError for what is not there.

    max_gen_toks: where they name no length; of several the first of LENGTHS counts. Without do_sample a
    temperature above 0 samples; do_sample without a temperature samples at 1; do_sample false is greedy
    whatever else is set.
    """
    for name, value in gen_kwargs.items():
        if name not in GEN_KWARGS and (name not in IDLE or value != IDLE[name]):
            raise ValueError(
                f"gen_kwargs has {name}={value!r}: eagle_fsd takes {', '.join(GEN_KWARGS)}; leave it out, or "
                "change the task"
            )
    given = {name: value for name, value in gen_kwargs.items() if value is not None}
    name = next((name for name in LENGTHS if name in given), LENGTHS[0])
    length = given.get(name, max_gen_toks)
    require_integer(name, length, 1, "ask for at least one token")
    until = given.get("until", ())
    stops = (until,) if isinstance(until, str) else until
    if not isinstance(stops, Sequence) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"until is {until!r}: it must be a string or a list of strings; quote them")
    samples = require_switch("do_sample", given.get("do_sample", given.get("temperature", 0) != 0))
    temperature = given.get("temperature", 1.0 if samples else 0.0)
    wanted = SamplingConfig(temperature, given.get("top_k", 0), given.get("top_p", 1.0))
    return Ending(tuple(stops), length, wanted if samples and not wanted.greedy else SamplingConfig())


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


def answers(
    engine: EagleFSD,
    asks: Sequence[Ask],
    rule: AcceptanceRule,
    tree: TreeConfig | AutoTree,
    batch_size: int,
) -> Iterator[tuple[Sequence[int], TextStream]]:
    """Yield streams that answer all, each with the places in `asks` of its texts' prompts.

    The longest prompts come first, so that what does not fit fails at once.
    """
    groups: dict[Ending, list[int]] = {}
    for place in sorted(range(len(asks)), key=lambda place: -len(asks[place].prompt)):
        groups.setdefault(asks[place].ending, []).append(place)
    for ending, places in groups.items():
        options = {"rule": rule, "tree": tree, "max_new_tokens": ending.max_new_tokens}
        options |= {"eos_token_id": end_tokens(engine, ending.until), **asdict(ending.sampling)}
        options["stop_strings"] = [stop for stop in ending.until if stop]
        prompts, seeds = [asks[place].prompt for place in places], [asks[place].seed for place in places]
        yield places, engine.generate_many(prompts, batch_size=batch_size, seed=seeds, **options)


def text_of(engine: EagleFSD, tokens: Sequence[int], until: Sequence[str]) -> str:
    """Return the text of new tokens before the first stop string."""
    text = StreamedText(require_tokenizer(engine.tokenizer), until)
    text.add(tokens)
    text.finish()
    return text.text


def end_tokens(engine: EagleFSD, until: Sequence[str]) -> tuple[int, ...]:
    """Return the model's own end tokens, and the stop strings that are special tokens."""
    ids = {*engine.target.eos_token_ids, *special_tokens(require_tokenizer(engine.tokenizer), until)}
    return tuple(sorted(token for token in ids if token < engine.target.vocab_size))
