"""Threads on one engine, and on one model: right texts, and a model that its owner finds as it was."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.tiny_models import greedy_alone, prompts_of, tiny_head, tiny_model
from torch import nn

from eagle_fsd import EagleFSD, Lossless, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.target.model import TargetModel

PROMPTS, NEW, TREE = prompts_of([9, 4, 6, 11]), 16, TreeConfig(8, 3, 3)
THREADS, ROUNDS = 4, 6


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual, so that races show."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(usual)


def at_once(*works: Callable[[int], object]) -> list[object]:
    """The results of all works, each run by its own thread, all started together."""
    barrier = threading.Barrier(len(works))

    def run(number: int, work: Callable[[int], object]) -> object:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(len(works)) as pool:
        return [one.result() for one in [pool.submit(run, *pair) for pair in enumerate(works)]]


def state_of(model: nn.Module) -> list[object]:
    """Whatever hangs on a model's modules and configs: values, or the identity of what has none."""
    config, defaults = model.config, model.generation_config
    found: list[object] = [config.to_dict(), config._attn_implementation, id(defaults)]
    for module in model.modules():
        for name, value in sorted(vars(module).items()):
            plain = isinstance(value, bool | int | float | str | type(None) | dict)
            found.append((name, copy.copy(value) if plain else id(value)))
    return found


def engine_of(family: str = "llama", packed: bool = False) -> EagleFSD:
    model = tiny_model(family, "sdpa")
    return EagleFSD(TargetModel(pack_linears(model) if packed else model), tiny_head())


@pytest.mark.parametrize("engines", [1, 2])
def test_threads_write_the_texts_that_one_writes(engines: int) -> None:
    """On one engine, and on two engines of one model."""
    first = engine_of()
    model = first.target.model
    makers = [first, *(EagleFSD(TargetModel(model), tiny_head()) for _ in range(engines - 1))]
    wanted = [greedy_alone(model, [prompt], NEW)[0] for prompt in PROMPTS]
    before = state_of(model)

    def work(number: int) -> list[list[int]]:
        maker, prompt = makers[number % engines], [PROMPTS[number]]
        made = [maker.generate(prompt, max_new_tokens=NEW, tree=TREE) for _ in range(ROUNDS)]
        return [one.new_tokens[0] for one in made]

    texts = at_once(*[work] * THREADS)
    assert texts == [[text] * ROUNDS for text in wanted]
    assert state_of(model) == before


def test_the_owner_may_use_the_model_meanwhile() -> None:
    """Hugging Face's own `generate` on a padded batch, whose masks depend on what the config says."""
    engine = engine_of()
    model = engine.target.model
    ids, mask = pad_left(PROMPTS, 0)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, attention_mask=mask, **options)
    ours = engine.generate(ids, mask, max_new_tokens=NEW, tree=TREE).new_tokens

    def decode(_: int) -> bool:
        made = [engine.generate(ids, mask, max_new_tokens=NEW, tree=TREE).new_tokens for _ in range(ROUNDS)]
        return made == [ours] * ROUNDS

    def alone(_: int) -> bool:
        made = [model.generate(ids, attention_mask=mask, **options) for _ in range(ROUNDS)]
        return all(torch.equal(one, wanted) for one in made)

    assert all(at_once(decode, alone, decode))


def test_baselines_beside_each_other_leave_the_model_as_it_was() -> None:
    """Packed layers give way to plain ones for a baseline, and its `generate` has other defaults."""
    engine = engine_of(packed=True)
    model = engine.target.model
    wanted = engine.generate([PROMPTS[0]], max_new_tokens=NEW, tree=TREE).new_tokens
    before = state_of(model)

    def alone(_: int) -> list[list[list[int]]]:
        return [engine.target_alone([PROMPTS[0]], max_new_tokens=NEW).new_tokens for _ in range(ROUNDS)]

    assert at_once(*[alone] * THREADS) == [[wanted] * ROUNDS] * THREADS
    assert state_of(model) == before


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_forward_that_fails_leaves_the_model_as_it_was(family: str) -> None:
    attention = "eager" if family == "gemma2" else "sdpa"
    model = tiny_model(family, attention)
    engine = EagleFSD(TargetModel(model), None)
    before = state_of(model)

    def fail(*_: object) -> None:
        raise RuntimeError("a layer fails")

    last = [layer for layer in engine.target.decoder.modules() if isinstance(layer, nn.Linear)] or [
        engine.target.lm_head
    ]
    hook = last[-1].register_forward_pre_hook(fail)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a layer fails"):
                engine.generate([PROMPTS[0]], max_new_tokens=4, rule=Lossless(), tree=TreeConfig(1))
    finally:
        hook.remove()
    assert state_of(model) == before
    text = engine.generate([PROMPTS[0]], max_new_tokens=4, tree=TreeConfig(1)).new_tokens
    assert text == greedy_alone(model, [PROMPTS[0]], 4)


def test_the_model_changes_neither_on_admission_nor_in_a_forward() -> None:
    """At no moment: another thread could look just then."""
    model = tiny_model("mistral", "sdpa")  # its window is narrowed on admission
    before = state_of(model)
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_: seen.append(state_of(model)))
        for layer in (model.lm_head, model.model.norm)
    ]
    before = state_of(model)
    engine = EagleFSD(TargetModel(model), None)
    engine.generate([PROMPTS[0]], max_new_tokens=3, tree=TreeConfig(1))
    assert len(seen) > 5 and all(state == before for state in seen)
    for hook in hooks:
        hook.remove()
