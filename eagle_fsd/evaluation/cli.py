"""What every script of eval/ asks for: the models, the prompt files and how much of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle_fsd.core.checks import require_integer
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.prompt_sets import require_own_names, require_range
from eagle_fsd.hub.resolve import DEFAULT_TARGET


def model_parser(description: str, dtype: str | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments of `load_engine`; the description is shown as it is. dtype: the default
    everywhere, for what rounding would blur; None: the device's own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base-model", default=DEFAULT_TARGET, help="target: Hub id, folder or .gguf file")
    add("--ea-model", help="draft head: Hub id or folder (default: the shipped one)")
    add("--dtype", default=dtype, help=f"default: {dtype or 'float32 on a CPU, bfloat16 on CUDA'}")
    add("--head-dtype", help="what drafts are computed in; default: the target's dtype")
    add("--device", help="default: CUDA where there is one, else the CPU")
    add("--no-pack", dest="pack", action="store_false", help="leave the linear layers as they are")
    add("--no-graphs", dest="graphs", action="store_false", help="on CUDA, record no CUDA graphs")
    add("--full-vocabulary", action="store_true", help="draft over all tokens, whatever the head's list")
    return parser


def load_engine(arguments: argparse.Namespace) -> EagleFSD:
    """The target and head that a parser's arguments name."""
    return EagleFSD.from_pretrained(
        arguments.base_model,
        arguments.ea_model,
        dtype=arguments.dtype,
        head_dtype=arguments.head_dtype,
        device=arguments.device,
        pack=arguments.pack,
        graphs=arguments.graphs,
        full_vocabulary=arguments.full_vocabulary,
    )


def parser_of(description: str, dtype: str | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments of the models and of the prompts; dtype: see `model_parser`."""
    parser = model_parser(description, dtype)
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        required=True,
        help="JSONL files of `prompt`, `turns`, `messages` ...",
    )
    parser.add_argument("--limit", type=int, help="at most LIMIT prompts of every file")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first SKIP prompts of every file")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    return parser


def check_sizes(arguments: argparse.Namespace, *batch_sizes: int) -> None:
    """ValueError for numbers that leave nothing to do, and for a file given twice."""
    require_range(arguments.skip, arguments.limit)
    require_integer("max_new_tokens", arguments.max_new_tokens, 1, "ask for at least one token")
    for size in batch_sizes:
        require_integer("batch_size", size, 1, "1 runs every prompt alone")
    require_own_names(arguments.prompts)
