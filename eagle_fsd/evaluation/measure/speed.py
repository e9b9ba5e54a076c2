"""Tokens per second of several methods side by side: the same prompts, weights, dtype and device, in turn.

Every method answers a batch of prompts before any goes on to the next batch, and the order rotates, so that
what the machine does meanwhile is shared by all. Ratios are what a noisy machine can tell: of the sums, and
their spread over the batches. Only delivered tokens count.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import CompileConfig

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.config import AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.prompt_sets import batches
from eagle_fsd.target.hf_generate import generate_alone
from eagle_fsd.target.model import TargetModel

WARM_UP = 3  # batches: kernels' first calls, and compilation, which takes a second length for a dynamic one
LOOKUP_TOKENS = 10  # prompt lookup proposes so many, as Hugging Face's documentation does


@dataclass(frozen=True)
class Answers:
    """New tokens of a batch of prompts, its statistics as one, the steps that the whole batch took, and the
    draft trees' size, if any."""

    tokens: list[list[int]]
    stats: GenerationStats
    steps: int
    tree: TreeConfig | None = None

    @classmethod
    def of(
        cls, tokens: list[list[int]], rows: Sequence[GenerationStats], tree: TreeConfig | None = None
    ) -> Answers:
        """The answers of one batch from its rows' statistics."""
        return cls(tokens, GenerationStats.total(rows, concurrent=True), max(row.steps for row in rows), tree)


@dataclass(frozen=True)
class Setting:
    """What all methods share. endless: no token ends an answer, so that all have as many."""

    max_new_tokens: int
    sampling: SamplingConfig
    tree: TreeConfig | AutoTree
    seed: int = 0
    endless: bool = False


@dataclass(frozen=True)
class Method:
    """A name, and how it answers prompts (token ids) in one batch."""

    name: str
    answer: Callable[[Sequence[Sequence[int]], int], Answers]


def method(name: str, engine: EagleFSD, stock: Callable[[], TargetModel], setting: Setting) -> Method:
    """The method of that name.

    hf, hf-compiled, lookup: Hugging Face's generate, plain, compiled with a static cache, and with prompt
    lookup. plain: our own loop with the tree of one node. Else a rule as `parse_rule` reads it: draft trees
    of the setting's size, or of the size behind an "@" (`tree_of`). stock: the target untouched by us, loaded
    where a method needs it. ValueError for any other name.
    """
    if name in HUGGING_FACE:
        return Method(name, hugging_face(stock(), engine.pad_token_id, setting, HUGGING_FACE[name]()))
    if name == "plain":
        return Method(name, ours(engine, Lossless(), TreeConfig(1), setting))
    word, own, size = name.partition("@")
    try:
        rule = parse_rule(word)
    except ValueError as error:
        others = ", ".join((*HUGGING_FACE, "plain"))
        raise ValueError(f"method is {name!r}: it is none of {others}, and {error}") from error
    return Method(name, ours(engine, rule, tree_of(size) if own else setting.tree, setting))


def tree_of(text: str) -> TreeConfig | AutoTree:
    """A tree's size as a command line says it; "auto" is one chosen by cost. ValueError for anything else."""
    return AutoTree() if text == "auto" else TreeConfig.parse(text)


def ours(
    engine: EagleFSD, rule: AcceptanceRule, tree: TreeConfig | AutoTree, setting: Setting
) -> Callable[..., Answers]:
    def answer(prompts: Sequence[Sequence[int]], most: int) -> Answers:
        ids, mask = pad_left(prompts, engine.pad_token_id)
        output = engine.generate(
            ids,
            mask,
            max_new_tokens=most,
            rule=rule,
            tree=tree,
            seed=setting.seed,
            eos_token_id=() if setting.endless else None,
            **asdict(setting.sampling),
        )
        return Answers.of(output.new_tokens, output.stats, output.tree)

    return answer


def hugging_face(
    target: TargetModel, pad: int, setting: Setting, options: Mapping[str, Any]
) -> Callable[..., Answers]:
    def answer(prompts: Sequence[Sequence[int]], most: int) -> Answers:
        tokens, stats = generate_alone(
            target, prompts, most, setting.sampling, setting.seed, pad, options, setting.endless
        )
        return Answers.of(tokens, stats)

    return answer


def compiled() -> dict[str, Any]:
    """Hugging Face compiles on accelerators alone, unless it is told to everywhere."""
    config = CompileConfig(mode="default", dynamic=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


HUGGING_FACE: dict[str, Callable[[], dict[str, Any]]] = {
    "hf": dict,
    "hf-compiled": compiled,
    "lookup": lambda: {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
}


def race(
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    setting: Setting,
    device: torch.device,
    note: Callable[[Sequence[Sequence[int]], list[list[int]]], Mapping[str, Any]],
    context: int | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for every method and batch. note: what else a row says of an answer, untimed. context: prompts
    are brought to so many tokens, see `stretched`; None leaves them as they are."""
    prompts = prompts if context is None else stretched(prompts, context)
    parts = list(batches(len(prompts), batch_size))
    for one in methods:
        for places in parts[:WARM_UP]:
            one.answer([prompts[place] for place in places], setting.max_new_tokens)
    bar = tqdm(total=len(parts) * len(methods), unit="answer", desc=f"batch {batch_size}")
    with bar:
        for number, places in enumerate(parts):
            part = [prompts[place] for place in places]
            turn = number % len(methods)
            for one in (*methods[turn:], *methods[:turn]):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                answers = one.answer(part, setting.max_new_tokens)
                bar.set_postfix_str(one.name, refresh=False)
                bar.update()
                yield {
                    "method": one.name,
                    "batch_size": batch_size,
                    "context": context,
                    "prompts": list(places),
                    "tree": str(answers.tree) if answers.tree and answers.tree.total_tokens > 1 else None,
                    **answers.stats.to_dict(),
                    "batch_steps": answers.steps,
                    "peak_memory": peak_memory(device),
                    **note(part, answers.tokens),
                }


def stretched(prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Every prompt behind as much of the others as makes it `length` tokens; a longer one loses its start."""
    made = []
    for number in range(len(prompts)):
        text: list[int] = []
        place = number
        while len(text) < length:
            text = [*prompts[place], *text]
            place -= 1
            place %= len(prompts)
        made.append(text[-length:])
    return made


def peak_memory(device: torch.device) -> int:
    """Bytes: of the method's own run on CUDA; of the whole process so far on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
