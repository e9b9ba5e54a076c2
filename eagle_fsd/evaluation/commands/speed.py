"""Tokens per second of several methods side by side, in one process: JSONL of rows, a table, a plot.

    python eval/speed.py --prompts data/prompts_*.jsonl --output runs/speed
    python eval/speed.py --prompts data/prompts_*.jsonl --temperature 0.6 --top-p 0.9 --top-k 50 \\
        --methods hf plain lossless js:0.6:paper:likeliest --likelihood --output runs/speed_sampling

Methods: hf, hf-compiled and lookup are Hugging Face's generate, plain, compiled with a static cache, and with
prompt lookup; llama.cpp is that program on the target's own .gguf file (pip install llama-cpp-python); plain
is our own loop without a draft; lossless; and any acceptance rule in a word, such as js:0.3,
js:0.6:paper:target:min_p=0.2 or cactus:0.1, with a tree of its own behind an @ (lossless@16/5/8,
js:0.3@auto). A rule with +lookup drafts what the text repeats beside the head (lossless+lookup@16/5/8), and
lookup@16/5/8 drafts so alone, with our own loop. Each answers every prompt, in rotating order; nothing else
should run on the machine.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from eagle_fsd import hub
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.cli import check_sizes, encoded_prompts, load_engine, parsed, parser_of, say
from eagle_fsd.evaluation.measure.llama_cpp import LLAMA_CPP, build
from eagle_fsd.evaluation.measure.observers import likelihoods
from eagle_fsd.evaluation.measure.speed import PEERS, Setting, method, parse_own, race, tree_of
from eagle_fsd.evaluation.report.plots import require_matplotlib
from eagle_fsd.evaluation.report.speed_ratios import plot_speed, results, table
from eagle_fsd.files.jsonl import append_row
from eagle_fsd.files.provenance import provenance
from eagle_fsd.runtime.packed_linear import backend_names
from eagle_fsd.target.model import TargetModel

METHODS = ("hf", "hf-compiled", "lookup", "plain", "lossless")
ONE_AT_A_TIME = {"lookup": "Hugging Face's prompt lookup", LLAMA_CPP: "a context of llama.cpp"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.set_defaults(max_new_tokens=128)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of rows.jsonl, table.md and speed.png")
    add("--methods", nargs="+", default=list(METHODS), help=f"default: {' '.join(METHODS)}")
    add("--batch-size", type=int, nargs="+", default=[1], help="default: 1")
    longer = "bring the prompts to this many tokens; no answer ends early then"
    add("--context", type=int, nargs="+", help=longer)
    sizes = f"{TreeConfig.FORM}, or auto, of methods without their own; default: %(default)s"
    add("--tree", default="16/5/8", help=sizes)
    add("--temperature", type=float, default=0.0, help="default: 0")
    add("--top-p", type=float, default=1.0, help="default: 1")
    add("--top-k", type=int, default=0, help="default: 0, every token")
    add("--seed", type=int, default=0)
    add("--likelihood", action="store_true", help="also score every answer by the target (not timed)")
    with parsed(parser, argv) as arguments:
        check(arguments)
        sampling = SamplingConfig(arguments.temperature, arguments.top_k, arguments.top_p)
        tree = tree_of(arguments.tree)
        engine, most = load_engine(arguments), arguments.max_new_tokens
        longest, positions = max(arguments.context or [0]) + most, engine.target.max_positions
        if longest > positions:
            raise ValueError(
                f"context and max_new_tokens are {longest} together: the target has {positions} positions; "
                "lower --context or --max-new-tokens"
            )
        prompts = encoded_prompts(arguments, engine)
        longest = max(arguments.context or map(len, prompts)) + most
        setting = Setting(most, sampling, tree, arguments.seed, arguments.context is not None, longest)
        stock = functools.partial(stock_target, engine, arguments.base_model)
        methods = {name: method(name, engine, stock, setting) for name in arguments.methods}
        arguments.output.mkdir(parents=True, exist_ok=True)
        names = ("base_model", "ea_model", "draft_vocab_size")
        made = {name: getattr(engine, name) for name in names} | {"packed": backend_names(engine.target.held)}
        made |= ({"llama_cpp": build()} if LLAMA_CPP in methods else {}) | provenance(engine.device)
        note = (
            functools.partial(mean_likelihood, engine) if arguments.likelihood else lambda part, answers: {}
        )
        rows, file = [], arguments.output / "rows.jsonl"
        file.unlink(missing_ok=True)  # a race is run anew, not resumed
        for context, size in product(arguments.context or [None], arguments.batch_size):
            for row in race(methods, prompts, size, engine.device, note, context):
                rows.append(row | made)
                append_row(file, rows[-1])
        found = results(rows)
        (arguments.output / "table.md").write_text(table(found) + "\n", encoding="utf-8")
        plot_speed(found, arguments.output / "speed.png")
        say(table(found))


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for what cannot be raced, before a model is loaded."""
    check_sizes(arguments, *arguments.batch_size)
    for context in arguments.context or ():
        require_integer("context", context, 1, "leave --context out for the prompts as they are")
    for name in arguments.methods:
        if name not in PEERS:
            parse_own(name)
    for name in ONE_AT_A_TIME.keys() & arguments.methods:
        if max(arguments.batch_size) > 1:
            raise ValueError(
                f"batch_size is {max(arguments.batch_size)} with {name}: {ONE_AT_A_TIME[name]} takes one "
                "prompt at a time; leave it out of --methods"
            )
    require_matplotlib()


def mean_likelihood(
    engine: EagleFSD, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Mapping[str, Any]:
    """Score a batch of answers by the target: the mean of their log-probabilities per token."""
    known = [log_p for log_p in likelihoods(engine.target, prompts, answers) if log_p is not None]
    return {"log_likelihood": sum(known) / len(known) if known else None}


@functools.cache
def stock_target(engine: EagleFSD, base_model: str) -> TargetModel:
    """Load the target as Hugging Face does; the engine's own serves where nothing of it is packed."""
    if not backend_names(engine.target.held):
        return engine.target
    return TargetModel(hub.load_target(base_model, engine.dtype, engine.device)[0])
