"""Write fixed public text as training pairs, JSONL of prompt and completion.

Sources are Python functions, worked grade-school answers, and rows of pairs such as P3's.

    eagle-fsd train text --functions 1200 --gsm8k $EAGLE_FSD_DATA/gsm8k_train.jsonl --gsm8k-rows 1000 \\
        --output runs/text.jsonl

The functions are those of the running interpreter's standard library that have a docstring (PSF licence).
Rows that share eight words in a row with a file given as --exclude (the evaluation prompts) are left out and
counted.
"""

from __future__ import annotations

import argparse
import ast
import logging
import platform
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from eagle_fsd.core.checks import flag_of, format_value, require_integer
from eagle_fsd.evaluation.cli import plain_parser
from eagle_fsd.files.jsonl import read_jsonl, write_rows
from eagle_fsd.files.places import require_file
from eagle_fsd.training.cli import add_paths, run_command
from eagle_fsd.training.data.examples import banned_runs, overlap

logger = logging.getLogger(__name__)

REQUESTS = (
    "Complete this function.",
    "Finish the code below.",
    "Implement the following function.",
    "Write the body of this function.",
)
OPENINGS = ("Here's the completed code:\n\n", "Here is the function:\n\n", "")


def functions(most_lines: int = 40) -> Iterator[dict[str, str]]:
    """Yield the documented functions of the standard library: signature and docstring, then all of it."""
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
            if any(line[: node.col_offset].strip() for line in lines):
                continue  # a docstring of another margin
            lines = [line[node.col_offset :] for line in lines]
            head = "\n".join(lines[: (node.body[0].end_lineno or node.lineno) - node.lineno + 1])
            whole = "\n".join(lines)
            yield {
                "task": "function",
                "prompt": f"{generator.choice(REQUESTS)}\n\n{head}\n",
                "completion": f"{generator.choice(OPENINGS)}```python\n{whole}\n```",
            }


def worked_answers(path: Path) -> Iterator[dict[str, str]]:
    """Yield GSM8K rows without the calculator marks."""
    for row in rows_with(path, "question", "answer"):
        answer = re.sub(r"<<.*?>>", "", row["answer"])
        yield {
            "task": "gsm8k",
            "prompt": row["question"],
            "completion": re.sub(r"\n#### (.*)", r"\nThe answer is \1.", answer),
        }


def rows_with(path: Path, *names: str) -> list[dict[str, str]]:
    """Return a file's rows. Raises ValueError for one that lacks a text of these names."""
    rows = []
    for number, row in read_jsonl(path):
        for name in names:
            if not isinstance(row.get(name), str):
                raise ValueError(
                    f"{path}:{number}: {name} is {format_value(row.get(name))}: every row needs the texts "
                    f"{' and '.join(names)}; fix it, or remove the row"
                )
        rows.append(row)
    return rows


def sample(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    return random.Random(1).sample(rows, min(count, len(rows)))


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    parser.add_argument("--functions", type=int, default=0, help="how many standard library functions")
    parser.add_argument("--gsm8k", type=Path, help="gsm8k_train.jsonl")
    parser.add_argument("--gsm8k-rows", type=int, default=0)
    parser.add_argument(
        "--pairs", type=Path, help="a JSONL file of prompt and completion, such as p3_text.jsonl"
    )
    parser.add_argument("--pairs-rows", type=int, default=0)
    add_paths(parser, "--exclude", "evaluation files that no row may overlap")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    check(args)
    banned = banned_runs(args.exclude)
    gsm8k = list(worked_answers(args.gsm8k)) if args.gsm8k else []
    pairs = rows_with(args.pairs, "prompt", "completion") if args.pairs else []
    own = list(functions()) if args.functions else []  # after the files, since it takes longest
    sources = [(own, args.functions), (gsm8k, args.gsm8k_rows), (pairs, args.pairs_rows)]
    rows = [row for source, count in sources for row in sample(source, count)]
    # A short prompt is a run of its own, which its text with the completion does not show.
    kept = [
        row
        for row in rows
        if not (overlap(row["prompt"], banned) or overlap(f"{row['prompt']} {row['completion']}", banned))
    ]
    if not kept:
        raise ValueError(
            f"no row is left: of {len(rows)} each shares eight words in a row with a file of --exclude; give "
            "other sources"
        )
    random.Random(2).shuffle(kept)
    write_rows(args.output, kept)
    report = f"{args.output}: {len(kept)} rows, {len(rows) - len(kept)} left out for overlap"
    if args.functions:
        report += f"; functions of Python {platform.python_version()}"  # other versions differ
    logger.info(report)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for mistakes that need no file to be read."""
    for name in ("functions", "gsm8k_rows", "pairs_rows"):
        require_integer(name, getattr(args, name), 0, f"change {flag_of(name)}")
    for name in ("gsm8k", "pairs"):
        path, count = getattr(args, name), getattr(args, f"{name}_rows")
        if (path is None) != (count == 0):
            raise ValueError(
                f"{name} is {path} and {name}_rows {count}: a file and how many of its rows "
                f"go together; give both --{name} and --{name}-rows, or neither"
            )
    if not (args.functions or args.gsm8k or args.pairs):
        raise ValueError("no source: give --functions, --gsm8k or --pairs")
    require_file("--output", args.output)
