"""Give a draft head a vocabulary of the tokens that its target writes most (FR-Spec, arXiv 2502.14856).

    eagle-fsd train rank --data runs/answers.jsonl --draft-vocab-size 8192 --output runs/head-8192
    eagle-fsd train rank --base-model owner/target --ea-model owner/head --data runs/answers.jsonl \\
        --draft-vocab-size 16384 8192 4096 --output runs/heads

Works on any EAGLE-1/2 head. The head's weights stay as they are, the target's are not read, and its
text at threshold 0 does not change. The tokens that `eagle-fsd train head` would learn from the same rows are
counted: the answers of --data, all of --text, and either in --shards. OUTPUT is the new head's folder, or
holds one folder per size. The share covered is of the counted text; it is a little less of other text.
Beside the list, tokens that a text has had itself are drafted for it (--draft-text-tokens).
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle_fsd import hub
from eagle_fsd.evaluation.cli import plain_parser, say
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.places import require_new_folder
from eagle_fsd.files.provenance import provenance
from eagle_fsd.hub.head_checkpoint import extra_fields, stored_dtype
from eagle_fsd.hub.target_loader import TargetText
from eagle_fsd.training.cli import (
    add_head,
    add_shards,
    add_text_arguments,
    add_text_tokens,
    check_text,
    read_examples,
    run_command,
    text_tokens,
)
from eagle_fsd.training.data.shards import StoredFeatures
from eagle_fsd.training.data.token_counts import always_drafted, learned_tokens, require_size

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add_head(parser)
    add_text_arguments(parser)
    add_shards(parser)
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        nargs="+",
        required=True,
        metavar="SIZE",
        help="how many tokens the head drafts; each size makes a head",
    )
    add_text_tokens(parser)
    parser.add_argument("--output", type=Path, required=True, help="a folder that does not exist yet")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    folders = output_folders(args)
    source = hub.resolve_target(args.base_model, weights=False)
    target = hub.load_text(source)
    always = always_drafted(target, target.tokenizer)
    for size in folders.values():
        require_size(size, always, target.vocab_size)
    found = hub.resolve_head(args.ea_model, source.name)
    head = hub.load_head(found, target.hidden_size, target.vocab_size)
    learned = learned_tokens(texts(args, target, source.name), target, target.tokenizer)
    lists = {folder: learned.best(size) for folder, size in folders.items()}  # all, before one is written
    dtype, extra, own = stored_dtype(found.file), extra_fields(found.folder, head.config), text_tokens(args)
    for folder, tokens in lists.items():
        record = {
            "base_model": source.name,
            "ea_model": found.name,
            "draft_vocab_size": len(tokens),
            "draft_text_tokens": own or 0,
            "vocab_size": target.vocab_size,
            "counted": int(learned.counts.sum()),
            "distinct": int((learned.counts > 0).sum()),
            "coverage": learned.coverage(tokens),
            **provenance(torch.device("cpu")),
        }
        hub.save_head(head.restrict(tokens, own), folder, extra, dtype)
        write_atomically(folder / "draft_vocabulary.json", json.dumps(record, indent=1) + "\n")
        say(format_head(folder, record))


def output_folders(args: argparse.Namespace) -> dict[Path, int]:
    """Return each head's folder and size. Raises ValueError for mistakes that need no model to be found."""
    check_text(args)
    text_tokens(args)
    sizes = list(dict.fromkeys(args.draft_vocab_size))
    folders = {args.output / str(size): size for size in sizes} if len(sizes) > 1 else {args.output: sizes[0]}
    for folder in folders:
        require_new_folder("--output", folder)
    return folders


def texts(args: argparse.Namespace, target: TargetText, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and masks of all rows and shards. Only the name of the shards' target can be compared."""
    for examples in read_examples(args, target.tokenizer, name, target.max_positions).values():
        yield from ((torch.tensor(one.tokens), torch.tensor(one.learn)) for one in examples)
    stored = StoredFeatures(args.shards, {"name": name})
    yield from zip(stored.tokens, stored.learn, strict=True)


def format_head(folder: Path, record: dict[str, object]) -> str:
    """Describe a head in one line: its tokens, the share they cover, and the rows of lm_head that remain."""
    return (
        f"{folder}: drafts {record['draft_vocab_size']:,} tokens, {100 * record['coverage']:.2f} % of the "
        f"{record['counted']:,} counted ({record['distinct']:,} distinct); the draft's lm_head has "
        f"{100 * record['draft_vocab_size'] / record['vocab_size']:.1f} % of the target's "
        f"{record['vocab_size']:,} rows"
    )
