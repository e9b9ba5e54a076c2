"""Tells people at a terminal what takes a while. In a pipe or a file bars are shown only on demand.

Notes of libraries are for who works on programs, and not for who runs them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator

import transformers
from huggingface_hub import constants, utils

from eagle_fsd.runtime.ranks import rank_by_environment

logger = logging.getLogger(__name__)


def wants_progress_bars() -> bool:
    """Return whether to show progress bars: not in a pipe or a file, unless the user asks for them."""
    return sys.stderr.isatty() or constants.HF_HUB_DISABLE_PROGRESS_BARS is False


def hide_notes_of_libraries() -> None:
    """Hide what libraries note while they work, such as a kernel that would be faster, from a program's user.

    Errors are shown.
    """
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of every product in bfloat16
    # What transformers will change in itself is no news to whoever asks a question.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def show_progress(text: str) -> None:
    """Tell people at a terminal what takes a while; elsewhere it is only logged."""
    if rank_by_environment()[0] > 0:
        return  # under torchrun one process speaks
    if wants_progress_bars():
        sys.stderr.write(f"{text}\n")
    else:
        logger.info("%s", text)


@contextlib.contextmanager
def hide_unwanted_bars() -> Iterator[None]:
    """Hide download bars inside the block if they are not wanted."""
    if wants_progress_bars() or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextlib.contextmanager
def hide_loading_bars(gguf: bool) -> Iterator[None]:
    """Hide loading bars inside the block if they are not wanted."""
    bars = transformers.utils.logging
    if wants_progress_bars() or not bars.is_progress_bar_enabled():
        yield
        return
    with contextlib.ExitStack() as stack:
        bars.disable_progress_bar()
        stack.callback(bars.enable_progress_bar)
        with contextlib.suppress(ImportError, AttributeError):  # other releases keep it elsewhere
            if gguf:  # its bar ignores transformers' switches
                module = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
                stack.callback(setattr, module, "tqdm", module.tqdm)
                module.tqdm = functools.partial(module.tqdm, disable=True)
        yield
