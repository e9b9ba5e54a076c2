"""The prompts that the command line names, or that are piped in."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import require_integer, require_utf8
from eagle_fsd.text.prompt_files import decode_text, read_prompts

ALONE = "the prompt"  # what messages call a prompt that is the only one


def read_piped() -> bytes:
    """Return what is piped into the program: nothing from a terminal, or from a stdin that cannot be read."""
    if sys.stdin is None or sys.stdin.isatty():
        return b""
    try:
        return sys.stdin.buffer.read()
    except OSError:  # it is open for writing only, say
        return b""


def read_prompt_arguments(args: argparse.Namespace) -> list[str]:
    """Return the prompts that the arguments name, or else what is piped in, without a final newline.

    Raises ValueError if there is none, or one is blank or no text.
    """
    if args.prompt_file is not None:
        prompts, origin = read_prompts(Path(args.prompt_file)), args.prompt_file
    else:
        given = args.prompt if args.prompt is not None else args.text
        prompts, origin = [given], "the command line"
        if given == "-" and sys.stdin is None:
            raise ValueError("stdin is closed: pipe a prompt into it, or give a TEXT")
        if given in (None, "-"):
            text = sys.stdin.buffer.read() if given else read_piped()
            if given is None and not text.strip():
                raise ValueError("no prompt: give a TEXT, --prompt TEXT, --prompt-file FILE, or - for stdin")
            prompts, origin = [decode_text(text, "stdin")], "stdin"
    if not prompts:
        raise ValueError(f"{origin} holds no prompt: it must hold at least one")
    require_integer("--skip", args.skip, 0, f"{origin} has {len(prompts)} prompts", len(prompts) - 1)
    for number, prompt in enumerate(prompts[args.skip :], args.skip + 1):
        if not prompt.strip():
            raise ValueError(f"prompt {number} of {origin} is empty: write something to answer")
        require_utf8(f"prompt {number} of {origin}", prompt)
    return prompts[args.skip :]


def require_images(args: argparse.Namespace) -> None:
    """Let torch compute the target where images are asked about, and check that they are there.

    Raises ValueError for a file that is not, and for what does not go with images.
    """
    if not args.image:
        return
    for flag, given in (("--raw", args.raw), ("--adapt", args.adapt)):
        if given:
            raise ValueError(f"--image with {flag}: a prompt with images has no such answer; leave one out")
    for path in args.image:
        if not Path(path).is_file():
            raise ValueError(f"--image {path!r} is no file: name a picture, such as cat.png")
    if args.runtime == "auto" and args.weight_format in (None, "float32", "bfloat16"):
        args.runtime = "torch"


def open_images(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return images as parts of a message. Raises ValueError for a file that is none."""
    if not paths:
        return []
    from eagle_fsd.hub.media.pictures import open_picture

    return [{"type": "image", "image": open_picture(Path(path), f"--image {path!r}")} for path in paths]


def prompt_of(args: argparse.Namespace, place: int, answers: int) -> str:
    """Return what a message calls the prompt of an answer: by its place in the file, --skip counted.

    place: of the answer, counted from 0, among so many `answers`, --num-return-sequences to a prompt.
    """
    copies = args.num_return_sequences
    count = args.skip + answers // copies
    return f"prompt {args.skip + place // copies + 1} of {count}" if count > 1 else ALONE


def error_in(name: str, error: Exception) -> str:
    """Return what went wrong with a prompt, which is named if it is one of several. name: of `prompt_of`."""
    return str(error) if name == ALONE else f"{name}: {error}"
