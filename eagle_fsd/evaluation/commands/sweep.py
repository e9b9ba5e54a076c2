"""Sweep acceptance rules over tasks, samplings and thresholds: raw rows to a JSONL file, for eval/report.py.

    python eval/sweep.py --tasks ifeval --data data --grid quick --limit 8 --output runs/quick.jsonl
    python eval/report.py --rows runs/quick.jsonl --output runs/quick

Every row keeps the answer's text, so that it can be scored again without a model (eval/score.py). A sweep
that was stopped goes on at the first missing row; one that asks for more rules or samples adds them. With
--same-trees a frontier of tens of rules takes minutes, without texts of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import HYBRID, PAPER, SamplingConfig, TreeConfig
from eagle_fsd.evaluation.cli import check_sizes, load_engine, model_parser, parsed
from eagle_fsd.evaluation.measure.observers import StepMeter
from eagle_fsd.evaluation.measure.sweep import Cell, Questions, run
from eagle_fsd.evaluation.tasks import TASKS, task_named
from eagle_fsd.files.places import require_file
from eagle_fsd.files.provenance import provenance

JS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6)
REVERSE_KL = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 3.0)
UNPLANNED = (HYBRID, PAPER)  # modes that need no price
OTHERS = (
    *("typical:0.6:0.6", "typical:0.4:0.3", "typical:0.3:0.09", "typical:0.2:0.05", "typical:0.1:0.02"),
    *("relaxed_topk:2:0.05", "relaxed_topk:2:0.2", "relaxed_topk:3:0.4", "relaxed_topk:5:0.6"),
    "relaxed_topk:10:0.9",
    *("cactus:0.003", "cactus:0.01", "cactus:0.03", "cactus:0.1", "cactus:0.5"),
    *("ensemble:0.95", "ensemble:0.9", "ensemble:0.8", "ensemble:0.6", "ensemble:0.3"),
    *("fly:0.3:3", "fly:0.3:2", "fly:0.3:1", "fly:0.6:1", "fly:0:1"),
    *("sglang:1:0.9", "sglang:1:0.7", "sglang:0.5:1", "sglang:0.3:1", "sglang:0.1:1"),
)
AHEAD = tuple(f"js:{t}:min_gain=0.7" for t in (0.15, 0.2, 0.3, 0.45, 0.6))
PLANNED = (
    *(f"js:inf:swap:price={price}" for price in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)),
    *(f"js:inf:price={price}" for price in (1.0, 1.5, 2.0, 2.5)),
    *(f"js:inf:price={price}:cost=kl" for price in (0.5, 0.75, 1.0)),
)

# Which rules a sweep runs, lossless first, each as `parse_rule` reads it.
GRIDS: dict[str, tuple[str, ...]] = {
    # FSD's two thresholds in both modes, and where it looks ahead, against every other rule.
    "frontier": (
        "lossless",
        *(f"js:{t}:{mode}" for mode, t in product(UNPLANNED, JS)),
        *(f"reverse_kl:{t}:{mode}" for mode, t in product(UNPLANNED, REVERSE_KL)),
        *AHEAD,
        *PLANNED,
        *OTHERS,
    ),
    # The plan against every other rule; with --same-trees a matter of minutes.
    "planned": ("lossless", *(f"js:{t}" for t in JS), *AHEAD, *PLANNED, *OTHERS),
    # Minutes, not hours: a few of each.
    "quick": (
        *("lossless", "js:0.1", "js:0.3", "js:0.6", "js:0.6:paper", "reverse_kl:0.4", "reverse_kl:1.5"),
        *(f"js:{t}:{mode}:target" for mode, t in product(UNPLANNED, (0.1, 0.3, 0.6))),
        *("js:0.3:min_gain=0.7", "js:0.6:min_gain=0.7"),
        *("typical:0.3:0.09", "relaxed_topk:3:0.4", "cactus:0.1", "ensemble:0.8"),
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = model_parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", default=[], metavar="TASK", help=", ".join(TASKS))
    files = "files of prompts, a task without a score"
    add("--prompts", nargs="+", default=[], type=Path, metavar="FILE", help=files)
    add("--data", type=Path, help="folder of the tasks' files (default: $EAGLE_FSD_DATA, else the Hub)")
    add("--limit", type=int, help="at most LIMIT samples of every task or file")
    add("--skip", type=int, default=0, help="leave out the first SKIP samples of every task or file")
    sizes = ", ".join(f"{name} ({len(rules)})" for name, rules in GRIDS.items())
    add("--grid", choices=GRIDS, help=f"a list of rules: {sizes}; default: quick, where --rules names none")
    words = "js:0.3:paper:likeliest, cactus:0.1, lossless ..."
    add("--rules", nargs="+", default=[], metavar="RULE", help=words)
    how, form = "temperature, top-k (0: off) and top-p (1: off); default: %(default)s", "T[/TOP_K[/TOP_P]]"
    add("--sampling", nargs="+", default=["0.6/50/0.9"], metavar=form, help=how)
    add("--tree", default="16/5/8", help=f"{TreeConfig.FORM}; default: %(default)s")
    add("--max-new-tokens", type=int, help="default: the task's own; 128 for --prompts")
    add("--batch-size", type=int, default=1, help="answers at a time; speeds are of that batch; default: 1")
    same = "one lossless answer of each prompt, and what every rule is expected to do with its trees"
    add("--same-trees", action="store_true", help=f"{same}; eval/exchange.py reads such rows")
    add("--seed", type=int, default=0, help="sample i draws from SEED + i under every rule; default: 0")
    add("--output", type=Path, required=True, help="JSONL of rows; a later run resumes from it")
    with parsed(parser, argv) as arguments:
        if not (arguments.tasks or arguments.prompts):
            raise ValueError("nothing to sweep: name --tasks, or files of --prompts")
        check_sizes(arguments, arguments.batch_size)
        require_file("--output", arguments.output)
        require_integer("seed", arguments.seed, 0, "any will do")
        tree = TreeConfig.parse(arguments.tree)
        grid = GRIDS[arguments.grid or "quick"] if arguments.grid or not arguments.rules else ()
        rules = list(dict.fromkeys(parse_rule(word) for word in (*grid, *arguments.rules)))
        samplings = list(dict.fromkeys(map(SamplingConfig.parse, arguments.sampling)))
        tasks = [task_named(name) for name in dict.fromkeys(arguments.tasks)]
        engine = load_engine(arguments)
        for rule in rules:
            engine.settler.require_rule(rule)
        most, limit, skip = arguments.max_new_tokens, arguments.limit, arguments.skip
        asked = [Questions.load(task, engine, arguments.data, limit, skip) for task in tasks]
        if arguments.prompts:  # all files are one more task
            asked.append(Questions.of_prompts(arguments.prompts, engine, limit, skip, most or 128))
        expected: list[AcceptanceRule] = []
        if arguments.same_trees:
            expected = list(dict.fromkeys((Lossless(), *rules)))
            StepMeter(expected, 0)  # refuses what it cannot compute
            rules = [Lossless(share_noise=False)]  # what is computed takes draws and trees as independent
        cells = [
            Cell(one, rule, sampling, tree, most or one.task.max_new_tokens, arguments.seed)
            for one, sampling, rule in product(asked, samplings, rules)
        ]
        origin = provenance(engine.device)
        run(engine, cells, arguments.output, arguments.batch_size, origin, expected)
