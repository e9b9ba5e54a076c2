"""Write a draft head, and its target, as vLLM reads them.

    eagle-fsd train export-vllm --output runs/vllm

makes runs/vllm/head and runs/vllm/target of the default models. vLLM reads no draft vocabulary, so that the
head is written without; it then drafts all tokens. vLLM's `fc` has no bias: a head with one is refused unless
it is folded into the weights, by `eagle-fsd train fold-bias`, or given up, with --drop-bias. The target is
written as safetensors, which a .gguf file is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_fsd import hub
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.evaluation.cli import plain_parser, say
from eagle_fsd.files.places import require_new_folder
from eagle_fsd.hub.eagle3_checkpoint import is_eagle3
from eagle_fsd.hub.head_checkpoint import (
    check_target,
    extra_fields,
    read_config,
    read_head,
    save_head,
    stored_dtype,
)
from eagle_fsd.training.cli import add_head, add_target, run_command
from eagle_fsd.training.folding import drop_bias

if TYPE_CHECKING:
    import transformers
    from transformers import PreTrainedTokenizerBase

    Target = tuple[transformers.PreTrainedModel, PreTrainedTokenizerBase | None]

TARGET, HEAD = "target", "head"


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add_head(parser)
    add_target(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the target (default: float32)",
    )
    parser.add_argument("--head-only", action="store_true", help="write no target: vLLM can read yours")
    parser.add_argument("--drop-bias", action="store_true", help="write the head without the bias of its fc")
    parser.add_argument("--output", type=Path, required=True, help="the folder of both folders")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    if args.head_only and args.dtype is not None:
        raise ValueError(
            f"--dtype {args.dtype} with --head-only: it is the target's, and none is written; drop one"
        )
    for name in (HEAD,) if args.head_only else (HEAD, TARGET):
        require_new_folder("--output", args.output / name)
    source = hub.resolve_target(args.base_model)
    place = hub.resolve_head(args.ea_model, source.name)
    head = read_plain_head(place, args.drop_bias)
    # Nothing is written before all is read and found to fit.
    target = None if args.head_only else load_target(source, args.dtype or "float32", place.name, head)
    say(save_plain_head(head, place, args.output / HEAD))
    if target is not None:
        say(save_target(*target, args.output / TARGET))


def read_plain_head(source: hub.HeadSource, give_up_bias: bool = False) -> DraftHead:
    """Return an EAGLE-1/2 head as vLLM reads one. Raises ValueError for other kinds.

    It drafts all tokens. give_up_bias: leave out the bias of `fc`; else a head that has one is refused.
    """
    if is_eagle3(source.file, source.name):
        raise ValueError(
            f"draft head {source.name!r} is of EAGLE-3: vLLM reads its files as they are; name its folder"
        )
    config = read_config(source.folder, "draft head")
    sizes = (config.get("hidden_size", 0), config.get("vocab_size", 0))
    head = read_head(source.file, source.name, *sizes)
    if head.fc.bias is not None and not give_up_bias:
        largest = float(head.fc.bias.detach().abs().max())
        raise ValueError(
            f"draft head {source.name!r} has a bias of fc, up to {largest:.3g}: vLLM's fc has none and would "
            "drop it in silence; fold it with `eagle-fsd train fold-bias`, or give --drop-bias"
        )
    drop_bias(head)
    return head.restrict(None)


def save_plain_head(head: DraftHead, source: hub.HeadSource, folder: Path) -> Path:
    """Write what `read_plain_head` made of a head into a folder, with its dtype, and return the folder."""
    return save_head(head, folder, extra_fields(source.folder, head.config), stored_dtype(source.file))


def load_target(source: hub.TargetSource, dtype: str, name: str, head: DraftHead) -> Target:
    """Load a target and its tokenizer. Raises ValueError unless the head of this name is of its sizes."""
    model, tokenizer = hub.load_target(source, dtype, "cpu")
    vocab_size, hidden_size = model.get_input_embeddings().weight.shape
    check_target(head.config, name, hidden_size, vocab_size)
    return model, tokenizer


def save_target(
    model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> Path:
    """Write a target's weights as safetensors, its config and tokenizer, into a folder, and return it."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
