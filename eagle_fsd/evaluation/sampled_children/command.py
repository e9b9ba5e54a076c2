"""Measure whether children drawn from q would be accepted more often: JSONL of rows, and a table to stdout.

    python eval/sampled_children.py --prompts data/prompts_*.jsonl --output runs/sampled_children.jsonl

The package takes the K likeliest tokens of q as a node's children, and draws once from p. Others draw the
children from q and try them one after the other, p being replaced by what is left of it. Lossless texts are
decoded, and p and q of every node on their paths that has children are read. The table has the chance that a
child is accepted, in per cent, as a mean over the contexts; the module acceptance beside this one says what
the columns are. All are exact but for draws without replacement of more than two children, which have a
standard error. Gains are over the likeliest children, and brackets are 95 % intervals of a bootstrap over
prompts. "the tree's" has as many children in each context as the tree has there. A run that was stopped goes
on at the first missing row.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.core.checks import require_integer, require_number
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Sums, changes
from eagle_fsd.evaluation.cli import check_sizes, load_engine, mistakes_on_one_line, parser_of, say
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.measure.sweep import Cell, Questions, run
from eagle_fsd.evaluation.sampled_children.meter import LIKELIEST, MIXED, WAYS, WITHOUT, ChildrenMeter
from eagle_fsd.files.provenance import provenance

COLUMNS = (
    "the likeliest",
    "drawn without replacement",
    "drawn with replacement",
    "K - 1 likeliest, one drawn",
    "bound for independent draws",
)
TREE = "the tree's"
Row = Mapping[str, Any]


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, "float32")
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSONL of rows; a later run resumes from it")
    form = "T[/TOP_K[/TOP_P]]"
    add("--sampling", nargs="+", default=["0.6", "1"], metavar=form, help="default: %(default)s")
    add("--draft-temperature", type=float, help="of q, where children are drawn; default: the target's")
    add("--children", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers K; default: %(default)s")
    tree = TreeConfig()
    add("--tree", default=str(tree), help=f"{TreeConfig.FORM}; default: %(default)s")
    add("--batch-size", type=int, default=1, help="default: %(default)s")
    add("--draws", type=int, default=8, help="runs of an estimate in each context; default: %(default)s")
    add("--seed", type=int, default=0, help="of the texts and of the estimates; default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    with mistakes_on_one_line(parser):
        samplings, tree = check(arguments)
        engine, most = load_engine(arguments), max(*arguments.children, tree.top_k)
        drafted = engine.draft_vocab_size or engine.target.vocab_size
        require_integer("children", most, 1, "the draft covers no more tokens", drafted)
        questions = Questions.of_prompts(
            arguments.prompts, engine, arguments.limit, arguments.skip, arguments.max_new_tokens
        )
        cells = [
            Cell(questions, Lossless(), one, tree, arguments.max_new_tokens, arguments.seed)
            for one in samplings
        ]
        measured = [most, arguments.draws, arguments.draft_temperature]
        meter = functools.partial(ChildrenMeter, *measured, np.random.default_rng(arguments.seed))
        about = (provenance(engine.device), meter, measured)
        made = run(engine, cells, arguments.output, arguments.batch_size, *about)
        answers = {str_of(cell.sampling): cell.rows(engine, made, measured) for cell in cells}
        shown = table(answers, arguments.children)
    say(shown)


def check(arguments: argparse.Namespace) -> tuple[list[SamplingConfig], TreeConfig]:
    """Return the samplings and the tree. Raises ValueError for what cannot be measured."""
    check_sizes(arguments, arguments.batch_size)
    for count in arguments.children:
        require_integer("children", count, 1, "1, 2, 4 and 8 are usual")
    require_integer("draws", arguments.draws, 2, "a standard error needs two; 8 is usual")
    if arguments.draft_temperature is not None:
        require_number("draft_temperature", arguments.draft_temperature, 1e-3, math.inf, "1 takes q as it is")
    if arguments.lookup:
        raise ValueError("lookup is set: a copied token has no q to draw from; leave --lookup out")
    tree = TreeConfig.parse(arguments.tree)
    if tree.total_tokens < 2:
        raise ValueError(f"tree is {arguments.tree!r}: it has no drafts to look at; 16/5/8 has")
    samplings = list(dict.fromkeys(map(SamplingConfig.parse, arguments.sampling)))
    if any(sampling.greedy for sampling in samplings):
        raise ValueError("temperature is 0: nothing is drawn there; take one above 0, such as 0.6")
    return samplings, tree


def str_of(sampling: SamplingConfig) -> str:
    """Write a sampling as the flag has it, without what it leaves alone."""
    parts = [f"{sampling.temperature:g}"]
    if sampling.top_k or sampling.top_p < 1:
        parts.append(str(sampling.top_k))
    if sampling.top_p < 1:
        parts.append(f"{sampling.top_p:g}")
    return "/".join(parts)


def table(answers: Mapping[str, Sequence[Row]], numbers: Sequence[int]) -> str:
    """Write a line per sampling and number of children. answers: the rows of every sampling.

    Raises ValueError where no context was found.
    """
    gains = {way: f"{COLUMNS[WAYS.index(way)]}: gain" for way in (WITHOUT, MIXED)}
    titles = ["sampling", "contexts", "children K", *COLUMNS, *gains.values()]
    lines = []
    for sampling, rows in answers.items():
        found = [row["sampled_children"] for row in rows]
        contexts = sum(one["contexts"] for one in found)
        if not contexts:
            raise ValueError(f"sampling {sampling}: no node has drafts with a q; name a head (--ea-model)")
        for number in (*numbers, None):
            sums = {way: sums_of(found, way, number) for way in (*WAYS, "variance")}
            cells = [f"{100 * one.numerator.sum() / contexts:.1f}" for one in sums.values()][: len(WAYS)]
            error = 100 * math.sqrt(sums["variance"].numerator.sum()) / contexts
            if error:
                cells[WAYS.index(WITHOUT)] += f" ± {error:.2f}"
            gained = changes(
                {way: sums[way] for way in gains}, dict.fromkeys(gains, sums[LIKELIEST]), Bootstrap()
            )
            cells += [f"{gained[way].difference.scaled(100):+.1f}" for way in gains]
            mean = sum(one["children"] for one in found) / contexts
            shown = f"{TREE}, {mean:.1f}" if number is None else str(number)
            lines.append([sampling, str(contexts), shown, *cells])
    return markdown_table(titles, lines)


def sums_of(found: Sequence[Row], way: str, number: int | None) -> Sums:
    """Return a way's sums over the contexts of every prompt. number: of children; None: as the tree has."""
    values = [one[way]["tree"] if number is None else one[way]["by_children"][number - 1] for one in found]
    return Sums(np.array(values), np.array([float(one["contexts"]) for one in found]))
