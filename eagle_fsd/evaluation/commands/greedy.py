"""Show that T = 0 at temperature 0 gives the target's own greedy text, token for token, on files of prompts.

    python eval/check_greedy.py --prompts data/prompts_*.jsonl --tree 16/5/8 60/6/10 --batch-size 1 4

Exits with 1 if a text differs other than at a near tie of the target's two best logits, or more than two do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.evaluation.cli import check_sizes, load_engine, mistakes_on_one_line, parser_of, say
from eagle_fsd.evaluation.measure.greedy_equality import compare, reference
from eagle_fsd.evaluation.prompt_sets import prompt_sets
from eagle_fsd.files.jsonl import append_row
from eagle_fsd.files.provenance import provenance

MOST_EXCUSED = 2  # prompts whose text may part at a near tie


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, "float32")  # half precision rounds differently in forwards of several rows
    add = parser.add_argument
    add("--tree", nargs="+", default=["16/5/8", "60/6/10"], help=TreeConfig.FORM)
    add("--batch-size", type=int, nargs="+", default=[1, 4], help="default: %(default)s")
    add("--output", type=Path, help="append one JSON row per tree and batch size to this file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    most = arguments.max_new_tokens
    with mistakes_on_one_line(parser):
        check_sizes(arguments, *arguments.batch_size)
        trees = [TreeConfig.parse(tree) for tree in arguments.tree]
        engine = load_engine(arguments)
        sets = prompt_sets(arguments.prompts, engine.tokenizer, arguments.skip, arguments.limit)
    prompts = [ids for prompts in sets.values() for ids in prompts]
    expected = reference(engine, prompts, most)
    differing: set[int] = set()  # prompts, over all trees and batch sizes
    unexcused = False
    for tree, batch_size in product(trees, arguments.batch_size):
        differences, stats = compare(engine, prompts, expected, tree, batch_size, most)
        counts = {"equal": len(prompts) - len(differences), "of": len(prompts)}
        said = f"{counts['equal']} of {counts['of']} equal, tau {stats.tau:.3f}"
        say(f"tree {tree}, batch {batch_size}: {said}")
        for difference in differences:
            say(f"  {difference}, excused: {difference.excused}")
        differing |= {difference.prompt for difference in differences}
        unexcused |= not all(difference.excused for difference in differences)
        if arguments.output:
            row = {"tree": str(tree), "batch_size": batch_size, **counts, **stats.to_dict()}
            row |= {"differences": [vars(difference) for difference in differences]}
            append_row(arguments.output, row | provenance(engine.device))
    sys.exit(1 if unexcused or len(differing) > MOST_EXCUSED else 0)
