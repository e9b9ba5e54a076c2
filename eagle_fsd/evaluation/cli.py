"""What the evaluation's commands share: parsers of the models and prompts, and errors of one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import NoReturn

from eagle_fsd.core.checks import one_line, require_integer
from eagle_fsd.core.devices import ran_out_of_memory
from eagle_fsd.core.process.signals import EXIT_BROKEN_PIPE, EXIT_USAGE, report_interrupt
from eagle_fsd.core.process.streams import discard_stdout, outlive_stderr, tell
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.prompt_sets import prompts_of, require_own_names
from eagle_fsd.evaluation.tasks.base import require_range
from eagle_fsd.hub.loading.progress import hide_notes_of_libraries
from eagle_fsd.hub.resolve import DEFAULT_TARGET
from eagle_fsd.text.chat import encode_as_trained


def plain_parser(description: str | None) -> argparse.ArgumentParser:
    """Return an empty parser that shows the description as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def rows_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of what is made from raw rows: the files, and the bootstrap."""
    parser = plain_parser(description)
    add = parser.add_argument
    add("--rows", type=Path, nargs="+", required=True, help="JSONL files of raw rows, or .jsonl.gz")
    add("--resamples", type=int, default=10_000, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the resamples; default: %(default)s")
    return parser


def model_parser(description: str | None, dtype: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of `load_engine`.

    dtype: the default on every device, for what rounding would blur; None takes the device's own.
    """
    parser = plain_parser(description)
    add = parser.add_argument
    add("--base-model", default=DEFAULT_TARGET, help="target: Hub id, folder or .gguf file")
    add("--ea-model", help="draft head: Hub id or folder, or none (default: the shipped one)")
    add("--lookup", action="store_true", help="drafts are looked up too; with --ea-model none, all are")
    add("--draft-model", help="instead of a head: a smaller language model of the target's family")
    add("--draft-layers", type=int, help="instead of a head: the target's own first layers")
    parser.set_defaults(usual_dtype=dtype)
    add("--dtype", help=f"default: {dtype or 'float32 on a CPU, bfloat16 on CUDA'}")
    add("--head-dtype", help="what drafts are computed in; default: the target's dtype")
    add("--device", help="default: CUDA where there is one, else the CPU")
    add("--no-pack", dest="pack", action="store_false", help="leave the linear layers as they are")
    add("--no-graphs", dest="graphs", action="store_false", help="on CUDA, record no CUDA graphs")
    add("--runtime", default="auto", help="torch, openvino, or auto, the faster one (default: auto)")
    add("--weight-format", help="float32, bfloat16, int8 or packed (default: the dtype)")
    add("--full-vocabulary", action="store_true", help="draft over all tokens, whatever the head's list")
    return parser


def parser_of(description: str | None, dtype: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of the models and of the prompts; dtype: see `model_parser`."""
    parser = model_parser(description, dtype)
    add_prompts(parser)
    return parser


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the prompts, and of how long an answer may be."""
    add = parser.add_argument
    files = "JSONL files of `prompt`, `turns`, `messages` ..."
    add("--prompts", type=Path, nargs="+", required=True, help=files)
    add("--limit", type=int, help="at most LIMIT prompts of every file")
    add("--skip", type=int, default=0, help="leave out the first SKIP prompts of every file")
    add("--max-new-tokens", type=int, default=64, help="default: %(default)s")


def load_engine(arguments: argparse.Namespace) -> EagleFSD:
    """Load the target and head that a parser's arguments name."""
    names = ("dtype", "head_dtype", "device", "pack", "graphs", "full_vocabulary", "runtime", "weight_format")
    names += ("lookup", "draft_model", "draft_layers")
    options = {name: getattr(arguments, name) for name in names}
    if arguments.weight_format is None:  # which says the dtype by itself
        options["dtype"] = arguments.dtype or arguments.usual_dtype
    return EagleFSD.from_pretrained(arguments.base_model, arguments.ea_model, **options)


def all_prompts(arguments: argparse.Namespace) -> list[str]:
    """Return the prompts of all files."""
    return [text for path in arguments.prompts for text in prompts_of(path, arguments.skip, arguments.limit)]


def encoded_prompts(arguments: argparse.Namespace, engine: EagleFSD) -> list[list[int]]:
    """Return the token ids of the prompts of all files, see `encode_as_trained`."""
    return [encode_as_trained(engine.tokenizer, text) for text in all_prompts(arguments)]


def check_sizes(arguments: argparse.Namespace, *batch_sizes: int) -> None:
    """Raise ValueError for numbers that leave nothing to do, and for files without prompts or given twice."""
    require_range(arguments.skip, arguments.limit)
    if arguments.max_new_tokens is not None:
        require_integer("max_new_tokens", arguments.max_new_tokens, 1, "ask for at least one token")
    for size in batch_sizes:
        require_integer("batch_size", size, 1, "1 runs every prompt alone")
    require_own_names(arguments.prompts)
    for path in arguments.prompts:
        if not path.is_fifo():  # which can be read once
            prompts_of(path, arguments.skip, arguments.limit)


@contextmanager
def mistakes_on_one_line(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Report what a user can fix in one line, as the other programs do; exit code 2.

    That is a ValueError or OSError within, lack of memory, and logits that are not finite. Flags that cannot
    be parsed are the parser's own errors, above which it shows how it is used.
    """

    def report(said: str) -> NoReturn:
        parser.exit(EXIT_USAGE, f"{parser.prog}: error: {said}\n")

    try:
        yield
    except (ValueError, OSError, FloatingPointError) as error:
        report(one_line(error))
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        report(f"out of memory: {one_line(error, 120)}; give smaller batches, or a smaller dtype")


@contextmanager
def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> Iterator[argparse.Namespace]:
    """Parse the arguments; what is found to be wrong with them within is reported in one line.

    All of a command's work belongs within: Ctrl-C ends it with one line there. Rows that it wrote stay.
    """
    arguments = parser.parse_args(argv)
    hide_notes_of_libraries()
    try:
        with mistakes_on_one_line(parser), outlive_stderr():
            yield arguments
    except KeyboardInterrupt:
        sys.exit(report_interrupt())


def say(text: object) -> None:
    """Write a line to stdout now: a command's result, not its log. Exits with one line if that is full."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        with suppress(UnsupportedOperation):  # of a stdout that is no file
            discard_stdout()
        if isinstance(error, BrokenPipeError):
            sys.exit(EXIT_BROKEN_PIPE)
        tell(f"stdout takes no more ({error.strerror}): what is in files stays; make room there")
        sys.exit(EXIT_USAGE)
