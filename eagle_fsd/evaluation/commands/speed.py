"""Tokens per second of several methods side by side, in one process: JSONL of rows, a table, a plot.

    python eval/speed.py --prompts data/prompts_*.jsonl --output runs/speed
    python eval/speed.py --prompts data/prompts_*.jsonl --temperature 0.6 --top-p 0.9 --top-k 50 \\
        --methods hf plain lossless js:0.6:paper:likeliest --likelihood --output runs/speed_sampling

Methods: hf, hf-compiled and lookup are Hugging Face's generate, plain, compiled with a static cache, and with
prompt lookup; llama.cpp is that program on the target's own .gguf file (pip install llama-cpp-python), and
llama.cpp+lookup the same with llama-cpp-python's prompt lookup, greedy; plain is our own loop without a
draft; lossless; and any acceptance rule in a word, such as js:0.3, js:0.6:paper:target:min_p=0.2 or
cactus:0.1, with a tree of its own behind an @ (lossless@16/5/8, js:0.3@auto). A rule with +lookup drafts what
the text repeats beside the head (lossless+lookup@16/5/8), and lookup@16/5/8 drafts so alone, with our own
loop. Each answers every prompt, in rotating order; nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd import hub
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.stats import PHASES
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.cli import check_sizes, encoded_prompts, load_engine, parsed, parser_of, say
from eagle_fsd.evaluation.markdown_table import filled_columns
from eagle_fsd.evaluation.measure.llama_cpp import METHODS as LLAMA_CPP_METHODS
from eagle_fsd.evaluation.measure.llama_cpp import build
from eagle_fsd.evaluation.measure.observers import likelihoods
from eagle_fsd.evaluation.measure.speed import PEERS, Setting, method, parse_own, race, tree_of
from eagle_fsd.evaluation.plots import FAINT, INK, require_matplotlib, save
from eagle_fsd.evaluation.rows import sole_writer
from eagle_fsd.files.jsonl import append_row
from eagle_fsd.files.places import require_folder
from eagle_fsd.files.provenance import provenance
from eagle_fsd.runtime.packed_linear import backend_names
from eagle_fsd.target.model import TargetModel

BASELINES = ("hf", "hf-compiled", "llama.cpp", "plain", "lossless")  # of the others, where they ran
ORDER = (
    *("context", "batch", "method", "tree", "tokens/s", "tau"),
    *("prefill s", *(f"{phase} ms" for phase in PHASES[1:]), "peak GB"),
    *(*(f"vs {base}" for base in BASELINES), "log p"),
)
FILES = ("rows.jsonl", "table.md", "speed.png")
METHODS = ("hf", "hf-compiled", "lookup", "plain", "lossless")
ONE_AT_A_TIME = {
    "lookup": "Hugging Face's prompt lookup",
    **dict.fromkeys(LLAMA_CPP_METHODS, "a context of llama.cpp"),
}
Row = Mapping[str, Any]


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
        prompts, positions = encoded_prompts(arguments, engine), engine.target.max_positions
        longest = max(arguments.context or map(len, prompts)) + most
        if longest > positions:  # where Hugging Face's methods would go on, and ours end
            which = "context" if arguments.context else "the longest prompt"
            raise ValueError(
                f"{which} and max_new_tokens are {longest} together: the target has {positions} positions; "
                "lower --max-new-tokens, or give shorter prompts or --context"
            )
        setting = Setting(most, sampling, tree, arguments.seed, arguments.context is not None, longest)
        # Loaded once, and kept no longer than this race.
        stock = functools.cache(functools.partial(stock_target, engine, arguments.base_model))
        methods = {name: method(name, engine, stock, setting) for name in arguments.methods}
        names = ("base_model", "ea_model", "draft_vocab_size", "runtime", "weight_format")
        made = {name: getattr(engine, name) for name in names} | {"packed": backend_names(engine.target.held)}
        made |= {"sampling": asdict(sampling), "max_new_tokens": most, "seed": arguments.seed}
        made |= ({"llama_cpp": build()} if {*LLAMA_CPP_METHODS} & {*methods} else {}) | provenance(
            engine.device
        )
        note = functools.partial(mean_likelihood, engine) if arguments.likelihood else None
        rows, (file, table, plot) = [], [arguments.output / name for name in FILES]
        with sole_writer(file):
            for old in (file, table, plot):  # a race is run anew, not resumed
                old.unlink(missing_ok=True)
            contexts, sizes = (
                dict.fromkeys(one) for one in (arguments.context or [None], arguments.batch_size)
            )
            for context, size in product(contexts, sizes):
                for row in race(methods, prompts, size, engine.device, note, context):
                    rows.append(row | made)
                    append_row(file, rows[-1])
            found = results(rows)
            text = f"{filled_columns([one.cells for one in found], ORDER)}\n\n{about(rows)}"
            table.write_text(text + "\n", encoding="utf-8")
            plot_speed(found, plot)
        say(text)


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for what cannot be raced, before a model is loaded."""
    check_sizes(arguments, *arguments.batch_size)
    require_folder("--output", arguments.output)
    require_integer("seed", arguments.seed, 0, "any will do")
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


def stock_target(engine: EagleFSD, base_model: str) -> TargetModel:
    """Load the target as Hugging Face does; the engine's own serves where nothing of it is packed."""
    if not backend_names(engine.target.held):
        return engine.target
    return TargetModel(hub.load_target(base_model, engine.dtype, engine.device)[0])


@dataclass(frozen=True)
class Result:
    """One method at one context and batch size.

    ratios: by baseline, of the sums, and the quartiles over batches. cells: its line of the table, by column.
    """

    method: str
    tokens_per_second: float
    ratios: dict[str, tuple[float, float, float]]
    cells: dict[str, str]


def results(rows: Sequence[Row]) -> list[Result]:
    """Sum up the rows of one run by context, batch size and method."""
    groups: dict[tuple[Any, int], dict[str, list[Row]]] = {}
    for row in rows:
        methods = groups.setdefault((row["context"], row["batch_size"]), {})
        methods.setdefault(row["method"], []).append(row)
    return [result(name, mine) for mine in groups.values() for name in mine]


def result(name: str, methods: Mapping[str, Sequence[Row]]) -> Result:
    """Sum up one method's rows, beside those of the others at the same context and batch size."""
    ordered = {other: sorted(runs, key=lambda row: row["prompts"]) for other, runs in methods.items()}
    runs = ordered[name]
    ratios = {}
    for base in (base for base in BASELINES if base in ordered and base != name):
        single = [rate([a]) / rate([b]) for a, b in zip(runs, ordered[base], strict=True)]
        low, high = np.quantile(single, (0.25, 0.75)).tolist()
        ratios[base] = (rate(runs) / rate(ordered[base]), low, high)

    def total(field: str) -> float:
        return sum(row[field] for row in runs)

    tau, prefill = total("new_tokens") / max(total("steps"), 1), total("prefill_seconds") / len(runs)
    likelihoods = [row["log_likelihood"] for row in runs if row.get("log_likelihood") is not None]
    cells = {
        "context": str(runs[0]["context"] or ""),
        "batch": str(runs[0]["batch_size"]),
        "method": name,
        "tree": "; ".join(dict.fromkeys(row["tree"] for row in runs if row["tree"])),
        "tokens/s": f"{rate(runs):.1f}",
        "tau": "" if name in PEERS else f"{tau:.2f}",  # lookup's steps are not told
        "prefill s": f"{prefill:.2f}" if prefill else "",
        "peak GB": f"{max(row['peak_memory'] for row in runs) / 1e9:.2f}",
        "log p": f"{statistics.fmean(likelihoods):.3f}" if likelihoods else "",
    }
    for phase in PHASES[1:]:
        milliseconds = 1000 * total(f"{phase}_seconds") / max(total("batch_steps"), 1)
        cells[f"{phase} ms"] = f"{milliseconds:.1f}" if milliseconds else ""
    for base, (middle, low, high) in ratios.items():
        cells[f"vs {base}"] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    return Result(name, rate(runs), ratios, cells)


def about(rows: Sequence[Row]) -> str:
    """Say what a race was of, and what its table shows."""
    first, sampling = rows[0], SamplingConfig(**rows[0]["sampling"])
    cuts = f"/{sampling.top_k}/{sampling.top_p:g}" if sampling.cuts else ""
    prompts = len({number for row in rows for number in row["prompts"]})
    others = " but for other programs" if any(row["method"] in PEERS for row in rows) else ""
    return (
        f"{first['base_model']}, {first['weight_format']} on {first['runtime']}{others}; "
        f"{first['device']}, threads: {first['threads']}; prompts: {prompts}, at most "
        f"{first['max_new_tokens']} new tokens, temperature {sampling.temperature:g}{cuts}. Tokens/s "
        "include the reading of prompts. Ratios are of the sums, with the quartiles over batches in "
        "brackets. prefill s is a mean over batches, and log p one over answers; other times are "
        "milliseconds a step."
    )


def rate(rows: Sequence[Row]) -> float:
    """Return the tokens per second of runs one after the other."""
    return sum(row["new_tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def plot_speed(found: Sequence[Result], path: Path) -> None:
    """Draw tokens per second by method, a panel for each context and batch size, to a PNG."""
    from matplotlib.figure import Figure

    groups: dict[str, list[Result]] = {}
    for one in found:
        context = one.cells["context"] and f", context {one.cells['context']}"
        groups.setdefault(f"batch {one.cells['batch']}{context}", []).append(one)
    most = max(map(len, groups.values()))
    figure = Figure(figsize=(7, len(groups) * (0.8 + 0.36 * most)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for panel, (title, members) in zip(panels, groups.items(), strict=True):
        mine = members[::-1]
        bars = panel.barh(
            [one.method for one in mine],
            [one.tokens_per_second for one in mine],
            color=[FAINT if one.method in PEERS else INK for one in mine],
            height=0.6,
        )
        for bar, one in zip(bars, mine, strict=True):
            if one.method in PEERS:
                bar.set(hatch="///", edgecolor="white")
        panel.bar_label(bars, labels=[label(one) for one in mine], padding=3, fontsize=9)
        panel.margins(x=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(title, loc="left", fontsize=10)
    others = "; hatched: other programs" if any(one.method in PEERS for one in found) else ""
    panels[-1].set_xlabel(f"delivered tokens per second{others}")
    save(figure, path)


def label(one: Result) -> str:
    first = None if one.method == "hf" else next(iter(one.ratios.items()), None)
    return f"{one.tokens_per_second:.1f}" + (f"  ({first[1][0]:.2f} x {first[0]})" if first else "")
