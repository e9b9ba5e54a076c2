"""Give a draft head a vocabulary of the tokens that its target writes most (FR-Spec, arXiv 2502.14856).

    python train/rank_tokens.py --data runs/answers.jsonl --draft-vocab-size 8192 --output runs/head-8192
    python train/rank_tokens.py --base-model owner/target --ea-model owner/head --data runs/answers.jsonl \\
        --draft-vocab-size 16384 8192 4096 --output runs/heads

For any EAGLE-1/2 head, whoever trained it: its weights stay, the target's are not read, and the target's text
at threshold 0 is what it was. Counted is what train_head.py would learn of the same rows: the answers of
--data, all of --text, what --shards hold of either. OUTPUT is the head's folder; of several sizes there is an
OUTPUT/SIZE for each. The share covered is that of the counted text: of other text it is a little less.
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
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.provenance import provenance
from eagle_fsd.hub.head_checkpoint import extra_fields, stored_dtype
from eagle_fsd.hub.target_loader import TargetText
from eagle_fsd.training.cli import add_shards, add_text_arguments, read_examples, run_command
from eagle_fsd.training.data.shards import StoredFeatures
from eagle_fsd.training.data.token_counts import learned_tokens

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ea-model", help="the head: a folder or a Hub id (default: the shipped one)")
    add_text_arguments(parser)
    add_shards(parser)
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        nargs="+",
        required=True,
        metavar="SIZE",
        help="how many tokens the head drafts; several sizes make several heads",
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder that is not there yet")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    folders = output_folders(args)
    source = hub.resolve_target(args.base_model, weights=False)
    target = hub.load_text(source)
    found = hub.resolve_head(args.ea_model, source.name)
    head = hub.load_head(found, target.hidden_size, target.vocab_size)
    learned = learned_tokens(texts(args, target, source.name), target, target.tokenizer)
    lists = {folder: learned.best(size) for folder, size in folders.items()}  # all, before one is written
    dtype, extra = stored_dtype(found.file), extra_fields(found.folder, head.config)
    for folder, tokens in lists.items():
        record = {
            "base_model": source.name,
            "ea_model": found.name,
            "draft_vocab_size": len(tokens),
            "vocab_size": target.vocab_size,
            "counted": int(learned.counts.sum()),
            "distinct": int((learned.counts > 0).sum()),
            "coverage": learned.coverage(tokens),
            **provenance(),
        }
        hub.save_head(head.restrict(tokens), folder, extra, dtype)
        write_atomically(folder / "draft_vocabulary.json", json.dumps(record, indent=1) + "\n")
        print(shown(folder, record))


def output_folders(args: argparse.Namespace) -> dict[Path, int]:
    """Where the head of each size goes; ValueError for what can be told before anything is read."""
    sizes = list(dict.fromkeys(args.draft_vocab_size))
    if not (args.data or args.text or args.shards):
        raise ValueError("no data: give --data, --text or --shards")
    folders = {args.output / str(size): size for size in sizes} if len(sizes) > 1 else {args.output: sizes[0]}
    for folder in folders:
        if folder.exists():
            raise ValueError(
                f"output {str(folder)!r} is there already: it must be new; name another --output"
            )
    return folders


def texts(args: argparse.Namespace, target: TargetText, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and masks of all rows and shards. Of the shards' target the name alone can be compared."""
    for examples in read_examples(args, target.tokenizer, name, target.max_positions).values():
        yield from ((torch.tensor(one.tokens), torch.tensor(one.learn)) for one in examples)
    stored = StoredFeatures(args.shards, {"name": name})
    yield from zip(stored.tokens, stored.learn, strict=True)


def shown(folder: Path, record: dict[str, object]) -> str:
    """A head in a line: its list, what that covers, and what is left of lm_head."""
    return (
        f"{folder}: drafts {record['draft_vocab_size']:,} tokens, {100 * record['coverage']:.2f} % of the "
        f"{record['counted']:,} counted ({record['distinct']:,} distinct); the draft's lm_head has "
        f"{100 * record['draft_vocab_size'] / record['vocab_size']:.1f} % of the target's "
        f"{record['vocab_size']:,} rows"
    )


if __name__ == "__main__":
    main()
