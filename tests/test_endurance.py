"""A thousand generations in one process, errors and streams that are left among them: it stays as it was."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Fuzzy, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.target.model import TargetModel

STATM, HANDLES = Path("/proc/self/statm"), Path("/proc/self/fd")
GENERATIONS, SETTLED = 1000, 300  # by then every pool and cache of torch's has its size
GROWTH = 1.05

pytestmark = pytest.mark.skipif(not STATM.is_file(), reason="resident memory is read from /proc")


def resident() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fail_to_observe(*_: object) -> None:
    """An observer that ends a generation after its first step; there may be no second one."""
    raise RuntimeError("an observer fails")


def fail_in_a_forward(engine: EagleFSD, ids: torch.Tensor, settings: dict[str, Any]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a layer fails")

    hook = engine.target.lm_head.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="a layer fails"):
            engine.generate(ids, **settings)
    finally:
        hook.remove()


def fail_in_an_observer(engine: EagleFSD, ids: torch.Tensor, settings: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="an observer fails"):
        engine.generate(ids, observer=fail_to_observe, **settings)


def fail_by_an_argument(engine: EagleFSD, ids: torch.Tensor, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="top_p is 7"):
        engine.generate(ids, **{**settings, "top_p": 7})


def leave_a_stream(engine: EagleFSD, ids: torch.Tensor, settings: dict[str, Any]) -> None:
    for _ in engine.stream(ids, **settings):
        return


def leave_a_batch(engine: EagleFSD, ids: torch.Tensor, settings: dict[str, Any]) -> None:
    next(engine.stream_batch(ids, **settings).steps)


def generate_a_batch(engine: EagleFSD, ids: torch.Tensor, settings: dict[str, Any]) -> None:
    rows = [row.tolist()[: 1 + place] for place, row in enumerate(ids.expand(3, -1))]
    engine.generate(*pad_left(rows, 0), **settings)


def generate(engine: EagleFSD, ids: torch.Tensor, settings: dict[str, Any]) -> None:
    engine.generate(ids, **settings)


WAYS: tuple[Callable[[EagleFSD, torch.Tensor, dict[str, Any]], None], ...] = (
    *(generate, generate_a_batch, leave_a_stream, leave_a_batch),
    *(fail_in_a_forward, fail_in_an_observer, fail_by_an_argument),
)


def live_through(engine: EagleFSD, new_tokens: int, generations: int, settled: int) -> tuple[int, int]:
    """Resident memory after `settled` generations of all ways, and after all."""
    draw, before = random.Random(0), 0
    ways = itertools.cycle(WAYS)
    for number in range(generations):
        if number == settled:
            before = resident()
            open_then = (threading.active_count(), len(list(HANDLES.iterdir())))
        ids = torch.tensor(prompts_of([draw.choice((4, 9, 30))], seed=number))
        settings = {
            "max_new_tokens": draw.choice((5, new_tokens)),
            "temperature": draw.choice((0.0, 0.6, 1.0)),
            "rule": draw.choice((None, Fuzzy(0.3))),
            "tree": draw.choice((TreeConfig(1), TreeConfig(8, 3, 3), TreeConfig(16, 5, 8, 0.05))),
        }
        next(ways)(engine, ids, settings)
    assert (threading.active_count(), len(list(HANDLES.iterdir()))) == open_then
    return before, resident()


@pytest.mark.parametrize("generations", [360, pytest.param(GENERATIONS, marks=pytest.mark.slow)])
def test_many_generations_leave_nothing_behind(generations: int) -> None:
    engine = EagleFSD(TargetModel(pack_linears(tiny_model("llama", "sdpa"))), pack_linears(tiny_head()))
    before, after = live_through(engine, 10, generations, SETTLED)
    assert after <= GROWTH * before, f"{before / 2**20:.0f} MB grew to {after / 2**20:.0f} MB"


@pytest.mark.real
@pytest.mark.slow
def test_a_thousand_generations_of_the_real_model_leave_nothing_behind(smollm2: EagleFSD) -> None:
    before, after = live_through(smollm2, 12, GENERATIONS, SETTLED)
    assert after <= GROWTH * before, f"{before / 2**20:.0f} MB grew to {after / 2**20:.0f} MB"
