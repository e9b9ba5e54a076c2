"""Tokens per second of several methods side by side: the same prompts, weights, dtype and device, in turn.

Every method answers a batch of prompts before any goes on to the next batch, and the order rotates, so that
what the machine does meanwhile is shared by all. Ratios are what a noisy machine can tell: of the sums, and
their spread over the batches. Only delivered tokens count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import CompileConfig

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.config import AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.drafting.lookup.lookup_drafter import LookupSpec
from eagle_fsd.drafting.lookup.merged_drafter import MergedSpec
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.measure.llama_cpp import LLAMA_CPP_LOOKUP, LlamaCpp, gguf_file
from eagle_fsd.evaluation.measure.llama_cpp import METHODS as LLAMA_CPP_METHODS
from eagle_fsd.evaluation.measure.memory import memory
from eagle_fsd.evaluation.prompt_sets import answer, batches, rotated
from eagle_fsd.target.hf_generate import generate_alone
from eagle_fsd.target.model import TargetModel

WARM_UP = 3  # batches: kernels' first calls, and compilation, which takes a second length for a dynamic one
LOOKUP, BESIDE_HEAD = "lookup", "+lookup"
LOOKUP_TOKENS = 10  # that prompt lookup proposes, as in Hugging Face's documentation


class Answers(NamedTuple):
    """New tokens of a batch of prompts, its rows' statistics, and the draft trees' size, if any."""

    tokens: list[list[int]]
    stats: Sequence[GenerationStats]
    tree: TreeConfig | None = None


Prompts = Sequence[Sequence[int]]
Method = Callable[[Prompts], Answers]  # how prompts (token ids) are answered in one batch


class Setting(NamedTuple):
    """What all methods share.

    endless: no token ends an answer, so that all have as many. longest: tokens of a prompt and its answer;
    None: as many as the target has positions.
    """

    max_new_tokens: int
    sampling: SamplingConfig
    tree: TreeConfig | AutoTree
    seed: int = 0
    endless: bool = False
    longest: int | None = None


def method(name: str, engine: EagleFSD, stock: Callable[[], TargetModel], setting: Setting) -> Method:
    """Return the method of that name, one of those that `eagle-fsd eval speed --help` explains.

    stock: the target untouched by us, loaded where a method needs it. Raises ValueError for any other name,
    and where llama.cpp cannot run.
    """
    most, sampling, usual, seed, endless, longest = setting
    if name in HUGGING_FACE:
        target, options, pad = stock(), HUGGING_FACE[name](), engine.pad_token_id
        return lambda prompts: Answers(
            *generate_alone(target, prompts, most, sampling, seed, pad, options=options, endless=endless)
        )
    if name in LLAMA_CPP_METHODS:
        if engine.device.type != "cpu":
            raise ValueError(
                f"method {name} runs on the CPU, and the target on {engine.device}: name --device cpu, "
                f"or leave {name} out of --methods"
            )
        looks_up = name == LLAMA_CPP_LOOKUP
        if looks_up and not sampling.greedy:
            raise ValueError(
                f"method {name} has the temperature {sampling.temperature:g}: its own sampling has another "
                f"order; name --temperature 0, or leave {name} out of --methods"
            )
        capacity, threads = longest or engine.target.max_positions, torch.get_num_threads()
        peer = LlamaCpp(gguf_file(engine.base_model), capacity, threads, looks_up)
        ends = () if endless else engine.target.eos_token_ids
        return lambda prompts: Answers(*peer.answer(prompts, most, sampling, seed, ends))
    own = parse_own(name)
    ours: dict[str, Any] = {"max_new_tokens": most, "rule": own.rule, "tree": own.tree or usual, "seed": seed}
    ours["eos_token_id"] = () if endless else None
    engine = engine_of(engine, own)

    def run(prompts: Prompts) -> Answers:
        output = answer(engine, prompts, sampling, **ours)
        return Answers(output.new_tokens, output.stats, output.tree)

    return run


class Own(NamedTuple):
    """A method of ours. tree: None is the setting's. beside, alone: whether lookup drafts so."""

    rule: AcceptanceRule
    tree: TreeConfig | AutoTree | None
    beside: bool
    alone: bool


def parse_own(name: str) -> Own:
    """Read the name of a method that is no other program's; see `method`. Raises ValueError if it is none."""
    word, sized, size = name.partition("@")
    beside, alone = word.endswith(BESIDE_HEAD), word == LOOKUP
    word = word.removesuffix(BESIDE_HEAD)
    try:
        rule = Lossless() if name == "plain" or alone else parse_rule(word)
    except ValueError as error:
        others = ", ".join((*PEERS, "plain"))
        raise ValueError(f"method is {name!r}: it is none of {others}, and {error}") from error
    tree = TreeConfig(1) if name == "plain" else tree_of(size) if sized else None
    return Own(rule, tree, beside, alone)


def engine_of(engine: EagleFSD, own: Own) -> EagleFSD:
    """Return an engine on the same target for a method, with caches and recordings of its own.

    One engine keeps those of its last drafter, so that on a GPU a method behind another one would record its
    steps anew with every prompt.
    """
    drafter, lookup = engine.drafter, own.alone or own.beside
    if lookup:
        drafter = drafter.head if isinstance(drafter, MergedSpec) else drafter
        drafter = None if own.alone or isinstance(drafter, LookupSpec) else drafter
    names = (engine.base_model, engine.ea_model)
    mine = EagleFSD(engine.target, drafter, engine.tokenizer, *names, lookup=lookup)
    mine.settler = mine.settler if lookup else engine.settler  # which remembers the trees that it chose
    return mine


def tree_of(text: str) -> TreeConfig | AutoTree:
    """Read a tree's size; "auto" is one chosen by cost. Raises ValueError for anything else."""
    return AutoTree() if text == "auto" else TreeConfig.parse(text)


def compiled() -> dict[str, Any]:
    """Return the options of a compiled `generate`, on CPUs too, where Hugging Face must be told."""
    config = CompileConfig(mode="default", dynamic=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


HUGGING_FACE: dict[str, Callable[[], dict[str, Any]]] = {
    "hf": dict,
    "hf-compiled": compiled,
    LOOKUP: lambda: {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
}
PEERS = (*HUGGING_FACE, *LLAMA_CPP_METHODS)  # the methods that are other programs


def race(
    methods: Mapping[str, Method],
    prompts: Prompts,
    batch_size: int,
    device: torch.device,
    note: Callable[[Prompts, Prompts], Mapping[str, Any]] | None = None,
    context: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row for every method and batch.

    note: what else a row says of prompts and answers, untimed. context: the length that prompts are brought
    to, see `stretched`; None leaves them as they are.
    """
    prompts = prompts if context is None else stretched(prompts, context)
    parts = list(batches(prompts, batch_size))
    for one in methods.values():
        for part in parts[:WARM_UP]:
            one(part)
    with tqdm(total=len(parts) * len(methods), unit="answer", desc=f"batch {batch_size}") as bar:
        for number, part in enumerate(parts):
            first = number * batch_size
            for name in rotated(list(methods), number):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                answers = methods[name](part)
                bar.set_postfix_str(name, refresh=False)
                bar.update()
                yield {
                    "method": name,
                    "batch_size": batch_size,
                    "context": context,
                    "prompts": list(range(first, first + len(part))),
                    "tree": str(answers.tree) if answers.tree and answers.tree.total_tokens > 1 else None,
                    **GenerationStats.total(answers.stats, concurrent=True).to_dict(),
                    "batch_steps": max(row.steps for row in answers.stats),
                    "peak_memory": memory(device)["peak"],
                    **(note(part, answers.tokens) if note else {}),
                }


def stretched(prompts: Prompts, length: int) -> list[list[int]]:
    """Put the others before every prompt until it has `length` tokens; a longer one loses its start."""
    made = []
    for place in range(len(prompts)):
        text: list[int] = []
        while len(text) < length:
            text = [*prompts[place], *text]
            place = (place - 1) % len(prompts)
        made.append(text[-length:])
    return made
