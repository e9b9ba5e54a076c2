"""Sweep acceptance rules over tasks, samplings and thresholds: raw rows to a JSONL file, for eval/report.py.

    python eval/sweep.py --tasks ifeval --data data --grid quick --limit 8 --output runs/quick.jsonl
    python eval/report.py --rows runs/quick.jsonl --output runs/quick

Every row keeps the answer's text, so that it can be scored again without a model (eval/score.py). A sweep
that was stopped goes on at the first missing row; one that asks for more rules or samples adds them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.cli import check_sizes, load_engine, mistakes_on_one_line, model_parser
from eagle_fsd.evaluation.grids import GRIDS
from eagle_fsd.evaluation.measure.sweep import Cell, Questions, run
from eagle_fsd.evaluation.tasks import TASKS, Task, task_named
from eagle_fsd.files.provenance import provenance

SAMPLING = "temperature, top-k (0: off) and top-p (1: off); default: %(default)s"
GRID = "a list of rules: quick (19) or frontier (63); default: quick, where --rules names none"


def build_parser() -> argparse.ArgumentParser:
    parser = model_parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", default=[], metavar="TASK", help=", ".join(TASKS))
    files = "files of prompts, a task without a score"
    add("--prompts", nargs="+", default=[], type=Path, metavar="FILE", help=files)
    add("--data", type=Path, help="folder of the tasks' files (default: $EAGLE_FSD_DATA, else the Hub)")
    add("--limit", type=int, help="at most LIMIT samples of every task or file")
    add("--skip", type=int, default=0, help="leave out the first SKIP samples of every task or file")
    add("--grid", choices=GRIDS, help=GRID)
    words = "js:0.3:paper:likeliest, cactus:0.1, lossless ..."
    add("--rules", nargs="+", default=[], metavar="RULE", help=words)
    form = "T[/TOP_K[/TOP_P]]"
    add("--sampling", nargs="+", default=["0.6/50/0.9"], metavar=form, help=SAMPLING)
    add("--tree", default="16/5/8", help=f"{TreeConfig.FORM}; default: %(default)s")
    add("--max-new-tokens", type=int, help="default: the task's own; 128 for --prompts")
    add("--batch-size", type=int, default=1, help="answers at a time; speeds are of that batch; default: 1")
    add("--seed", type=int, default=0, help="sample i draws from SEED + i under every rule; default: 0")
    add("--output", type=Path, required=True, help="JSONL of rows; a later run resumes from it")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    with mistakes_on_one_line(parser):
        check(arguments)
        tree = TreeConfig.parse(arguments.tree)
        grid = GRIDS[arguments.grid or "quick"] if arguments.grid or not arguments.rules else ()
        rules = list(dict.fromkeys(parse_rule(word) for word in (*grid, *arguments.rules)))
        samplings = list(dict.fromkeys(map(SamplingConfig.parse, arguments.sampling)))
        tasks = [task_named(name) for name in dict.fromkeys(arguments.tasks)]
        engine = load_engine(arguments)
        for rule in rules:
            engine.require_rule(rule)
        most = arguments.max_new_tokens
        cells = [
            Cell(asked, rule, sampling, tree, most or asked.task.max_new_tokens, arguments.seed)
            for asked in questions(arguments, tasks, engine)
            for sampling in samplings
            for rule in rules
        ]
        run(engine, cells, arguments.output, arguments.batch_size, provenance(engine.device))


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for what leaves nothing to sweep, before a model is loaded."""
    if not (arguments.tasks or arguments.prompts):
        raise ValueError("nothing to sweep: name --tasks, or files of --prompts")
    check_sizes(arguments, arguments.batch_size)
    require_integer("seed", arguments.seed, 0, "any will do")


def questions(arguments: argparse.Namespace, tasks: Sequence[Task], engine: EagleFSD) -> list[Questions]:
    """Load the samples of every task, and all prompt files as one more task."""
    limit, skip = arguments.limit, arguments.skip
    found = [Questions.load(task, engine, arguments.data, limit, skip) for task in tasks]
    if arguments.prompts:
        most = arguments.max_new_tokens or 128
        found.append(Questions.of_prompts(arguments.prompts, engine, limit, skip, most))
    return found
