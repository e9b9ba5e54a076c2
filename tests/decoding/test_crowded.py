"""Smaller trees while many texts are decoded: exact texts are the same, and no other gets one."""

from __future__ import annotations

import math

import pytest
import torch
from support.tiny_engine import TREE, tiny_engine

from eagle_fsd import Fuzzy, TreeConfig
from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.drafting.lookup.merged_drafter import MergedSpec

SAMPLED = SamplingConfig(1.0)
CROWDED = {2: TreeConfig(3, 2, 1), 3: TreeConfig(1)}


def prompts(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 90, (6 + place,), generator=draw).tolist() for place in range(count)]


def texts(terms: Terms, crowded: dict[int, TreeConfig], lookup: bool, count: int = 4) -> list[Text]:
    engine = tiny_engine()
    spec = MergedSpec.for_target(engine.drafter, engine.target) if lookup else engine.drafter
    scheduler = Scheduler(engine.target, spec, TREE, 3, crowded=crowded)
    made = [Text(i, 8 + 9 * i, terms, prompt=ids, stream=(1, i)) for i, ids in enumerate(prompts(count))]
    for text in made:
        scheduler.admit(text)
    for _ in scheduler.run():
        pass
    return made


@pytest.mark.covering(2)
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize(
    "rule", [Lossless(), Fuzzy(0.0), Fuzzy(0.0, price=0.5), Fuzzy(math.inf, price=math.inf, mode="swap")]
)
@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
def test_exact_texts_are_the_same_in_more_steps(
    sampling: SamplingConfig, rule: Lossless | Fuzzy, lookup: bool
) -> None:
    alone = texts(Terms((), rule, sampling), {}, lookup)
    crowd = texts(Terms((), rule, sampling), CROWDED, lookup)
    assert [text.new_tokens for text in crowd] == [text.new_tokens for text in alone]
    assert sum(text.stats.steps for text in crowd) > sum(text.stats.steps for text in alone)
    # The longest text is alone in the end, where it has its whole tree again.
    assert crowd[-1].stats.steps < len(crowd[-1].new_tokens)


@pytest.mark.parametrize(
    "terms",
    [
        Terms((), Fuzzy(0.3)),
        Terms((), Lossless(), SamplingConfig(0.7)),
        Terms((), Lossless(share_noise=False), SAMPLED),
        Terms((), Fuzzy(1e-9, price=1e9)),
    ],
)
def test_a_text_that_its_tree_decides_keeps_it(terms: Terms) -> None:
    assert not terms.any_tree
    alone, crowd = texts(terms, {}, False), texts(terms, CROWDED, False)
    assert [text.new_tokens for text in crowd] == [text.new_tokens for text in alone]
    assert [text.stats.steps for text in crowd] == [text.stats.steps for text in alone]


def test_one_such_text_keeps_the_tree_of_all_beside_it() -> None:
    engine = tiny_engine()
    scheduler = Scheduler(engine.target, engine.drafter, TREE, 3, crowded=CROWDED)
    kinds = [Terms(()), Terms(()), Terms((), Fuzzy(0.3))]
    for number, (terms, ids) in enumerate(zip(kinds, prompts(3), strict=True)):
        scheduler.admit(Text(number, (40, 40, 6)[number], terms, prompt=ids))
    trees = []
    while scheduler.busy:
        fuzzy = any(not text.terms.any_tree for text in scheduler.decoding)
        scheduler.step()
        if scheduler.batch is not None and len(scheduler.decoding) > 1:
            trees.append((fuzzy, scheduler.batch.tree))
    assert {tree for fuzzy, tree in trees if fuzzy} == {TREE}
    assert TREE not in {tree for fuzzy, tree in trees[1:] if not fuzzy} and len(trees) > 3


@pytest.mark.parametrize("tree", ["8/5/8", "3/2/1", "3/1/2", "16/8/2/0.07", "2/1/1", "60/6/10"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
def test_the_trees_of_many_texts_have_the_nodes_of_one(tree: str, rows: int) -> None:
    own = TreeConfig.parse(tree)
    found = own.for_many(rows)
    assert (not found) == (rows == 1)
    for size, one in found.items():
        assert 2 <= size <= rows and own.holds(one) and one.min_confidence == own.min_confidence
        assert one.total_tokens == 1 or size * one.total_tokens <= 1.5 * own.total_tokens
    if rows == 8 and tree == "8/5/8":
        assert {size: str(one) for size, one in found.items()} == {2: "4/2/3", 3: "2/1/1", 5: "1/1/1"}


def test_a_tree_that_is_too_large_is_refused() -> None:
    engine = tiny_engine()
    with pytest.raises(ValueError, match="crowded has the tree 16/5/8 for 2 texts"):
        Scheduler(engine.target, engine.drafter, TREE, 3, crowded={2: TreeConfig(16, 5, 8)})
