"""Random histories of one engine: every text is the plain twin's, or that of a fresh engine alone.

EAGLE_FSD_HISTORY=7 runs the history of seed 7 alone. Where steps are recorded, `OpRecorder` plays the part of
CUDA graphs.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.op_recorder import OpRecorder, as_on_an_accelerator
from support.plain_texts import PlainTexts, require_equal
from support.random_calls import (
    DRAFTERS,
    TREES,
    VOCAB_SIZE,
    Call,
    Interrupted,
    interrupting,
    padded,
    random_call,
    seeds,
)
from support.tiny_models import FAMILIES, RECURRENT, attention_of, tiny_model

from eagle_fsd import EagleFSD, GenerationOptions, PromptCache, TreeConfig
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.decoding import workspace
from eagle_fsd.decoding.prompts import prefill, prefix_cache
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import CANCELLED, Scheduler
from eagle_fsd.drafting.specs import with_lookup
from eagle_fsd.drafting.tree_growth import BeamDrafter
from eagle_fsd.runtime import kv_cache
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.block_cache import BlockCache
from eagle_fsd.runtime.openvino.library import is_installed
from eagle_fsd.runtime.step_recorder import EAGER, Graphs
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

POSITIONS = 512
CONVERTED = ("llama", "gemma3", "gemma2", "qwen2-window", "gpt2", "granite")
RUN_BY = {
    "torch": sorted([*FAMILIES, *RECURRENT]),
    "recorded": sorted(FAMILIES),
    "openvino": CONVERTED,
}
ASKED = "EAGLE_FSD_HISTORY"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models as small as these are fastest so."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


# What a caller cannot set: sizes of caches and of the parts of prompts, which change no text.
SIZES: tuple[tuple[Any, str, tuple[int, ...]], ...] = (
    *((workspace, "AHEAD", (3, 40, 512)), (workspace, "LEAST", (0, 300, 1024))),
    *((kv_cache, "WIDEST", (7, 100, 512)), (BlockCache, "widest", (16, 100, 256))),
    *((prefill, "SHARED", (4, 64)), (prefix_cache, "LEAST", (4, 16))),
)


@dataclass
class Walk:
    """One engine on its way through a history.

    texts: what its scheduler has admitted. made: what its calls have made, prompts included.
    """

    draw: random.Random
    runtime: str
    texts: list[tuple[Text, Call]] = field(default_factory=list)
    made: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw, graphs = self.draw, OpenVINO("float32") if self.runtime == "openvino" else None
        family = draw.choice(RUN_BY[self.runtime])
        sizes: dict[str, Any] = {
            "n_positions" if family in ("gpt2", "gptj") else "max_position_embeddings": POSITIONS
        }
        if family in ("gemma2", "gemma3"):  # a cap that many logits reach makes ties, which rounding decides
            sizes["final_logit_softcapping"] = 20.0
        self.model = tiny_model(family, attention_of(family), vocab_size=VOCAB_SIZE, **sizes)
        stepper = Graphs(OpRecorder()) if self.runtime == "recorded" else EAGER
        self.target, self.plain = TargetModel(self.model, stepper, graphs), PlainTexts(self.model)
        self.drafter, self.lookup = draw.choice(sorted(DRAFTERS)), draw.random() < 0.5
        few = draw.sample(TREES, 2) if graphs else TREES  # a graph is compiled for each size
        self.trees = TREES[:1] if self.drafter == "none" else few
        self.engine, self.tree = self.fresh(), draw.choice(self.trees)
        rows = draw.choice([1, 2, 4])
        ways = {"slice_tokens": draw.choice([1, 8, None]), "prefix_tokens": draw.choice([0, 3000])}
        self.kept = PromptCache(draw.choice([0, 150, 3000]))
        crowded = draw.choice([None, self.tree.for_many(rows)])
        self.scheduler = Scheduler(self.target, self.engine.drafter, self.tree, rows, crowded=crowded, **ways)

    def fresh(self) -> EagleFSD:
        """Return an engine that has done nothing yet."""
        made = DRAFTERS[self.drafter](self.target)
        merges = self.lookup and self.drafter not in ("none", "lookup")
        return EagleFSD(self.target, with_lookup(made, self.target) if merges else made)

    def call(self) -> Call:
        known = [[*text.prompt, *text.new_tokens] for text, _ in self.texts]
        call = random_call(self.draw, [*known, *self.made], self.trees)
        call.options["prompt_cache"] = self.draw.choice([None, self.kept])
        return call

    # --- what is right ---

    def require(
        self, call: Call, row: int, made: Sequence[int], stats: GenerationStats, tree: TreeConfig
    ) -> None:
        """Assert that a row's new tokens and its statistics are right; of a text that was left, so far."""
        prompt, stream = call.prompts[row], call.streams[row]
        options = {name: value for name, value in call.options.items() if name != "prompt_cache"}
        if terms_of(options).any_tree:
            wanted, leads = self.plain.text(prompt, options, stream, options["max_new_tokens"])
        else:
            alone = self.fresh().generate(*padded([prompt]), seed=[stream], **{**options, "tree": tree})
            wanted, leads = alone.new_tokens[0], [1.0] * len(alone.new_tokens[0])
        ended = stats.finish_reason in ("stop", "length")
        require_equal(made, wanted if ended else wanted[: len(made)], leads)
        self.made.append([*prompt, *made])
        accepted = stats.exact_accepts + stats.fuzzy_accepts
        assert stats.new_tokens == len(made) == sum(stats.sources.values())
        assert sum(stats.accept_histogram) == stats.steps and accepted == sum(stats.accepted_of.values())
        # Every step emits the target's own token, but for a last one that is cut.
        assert len(made) - accepted in (stats.steps, stats.steps - 1)

    def require_all(
        self, call: Call, rows: Sequence[Sequence[int]], stats: Sequence[GenerationStats]
    ) -> None:
        for row, (made, its) in enumerate(zip(rows, stats, strict=True)):
            if made or its.finish_reason in ("stop", "length"):
                self.require(call, row, made, its, call.options["tree"])

    # --- what may happen ---

    def generate(self) -> None:
        call = self.call()
        made = self.engine.generate(*padded(call.prompts), seed=call.streams, **call.options)
        self.require_all(call, made.new_tokens, made.stats)

    def interleave(self) -> None:
        """Begin a batch, do something else, and go on with the batch or leave it."""
        call, rows = self.call(), []
        with self.engine.stream_batch(*padded(call.prompts), seed=call.streams, **call.options) as started:
            for number, step in enumerate(started.steps):
                rows.append(step)
                if number == 1:
                    self.draw.choice([self.generate, self.fail, self.engine.free_memory, self.steps])()
                    if self.draw.random() < 0.5:
                        break
        made = [[token for step in rows for token in step[row]] for row in range(len(call.prompts))]
        self.require_all(call, made, started.stats)

    def many(self) -> None:
        """Answer a call's prompts some at a time; now and then end them early."""
        call, last = self.call(), self.draw.choice([0, 1, 3, 9, 1000])
        texts = self.engine.generate_many(
            call.prompts, batch_size=self.draw.choice([1, 2, 3]), seed=call.streams, **call.options
        )
        found = []
        while texts.busy:
            found += texts.step() if last else texts.end()
            last -= 1
        for text in found:
            self.require(call, text.number, text.new_tokens, text.stats, call.options["tree"])

    def fail(self) -> None:
        """Raise an exception in some part of a call, once it has done its work there."""
        call, number = self.call(), self.draw.choice([1, 2, 4])
        cache = type(self.target.new_cache(1, 1))
        places = [*((TargetSession, name) for name in ("prefill", "verify", "keep")), (cache, "grow")]
        with interrupting(*self.draw.choice([*places, (BeamDrafter, "draft")]), number):
            try:
                made = self.engine.generate(*padded(call.prompts), seed=call.streams, **call.options)
            except Interrupted:
                return
        self.require_all(call, made.new_tokens, made.stats)

    def threads(self) -> None:
        calls = [self.call(), self.call()]

        def run(call: Call) -> Any:
            return self.engine.generate(*padded(call.prompts), seed=call.streams, **call.options)

        with ThreadPoolExecutor(2) as pool:
            for call, made in zip(calls, pool.map(run, calls), strict=True):
                self.require_all(call, made.new_tokens, made.stats)

    def admit(self) -> None:
        call = self.call()
        for row, prompt in enumerate(call.prompts):
            terms, alone = terms_of(call.options), Call([prompt], call.options, [call.streams[row]])
            text = Text(row, call.options["max_new_tokens"], terms, prompt=prompt, stream=call.streams[row])
            self.scheduler.admit(text)
            self.texts.append((text, alone))

    def steps(self, most: int = 12) -> None:
        while self.scheduler.busy and most:
            self.scheduler.step()
            most -= 1

    def drain(self) -> None:
        """Let the scheduler end all its texts: the next one finds it idle."""
        self.steps(-1)

    def retire(self) -> None:
        if self.texts:
            self.scheduler.retire(self.draw.choice(self.texts)[0])

    def end(self) -> None:
        self.steps(-1)
        for text, call in self.texts:
            if text.new_tokens or text.stats.finish_reason != CANCELLED:
                self.require(call, 0, text.new_tokens, text.stats, self.tree)


def terms_of(options: dict[str, Any]) -> Terms:
    asked = GenerationOptions(**options)
    return Terms(tuple(options["eos_token_id"]), options["rule"], asked.sampling, asked.processing)


def caches() -> int:
    gc.collect()
    return sum(issubclass(type(one), KVCache) for one in gc.get_objects())


def run_history(seed: int, runtime: str, operations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"{seed}/{runtime}")
    if runtime == "recorded":
        as_on_an_accelerator(monkeypatch, draw.choice([16, 64, 256]))
    for owner, name, values in SIZES:
        monkeypatch.setattr(owner, name, draw.choice(values))
    walk, before = Walk(draw, runtime), caches()
    ways = [walk.generate, walk.many, walk.interleave, walk.fail, walk.threads, walk.admit, walk.admit]
    ways += [walk.steps, walk.drain, walk.retire, walk.engine.free_memory]
    done: list[str] = []
    try:
        for way in [*draw.choices(ways, k=operations), walk.end]:
            done.append(way.__name__)
            way()
    except Exception as error:
        where = f"{walk.model.config.model_type}, {walk.drafter}, lookup {walk.lookup}: {', '.join(done)}"
        raise AssertionError(f"EAGLE_FSD_HISTORY={seed} on {runtime}, {where}: {error}") from error
    assert runtime != "recorded" or walk.target.stepper.records, "recording was given up"
    walk.texts.clear()
    walk.engine.free_memory()
    del walk.scheduler  # it may keep a lone text's
    assert caches() <= before, f"EAGLE_FSD_HISTORY={seed} on {runtime} leaves caches behind"


@pytest.mark.parametrize("seed", seeds(ASKED, 2, 60))
def test_texts_do_not_depend_on_what_was_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_history(seed, "torch", 8, monkeypatch)


@pytest.mark.parametrize("seed", seeds(ASKED, 1, 40))
def test_texts_of_recorded_steps_do_not_depend_on_what_was_before(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_history(seed, "recorded", 8, monkeypatch)


@pytest.mark.skipif(not is_installed(), reason="the extra openvino is not installed")
@pytest.mark.parametrize("seed", seeds(ASKED, 1, 40))
def test_texts_of_graphs_do_not_depend_on_what_was_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_history(seed, "openvino", 10, monkeypatch)
