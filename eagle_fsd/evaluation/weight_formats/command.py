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
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd.core.checks import require_choice
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.drafting.drafter import NO_HEAD
from eagle_fsd.evaluation.cli import add_prompts, check_sizes, parsed, plain_parser, say
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.prompt_sets import prompts_of, set_name
from eagle_fsd.evaluation.rows import rows_of_answers, sole_writer, tau_of
from eagle_fsd.evaluation.weight_formats.passes import (
    AS_TREES,
    AT_ONCE,
    CPU,
    DECODE,
    NODES,
    READ,
    Job,
    Question,
    Row,
    decode_prompts,
    in_own_process,
    read_answers,
)
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.files.jsonl import drop_torn_line
from eagle_fsd.files.places import require_file
from eagle_fsd.hub.choose_runtime import OPENVINO, TORCH, plan_runtime
from eagle_fsd.hub.head_digest import head_digests
from eagle_fsd.hub.kept.weights_cache import digest_file
from eagle_fsd.hub.resolve import DEFAULT_TARGET, resolve_head, resolve_target
from eagle_fsd.runtime.openvino.weight_formats import BFLOAT16, FLOAT32, FORMATS, PACKED

REFERENCE = f"{TORCH}/{FLOAT32}"
KNOWN = (REFERENCE, f"{TORCH}/{BFLOAT16}", *(f"{OPENVINO}/{name}" for name in FORMATS))
USUAL = (REFERENCE, *KNOWN[2:])
WEIGHTS = ("*.safetensors", "*.bin", "config.json")  # of a target's folder
LIMIT = 5  # prompts of a file, where none is given


TITLES = (
    *("runtime", "weights"),
    *("TV, mean (95 %)", f"TV, {NODES} a forward", "same token", f"same, {NODES} a forward"),
    *("weights MB", "resident MB", "peak MB", "tau", "as plain", "as float32"),
)
Rows = Sequence[Mapping[str, Any]]


def main(argv: Sequence[str] | None = None) -> None:
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
    with parsed(parser, argv) as arguments:
        check_sizes(arguments)
        require_file("--output", arguments.output)
        jobs = jobs_of(arguments)
        questions = questions_of(arguments.prompts, arguments.skip, arguments.limit)
        with sole_writer(arguments.output):
            drop_torn_line(arguments.output)
            reference = made(decode_prompts, DECODE, jobs[0], questions)
            pairs = zip(questions, reference, strict=True)
            answered = [replace(one, answer=tuple(row["plain"])) for one, row in pairs]
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
    names = list(dict.fromkeys((REFERENCE, *wanted)))
    for name in names:
        require_choice("format", name, KNOWN)
        plan_runtime(*name.split("/"), None, CPU, False, gguf)
    models, tree = (arguments.base_model, arguments.ea_model), str(TreeConfig.parse(arguments.tree))
    digest = digest_models(*models)  # last: it reads all weights
    how = (*models, digest, tree, arguments.max_new_tokens, arguments.output)
    return [Job(*name.split("/"), *how) for name in names]


def digest_models(base_model: str, ea_model: str | None) -> str:
    """Return a digest of the files of target and head, whatever they are called."""
    source = resolve_target(base_model)
    if source.gguf_file is not None:
        files = [source.folder / source.gguf_file]
    else:
        files = sorted(path for name in WEIGHTS for path in source.folder.glob(name))
    head = None if ea_model == NO_HEAD else head_digests(resolve_head(ea_model, source.name).file)
    return digest_json([digest_file(path) for path in files], head)


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


def format_table(formats: Mapping[str, tuple[Rows, Rows]], reference: Rows) -> str:
    """Write a line for each format from its rows of reading and decoding, all in the order of the questions.

    reference: the rows of decoding of the format that all are compared with. Of the memory the largest of
    all rows is shown. "as plain": texts of lossless decoding that equal those of the same format's plain
    decoding; "as float32": texts of plain decoding that equal the reference's.
    """
    return markdown_table(TITLES, [line(*rows, reference) for rows in formats.values()])


def line(read: Rows, decoded: Rows, reference: Rows) -> list[str]:
    spread, same = [], []
    for way in (AT_ONCE, AS_TREES):
        values = [value for row in read for value in row["tv"][way]]
        spread.append(f"{statistics.fmean(values):.2g} ({np.percentile(values, 95):.2g})")
        same.append(f"{sum(row['same'][way] for row in read) / len(values):.1%}")
    as_plain = sum(row["lossless"] == row["plain"] for row in decoded)
    as_reference = sum(a["plain"] == b["plain"] for a, b in zip(decoded, reference, strict=True))
    sizes = [max(row[name] for row in decoded) for name in ("weight_bytes", "resident", "peak")]
    return [
        *(decoded[0]["runtime"], decoded[0]["weight_format"], *spread, *same),
        *(f"{size / 1e6:.0f}" for size in sizes),
        f"{tau_of(decoded):.2f}",
        *(f"{count} of {len(decoded)}" for count in (as_plain, as_reference)),
    ]


def about(formats: Mapping[str, tuple[Rows, Rows]]) -> str:
    """Say in a line how much was measured, where, and at which commits: several where a run was resumed."""
    rows = [row for pair in formats.values() for part in pair for row in part]
    read = next(iter(formats.values()))[0]
    places = sum(len(row["tv"][AT_ONCE]) for row in read)
    libraries = max(row["libraries"] for _, decoded in formats.values() for row in decoded)
    commits = ", ".join(sorted({str(row["commit"]) for row in rows}))
    devices = ", ".join(sorted({f"{row['device']} with {row['threads']} threads" for row in rows}))
    return (
        f"{len(read)} prompts, {places} places, tree {rows[0]['tree']}; {libraries / 1e6:.0f} MB of the "
        f"memory are Python and its libraries; {devices}; commit {commits}"
    )
