"""Write fixed public text as training pairs (JSONL of prompt and completion): Python functions, worked
grade-school answers, P3 rows.

python train/make_text.py --functions 1200 --gsm8k $EAGLE_FSD_DATA/gsm8k_train.jsonl --gsm8k-rows 1000
--output runs/text.jsonl

The functions are those of the running interpreter's standard library that have a docstring (PSF licence).
Rows that share a run of eight words with a file given as --exclude (the evaluation prompts) are left out and
counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from eagle_fsd.training.data import read_jsonl

REQUESTS = (
    "Complete this function.",
    "Finish the code below.",
    "Implement the following function.",
    "Write the body of this function.",
)
OPENINGS = ("Here's the completed code:\n\n", "Here is the function:\n\n", "")
RUN = 8


def functions(most_lines: int = 40) -> Iterator[dict[str, str]]:
    """Each documented function of the standard library: signature and docstring as the prompt, the whole of
    it as the completion.
    """
    generator = random.Random(0)
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.relative_to(root).parts):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
                continue
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            if len(lines) > most_lines:
                continue
            lines = [line[node.col_offset :] for line in lines]
            head = "\n".join(lines[: (node.body[0].end_lineno or node.lineno) - node.lineno + 1])
            whole = "\n".join(lines)
            yield {
                "task": "function",
                "prompt": f"{generator.choice(REQUESTS)}\n\n{head}\n",
                "completion": f"{generator.choice(OPENINGS)}```python\n{whole}\n```",
            }


def worked_answers(path: Path) -> Iterator[dict[str, str]]:
    """GSM8K rows without the calculator marks."""
    for _, row in read_jsonl(path):
        answer = re.sub(r"<<.*?>>", "", row["answer"])
        yield {
            "task": "gsm8k",
            "prompt": row["question"],
            "completion": re.sub(r"\n#### (.*)", r"\nThe answer is \1.", answer),
        }


def word_runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}


def excluded_runs(paths: list[Path]) -> set[tuple[str, ...]]:
    runs: set[tuple[str, ...]] = set()
    for path in paths:
        for _, row in read_jsonl(path):
            for text in [row.get("question"), row.get("prompt"), *row.get("turns", [])]:
                runs |= word_runs(text or "")
    return runs


def sample(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    return random.Random(1).sample(rows, min(count, len(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", type=int, default=0, help="how many standard library functions")
    parser.add_argument("--gsm8k", type=Path, help="gsm8k_train.jsonl")
    parser.add_argument("--gsm8k-rows", type=int, default=0)
    parser.add_argument(
        "--pairs", type=Path, help="a JSONL file of prompt and completion, such as p3_text.jsonl"
    )
    parser.add_argument("--pairs-rows", type=int, default=0)
    parser.add_argument(
        "--exclude", type=Path, nargs="*", default=[], help="evaluation files that no row may overlap"
    )
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    banned = excluded_runs(args.exclude)
    sources = [(list(functions()) if args.functions else [], args.functions)]
    if args.gsm8k:
        sources.append((list(worked_answers(args.gsm8k)), args.gsm8k_rows))
    if args.pairs:
        sources.append(([row for _, row in read_jsonl(args.pairs)], args.pairs_rows))
    rows = [row for source, count in sources for row in sample(source, count)]
    kept = [row for row in rows if not word_runs(row["prompt"] + " " + row["completion"]) & banned]
    random.Random(2).shuffle(kept)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    parser.exit(0, f"{args.output}: {len(kept)} rows, {len(rows) - len(kept)} left out for overlap\n")


if __name__ == "__main__":
    main()
