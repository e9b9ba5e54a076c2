"""Show that T = 0 at temperature 0 gives the target's own greedy text, token for token, on files of prompts.

    python eval/check_greedy.py --prompts data/prompts_*.jsonl --tree 16/5/8 60/6/10 --batch-size 1 4

Exits with 1 if a text differs other than at a near tie of the target's two best logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.evaluation.greedy import compare, reference
from eagle_fsd.evaluation.prompts import chat_prompts
from eagle_fsd.provenance import provenance


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-model", default="smollm2-135m", help="target: Hub id, folder or .gguf file")
    parser.add_argument("--ea-model", help="draft head: Hub id or folder (default: the shipped one)")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", required=True, help="JSONL files with `turns` or `prompt`"
    )
    parser.add_argument("--limit", type=int, help="only the first LIMIT prompts of every file")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--tree", nargs="+", default=["16/5/8", "60/6/10"], help="total_tokens/depth/top_k")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4], help="default: %(default)s")
    parser.add_argument(
        "--reference", type=Path, help="JSON file that keeps the target's own texts between runs"
    )
    parser.add_argument(
        "--output", type=Path, help="append one JSON row per tree and batch size to this file"
    )
    arguments = parser.parse_args()

    try:
        trees = [TreeConfig.parse(tree) for tree in arguments.tree]
        engine = EagleFSD.from_pretrained(arguments.base_model, arguments.ea_model, dtype="float32")
        prompts = [
            ids for path in arguments.prompts for ids in chat_prompts(path, engine.tokenizer, arguments.limit)
        ]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    asked = {"base_model": engine.base_model, "max_new_tokens": arguments.max_new_tokens, "prompts": prompts}
    kept = (
        json.loads(arguments.reference.read_text())
        if arguments.reference and arguments.reference.exists()
        else {}
    )
    expected = kept.get("texts") if kept.get("asked") == asked else None
    if expected is None:
        expected = reference(engine, prompts, arguments.max_new_tokens)
        if arguments.reference:
            arguments.reference.write_text(json.dumps({"asked": asked, "texts": expected}))

    failed = False
    for tree, batch_size in product(trees, arguments.batch_size):
        differences, stats = compare(engine, prompts, expected, tree, batch_size, arguments.max_new_tokens)
        equal = len(prompts) - len(differences)
        print(
            f"tree {tree}, batch {batch_size}: {equal} of {len(prompts)} equal, tau {stats.tau:.3f}",
            flush=True,
        )
        for difference in differences:
            print(f"  {difference}, excused: {difference.excused}", flush=True)
        failed |= sum(not difference.excused for difference in differences) > 0 or len(differences) > 2
        if arguments.output:
            row = {
                "tree": str(tree),
                "batch_size": batch_size,
                "equal": equal,
                "of": len(prompts),
                **stats.to_dict(),
            }
            row |= {"differences": [vars(difference) for difference in differences], **provenance()}
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
