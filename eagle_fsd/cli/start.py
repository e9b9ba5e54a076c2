"""A program's start and end: graphs compile while torch is imported, and the flags' engine is loaded."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import signal
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from eagle_fsd.core.config import AutoTree
from eagle_fsd.core.process.collector import without_collector
from eagle_fsd.runtime.openvino.kept.head_start import HEAD_START

if TYPE_CHECKING:  # torch takes seconds to import
    from eagle_fsd.decoding.options import GenerationOptions
    from eagle_fsd.engine import EagleFSD

# The flags that tell which graphs are compiled at a start.
OF_GRAPHS = (
    *("base_model", "ea_model", "draft_model", "draft_layers", "full_vocabulary", "lookup"),
    *("runtime", "weight_format", "dtype", "head_dtype", "device"),
    *("total_tokens", "depth", "tree_top_k", "min_confidence"),
)


def begin_early(args: argparse.Namespace) -> None:
    """Let OpenVINO compile what it compiled at the last start with these flags, while torch is imported.

    end_program must follow. HEAD_START.end may come earlier, once the graphs are in use.
    """
    if args.runtime != "torch" and args.tp_plan is None and args.device_map is None:
        HEAD_START.begin({name: getattr(args, name) for name in OF_GRAPHS})


@without_collector()
def load_model(args: argparse.Namespace) -> EagleFSD:
    """Load the engine that the flags name. Messages of the libraries stay off unless --verbose is given."""
    if not args.verbose:
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported: progress bars
    from eagle_fsd.core.devices import resolve_device, resolve_dtype
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.hub.loading.options import LoadOptions
    from eagle_fsd.hub.loading.progress import hide_notes_of_libraries
    from eagle_fsd.hub.resolve import DEFAULT_TARGET

    resolve_dtype(args.dtype, resolve_device(args.device))  # before a download, not after it
    if args.verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("eagle_fsd").setLevel(logging.INFO)
    else:
        hide_notes_of_libraries()
    base_model = DEFAULT_TARGET if args.base_model is None else args.base_model
    options = LoadOptions(**{field.name: getattr(args, field.name) for field in fields(LoadOptions)})
    return EagleFSD.from_pretrained(base_model, args.ea_model, options)


def measure_later(options: GenerationOptions) -> GenerationOptions:
    """Return the options of a text that does not wait till its tree is measured, see AutoTree.later."""
    tree = options.tree
    return replace(options, tree=replace(tree, later=True)) if isinstance(tree, AutoTree) else options


def interrupt_at_once() -> None:
    """Let Ctrl-C end the process at once, with nothing more to keep.

    Freeing a model takes a while, as does the interpreter's own end: an interrupt in it shows a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_program() -> None:
    """Drop what nothing will use any more. Ctrl-C is the caller's again, up to the interpreter's end."""
    atexit.register(interrupt_at_once)
    HEAD_START.end()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
