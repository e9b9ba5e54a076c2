"""Parts of a GPU check about what goes wrong: a capture fails, memory runs out, logits overflow."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.gpu.bench import Bench, engine_of, ids_of, tiny_model
from eagle_fsd.evaluation.gpu.runner import Findings
from eagle_fsd.runtime.step_recorder import EAGER, Graphs, Stepper

TREE = TreeConfig(8, 3, 3)


def failed_capture(bench: Bench) -> Findings:
    """Check that a model whose forward waits for the device runs unrecorded.

    There is one warning, the text is the same, and torch works on as if nothing had been.
    """
    model = tiny_model("llama", bench.device)
    wanted = texts_of(engine_of(model, EAGER))
    hook = model.lm_head.register_forward_pre_hook(lambda module, given: ask(given[0]))
    try:
        with warnings_of("eagle_fsd") as said:
            problem = problem_of(lambda: require_text(model, bench.graphs(), wanted))
    finally:
        hook.remove()
    found = aftermath(bench, model, wanted, problem)
    said_once = f"{found['summary']}, after {len(said)} warning(s)"
    return {**found, "ok": found["ok"] and len(said) == 1, "summary": said_once, "warnings": said}


def ask(hidden: torch.Tensor) -> None:
    """Wait for the device, as some models do within a forward."""
    if bool(hidden.isnan().any()):
        raise ValueError("the features are not finite")


def out_of_memory(bench: Bench) -> Findings:
    """Check that memory that runs out while a step is recorded costs no text, and leaves torch working."""
    model = tiny_model("llama", bench.device)
    wanted = texts_of(engine_of(model, EAGER))
    starved = Starved(bench.graphs().record, bench.device)
    problem = problem_of(lambda: require_text(model, Graphs(starved), wanted))
    found = aftermath(bench, model, wanted, problem)
    return found if starved.failures else {**found, "ok": False, "summary": "nothing was recorded"}


class Starved:
    """A recorder whose first recording runs out of memory within the capture."""

    def __init__(self, recorder: Any, device: torch.device) -> None:
        self.recorder, self.device = recorder, device
        self.failures = 0

    def __call__(self, work: Callable[[], Any], repeatable: bool) -> Any:
        if self.failures:
            return self.recorder(work, repeatable)
        calls = 0

        def hungry() -> Any:
            nonlocal calls
            calls += 1
            result = work()
            if calls == (2 if repeatable else 1):  # the first of two is the warm-up
                self.failures += 1
                spend_all(self.device)
            return result

        return self.recorder(hungry, repeatable)


def spend_all(device: torch.device) -> None:
    """Ask for 64 TiB on a GPU; a CPU, which may promise them, only says that it has none."""
    if device.type == "cuda":
        torch.empty(2**46, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError("out of memory, as the check wants it")


def texts_of(engine: EagleFSD) -> list[list[list[int]]]:
    """Write the same short greedy texts three times: a step is run, recorded and replayed."""
    ids, mask = ids_of([9])
    return [engine.generate(ids, mask, max_new_tokens=16, tree=TREE).new_tokens for _ in range(3)]


def aftermath(bench: Bench, model: Any, wanted: object, problem: str | None) -> Findings:
    """Probe what no longer works after a failed capture, whose own problem comes first: the error by name."""
    ids, _ = ids_of([9])
    ids, stepper = ids.to(bench.device), bench.graphs()
    counted = stepper.record
    probes: dict[str, Callable[[], object]] = {
        "random numbers": lambda: torch.rand(8, device=bench.device).cpu(),
        "dropout": lambda: F.dropout(torch.ones(64, device=bench.device), training=True).cpu(),
        "Hugging Face samples": lambda: model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=4
        ),
        "another engine's text": lambda: require_text(model, stepper, wanted),
    }
    if bench.on_gpu:
        probes["empty_cache"] = torch.cuda.empty_cache
        probes["allocation"] = lambda: torch.zeros(2**24, device=bench.device).sum().item()
    after = {"the text": problem, **{name: problem_of(probe) for name, probe in probes.items()}}
    after["another engine's recordings"] = None if counted.made else "there are none"
    bad = [f"{name} ({error})" for name, error in after.items() if error is not None]
    said = f"no longer works: {'; '.join(bad)}" if bad else "the same text, and all works afterwards"
    return {"ok": not bad, "summary": said, "after": after}


def problem_of(work: Callable[[], object]) -> str | None:
    """Return the error that work raises, in one line; None where it raises none."""
    try:
        work()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {one_line(error, 200)}"
    return None


def require_text(model: Any, stepper: Stepper, wanted: object) -> None:
    """Raise ValueError unless a new engine writes the texts that are wanted."""
    if texts_of(engine_of(model, stepper)) != wanted:
        raise ValueError("its text is another one")


@contextlib.contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """Collect the warnings that a logger and those below it give within."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(one_line(record.getMessage(), 300))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def overflow(bench: Bench) -> Findings:
    """Check that logits that overflow in half precision end in an error of one line, and not in a text."""
    dtypes = (torch.bfloat16,) if bench.quick else (torch.float16, torch.bfloat16)
    ids, mask = ids_of([5, 9])
    cells: dict[str, list[str | None]] = {}
    for dtype, (mode, stepper) in product(dtypes, bench.modes().items()):
        engine = engine_of(tiny_model("llama", bench.device, dtype), stepper)
        with torch.no_grad():  # after the model was admitted: a NaN would not have been
            engine.target.lm_head.weight.mul_(torch.finfo(dtype).max)
        for temperature in (0.0, 1.0):
            options = {"max_new_tokens": 8, "temperature": temperature, "tree": TREE}
            answer = functools.partial(engine.generate, ids, mask, **options)
            # With graphs a step is run, recorded and replayed.
            name = f"{str(dtype).removeprefix('torch.')}, {mode}, temperature {temperature:g}"
            cells[name] = [problem_of(answer) for _ in range(3)]
    silent = [name for name, said in cells.items() if not all(one and "finite" in one for one in said)]
    said = f"an error in {len(cells) - len(silent)} of {len(cells)} settings"
    return {
        "ok": not silent,
        "summary": said + (f"; a text or another error: {', '.join(silent)}" if silent else ""),
        "cells": cells,
    }
