"""Let the target answer prompts, into JSONL of conversations for `eagle-fsd train head --data`.

    eagle-fsd train synthesize --prompts prompts.jsonl --temperature 0 0.7 --output runs/answers.jsonl
    eagle-fsd train synthesize --dataset owner/name --limit 5000 --output runs/answers.jsonl
    eagle-fsd train synthesize --dataset openai/gsm8k --dataset-config main --output runs/answers.jsonl
    eagle-fsd train synthesize --self-prompts 2000 --output runs/answers.jsonl

Rows may be ShareGPT `conversations`, chat `messages` or a `prompt` of messages (the user's first turn
counts), Alpaca's `instruction` with its `input`, or a plain `prompt`, `question` or `turns`. A target without
a chat template continues its prompts as they are. The same command continues a run that was stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd import hub
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.devices import resolve_device
from eagle_fsd.evaluation.cli import plain_parser
from eagle_fsd.files.atomic import sole, write_atomically
from eagle_fsd.files.jsonl import read_jsonl
from eagle_fsd.files.places import require_file
from eagle_fsd.files.provenance import provenance
from eagle_fsd.hub.choose_runtime import OPENVINO, TORCH, plan_runtime
from eagle_fsd.hub.loading.target import compile_target
from eagle_fsd.runtime.cuda_graphs import usual_stepper
from eagle_fsd.runtime.openvino.weight_formats import FORMATS
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.cli import add_paths, add_target, run_command
from eagle_fsd.training.data.conversations import (
    Plan,
    answer_prompts,
    self_prompts,
)
from eagle_fsd.training.data.prompts import gather_prompts, usable_prompts, without_overlap

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add_target(parser)
    add_paths(parser, "--prompts", "JSONL files, or text files of one prompt")
    parser.add_argument(
        "--dataset", help="a data set of the Hub, or a folder of one (needs the package datasets)"
    )
    parser.add_argument(
        "--dataset-config",
        metavar="NAME",
        help="of --dataset, for one that has several: main of openai/gsm8k (default: the data set's own)",
    )
    parser.add_argument("--split", metavar="NAME", help="of --dataset (default: train)")
    parser.add_argument("--limit", type=int, help="at most LIMIT prompts of every file and data set")
    parser.add_argument(
        "--self-prompts",
        type=int,
        default=0,
        metavar="N",
        help="also N prompts that the target writes itself, in its chat template's user turn",
    )
    add_paths(
        parser,
        "--exclude",
        "prompt files (evaluation sets): a prompt that shares eight words in a row with one is left out",
    )
    parser.add_argument("--system", help="system message of every conversation (default: the template's)")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file, one row per answered prompt")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=512, help="longer ones are left out; default: %(default)s"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0],
        help="prompts use these in turn, so that several make a mixture; 0 is greedy; default: 0",
    )
    parser.add_argument("--top-k", type=int, default=50, help="where temperature > 0; default: %(default)s")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="where temperature > 0; default: %(default)s"
    )
    parser.add_argument(
        "--rows", type=int, default=64, help="prompts answered together; default: %(default)s"
    )
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on CUDA")
    parser.add_argument(
        "--weight-format",
        choices=FORMATS,
        help="write with OpenVINO, on a CPU, with weights kept like this; int8 is fastest for many rows, "
        "and its text is that of the rounded target (default: torch, in --dtype)",
    )
    parser.add_argument("--device", help="default: CUDA where there is one, else the CPU")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    require_file("--output", args.output)
    lock = beside(args.output.with_name(f".{args.output.name}"), ".lock")
    with sole(lock, args.output, "write each row twice"):
        write(args)


def write(args: argparse.Namespace) -> None:
    """Write the prompts and the answers, as far as they are not there yet."""
    require_integer("self_prompts", args.self_prompts, 0, "change --self-prompts")
    plan = Plan(
        base_model=args.base_model,
        samplings=tuple(
            SamplingConfig(heat, args.top_k, args.top_p) if heat else SamplingConfig()
            for heat in args.temperature
        ),
        max_new_tokens=args.max_new_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        rows=args.rows,
        seed=args.seed,
        system=args.system,
    )
    read = gather_prompts(args.prompts, args.dataset, args.split, args.limit, args.dataset_config)
    given = usable_prompts(read)
    if not given and args.self_prompts < 1:
        files = f" in {', '.join(map(str, args.prompts))}" if args.prompts else ""
        raise ValueError(f"no prompts{files}: give --prompts, --dataset or --self-prompts")
    prompts = without_overlap(given, args.exclude)  # now: a mistake in these files is found before a model is
    if args.self_prompts < 1:
        require_prompts(prompts)
    own = beside(args.output, ".prompts.jsonl")
    refuse_more_prompts(args, own)
    source = hub.resolve_target(args.base_model)
    runtime = TORCH if args.weight_format is None else OPENVINO
    place, gguf = resolve_device(args.device), source.gguf_file is not None
    computed = plan_runtime(runtime, args.weight_format, args.dtype, place, movable=False, gguf=gguf)
    model, tokenizer = hub.load_target(source, dtype=computed.dtype, device=place)
    if tokenizer is None:
        raise ValueError(f"target {source.name!r} has no tokenizer: name a folder or Hub id that holds one")
    if runtime == OPENVINO:
        target = compile_target(model, source, computed.weight_format)
    else:
        pack_linears(model)
        target = TargetModel(model, usual_stepper(model.device))
    written = self_prompts(target, tokenizer, args.self_prompts, plan, own)
    if left_out := args.self_prompts - len(written):
        logger.info(
            "%d of the target's %d prompts did not end, are short or come twice: they are left out",
            left_out,
            args.self_prompts,
        )
    prompts += without_overlap(written, args.exclude)
    require_prompts(prompts)
    rows = answer_prompts(target, tokenizer, prompts, plan, args.output)
    record = provenance(target.device) | {"base_model": source.name, "rows": len(rows)}
    write_atomically(beside(args.output, ".provenance.json"), json.dumps(record, indent=1) + "\n")
    complete = sum(row["complete"] for row in rows)
    usable = len(given) + len(written)
    left_out_for = {
        "blank, broken or repeated": len(read) + args.self_prompts - usable,
        "for --exclude": usable - len(prompts),
        "too long or with an empty answer": len(prompts) - len(rows),
    }
    logger.info(
        "%s: %d conversations of %d prompts, %d of them ended by the target%s",
        args.output,
        len(rows),
        len(read) + args.self_prompts,
        complete,
        "".join(f"; {count} left out ({why})" for why, count in left_out_for.items() if count),
    )


def beside(path: Path, ending: str) -> Path:
    """Return the path of a file that goes with a file of rows."""
    return path.with_name(path.name.removesuffix(".jsonl") + ending)


def refuse_more_prompts(args: argparse.Namespace, own: Path) -> None:
    """Raise ValueError if the target would write more prompts for a file of answers to those that it has.

    The file is of its prompts, and would be refused when they are written.
    """
    if args.output.is_file() and own.is_file():
        have = sum(1 for _ in read_jsonl(own, torn=True))
        if have < args.self_prompts:
            raise ValueError(
                f"self_prompts is {args.self_prompts}: {args.output} was begun with {have}, and answers to "
                "other prompts do not go into it; name another --output, or remove it"
            )


def require_prompts(prompts: Sequence[str]) -> None:
    """Raise ValueError if no prompt is left to answer."""
    if not prompts:
        raise ValueError(
            "no prompt is left to answer: each shares eight words in a row with a file of --exclude, or is "
            "one of the target's own that did not end; give other --prompts, or more --self-prompts"
        )
