"""Sweep acceptance rules over tasks, samplings and thresholds: raw rows to a JSONL file, for eval/report.py.

    python eval/sweep.py --tasks ifeval --data data --grid quick --limit 8 --output runs/quick.jsonl
    python eval/report.py --rows runs/quick.jsonl --output runs/quick

Every row keeps the answer's text, so that it can be scored again without a model (eval/score.py). A sweep
that was stopped goes on at the first missing row; one that asks for more rules or samples adds them. With
--refine a cheap pass over all rules is followed by a longer one over those that may be on the frontier.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from eagle_fsd import SamplingConfig, TreeConfig
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.checks import one_line, require_integer
from eagle_fsd.evaluation.cli import load_engine, model_parser
from eagle_fsd.evaluation.grids import GRIDS
from eagle_fsd.evaluation.measure.refine import refined
from eagle_fsd.evaluation.measure.sweep import Cell, Questions, run
from eagle_fsd.evaluation.prompt_sets import require_own_names
from eagle_fsd.evaluation.tasks import TASKS, task_named
from eagle_fsd.files.provenance import provenance

logger = logging.getLogger("sweep")


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = model_parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", default=[], metavar="TASK", help=", ".join(TASKS))
    add(
        "--prompts",
        nargs="+",
        default=[],
        type=Path,
        metavar="FILE",
        help="files of prompts, a task without a score",
    )
    add("--data", type=Path, help="folder of the tasks' files (default: $EAGLE_FSD_DATA, else the Hub)")
    add("--limit", type=int, help="at most LIMIT samples of every task or file")
    add("--skip", type=int, default=0, help="leave out the first SKIP samples of every task or file")
    add(
        "--refine",
        type=int,
        metavar="N",
        help="after LIMIT samples of every rule, N of those that are near the frontier",
    )
    add(
        "--grid",
        choices=GRIDS,
        help="a list of rules: quick (19), frontier (63), variants (with a head that has a list of frequent "
        "tokens only beside --full-vocabulary); default: quick, where --rules names none",
    )
    add(
        "--rules",
        nargs="+",
        default=[],
        metavar="RULE",
        help="js:0.3:paper:likeliest, cactus:0.1, lossless ...",
    )
    add(
        "--sampling",
        nargs="+",
        default=["0.6/50/0.9"],
        metavar="T[/TOP_K[/TOP_P]]",
        help="temperature, top-k (0: off) and top-p (1: off); default: %(default)s",
    )
    add("--tree", default="16/5/8", help=f"{TreeConfig.FORM}; default: %(default)s")
    add("--max-new-tokens", type=int, help="default: the task's own; 128 for --prompts")
    add("--batch-size", type=int, default=1, help="answers at a time; speeds are of that batch; default: 1")
    add("--seed", type=int, default=0, help="sample i draws from SEED + i under every rule; default: 0")
    add("--output", type=Path, required=True, help="JSONL of rows; a later run resumes from it")
    return parser, parser.parse_args()


def main() -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    parser, arguments = parse()
    try:
        if not (arguments.tasks or arguments.prompts):
            raise ValueError("nothing to sweep: name --tasks, or files of --prompts")
        for name in ("limit", "refine", "max_new_tokens"):
            if getattr(arguments, name) is not None:
                require_integer(name, getattr(arguments, name), 1, "leave it out for all")
        require_integer("batch_size", arguments.batch_size, 1, "1 answers every sample alone")
        require_integer("seed", arguments.seed, 0, "any will do")
        require_integer("skip", arguments.skip, 0, "0 begins with the first sample")
        require_own_names(arguments.prompts)
        tree = TreeConfig.parse(arguments.tree)
        grid = GRIDS[arguments.grid or "quick"] if arguments.grid or not arguments.rules else ()
        rules = list(dict.fromkeys(parse_rule(word) for word in (*grid, *arguments.rules)))
        samplings = list(dict.fromkeys(map(SamplingConfig.parse, arguments.sampling)))
        tasks = [task_named(name) for name in dict.fromkeys(arguments.tasks)]
        engine = load_engine(arguments)
        for rule in rules:
            engine.require_rule(rule)

        def cells(limit: int | None) -> list[Cell]:
            most = arguments.max_new_tokens
            questions = [
                Questions.load(task, engine, arguments.data, limit, arguments.skip) for task in tasks
            ]
            if arguments.prompts:
                sets = [
                    Questions.of_prompts(path, engine, limit, arguments.skip, most or 128)
                    for path in arguments.prompts
                ]
                questions.append(Questions.together(sets))
            return [
                Cell(one, rule, sampling, tree, most or one.task.max_new_tokens, arguments.seed)
                for one in questions
                for sampling in samplings
                for rule in rules
            ]

        asked, made = cells(arguments.limit), provenance(engine.device)
        run(engine, asked, arguments.output, arguments.batch_size, made)
        if arguments.refine is not None:
            near = refined(engine, asked, arguments.output)
            # Both lists go through the same questions, samplings and rules, in this order.
            more = [cell for old, cell in zip(asked, cells(arguments.refine), strict=True) if old in near]
            logger.info("%d of %d cells are near the frontier: more samples of these", len(more), len(asked))
            run(engine, more, arguments.output, arguments.batch_size, made)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))


if __name__ == "__main__":
    main()
