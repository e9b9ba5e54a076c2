"""Show that T = 0 at temperature 0 gives the target's own greedy text, token for token, on files of prompts.

    python eval/check_greedy.py --prompts data/prompts_*.jsonl --tree 16/5/8 60/6/10 --batch-size 1 4

Exits with 1 if a text differs other than at a near tie of the target's two best logits, or more than two do.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from eagle_fsd import TreeConfig
from eagle_fsd.core.checks import one_line
from eagle_fsd.evaluation.cli import check_sizes, load_engine, parser_of
from eagle_fsd.evaluation.measure.greedy_equality import compare, reference
from eagle_fsd.evaluation.prompt_sets import prompt_sets
from eagle_fsd.files.provenance import provenance

MOST_EXCUSED = 2  # prompts whose text may part at a near tie


def main() -> None:
    parser = parser_of(__doc__, "float32")  # in half precision forwards of several rows round otherwise
    parser.add_argument("--tree", nargs="+", default=["16/5/8", "60/6/10"], help=TreeConfig.FORM)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4], help="default: %(default)s")
    parser.add_argument(
        "--reference", type=Path, help="JSON file that keeps the target's own texts between runs"
    )
    parser.add_argument(
        "--output", type=Path, help="append one JSON row per tree and batch size to this file"
    )
    arguments = parser.parse_args()

    try:
        check_sizes(arguments, *arguments.batch_size)
        trees = [TreeConfig.parse(tree) for tree in arguments.tree]
        engine = load_engine(arguments)
        sets = prompt_sets(arguments.prompts, engine.tokenizer, arguments.skip, arguments.limit)
        prompts = [ids for prompts in sets.values() for ids in prompts]
        kept = read_reference(arguments.reference)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))
    asked = {"base_model": engine.base_model, "max_new_tokens": arguments.max_new_tokens, "prompts": prompts}
    expected = kept.get("texts") if kept.get("asked") == asked else None
    if expected is None:
        expected = reference(engine, prompts, arguments.max_new_tokens)
        if arguments.reference:
            arguments.reference.write_text(json.dumps({"asked": asked, "texts": expected}))

    differing: set[int] = set()  # prompts, over all trees and batch sizes
    unexcused = False
    for tree, batch_size in product(trees, arguments.batch_size):
        differences, stats = compare(engine, prompts, expected, tree, batch_size, arguments.max_new_tokens)
        equal = len(prompts) - len(differences)
        print(
            f"tree {tree}, batch {batch_size}: {equal} of {len(prompts)} equal, tau {stats.tau:.3f}",
            flush=True,
        )
        for difference in differences:
            print(f"  {difference}, excused: {difference.excused}", flush=True)
        differing |= {difference.prompt for difference in differences}
        unexcused |= not all(difference.excused for difference in differences)
        if arguments.output:
            row = {
                "tree": str(tree),
                "batch_size": batch_size,
                "equal": equal,
                "of": len(prompts),
                **stats.to_dict(),
            }
            row |= {"differences": [vars(difference) for difference in differences]}
            row |= provenance(engine.device)
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    sys.exit(1 if unexcused or len(differing) > MOST_EXCUSED else 0)


def read_reference(path: Path | None) -> dict[str, Any]:
    """What an earlier run kept; nothing if there is none. ValueError for a file that holds something else."""
    if path is None or not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--reference {path} is not JSON ({error}): remove it to make it anew") from error
    return kept if isinstance(kept, dict) else {}


if __name__ == "__main__":
    main()
