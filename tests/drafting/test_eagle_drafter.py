"""The EAGLE drafter against a plain recursive EAGLE-2 that keeps no cache and no mask.

The plain one runs the head on the whole sequence of pairs of every node's own path, one node at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.drafters import eagle_drafter, feed
from support.stubs import TinyVocabulary, causal_attention, depths_of, generator, tiny_head
from torch import Tensor
from transformers import GPT2Config

import eagle_fsd.core.tree as tree_module
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.drafting import tree_growth
from eagle_fsd.drafting.draft_vocabulary import DraftVocabulary
from eagle_fsd.drafting.drafter import NoDrafter, Seen
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_drafter import Vocabulary
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.drafting.tree_growth import BeamDrafter
from eagle_fsd.runtime import kv_cache
from eagle_fsd.runtime.openvino.fixed_shapes import FixedShapes
from eagle_fsd.runtime.step_recorder import EAGER, Stepper

CPU = torch.device("cpu")
VOCAB, HIDDEN = 40, 32
Pairs = tuple[Tensor, Tensor]  # features [n, d] and the tokens [n] that followed them


def random_pairs(count: int, seed: int) -> Pairs:
    draw = generator(seed)
    return torch.randn(count, HIDDEN, generator=draw), torch.randint(VOCAB, (count,), generator=draw)


def pad(rows: list[Pairs]) -> tuple[Tensor, Tensor, list[int]]:
    """Return right-padded features, tokens and counts, with junk in the padding."""
    counts = [len(tokens) for _, tokens in rows]
    features = torch.full((len(rows), max(counts), HIDDEN), 77.0)
    tokens = torch.full((len(rows), max(counts)), VOCAB - 1)
    for row, (feature, token) in enumerate(rows):
        features[row, : counts[row]], tokens[row, : counts[row]] = feature, token
    return features, tokens, counts


def start_drafter(
    head: DraftHead, vocabulary: Vocabulary, rows: list[Pairs], capacity: int = 64
) -> BeamDrafter:
    drafter = eagle_drafter(head, vocabulary, len(rows), capacity, CPU)
    feed(drafter, *pad(rows))
    return drafter


# --- the twin ---


class PlainEagle2:
    """EAGLE-2 (arXiv 2406.16858, section 4) for one text whose true pairs are known."""

    def __init__(self, head: DraftHead, vocabulary: Vocabulary, pairs: Pairs) -> None:
        self.head, self.vocabulary, self.pairs = head, vocabulary, pairs

    def predictions(self, path: tuple[int, ...]) -> list[Tensor]:
        """Return the features predicted after the true pairs and after each token of a path."""
        features, tokens = self.pairs
        predicted = self.predictions(path[:-1]) if path else []
        features = torch.cat((features, *[f[None] for f in predicted]))
        tokens = torch.cat((tokens, torch.tensor(path, dtype=torch.int64)))
        positions = torch.arange(len(tokens))  # the root's pair at L - 1, a node of depth i at L - 1 + i
        inputs = features[None], self.vocabulary.embed(tokens)[None], positions[None]
        return [*predicted, self.head(*inputs, self.attend)[0, -1]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to all before; past the longest text of training to its half, and to four first pairs."""
        longest, count = self.head.config.trained_positions, q.shape[2]
        if longest is None:
            return causal_attention(q, k, v)
        seen = torch.zeros(count, count, dtype=torch.bool)
        for here in range(count):
            for there in range(here + 1):
                seen[here, there] = here < longest or here - there < longest // 2 or there < 4
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def log_q(self, path: tuple[int, ...]) -> Tensor:
        return F.log_softmax(self.vocabulary.logits(self.predictions(path)[-1]), dim=-1)

    def candidates(self, config: TreeConfig) -> list[tuple[tuple[int, ...], float]]:
        """Return every competing path with its score, level by level, in the order of expansion."""
        found, beam = [], [((), 0.0)]
        for _ in range(config.depth):
            level = []
            for path, score in beam:
                best, tokens = self.log_q(path).topk(config.top_k)
                level += [
                    ((*path, t), score + s) for t, s in zip(tokens.tolist(), best.tolist(), strict=True)
                ]
            found += level
            if max(score for _, score in level) < math.log(2 * config.min_confidence or 1e-300):
                break
            beam = sorted(level, key=lambda entry: -entry[1])[: config.top_k]  # sorted() is stable
        return found

    def draft(self, config: TreeConfig, whole: bool = False) -> dict[tuple[int, ...], Tensor | None]:
        """Return the kept paths in order, the root () first, each with its log q if it has children."""
        found = self.candidates(config)
        found = [one for one in found if whole or math.exp(one[1]) >= config.min_confidence]
        best = sorted(range(len(found)), key=lambda c: (-found[c][1], c))[: config.total_tokens - 1]
        kept = [(), *[found[c][0] for c in sorted(best)]]
        parents = {path[:-1] for path in kept if path}
        return {path: self.log_q(path) if path in parents else None for path in kept}


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Return the tokens below the root on the path to every node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


def check_row(tree: DraftTree, row: int, root: int, twin: dict[tuple[int, ...], Tensor | None]) -> None:
    paths = paths_of(tree, row)
    assert paths == list(twin)
    assert tree.tokens[row, 0] == root
    assert tree.depths[row].tolist() == [len(path) for path in paths]
    expected = {path: log_p for path, log_p in twin.items() if log_p is not None}
    log_q = tree.whole_log_q(len(next(iter(expected.values()))) if expected else 0)[row]
    owned = zip(tree.owners[row].tolist(), log_q, strict=True)
    found = {paths[owner]: log_p for owner, log_p in owned if owner >= 0}
    assert found.keys() == expected.keys()
    for path, log_p in found.items():
        torch.testing.assert_close(log_p, twin[path], atol=1e-4, rtol=1e-4)


# --- growth ---


@pytest.mark.parametrize(
    "config", ["1/1/1", "2/1/1", "6/5/1", "3/1/4", "9/2/3", "16/4/3", "30/3/4", "33/4/4"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_trees_equal_the_plain_recursion(config: str, seed: int) -> None:
    """Tokens, parents, depths and owners equal; log q within float error. Rows of lengths 1, 5 and 9."""
    head, vocabulary = tiny_head(VOCAB, HIDDEN, seed), TinyVocabulary(VOCAB, HIDDEN, seed, peak=2.0)
    size = TreeConfig(*map(int, config.split("/")))
    rows = [random_pairs(count, 10 * seed + count) for count in (5, 1, 9)]
    roots = torch.stack([tokens[-1] for _, tokens in rows])
    with torch.no_grad():
        tree = start_drafter(head, vocabulary, rows).draft(roots, size)
        assert tree.tokens.shape == (3, size.total_tokens) and tree.depth == size.reach
        for row, pairs in enumerate(rows):
            check_row(tree, row, int(roots[row]), PlainEagle2(head, vocabulary, pairs).draft(size))


def test_beyond_the_longest_text_of_training_a_head_sees_a_window() -> None:
    """Rows that are shorter, that outgrow it in the tree, and far behind it, in two parts; a deep tree."""
    head, vocabulary = tiny_head(VOCAB, HIDDEN, 5, trained=8), TinyVocabulary(VOCAB, HIDDEN, 5, peak=2.0)
    rows, size = [random_pairs(count, count) for count in (3, 6, 30)], TreeConfig(14, 6, 3)
    roots = torch.stack([tokens[-1] for _, tokens in rows])
    with torch.no_grad():
        drafter = start_drafter(head, vocabulary, [(f[:-2], t[:-2]) for f, t in rows])
        features, tokens, counts = pad([(f[-2:], t[-2:]) for f, t in rows])
        drafter.root_states = drafter.predictor.commit_pairs(features, tokens, counts)
        tree = drafter.draft(roots, size)
        for row, pairs in enumerate(rows):
            check_row(tree, row, int(roots[row]), PlainEagle2(head, vocabulary, pairs).draft(size))
        unlimited = start_drafter(tiny_head(VOCAB, HIDDEN, 5), vocabulary, rows).draft(roots, size)
    assert torch.equal(unlimited.log_q[0], tree.log_q[0]), "a short text sees all"
    assert not torch.allclose(unlimited.log_q[2, 0], tree.log_q[2, 0], atol=1e-2), "the window did nothing"


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("asks", "one_size"), [(True, False), (True, True), (False, False)], ids=["fitted", "one size", "static"]
)
@pytest.mark.parametrize(
    "config", ["6/5/1/0.2", "16/4/3/0.03", "30/3/4/0.01", "33/4/4/0.1", "33/4/4/0.02", "9/2/3/1"]
)
def test_a_tree_is_as_large_as_the_draft_is_sure(
    config: str, asks: bool, one_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes are those of the plain recursion, with fillers after them up to the size of the largest row.

    If the host must not read tensors, or trees must have one size, the tree has the next best nodes of the
    levels that are drafted as well, and fillers only where there are no more.
    """
    for module in (tree_growth, tree_module):
        monkeypatch.setattr(module, "host_can_read", lambda tensor: asks)
    head, vocabulary = tiny_head(VOCAB, HIDDEN, 3), TinyVocabulary(VOCAB, HIDDEN, 3, peak=2.0)
    size, whole = TreeConfig.parse(config), one_size or not asks
    rows = [random_pairs(count, count) for count in (5, 1, 9, 12)]
    roots = torch.stack([tokens[-1] for _, tokens in rows])
    with torch.no_grad():
        fitted = start_drafter(head, vocabulary, rows)
        drafter = BeamDrafter(fitted.predictor, whole_trees=one_size)
        drafter.root_states = fitted.root_states
        tree = drafter.draft(roots, size)
        twins = [PlainEagle2(head, vocabulary, pairs) for pairs in rows]
        deepest = max(max(len(path) for path, _ in twin.candidates(size)) for twin in twins)
        drafts, sure = ([twin.draft(size, every) for twin in twins] for every in (whole, False))
    widest = max(map(len, drafts))
    assert tree.tokens.shape[1] == (size.total_tokens if whole else widest)
    assert tree.depth == (deepest if asks else size.reach) and tree.largest == size.total_tokens
    assert min(map(len, sure)) < size.total_tokens
    assert (sum(map(len, drafts)) > sum(map(len, sure))) == whole
    for row, twin in enumerate(drafts):
        real = len(twin)
        assert (tree.parents[row, real:] == -1).all() and (tree.depths[row, real:] == 0).all()
        assert (tree.owners[row] < real).all() and not tree.children[row, :, real:].any()
        parts = {name: getattr(tree, name)[:, :real] for name in ("tokens", "parents", "depths")}
        check_row(replace(tree, **parts), row, int(roots[row]), twin)
    assert len({len(twin) for twin in sure}) > 1 or size.min_confidence == 1


class Masked:
    """The slow twin of a draft vocabulary: logits of all tokens, -inf for those that are not drafted."""

    def __init__(self, vocabulary: Vocabulary, token_ids: list[int]) -> None:
        self.embed, self.vocabulary, self.token_ids = vocabulary.embed, vocabulary, token_ids

    def logits(self, features: Tensor) -> Tensor:
        logits = self.vocabulary.logits(features)
        for token in range(logits.shape[-1]):
            if token not in self.token_ids:
                logits[..., token] = -math.inf
        return logits


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", ["1/1/1", "2/1/1", "6/5/1", "9/2/3", "16/4/3", "33/4/4", "16/2/7"])
@pytest.mark.parametrize("count", [7, 25, VOCAB])
def test_a_draft_vocabulary_equals_the_plain_recursion_on_masked_logits(config: str, count: int) -> None:
    size, token_ids = TreeConfig.parse(config), torch.randperm(VOCAB, generator=generator(count))[:count]
    head, vocabulary = tiny_head(VOCAB, HIDDEN, 1), TinyVocabulary(VOCAB, HIDDEN, 1, peak=2.0)
    twin = PlainEagle2(head, Masked(vocabulary, token_ids.tolist()), random_pairs(1, 0))
    rows = [random_pairs(count, 10 + count) for count in (5, 1, 9)]
    roots = torch.stack([tokens[-1] for _, tokens in rows])
    head.restrict(token_ids)
    with torch.no_grad():
        tree = start_drafter(head, DraftVocabulary(vocabulary, token_ids), rows).draft(roots, size)
        for row, pairs in enumerate(rows):
            twin.pairs = pairs
            check_row(tree, row, int(roots[row]), twin.draft(size))


def test_a_draft_vocabulary_must_be_the_heads() -> None:
    head, vocabulary = tiny_head(VOCAB, HIDDEN), TinyVocabulary(VOCAB, HIDDEN)
    with torch.no_grad(), pytest.raises(AssertionError, match="DraftVocabulary"):
        start_drafter(head.restrict(torch.arange(5)), vocabulary, [random_pairs(3, 0)]).draft(
            torch.tensor([5]), TreeConfig(4, 2, 2)
        )


def test_trees_equal_the_plain_recursion_over_a_dialogue() -> None:
    """Draft, commit true pairs (ragged), draft again: nothing of an old tree is left in the cache.

    This also holds if the true pairs repeat none, some or all of it, and if the cache has to grow.
    """
    head, vocabulary = tiny_head(VOCAB, HIDDEN, 3), TinyVocabulary(VOCAB, HIDDEN, 3, peak=2.0)
    size, draw = TreeConfig(12, 3, 3), generator(4)
    rows = [random_pairs(count, count) for count in (4, 2, 6)]
    with torch.no_grad():
        drafter = start_drafter(head, vocabulary, rows, capacity=3)
        for step in range(5):
            roots = torch.stack([tokens[-1] for _, tokens in rows])
            tree = drafter.draft(roots, size)
            for row, pairs in enumerate(rows):
                check_row(tree, row, int(roots[row]), PlainEagle2(head, vocabulary, pairs).draft(size))
            news = [
                random_pairs(int(n), 50 + 7 * step + int(n))
                for n in torch.randint(1, 5, (3,), generator=draw)
            ]
            feed(drafter, *pad(news))
            rows = [(torch.cat((f, g)), torch.cat((t, u))) for (f, t), (g, u) in zip(rows, news, strict=True)]
            if step == 2:  # the middle row is done
                drafter.select([0, 2])
                rows = [rows[0], rows[2]]
                draw = generator(5)
                rows.append(rows[0])  # and one comes twice
                drafter.select([0, 1, 0])
        assert drafter.cache.capacity > 3


@pytest.mark.parametrize("sure", [0.0, 0.02, 0.2])
def test_a_row_is_the_same_alone(sure: float) -> None:
    head, vocabulary = tiny_head(VOCAB, HIDDEN, 1), TinyVocabulary(VOCAB, HIDDEN, 1, peak=2.0)
    rows, size = [random_pairs(count, count) for count in (3, 11, 1, 6)], TreeConfig(20, 4, 4, sure)
    roots = torch.stack([tokens[-1] for _, tokens in rows])
    with torch.no_grad():
        together = start_drafter(head, vocabulary, rows).draft(roots, size)
        for row, pairs in enumerate(rows):
            alone = start_drafter(head, vocabulary, [pairs], capacity=1).draft(roots[row : row + 1], size)
            used = alone.owners.shape[1]  # further rows of the batch's log_q belong to other trees
            assert (together.owners[row, used:] == -1).all() and (alone.owners >= 0).all()
            for name in ("tokens", "parents", "depths", "owners"):
                one, of_many = getattr(alone, name)[0], getattr(together, name)[row]
                assert torch.equal(one, of_many[: len(one)]), name
            assert (together.parents[row, alone.parents.shape[1] :] == -1).all()
            torch.testing.assert_close(alone.log_q[0], together.log_q[row, :used], atol=1e-5, rtol=1e-5)


# --- ties, certainty, impossibility ---


class FixedLogits:
    """A vocabulary whose logits depend only on the last token: `logits_after` maps it to a row of them.

    Embeddings carry the token in their first component, and the head below hands it on.
    """

    def __init__(self, logits_after: Callable[[int], list[float]]) -> None:
        self.table = torch.tensor([logits_after(token) for token in range(6)])

    def embed(self, tokens: Tensor) -> Tensor:
        return F.pad(tokens[..., None].float(), (0, HIDDEN - 1))

    def logits(self, features: Tensor) -> Tensor:
        return self.table[features[..., 0].round().long().clamp(0, 5)]


class Echo(DraftHead):
    """A head that predicts the embedding it was given; its attention is computed and thrown away."""

    def forward(self, features: Tensor, embeddings: Tensor, position_ids: Tensor, attend: Callable) -> Tensor:
        super().forward(features, embeddings, position_ids, attend)
        return embeddings


def echo(logits_after: Callable[[int], list[float]], config: TreeConfig) -> DraftTree:
    head = Echo(tiny_head(6, HIDDEN).config)
    with torch.no_grad():
        drafter = start_drafter(
            head, FixedLogits(logits_after), [(torch.zeros(2, HIDDEN), torch.tensor([0, 1]))]
        )
        return drafter.draft(torch.tensor([1]), config)


SURE = 1e4
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("total", range(2, 8))
def test_certain_drafts_tie_with_their_parents_and_stay_a_chain(total: int) -> None:
    """log q = 0.0 exactly along 1 -> 2 -> 3 ...: six equal scores; the shallower ones are kept."""
    tree = echo(lambda t: [SURE * (n == (t + 1) % 6) for n in range(6)], TreeConfig(total, 6, 2))
    assert tree.log_q[0, 0].amax() == 0.0
    assert tree.tokens.tolist() == [[(1 + n) % 6 for n in range(total)]]
    assert tree.parents.tolist() == [list(range(-1, total - 1))]
    assert tree.depths.tolist() == [list(range(total))]


@pytest.mark.parametrize("total", [2, 3, 4, 6, 9, 20])
def test_uniform_drafts_fill_the_tree_from_the_top(total: int) -> None:
    """All log q equal: a level is exhausted before the next one starts; siblings stay distinct."""
    tree = echo(lambda t: [0.0] * 6, TreeConfig(total, 3, 3))
    depths = tree.depths[0].tolist()
    assert depths == ([0] + [1] * 3 + [2] * 9 + [3] * 9)[:total]
    paths = paths_of(tree, 0)
    assert len(set(paths)) == total
    assert depths == depths_of(tree.parents[0].tolist())


@pytest.mark.parametrize("hole", [-INF, NAN])
@pytest.mark.parametrize("total", [2, 5, 12, 1 + 3 + 27])
def test_impossible_and_undefined_drafts_come_last(hole: float, total: int) -> None:
    """After 1, two tokens are impossible. After 2, all logits are NaN, or all but that of 2 are -inf.

    The tree is still connected and ordered, its siblings are distinct, and the good nodes are in it.
    """

    def logits_after(token: int) -> list[float]:
        if token == 2:
            return [hole if n != 2 or math.isnan(hole) else 0.0 for n in range(6)]
        return [0.5, -INF, 3.0, 1.0, -INF, 0.0]

    tree = echo(logits_after, TreeConfig(total, 4, 3))
    parents, paths = tree.parents[0].tolist(), paths_of(tree, 0)
    assert all(-1 < parent < node for node, parent in enumerate(parents) if node)
    assert len(set(paths)) == total
    assert tree.depths[0].tolist() == depths_of(parents)
    assert paths[1] == (2,)
    if total >= 12:
        assert (3,) in paths and (0,) in paths


def test_a_tree_of_one_node_and_no_drafter() -> None:
    head, vocabulary = tiny_head(VOCAB, HIDDEN), TinyVocabulary(VOCAB, HIDDEN)
    with torch.no_grad():
        own = start_drafter(head, vocabulary, [random_pairs(3, 0)]).draft(
            torch.tensor([5]), TreeConfig(1, 3, 2)
        )
    plain = NoDrafter(VOCAB).draft(torch.tensor([5]), TreeConfig(1, 3, 2))
    for tree in (own, plain):
        assert tree.tokens.tolist() == [[5]] and tree.parents.tolist() == [[-1]]
        assert tree.log_q.shape[1] == 0 and tree.owners.shape == (1, 0)


# --- the head's cache and positions ---


def keys_from_scratch(head: DraftHead, vocabulary: Vocabulary, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [H, n, D] and the last prediction [d] of one causal run over the true pairs."""
    captured = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        captured["k"], captured["v"] = k[0], v[0]
        return causal_attention(q, k, v)

    features, tokens = pairs
    positions = torch.arange(len(tokens))[None]
    out = head(features[None], vocabulary.embed(tokens)[None], positions, attend)
    return captured["k"], captured["v"], out[0, -1]


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_cache_after_extend_equals_a_head_run_from_scratch(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True features of accepted tokens replace those that the draft wrote there (trap 5).

    This holds for any draft in between and any chunks of a prompt.
    """
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", chunk)
    head, vocabulary = tiny_head(VOCAB, HIDDEN, 2), TinyVocabulary(VOCAB, HIDDEN, 2)
    rows = [random_pairs(count, count) for count in (7, 1, 4)]
    with torch.no_grad():
        drafter = start_drafter(head, vocabulary, rows, capacity=16)
        for step in range(4):
            for row, pairs in enumerate(rows):
                keys, values, prediction = keys_from_scratch(head, vocabulary, pairs)
                assert drafter.cache.row_lengths[row] == len(pairs[1])
                for buffer, expected in zip(drafter.cache.layers[0], (keys, values), strict=True):
                    kept = buffer[row, :, : len(pairs[1])]
                    torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(drafter.root_states[row], prediction, atol=1e-5, rtol=1e-5)
            drafter.draft(torch.stack([tokens[-1] for _, tokens in rows]), TreeConfig(10, 3, 3))
            news = [random_pairs(1 + (step + row) % 4, 90 + 9 * step + row) for row in range(3)]
            feed(drafter, *pad(news))
            rows = [(torch.cat((f, g)), torch.cat((t, u))) for (f, t), (g, u) in zip(rows, news, strict=True)]


class PositionSpy(DraftHead):
    """A head that records the positions of its inputs."""

    def forward(self, features: Tensor, embeddings: Tensor, position_ids: Tensor, attend: Callable) -> Tensor:
        self.__dict__.setdefault("seen", []).append(position_ids.clone())
        return super().forward(features, embeddings, position_ids, attend)


def test_positions_follow_pairs_and_depth() -> None:
    """Pair j is at position j, so the root's pair is at len - 1, and a node of depth i at len - 1 + i.

    Positions go by depth, and never by place in the tree (traps 1 and 2).
    """
    head = PositionSpy(tiny_head(VOCAB, HIDDEN).config)
    rows = [random_pairs(count, count) for count in (5, 2)]
    with torch.no_grad():
        drafter = start_drafter(head, TinyVocabulary(VOCAB, HIDDEN), rows)
        assert [p.tolist() for p in head.seen] == [[[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]]
        assert drafter.cache.row_lengths == [5, 2]  # the roots' pairs are at 4 and 1
        head.seen.clear()
        drafter.draft(torch.tensor([0, 0]), TreeConfig(10, 4, 2))
        levels = [[[4 + depth] * 2, [1 + depth] * 2] for depth in (1, 2, 3)]  # the deepest are not read
        assert [p.tolist() for p in head.seen] == levels
        head.seen.clear()
        feed(drafter, *pad([random_pairs(1, 8), random_pairs(3, 9)]))
        assert [p.tolist() for p in head.seen] == [[[5, 6, 7], [2, 3, 4]]]


def test_pairs_are_committed_in_chunks_whose_outputs_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of recorded work do: each replay overwrites what the one before it gave."""
    monkeypatch.setattr(kv_cache, "WIDEST", 2)
    shared, counts = torch.zeros(2, 2, 1), [1, 4]

    def read(numbers: Tensor, start: int) -> Tensor:
        return shared.copy_(numbers[:, :, None])

    cache = kv_cache.KVCache(2, 8, torch.device("cpu"))
    numbers = torch.tensor([[1.0, 0, 0, 0], [5.0, 6, 7, 8]])
    assert kv_cache.commit_in_chunks(cache, read, [numbers], counts, first=True).tolist() == [[1.0], [8.0]]
    assert cache.row_lengths == counts


@pytest.mark.parametrize(("stepper", "widths"), [(EAGER, [2, 1]), (FixedShapes(), [6, 6])])
def test_what_is_padding_in_all_rows_of_a_step_is_read_only_for_few_shapes(
    stepper: Stepper, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, vocabulary = tiny_head(VOCAB, HIDDEN), TinyVocabulary(VOCAB, HIDDEN)
    drafter = eagle_drafter(head, vocabulary, 3, 64, CPU, stepper)
    feed(drafter, *pad([random_pairs(4, row) for row in range(3)]))
    found = list[tuple[int, int]]()
    commit = drafter.predictor.commit_pairs

    def count(features: Tensor, tokens: Tensor, counts: list[int], first: bool, media: object) -> Tensor:
        found.append((features.shape[1], tokens.shape[1]))
        return commit(features, tokens, counts, first)

    monkeypatch.setattr(drafter.predictor, "commit_pairs", count)
    features, tokens, _ = pad([random_pairs(6, row) for row in range(3)])
    drafter.extend(Seen(tokens, [2, 0, 1], features))
    drafter.extend(Seen(tokens, [0, 0, 0], features))
    assert found == [(width, width) for width in widths]
    assert drafter.cache.row_lengths == [6, 4, 5]


@pytest.mark.parametrize("shift", [1, 100])
def test_positions_matter(shift: int) -> None:
    """With positions off by `shift` below the root, the twin's q differs: the tests above would fail."""

    class Shifted(PlainEagle2):
        def predictions(self, path: tuple[int, ...]) -> list[Tensor]:
            features, tokens = self.pairs
            predicted = self.predictions(path[:-1]) if path else []
            features = torch.cat((features, *[f[None] for f in predicted]))
            positions = torch.arange(len(features)) + shift * (torch.arange(len(features)) >= len(tokens))
            embeddings = self.vocabulary.embed(torch.cat((tokens, torch.tensor(path, dtype=torch.int64))))
            out = self.head(features[None], embeddings[None], positions[None], causal_attention)[0]
            return [*predicted, out[-1]]

    head, vocabulary = tiny_head(VOCAB, HIDDEN, 1), TinyVocabulary(VOCAB, HIDDEN, 1, peak=2.0)
    pairs = random_pairs(5, 5)
    with torch.no_grad():
        right, wrong = (kind(head, vocabulary, pairs).log_q((3, 4)) for kind in (PlainEagle2, Shifted))
    assert (right - wrong).abs().max() > 1e-2


def test_a_target_whose_shape_no_head_has_is_refused_as_such() -> None:
    """A new head has no config.json yet that could be checked."""
    odd = GPT2Config(n_embd=36, n_head=12)  # GPT-2's positions are learned, so its heads may have odd sizes
    with pytest.raises(ValueError, match=r"^head_dim is 3: .* need it even; .*: choose another target$"):
        HeadConfig.for_target(odd, 36, VOCAB)
    assert HeadConfig.for_target(GPT2Config(n_embd=36, n_head=9), 36, VOCAB).head_dim == 4
