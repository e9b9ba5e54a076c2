"""Share what the commands of training have in common: arguments, progress on stderr, errors of one line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eagle_fsd import hub
from eagle_fsd.cli.mistakes import report_mistake
from eagle_fsd.cli.ranks import in_silence
from eagle_fsd.core.checks import flag_of, one_line, require_integer
from eagle_fsd.core.devices import multiplies_bfloat16, ran_out_of_memory, resolve_device
from eagle_fsd.core.process.signals import report_interrupt
from eagle_fsd.core.process.streams import outlive_stderr
from eagle_fsd.drafting.eagle_config import LARGEST
from eagle_fsd.hub.loading.progress import hide_notes_of_libraries
from eagle_fsd.runtime.ranks import rank_by_environment
from eagle_fsd.training.data.examples import Example, check_rows, load_examples, require_cut
from eagle_fsd.training.data.shards import shard_counts

LONGEST = 512  # tokens of a row, unless --max-length says otherwise
TEXT_TOKENS = 256  # a text of some thousand tokens has fewer that a list lacks


def run_command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> None:
    """Parse the arguments and do a command's work.

    An error that its user can fix ends it with one line, and so does Ctrl-C. Of several processes only rank 0
    is heard, and another if it alone fails.
    """
    if rank := rank_by_environment()[0]:
        sys.exit(in_silence(lambda words: report(parser, run, words), argv, rank))
    if code := report(parser, run, argv):
        sys.exit(code)


def report(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> int:
    """Do a command's work, with its progress and its errors on stderr, and return the exit code."""
    args = parser.parse_args(argv)
    hide_notes_of_libraries()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it notes what it does with fonts
    try:
        with outlive_stderr():
            run(args)
    except (ValueError, OSError, FloatingPointError) as error:
        return report_mistake(parser.prog, one_line(error, 1000))
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return report_mistake(parser.prog, f"{one_line(error, 200)}; lower --batch-tokens or --rows")
    except KeyboardInterrupt:
        return report_interrupt()
    return 0


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-model", default=hub.DEFAULT_TARGET, help="the target: Hub id, folder or .gguf file"
    )


def add_head(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ea-model", help="the head: a folder or a Hub id (default: the shipped one)")


def add_paths(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Add an option that takes any number of paths and may be repeated for more."""
    parser.add_argument(name, type=Path, nargs="*", action="extend", default=[], help=text)


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the target and of the text that a head is trained on."""
    add_target(parser)
    add_paths(parser, "--data", "JSONL files that teach their answers")
    add_paths(parser, "--text", "JSONL files that teach at every position (text the target did not write)")
    parser.add_argument(
        "--max-length",
        type=int,
        help=f"tokens kept of each row (default: {LONGEST}, or the target's positions if these are fewer)",
    )
    parser.add_argument("--rows", type=int, help="use at most ROWS rows of each file")


def add_shards(parser: argparse.ArgumentParser) -> None:
    """Add the option of text whose features are already computed."""
    text = "folders of feature shards of the same target, of `eagle-fsd train features` or a run's --features"
    add_paths(parser, "--shards", text)


def add_compute_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the device and the dtype that the target computes its features in."""
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    add_extract_dtype(parser, "the dtype that the target computes in and features are stored in")


def uses_no_gpu(args: argparse.Namespace) -> bool:
    """Return whether accelerate is to use the CPU: if it is asked to, or where several processes share one.

    Otherwise accelerate takes each of them for the only process, and each does all of the work.
    """
    several = rank_by_environment()[1] > 1
    return args.cpu or (several and resolve_device(None).type == "cpu")


def add_extract_dtype(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--extract-dtype",
        choices=("bfloat16", "float32"),
        help=f"{text} (default: bfloat16, or float32 where bfloat16 is emulated)",
    )


def settle_dtypes(args: argparse.Namespace) -> None:
    """Compute in bfloat16 where that is fast on the command's device, and else in float32, unless asked."""
    fast = multiplies_bfloat16(resolve_device("cpu" if args.cpu else None))
    if args.extract_dtype is None:
        args.extract_dtype = "bfloat16" if fast else "float32"
    if getattr(args, "float32", False) is None:
        args.float32 = not fast


def add_text_tokens(parser: argparse.ArgumentParser) -> None:
    """Add the option of what a text has drafted beside a list."""
    parser.add_argument(
        "--draft-text-tokens",
        type=int,
        metavar="N",
        help="draft for each text, beside the list, the latest N tokens that it has had itself and the list "
        f"lacks; 0: none (default: {TEXT_TOKENS})",
    )


def text_tokens(args: argparse.Namespace) -> int | None:
    """Return how many tokens of its own each text has drafted beside a new head's list; None: none.

    Raises ValueError for an option that is no such number, or goes with no list.
    """
    given = args.draft_text_tokens
    if given is not None and (args.draft_vocab_size is None or getattr(args, "eagle3", False)):
        raise ValueError(
            f"--draft-text-tokens is {given}: it goes with an EAGLE-1/2 head that drafts a list; give "
            "--draft-vocab-size without --eagle3, or leave it out"
        )
    most = TEXT_TOKENS if given is None else given
    require_integer("draft_text_tokens", most, 0, "change --draft-text-tokens", LARGEST)
    return most or None


def check_text(args: argparse.Namespace) -> list[int] | None:
    """Raise ValueError for mistakes about files and shards that can be found before a model is loaded.

    Returns the most sequences that each source may have, in order; None if a source is not known by then.
    """
    files, folders = [*args.data, *args.text], getattr(args, "shards", ())
    if not (files or folders):
        options = "--data, --text or --shards" if "shards" in args else "--data or --text"
        raise ValueError(f"no data: give {options}")
    for name in ("rows", "max_length"):
        if getattr(args, name) is not None and not files:
            raise ValueError(
                f"{name} is {getattr(args, name)}: it is of files of --data and --text, and shards are taken "
                f"whole; leave {flag_of(name)} out"
            )
    require_cut(LONGEST if args.max_length is None else args.max_length, args.rows)
    names = [path.stem for path in files]
    counts: list[int] = []
    for path, name in zip(files, names, strict=True):
        if names.count(name) > 1:
            raise ValueError(
                f"two files are named {name!r}: each names the folder of its features; rename one"
            )
        if not path.is_fifo():  # which can be read once
            counts.append(check_rows(path, args.rows))
    stored = shard_counts(folders)
    return [*counts, *stored] if len(counts) == len(files) else None


def read_examples(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None, target_name: str, positions: int
) -> dict[str, list[Example]]:
    """Read the examples of every file of --data and --text, by the name of the file's folder of features.

    positions: the longest text that the target can read. check_text has passed the arguments.
    """
    longest = min(LONGEST, positions) if args.max_length is None else args.max_length
    if longest > positions:
        raise ValueError(f"max_length is {longest}: the target has {positions} positions; lower --max-length")
    if tokenizer is None and (args.data or args.text):
        raise ValueError(f"target {target_name!r} has no tokenizer: name a folder or Hub id that holds one")
    found: dict[str, list[Example]] = {}
    for path, learn_all in [(path, False) for path in args.data] + [(path, True) for path in args.text]:
        found[path.stem], _ = load_examples(path, tokenizer, longest, learn_all, args.rows)
    return found


# Optional experiment trackers, each a package of its own.
TRACKERS = ("tensorboard", "wandb", "trackio")


def require_tracker(name: str) -> str | None:
    """Return the tracker's name for accelerate, None for "none". Raises ValueError if it is not installed."""
    if name == "none":
        return None
    if find_spec(name) is None:
        raise ValueError(f"--report-to is {name}: the package is missing; pip install {name}")
    return name
