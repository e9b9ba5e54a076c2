"""Compute the target's features of training text once, into shards for `eagle-fsd train head --shards`.

    eagle-fsd train features --data runs/answers.jsonl --output runs/features
    eagle-fsd train head --shards runs/features/answers --output runs/head

Says how much disk and time it needs before it starts. Every file gets a folder of its own under --output. A
run that was stopped continues at the first missing shard. --eagle3 stores the target's taps too: with three
of them the shards are four times as large. They serve EAGLE-1/2 heads as well. Several processes divide the
shards:

    accelerate launch -m eagle_fsd.training.commands.features --data runs/answers.jsonl --output runs/features
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState

from eagle_fsd import hub
from eagle_fsd.core.checks import require_integer
from eagle_fsd.evaluation.cli import plain_parser
from eagle_fsd.files.places import require_folder
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.cli import (
    add_compute_arguments,
    add_text_arguments,
    check_text,
    read_examples,
    run_command,
    settle_dtypes,
    uses_no_gpu,
)
from eagle_fsd.training.data.features import Extraction
from eagle_fsd.training.eagle3.new_head import choose_taps
from eagle_fsd.training.eagle3.options import add_eagle3, taps_need_eagle3

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add_text_arguments(parser)
    add_compute_arguments(parser)
    add_eagle3(parser, "store what EAGLE-3 heads read too, the taps")
    parser.add_argument("--output", type=Path, required=True, help="folder that gets a folder for every file")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=2048,
        help="tokens that the target reads at once; default: %(default)s",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say how much disk and time it needs")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    settle_dtypes(args)
    check_text(args)
    taps_need_eagle3(args)
    require_integer("batch_tokens", args.batch_tokens, 1, "change --batch-tokens")
    require_folder("--output", args.output)
    state = PartialState(cpu=uses_no_gpu(args))
    source = hub.resolve_target(args.base_model)
    model, tokenizer = hub.load_target(source, args.extract_dtype, state.device)
    pack_linears(model)
    target = TargetModel(model)
    identity = target.identity(source.name)
    read = read_examples(args, tokenizer, source.name, target.max_positions)
    files = {args.output / name: examples for name, examples in read.items()}
    taps = choose_taps(target, args.taps) if args.eagle3 else ()
    extraction = Extraction(target.decoder, identity, target.dtype, taps, args.batch_tokens)
    if state.is_main_process:
        logger.info("features: %s", extraction.estimate(files))
    if not args.dry_run:
        extraction.write(files, (state.process_index, state.num_processes))


if __name__ == "__main__":
    main()
