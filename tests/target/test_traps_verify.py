"""Traps of verification, acceptance and cache: aliasing, padding, memory, kernels, sizes, vocabularies.

Most tests end with the trap itself, set on purpose: what the test checks must then come out wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from support.trap_models import VOCAB, exact_engine, exact_pair, random_head, random_llama, random_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_fsd import EagleFSD, Fuzzy, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.acceptance.divergence import DIVERGENCES, js
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(16, 5, 8)
ALWAYS = Fuzzy(threshold=float("inf"), mode="paper", exact_eos=False)  # the longest paths from any head


def filled_cache() -> KVCache:
    """Two layers, rows of 3 and 5 committed tokens, a tree of 8 nodes behind them; no number twice."""
    cache = KVCache(2, 24, torch.device("cpu"))
    cache.reserve(5)
    cache.place(5)
    numbers = torch.arange(2 * 1 * 5 * 2, dtype=torch.float32).reshape(2, 1, 5, 2)
    for layer in range(2):
        cache.update(numbers + 1000 * layer, numbers + 1000 * layer + 0.5, layer)
    cache.advance([3, 5])
    cache.reserve(8)
    cache.place(8)
    numbers = torch.arange(2 * 1 * 8 * 2, dtype=torch.float32).reshape(2, 1, 8, 2) + 100
    for layer in range(2):
        cache.update(numbers + 1000 * layer, numbers + 1000 * layer + 0.5, layer)
    return cache


PATH = torch.tensor([[0, 1, 3, 4, 6, 7], [0, 2, 5, -1, -1, -1]])
COUNTS = [6, 3]


def compacted(cache: KVCache) -> list[list[Tensor]]:
    """What compact(PATH) must leave in each row of each buffer: plain gathers from copies."""
    rows = []
    for row, count in enumerate(COUNTS):
        start = cache.row_lengths[row]
        slots = [*range(start), *(start + node for node in PATH[row, :count].tolist())]
        rows.append([buffer[row, :, slots].clone() for pair in cache.layers.values() for buffer in pair])
    return rows


def stored(cache: KVCache) -> list[list[Tensor]]:
    return [
        [buffer[row, :, :length].clone() for pair in cache.layers.values() for buffer in pair]
        for row, length in enumerate(cache.row_lengths)
    ]


def same(left: list[list[Tensor]], right: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b)
        for mine, its in zip(left, right, strict=True)
        for a, b in zip(mine, its, strict=True)
    )


def compact_through_views(cache: KVCache, path: Tensor, slots: Tensor) -> None:
    """KVCache.compact, slot by slot in place: a slot is read after it was written over."""
    for buffers in cache.layers.values():
        for buffer in buffers:
            for row, nodes in enumerate(path.tolist()):
                view = buffer[row, :, cache.row_lengths[row] :]
                for place in reversed(range(sum(node >= 0 for node in nodes))):
                    view[:, place] = view[:, nodes[place]]


def test_trap_04_compaction_does_not_alias() -> None:
    """Trap 4: an accepted path is compacted through views that alias: its source and target slots overlap."""
    cache = filled_cache()
    expected = compacted(cache)
    cache.compact(PATH, cache.slots)
    cache.advance(COUNTS)
    assert cache.row_lengths == [9, 8] and same(stored(cache), expected)
    cache = filled_cache()
    compact_through_views(cache, PATH, cache.slots)
    cache.advance(COUNTS)
    assert not same(stored(cache), expected)


def context_error(engine: EagleFSD, monkeypatch: pytest.MonkeyPatch, rule: Fuzzy) -> float:
    """Decode two ragged rows; the most that a root's logits differ from a plain forward over the text.

    The rows accept paths of different lengths, and what they accept is not what the target would say.
    """
    prompts, lengths = random_tokens(2, 9, engine.target.vocab_size, seed=3), [9, 4]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    roots: list[tuple[list[int], Tensor]] = []  # of every step with both rows: their places and logits
    right = TargetSession.verify

    def verify(session: TargetSession, tree: DraftTree) -> tuple[Tensor, Tensor]:
        logits, features = right(session, tree)
        if len(logits) == 2:
            roots.append((session.cache.row_lengths, logits[:, 0]))
        return logits, features

    with monkeypatch.context() as patch:
        patch.setattr(TargetSession, "verify", verify)
        options = {"temperature": 1.0, "rule": rule, "tree": TREE, "seed": 2}
        output = engine.generate(prompts, mask, max_new_tokens=40, **options)
    assert len({tuple(stats.accept_histogram) for stats in output.stats}) == 2
    worst = 0.0
    for row, length in enumerate(lengths):
        text = torch.tensor([prompts[row, :length].tolist() + output.new_tokens[row]])
        with torch.inference_mode():
            plain = engine.target.model(text).logits[0]
        for places, logits in roots:
            worst = max(worst, (logits[row] - plain[places[row]]).abs().max().item())
    return worst


def uncertain_engine() -> EagleFSD:
    """A random target and a random head: under a middling threshold the lengths of paths vary."""
    model = random_llama()
    return EagleFSD(TargetModel(model), random_head(model))


def test_trap_04_context_stays_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 4: soon the cache no longer holds the text: each root's logits must be a plain forward's."""
    engine = uncertain_engine()
    rule = dataclasses.replace(ALWAYS, threshold=0.35)
    assert context_error(engine, monkeypatch, rule) < 1e-3
    monkeypatch.setattr(KVCache, "compact", compact_through_views)
    assert context_error(engine, monkeypatch, rule) > 0.01


def small_tree() -> tuple[DraftTree, Tensor]:
    """Root 0 -> 1 -> 2 and the target's logits [1, 3, 4]: node 2 is a leaf.

    One row of log_q is unused, and equal to p at the root, while the root's own q is far from p.
    """
    logits = torch.tensor([[[0.0, 6.0, 0.0, 0.0], [0.0, 0.0, 6.0, 0.0], [0.0, 0.0, 0.0, 6.0]]])
    p = logits.log_softmax(-1)
    tree = DraftTree(
        tokens=torch.tensor([[0, 3, 2]]),
        parents=torch.tensor([[-1, 0, 1]]),
        depths=torch.tensor([[0, 1, 2]]),
        log_q=torch.stack((torch.tensor([0.0, 0.0, 0.0, 9.0]).log_softmax(-1), p[0, 1], p[0, 0]))[None],
        owners=torch.tensor([[0, 1, -1]]),
        depth=2,
    )
    return tree, logits


def decide(rule: Fuzzy | Lossless, tree: DraftTree, logits: Tensor) -> Verdict:
    batch = len(logits)
    none = torch.zeros(0, dtype=torch.int64)
    emitted = torch.zeros(batch, dtype=torch.int64)
    return accept(rule, Verified(tree, logits, SamplingConfig(), none), RowRandom(0, batch), emitted)


@pytest.mark.parametrize("mode", ["hybrid", "paper"])
def test_trap_06_no_child_no_acceptance(mode: str) -> None:
    """Trap 6: -1 padding read as a node, and a divergence-only rule accepting "token -1" at a leaf."""
    tree, logits = small_tree()
    verdict = decide(Fuzzy(float("inf"), mode=mode), tree, logits)
    assert verdict.path.tolist() == [[0, 1, 2]]
    assert verdict.tokens.tolist() == [[3, 2, 3]]  # the last one is the target's own, at the leaf
    close = Fuzzy(0.01, mode=mode)
    verdict = decide(close, tree, logits)
    assert verdict.path.tolist() == [[0, -1, -1]] and verdict.tokens.tolist() == [[1, -1, -1]]
    # The trap: the unused row's -1 read as a node. Its divergence is 0: the root's child would pass.
    trapped = dataclasses.replace(tree, owners=tree.owners.clamp(min=0))
    assert decide(close, trapped, logits).path.tolist() != verdict.path.tolist()


def test_trap_06_padded_paths_in_a_batch() -> None:
    """Trap 6: a short path's padding spoils its row beside a long one: rows must equal their runs alone."""
    engine = uncertain_engine()
    prompts = random_tokens(4, 9, engine.target.vocab_size, seed=5)
    for rule in (Lossless(), dataclasses.replace(ALWAYS, threshold=0.35)):
        settings = {"max_new_tokens": 24, "temperature": 1.0, "rule": rule, "tree": TREE}
        together = engine.generate(prompts, seed=7, **settings)
        alone = [engine.generate(prompts[i : i + 1], seed=[(7, i)], **settings) for i in range(4)]
        assert together.new_tokens == [output.new_tokens[0] for output in alone]
        assert all(0 <= token < engine.target.vocab_size for row in together.new_tokens for token in row)
        histograms = [stats.accept_histogram for stats in together.stats]
        assert histograms == [output.stats[0].accept_histogram for output in alone]
    assert len({tuple(histogram) for histogram in histograms}) > 1


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation's result had."""

    numel = 0

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_trap_07_no_table_of_leaves_depth_vocabulary(temperature: float) -> None:
    """Trap 7: tables of leaves x depth x V: no tensor of a step is larger than nodes x V."""
    tree, vocab = TreeConfig(60, 6, 10), 2000
    model = random_llama(vocab_size=vocab)
    engine = EagleFSD(TargetModel(model), random_head(model))
    with LargestTensor() as largest:
        engine.generate(
            random_tokens(1, 8, vocab),
            max_new_tokens=6,
            temperature=temperature,
            top_k=50 if temperature else 0,
            top_p=0.9 if temperature else 1.0,
            rule=Fuzzy(0.3),
            tree=tree,
        )
    bound = 1.1 * tree.total_tokens * vocab  # draws pad the vocabulary to whole blocks
    assert tree.total_tokens * vocab <= largest.numel <= bound
    paths = torch.zeros(20, tree.depth + 1, dtype=torch.int64)  # the trap, with as few as 20 leaves
    with LargestTensor() as largest:
        torch.zeros(tree.total_tokens, vocab)[paths]
    assert largest.numel > bound


def unexcused(
    engine: EagleFSD, prompts: Tensor, count: int, tolerance: float
) -> list[tuple[int, int, float]]:
    """Where T = 0 first leaves the target's own text: (row, place, difference of the tokens' logits).

    Differences within the tolerance are excused.
    """
    ours = engine.generate(prompts, max_new_tokens=count, rule=Lossless(), tree=TREE)
    theirs = engine.target_alone(prompts, max_new_tokens=count)
    found = []
    for row, (mine, its) in enumerate(zip(ours.new_tokens, theirs.new_tokens, strict=True)):
        places = [i for i in range(count) if mine[i] != its[i]]
        if places:
            text = torch.tensor([prompts[row].tolist() + its[: places[0]]])
            with torch.inference_mode():
                logits = engine.target.model(text).logits[0, -1].float()
            margin = (logits[its[places[0]]] - logits[mine[places[0]]]).abs().item()
            if margin > tolerance:
                found.append((row, places[0], margin))
    return found


def test_trap_08_float32_is_exact_half_precision_by_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 8: many rows run other kernels than one: equal tokens in float32, by margin in bf16."""
    prompts = random_tokens(8, 12, 2048)  # many tokens: half of these texts meet a near-tie in bf16
    model = random_llama(vocab_size=2048)
    exact = EagleFSD(TargetModel(model), random_head(model))
    assert unexcused(exact, prompts, 36, tolerance=0.0) == []
    model = random_llama(vocab_size=2048).bfloat16()
    half = EagleFSD(TargetModel(model), random_head(model))
    with torch.inference_mode():
        scale = half.target.model(prompts).logits.abs().max().item()
    tolerance = 2 * scale * torch.finfo(torch.bfloat16).eps  # two roundings of the largest logit
    assert unexcused(half, prompts, 36, tolerance) == []
    # A wrong position, unlike a kernel's rounding, moves logits by more than the tolerance.
    right = TargetSession.verify
    monkeypatch.setattr(
        TargetSession,
        "verify",
        lambda session, tree: right(session, dataclasses.replace(tree, depths=tree.depths + 1)),
    )
    for engine in (half, exact):
        assert unexcused(engine, prompts[:2], 12, tolerance)


def test_trap_13_cache_not_frozen_at_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 13: a cache frozen at the first call's length: a longer call must equal a fresh engine's."""
    engine = exact_engine()
    short, long = random_tokens(1, 8), random_tokens(3, 30, seed=1)
    for prompts, count in ((short, 4), (long, 90), (short, 4)):
        output = engine.generate(prompts, max_new_tokens=count, rule=Lossless(), tree=TREE)
        fresh = exact_engine().generate(prompts, max_new_tokens=count, rule=Lossless(), tree=TREE)
        assert output.new_tokens == fresh.new_tokens
        assert output.new_tokens == engine.target_alone(prompts, max_new_tokens=count).new_tokens
        assert [s.steps for s in output.stats] == [s.steps for s in fresh.stats]

    right = KVCache.__init__

    def cramped(cache: KVCache, batch: int, capacity: int, device: torch.device, step: int) -> None:
        right(cache, batch, 1, device, step)

    monkeypatch.setattr(KVCache, "__init__", cramped)  # every call must now grow its caches, several times
    assert engine.generate(long, max_new_tokens=90, rule=Lossless(), tree=TREE).stats[0].tau == 6.0
    grown = engine.generate(long, max_new_tokens=90, rule=Lossless(), tree=TREE)
    assert grown.new_tokens == engine.target_alone(long, max_new_tokens=90).new_tokens
    monkeypatch.setattr(KVCache, "grow", lambda cache, capacity: None)  # the trap
    with pytest.raises((IndexError, RuntimeError)):
        engine.generate(long, max_new_tokens=90, rule=Lossless(), tree=TREE)


def test_trap_16_padded_vocabularies() -> None:
    """Trap 16: p over a padded vocabulary, q over the plain one: never compared before they are aligned."""
    p, q = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    padding = torch.zeros(3, 8)
    for name, divergence in DIVERGENCES.items():
        with pytest.raises(ValueError, match="40 tokens and q_logits 32"):
            divergence(torch.cat((p, padding), -1), q)
        off = torch.full((3, 8), -torch.inf)
        aligned = divergence(torch.cat((p, off), -1), torch.cat((q, off), -1))
        assert torch.allclose(aligned, divergence(p, q), atol=1e-6), name
    wrong = js(torch.cat((p, padding), -1), torch.cat((q, torch.full((3, 8), -torch.inf)), -1))
    assert not torch.allclose(wrong, js(p, q), atol=1e-2)


def test_trap_16_padded_target() -> None:
    """Trap 16: a target padded past its tokenizer gives p and q of the same width, and the same tau."""
    target, head = exact_pair()
    target.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    with torch.no_grad():
        target.lm_head.weight[VOCAB:] = 0.0
    with pytest.raises(ValueError, match="vocab_size is 32 and the target's is 40"):
        EagleFSD(TargetModel(target), head)
    head.config = dataclasses.replace(head.config, vocab_size=VOCAB + 8)
    engine = EagleFSD(TargetModel(target), head)
    widths: set[tuple[int, int]] = set()
    right = TargetSession.verify

    def verify(session: TargetSession, tree: DraftTree) -> tuple[Tensor, Tensor]:
        logits, features = right(session, tree)
        widths.add((logits.shape[-1], tree.log_q.shape[-1]))
        return logits, features

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetSession, "verify", verify)
        output = engine.generate(random_tokens(1, 12), max_new_tokens=60, rule=Lossless(), tree=TREE)
    assert widths == {(VOCAB + 8, VOCAB + 8)}
    assert output.stats[0].tau == 6.0
    assert max(output.new_tokens[0]) < VOCAB
