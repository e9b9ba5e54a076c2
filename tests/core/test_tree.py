"""tree.py against a plain twin: one row at a time, Python lists and loops, nothing clever."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.stubs import depths_of, generator, random_tree
from torch import Tensor

from eagle_fsd.core import tree as tree_module
from eagle_fsd.core.tree import (
    HEAD,
    SUFFIX,
    Candidates,
    DraftTree,
    additive,
    ancestors,
    build_tree,
    children,
    rerank,
    root_only,
    visible_slots,
    within_chunk,
    within_window,
)

NAN, INF = math.nan, math.inf


def draw_mask(mask: Tensor) -> list[str]:
    """A bool mask [q, S] as rows of text: `x` is seen, `.` is not."""
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


# --- the twin ---


def plain_path(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*plain_path(parents, parents[node]), node]


def plain_rerank(scores: list[float], count: int) -> list[int]:
    """The best `count` by score, NaN last, a tie to the earlier one; in ascending order."""
    worth = [-INF if math.isnan(score) else score for score in scores]
    chosen: list[int] = []
    while len(chosen) < count:
        left = [c for c in range(len(worth)) if c not in chosen]
        chosen.append(max(left, key=lambda c: (worth[c], -c)))
    return sorted(chosen)


def plain_tree(root: int, pool: Candidates, row: int, count: int, log_q: Tensor, owners: list[int]) -> dict:
    """One row of build_tree as plain data: nodes are (token, parent node, depth); laws: q of each node."""
    tokens, parents = pool.columns[row].tolist(), pool.parents[row].tolist()
    kept = plain_rerank(pool.scores[row].tolist(), count - 1)
    node_of = {-1: 0} | {candidate: 1 + place for place, candidate in enumerate(kept)}
    nodes = [(root, -1, 0)]
    for candidate in kept:
        assert parents[candidate] in node_of, "a kept candidate's parent is kept"
        nodes.append((tokens[candidate], node_of[parents[candidate]], int(pool.depths[candidate])))
    with_children = {parent for _, parent, _ in nodes[1:]}
    laws = {
        node_of[owner]: log_q[expansion]
        for expansion, owner in enumerate(owners)
        if owner in node_of and node_of[owner] in with_children
    }
    return {"nodes": nodes, "laws": laws}


# --- random pools ---


def random_pool(
    batch: int, width: int, depth: int, vocab: int, seed: int, kind: str
) -> tuple[Candidates, Tensor, Tensor]:
    """Candidates as EAGLE-2 grows them (random beams), with log_q [B, E, V] and owners [B, E] of the
    expansions. `kind` says what log-probabilities look like: smooth, tied (0.0 and -1.0 only), or dead (-inf
    and NaN among them)."""
    draw = generator(seed)

    def log_probs(*shape: int) -> Tensor:
        values = -torch.rand(shape, generator=draw) * 3
        if kind == "tied":
            values = -torch.randint(2, shape, generator=draw).float()
        if kind == "dead":
            hole = torch.rand(shape, generator=draw)
            values = values.masked_fill(hole < 0.3, -INF).masked_fill(hole > 0.9, 0.0)
        return values

    scores, parents, depths, owners = [log_probs(batch, width)], [torch.full((batch, width), -1)], [], []
    depths.append(torch.ones(width, dtype=torch.int64))
    owners.append(torch.full((batch, 1), -1))
    start = 0
    for level in range(2, depth + 1):
        size = scores[-1].shape[1]
        picked = torch.stack([torch.randperm(size, generator=draw)[:width] for _ in range(batch)])
        owners.append(start + picked)
        parents.append((start + picked).repeat_interleave(width, dim=1))
        above = scores[-1].gather(1, picked).repeat_interleave(width, dim=1)
        start += size
        scores.append(above + log_probs(batch, width * width))
        depths.append(torch.full((width * width,), level))
    pool = Candidates(
        columns=torch.randint(vocab, (batch, sum(s.shape[1] for s in scores)), generator=draw),
        parents=torch.cat(parents, dim=1),
        scores=torch.cat(scores, dim=1),
        depths=torch.cat(depths),
    )
    expansions = 1 + width * (depth - 1)
    log_q = torch.randn(batch, expansions, vocab, generator=draw).log_softmax(-1)
    return pool, log_q, torch.cat(owners, dim=1)


# --- rerank and building ---


@pytest.mark.parametrize("kind", ["smooth", "tied", "nan"])
def test_rerank_equals_plain_choice(kind: str) -> None:
    draw = generator(3)
    for size in (1, 2, 7, 40):
        scores = torch.randn(4, size, generator=draw)
        if kind == "tied":
            scores = scores.round()
        if kind == "nan":
            scores[torch.rand(4, size, generator=draw) < 0.3] = NAN
        for count in {0, 1, size // 2, size}:
            expected = [plain_rerank(row, count) for row in scores.tolist()]
            assert rerank(scores, count).tolist() == expected


def test_rerank_gives_ties_to_the_shallower() -> None:
    """A draft probability of 1 (log-prob 0.0) ties a child with its parent: the parent comes first."""
    scores = torch.tensor([[-1.0, 0.0, 0.0, 0.0], [0.0, -0.0, 0.0, 0.0]])
    assert rerank(scores, 2).tolist() == [[1, 2], [0, 1]]


@pytest.mark.covering(2)
@pytest.mark.parametrize("asks", [True, False], ids=["fitted", "static"])
@pytest.mark.parametrize("kind", ["smooth", "tied", "dead"])
@pytest.mark.parametrize(("width", "depth"), [(1, 1), (1, 5), (3, 1), (2, 3), (3, 4), (4, 2)])
def test_build_tree_equals_plain_tree(
    kind: str, width: int, depth: int, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_module, "host_can_read", lambda tensor: asks)
    candidates = width + (depth - 1) * width**2
    for total in {1, 2, 1 + candidates // 2, 1 + candidates}:
        for seed in range(8):
            pool, log_q, owners = random_pool(3, width, depth, 11, seed, kind)
            roots = torch.tensor([5, 6, 7])
            tree = build_tree(roots, pool, total, depth, log_q.unbind(1), owners)
            assert tree.depth == depth
            most = int((tree.owners >= 0).sum(1).amax()) if asks else min(owners.shape[1], total - 1)
            assert tree.log_q.shape[1] == tree.owners.shape[1] == most
            for row in range(3):
                twin = plain_tree(int(roots[row]), pool, row, total, log_q[row], owners[row].tolist())
                nodes = zip(*(x[row].tolist() for x in (tree.tokens, tree.parents, tree.depths)), strict=True)
                assert list(nodes) == twin["nodes"]
                found = {
                    owner: law
                    for owner, law in zip(tree.owners[row].tolist(), tree.log_q[row], strict=True)
                    if owner >= 0
                }
                assert found.keys() == twin["laws"].keys()
                assert all(torch.equal(found[node], twin["laws"][node]) for node in found)


@pytest.mark.parametrize("kind", ["smooth", "tied", "dead"])
def test_built_trees_are_closed_and_ordered(kind: str) -> None:
    """Parents before children, depth one more than the parent's, every inner node owns a row of log_q."""
    for seed in range(40):
        pool, log_q, owners = random_pool(2, 3, 4, 9, seed, kind)
        tree = build_tree(torch.tensor([1, 2]), pool, 2 + seed % 28, 4, log_q.unbind(1), owners)
        for parents, depths, own in zip(
            tree.parents.tolist(), tree.depths.tolist(), tree.owners.tolist(), strict=True
        ):
            assert parents[0] == -1 and all(-1 < parent < node for node, parent in enumerate(parents) if node)
            assert depths == depths_of(parents)
            used = [node for node in own if node >= 0]
            assert len(used) == len(set(used)) and set(used) == set(parents) - {-1}


def test_a_dead_pool_still_builds() -> None:
    """Every score -inf or NaN: the tree is the shallowest one, and still a tree."""
    pool, log_q, owners = random_pool(2, 2, 3, 9, 0, "smooth")
    scores = torch.stack((torch.full_like(pool.scores[0], -INF), torch.full_like(pool.scores[0], NAN)))
    pool = Candidates(pool.columns, pool.parents, scores, pool.depths)
    tree = build_tree(torch.tensor([1, 2]), pool, 3, 3, log_q.unbind(1), owners)
    assert tree.depths.tolist() == [[0, 1, 1], [0, 1, 1]]
    assert tree.parents.tolist() == [[-1, 0, 0], [-1, 0, 0]]


def test_root_only_is_a_tree_without_drafts() -> None:
    tree = root_only(torch.tensor([4, 9]), vocab_size=12)
    assert tree.tokens.tolist() == [[4], [9]]
    assert tree.parents.tolist() == [[-1], [-1]] and tree.depths.tolist() == [[0], [0]]
    assert tree.log_q.shape == (2, 0, 12) and tree.owners.shape == (2, 0) and tree.depth == 0
    assert tree.children.tolist() == [[[False]], [[False]]]


def test_a_tree_is_filled_up_with_nodes_that_are_never_reached() -> None:
    tree = random_tree(2, 4, 2, 3, 11, 0)
    scores, sources = torch.full((2, 4), -1.0), torch.full((2, 4), SUFFIX)
    wide = replace(tree, most=6, columns=tree.tokens, scores=scores, sources=sources).filled_up()
    assert tree.filled_up() is tree, "nothing is copied where nothing is missing"
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(wide, name)[:, :4], getattr(tree, name))
    assert torch.equal(wide.tokens[:, 4:], tree.tokens[:, :1].expand(-1, 2))
    assert wide.parents[:, 4:].tolist() == [[-1, -1]] * 2 and wide.depths[:, 4:].tolist() == [[0, 0]] * 2
    assert not wide.children[:, :, 4:].any() and not wide.children[:, 4:].any()
    assert wide.columns is not None and wide.columns.shape == (2, 6)
    assert wide.scores is not None and wide.scores.tolist() == [[-1.0] * 4 + [-INF] * 2] * 2
    assert wide.sources is not None and wide.sources.tolist() == [[SUFFIX] * 4 + [HEAD] * 2] * 2


# --- relations ---


def trees() -> list[DraftTree]:
    return [random_tree(3, nodes, 1 + seed % 5, 5, 23, seed) for seed in range(30) for nodes in (1, 2, 6)]


def test_children_equal_plain_children() -> None:
    for tree in trees():
        for parents, relation in zip(tree.parents.tolist(), tree.children.tolist(), strict=True):
            nodes = range(len(parents))
            assert relation == [[parents[m] == n for m in nodes] for n in nodes]
    assert not children(torch.tensor([[-1, 0, 0]]))[0, 2].any(), "the root's -1 is not the last node"


def test_ancestors_equal_plain_paths() -> None:
    for tree in trees():
        for parents, relation in zip(
            tree.parents.tolist(), ancestors(tree.parents, tree.depth).tolist(), strict=True
        ):
            nodes = range(len(parents))
            assert relation == [[m in plain_path(parents, n) for m in nodes] for n in nodes]


def test_ancestors_drawn() -> None:
    #       0
    #     1   2
    #    3 4   5
    #    6
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3]])
    assert draw_mask(ancestors(parents, 3)[0]) == [
        "x......",
        "xx.....",
        "x.x....",
        "xx.x...",
        "xx..x..",
        "x.x..x.",
        "xx.x..x",
    ]


# --- masks ---


def test_tree_mask_drawn() -> None:
    """Two rows of 3 and 1 committed tokens; the tree 0(1(3), 2) behind each; seven slots in view."""
    relation = ancestors(torch.tensor([[-1, 0, 0, 1]] * 2), 2)
    lengths = torch.tensor([3, 1])
    slots = lengths[:, None] + torch.arange(4)
    visible = visible_slots(lengths, slots, relation, view=7)
    assert draw_mask(visible[0]) == [
        "xxxx...",
        "xxxxx..",
        "xxxx.x.",
        "xxxxx.x",
    ]
    assert draw_mask(visible[1]) == [
        "xx.....",
        "xxx....",
        "xx.x...",
        "xxx.x..",
    ]


def test_visible_slots_drawn_for_some_queries() -> None:
    """A second draft level asks alone: its nodes see the first level through `relation`, not each other."""
    lengths = torch.tensor([2])
    slots = torch.tensor([[2, 3, 4, 5]])  # level one in 2 and 3, level two in 4 and 5
    relation = torch.tensor([[[False, True, True, False], [True, False, False, True]]])
    assert draw_mask(visible_slots(lengths, slots, relation, view=8)[0]) == ["xx.xx...", "xxx..x.."]


def test_visible_slots_equal_plain_rule() -> None:
    draw = generator(1)
    for _ in range(40):
        batch, queries, related = (int(torch.randint(1, 5, (), generator=draw)) for _ in range(3))
        lengths = torch.randint(0, 6, (batch,), generator=draw)
        view = int(lengths.max()) + related + 2
        slots = lengths[:, None] + torch.stack(
            [torch.randperm(related + 2, generator=draw)[:related] for _ in range(batch)]
        )
        relation = torch.rand(batch, queries, related, generator=draw) < 0.5
        got = visible_slots(lengths, slots, relation, view).tolist()
        for row in range(batch):
            for query in range(queries):
                seen = {int(slots[row, n]) for n in range(related) if relation[row, query, n]}
                seen |= set(range(int(lengths[row])))
                assert got[row][query] == [slot in seen for slot in range(view)]


def test_window_goes_by_position_drawn() -> None:
    """Window 3 over four committed tokens and the tree 0(1(3), 2): the siblings 1 and 2 share position 5 and
    lose the same committed tokens, although their slots differ."""
    relation = ancestors(torch.tensor([[-1, 0, 0, 1]]), 2)
    lengths, slots = torch.tensor([4]), torch.tensor([[4, 5, 6, 7]])
    visible = visible_slots(lengths, slots, relation, view=8)
    query_positions = torch.tensor([[4, 5, 5, 6]])
    slot_positions = torch.tensor([[0, 1, 2, 3, 4, 5, 5, 6]])
    narrowed = within_window(visible, query_positions, slot_positions, window=3)
    assert draw_mask(narrowed[0]) == [
        "..xxx...",
        "...xxx..",
        "...xx.x.",
        "....xx.x",
    ]
    assert torch.equal(within_window(visible, query_positions, slot_positions, window=7), visible)
    assert draw_mask(within_window(visible, query_positions, slot_positions, window=1)[0]) == [
        "....x...",
        ".....x..",
        "......x.",
        ".......x",
    ]


def test_chunks_go_by_position_drawn() -> None:
    """Chunks of 3 positions over five committed tokens and the tree 0(1(3), 2): the root is the last token of
    its chunk, and its children begin the next."""
    relation = ancestors(torch.tensor([[-1, 0, 0, 1]]), 2)
    lengths, slots = torch.tensor([5]), torch.tensor([[5, 6, 7, 8]])
    visible = visible_slots(lengths, slots, relation, view=9)
    query_positions = torch.tensor([[5, 6, 6, 7]])
    slot_positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, 7]])
    assert draw_mask(within_chunk(visible, query_positions, slot_positions, chunk=3)[0]) == [
        "...xxx...",
        "......x..",
        ".......x.",
        "......x.x",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_mask_is_finite_in_the_models_dtype(dtype: torch.dtype) -> None:
    visible = torch.tensor([[[True, False], [False, False]], [[False, True], [True, True]]])
    mask = additive(visible, dtype)
    low = torch.finfo(dtype).min
    assert mask.dtype == dtype and mask.shape == (2, 1, 2, 2)
    assert mask.tolist() == [[[[0.0, low], [low, low]]], [[[low, 0.0], [0.0, 0.0]]]]
    assert mask.softmax(-1).isfinite().all(), "a row that sees nothing gives no NaN"
