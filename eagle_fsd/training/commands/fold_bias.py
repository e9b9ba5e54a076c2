"""Fold the bias of a draft head's `fc` into its weights, so that engines without such a bias read the head.

    eagle-fsd train fold-bias --ea-model runs/head/export --shards runs/features/answers --output runs/folded

vLLM's `fc` has no bias and ignores the one in a file. Features come out of the target's final norm, so one
direction in them is nearly constant: along it, fc.weight can do what the bias did. How nearly is measured on
the shards' features and on the head's own predictions. Prints the share that is kept, and the head's held-out
accuracy before and after.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd import hub
from eagle_fsd.core.checks import require_integer
from eagle_fsd.evaluation.cli import plain_parser, say
from eagle_fsd.files.places import require_new_folder
from eagle_fsd.hub.head_checkpoint import extra_fields, stored_dtype
from eagle_fsd.hub.head_digest import WEIGHTS, head_digests
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.batching import require_held_out, split_held_out
from eagle_fsd.training.cli import (
    add_extract_dtype,
    add_head,
    add_shards,
    add_target,
    run_command,
    settle_dtypes,
)
from eagle_fsd.training.data.shards import StoredFeatures, shard_counts
from eagle_fsd.training.folding import fold_bias, input_moments
from eagle_fsd.training.held_out import evaluate, hold_out
from eagle_fsd.training.readout import Readout
from eagle_fsd.training.run.exports import FOLDED_FROM


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add_head(parser)
    add_target(parser)
    add_shards(parser)
    add_extract_dtype(parser, "the dtype that the shards were extracted in")
    parser.set_defaults(cpu=True)  # where the head and the shards are
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        help="drafting steps; all but the first read the head's predictions; default: %(default)s",
    )
    parser.add_argument(
        "--held-out", type=int, default=48, help="sequences to measure on; default: %(default)s"
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder that does not exist yet")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    settle_dtypes(args)
    require_integer("steps", args.steps, 2, "change --steps")
    if not args.shards:
        raise ValueError("no features: give --shards, folders of `eagle-fsd train features`")
    counts = shard_counts(args.shards)
    require_held_out(sum(counts), args.held_out, counts[0])
    require_new_folder("--output", args.output)
    source = hub.resolve_target(args.base_model)
    model, _ = hub.load_target(source, args.extract_dtype, "cpu")
    target = TargetModel(model)
    found = hub.resolve_head(args.ea_model, source.name)
    head = hub.load_head(found, target.hidden_size, target.vocab_size)
    if head.fc.bias is None:
        raise ValueError(
            f"draft head {found.name!r} has no fc.bias: there is nothing to fold; use it as it is"
        )
    data = StoredFeatures(args.shards, target.identity(source.name))
    rest, held = split_held_out(len(data.tokens), args.held_out, 0, counts[0])
    embedding, readout = model.get_input_embeddings().weight.detach(), Readout.from_target(target)
    sequences = (one for number in rest for one in data.read([number]))
    folded = fold_bias(head, *input_moments(head, sequences, embedding, args.steps))
    say(folded)
    held_out = hold_out(data.read(held), readout)
    for name, one in (("before", head), ("after", folded.head)):
        say(f"{name}: {evaluate(one, held_out, embedding)}")
    extra = extra_fields(found.folder, folded.head.config) | {FOLDED_FROM: head_digests(found.file)[WEIGHTS]}
    hub.save_head(folded.head, args.output, extra, stored_dtype(found.file))
