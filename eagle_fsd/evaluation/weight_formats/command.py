"""How far each weight format is from float32, what memory it takes, and tau: JSONL of rows, and a table.

    python eval/weight_formats.py --prompts data/prompts_*.jsonl --output runs/weight_formats.jsonl

The reference is the target in float32 on torch. Its own greedy answers are read, teacher-forced, by every
format: all at once, and eight tokens a forward as a small tree has. TV is the total variation of the
next-token distributions at temperature 1, by place; "same token" the share of places with the same likeliest
one. Every format decodes the prompts greedily too, plainly and losslessly with the head, in a process of its
own, whose memory is shown. A run that was stopped goes on at the first missing row. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from eagle_fsd.core.checks import require_choice
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.evaluation.cli import add_prompts, check_sizes, mistakes_on_one_line, plain_parser, say
from eagle_fsd.evaluation.prompt_sets import prompts_of, set_name
from eagle_fsd.evaluation.rows import rows_of_answers
from eagle_fsd.evaluation.weight_formats.passes import (
    CPU,
    DECODE,
    READ,
    Job,
    Question,
    Row,
    decode_prompts,
    read_answers,
)
from eagle_fsd.evaluation.weight_formats.process import in_own_process
from eagle_fsd.evaluation.weight_formats.table import about, format_table
from eagle_fsd.files.jsonl import drop_torn_line
from eagle_fsd.hub.choose_runtime import OPENVINO, TORCH, plan_runtime
from eagle_fsd.hub.resolve import DEFAULT_TARGET, resolve_target
from eagle_fsd.runtime.openvino.weight_formats import BFLOAT16, FLOAT32, FORMATS, PACKED

REFERENCE = f"{TORCH}/{FLOAT32}"
KNOWN = (REFERENCE, f"{TORCH}/{BFLOAT16}", *(f"{OPENVINO}/{name}" for name in FORMATS))
USUAL = (REFERENCE, *KNOWN[2:])
LIMIT = 5  # prompts of a file, where none is given


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add = parser.add_argument
    add("--base-model", default=DEFAULT_TARGET, help="target: Hub id, folder or .gguf file")
    add("--ea-model", help="draft head: Hub id or folder (default: the shipped one)")
    add_prompts(parser)
    parser.set_defaults(limit=LIMIT)
    add("--output", type=Path, required=True, help="JSONL of rows; a later run resumes from it")
    names = f"of {' '.join(KNOWN)}; default: all but torch/bfloat16, packed only of a .gguf file"
    add("--formats", nargs="+", metavar="RUNTIME/FORMAT", help=names)
    tree = TreeConfig()
    add("--tree", default=str(tree), help=f"{TreeConfig.FORM} of lossless decoding; default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    with mistakes_on_one_line(parser):
        check_sizes(arguments)
        jobs = jobs_of(arguments)
        questions = questions_of(arguments.prompts, arguments.skip, arguments.limit)
        drop_torn_line(arguments.output)
        reference = made(decode_prompts, DECODE, jobs[0], questions)
        answered = [
            replace(one, answer=tuple(row["plain"])) for one, row in zip(questions, reference, strict=True)
        ]
        found = {}
        for job in jobs:
            read = made(read_answers, READ, job, answered)
            found[job.name] = read, made(decode_prompts, DECODE, job, questions)
    say(f"{format_table(found, reference)}\n\n{about(found)}")


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """Return a job for the reference and each format. Raises ValueError for what cannot be had."""
    source = resolve_target(arguments.base_model, weights=False)
    gguf = source.gguf_file is not None
    wanted = arguments.formats or [name for name in USUAL if gguf or not name.endswith(PACKED)]
    jobs = []
    for name in dict.fromkeys((REFERENCE, *wanted)):
        require_choice("format", name, KNOWN)
        runtime, weight_format = name.split("/")
        plan_runtime(runtime, weight_format, None, CPU, False, gguf)
        job = Job(
            runtime=runtime,
            weight_format=weight_format,
            base_model=arguments.base_model,
            ea_model=arguments.ea_model,
            tree=str(TreeConfig.parse(arguments.tree)),
            max_new_tokens=arguments.max_new_tokens,
            output=arguments.output,
        )
        jobs.append(job)
    return jobs


def questions_of(paths: Iterable[Path], skip: int, limit: int | None) -> list[Question]:
    """Return the prompts of all files."""
    return [
        Question(f"{set_name(path)}/{number}", text)
        for path in paths
        for number, text in enumerate(prompts_of(path, skip, limit), skip)
    ]


def made(
    work: Callable[[Job, Sequence[Question]], None], measure: str, job: Job, questions: Sequence[Question]
) -> list[Row]:
    """Let a process make the rows that are missing, and return those of all questions in order."""
    keys = [(job.key(measure, one), one.sample, 0) for one in questions]
    rows = rows_of_answers(job.output)
    missing = [one for one, key in zip(questions, keys, strict=True) if key not in rows]
    if missing:
        in_own_process(work, job, missing)
        rows = rows_of_answers(job.output)
    return [rows[key] for key in keys]
