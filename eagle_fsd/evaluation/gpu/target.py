"""Parts of a GPU check about the real target: what `eval greedy` and `eval limits` say of it here."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

from eagle_fsd import hub
from eagle_fsd.autotune.settle import EXAMPLE_PROMPTS
from eagle_fsd.evaluation.commands import greedy, limits
from eagle_fsd.evaluation.gpu.bench import ON, Bench, Findings, LeftOut
from eagle_fsd.files.jsonl import append_row


def equality(bench: Bench) -> Findings:
    """Compare the real target's float32 greedy texts with Hugging Face's `generate`."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        for prompt in EXAMPLE_PROMPTS:
            append_row(prompts, {"prompt": prompt})
        size = "--tree 16/5/8 --max-new-tokens 8" if bench.quick else "--tree 16/5/8 60/6/10"
        return by_mode(bench, greedy.main, ["--prompts", str(prompts), *size.split()])


def costs(bench: Bench, dtype: str) -> Findings:
    """Time the real target's forwards and its head's drafts in this dtype, in milliseconds by context."""
    sizes = "--context 32 --nodes 16" if bench.quick else "--context 256 4096 --nodes 16 60"
    return by_mode(bench, limits.main, ["--dtype", dtype, *sizes.split()])


def by_mode(bench: Bench, command: Callable[[list[str]], None], flags: list[str]) -> Findings:
    """Run a command with graphs off and, where they can be had, on. It fails as the command does.

    Raises LeftOut where there is no target, or no head for it.
    """
    try:
        hub.resolve_target(bench.target)
        hub.resolve_head(bench.head, bench.target)
    except ValueError as error:
        raise LeftOut(f"there is no real target with a head: {error}") from error
    models = ["--base-model", bench.target, "--device", str(bench.device), "--runtime", "torch", "--no-pack"]
    models += ["--ea-model", bench.head] if bench.head else []
    codes, written = {}, {}
    for mode in bench.modes():
        switch = [] if mode == ON else ["--no-graphs"]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                codes[mode] = command([*models, *flags, *switch]) or 0
            except SystemExit as end:  # its own complaint, if it has one, went to stderr
                codes[mode] = end.code
        written[mode] = said.getvalue()
    table = "\n".join(f"{mode}:\n\n{text}" for mode, text in written.items())
    ended = ", ".join(f"{mode} with {code}" for mode, code in codes.items())
    return {"ok": not any(codes.values()), "summary": f"ended: {ended}", "cells": written, "table": table}
