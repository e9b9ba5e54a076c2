"""What a looked-up draft is made of, each part against a slow plain twin: stores, confidences, trees."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.tree import RECYCLED, SUFFIX
from eagle_fsd.drafting.lookup.confidences import ALONE as ALONE_RATES
from eagle_fsd.drafting.lookup.confidences import (
    CELLS,
    LIST_CLASSES,
    NO_LIST,
    NOT_LISTED,
    OF_CONTESTED,
    OF_LENGTH,
    OF_LIST,
    PRIORS,
    WEIGHT,
    Confidences,
    cell_of,
    list_classes,
)
from eagle_fsd.drafting.lookup.recycled_lists import NextList, RecycledLists, next_lists
from eagle_fsd.drafting.lookup.suffix_store import ALONE, LONGEST, RECENT, SuffixStore
from eagle_fsd.drafting.lookup.text_memory import GrownTree, Sources, TextMemory

SEEDS = range(6)


def random_text(seed: int, length: int = 120, letters: int = 3) -> list[int]:
    return random.Random(seed).choices(range(letters), k=length)


def common_suffix(first: Sequence[int], second: Sequence[int], most: int) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first[::-1], second[::-1], strict=False))
    return min(sum(1 for _ in pairs), most)


# --- the suffix store ---


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("letters", [1, 3, 20])
def test_matches_are_the_common_suffixes(seed: int, letters: int) -> None:
    text = random_text(seed, letters=letters)
    found = SuffixStore(text).matches()
    wanted = [(place, common_suffix(text[: place + 1], text, LONGEST)) for place in range(len(text) - 1)]
    alone = [place for place, length in wanted if length][-ALONE:]
    assert found == [(place, length) for place, length in wanted if length > 1 or (length and place in alone)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_path_is_followed_through_the_text(seed: int) -> None:
    """A match of a path is a place where the text and the path end alike; without any, the token counts."""
    text, rng = random_text(seed, 90, 5), random.Random(seed + 100)  # fewer than ALONE of each
    store = SuffixStore(text)
    matches, path, known = store.matches(), [], len(text)
    for _ in range(30):
        token = (
            rng.choice([0, 1, 2, 9]) if rng.random() < 0.3 else text[rng.choice(matches or [(0, 1)])[0] + 1]
        )
        matches, path = store.follow(matches, token), [*path, token]
        need = len(path) + 1 if known == len(text) else known + 1
        known = need if known == len(text) else known + 1
        places = range(len(text) - 1)
        lengths = {place: common_suffix(text[: place + 1], text + path, len(text)) for place in places}
        wanted = {place for place, length in lengths.items() if length >= need}
        if not wanted:
            known = 1
            wanted = {place for place, length in lengths.items() if length >= 1}
        assert {place for place, _ in matches} == wanted
        assert all(length <= min(lengths[place], LONGEST) for place, length in matches)


def test_continuations_come_by_length_then_by_place() -> None:
    #       0  1  2  3  4  5  6  7  8  9 10 11 12 13
    text = [7, 1, 2, 5, 8, 1, 2, 6, 9, 2, 4, 8, 1, 2]
    store = SuffixStore(text)
    found = store.continuations(store.matches(), 4)
    # After 8 1 2 came 6, after 1 2 came 5 too, and after 2 alone also 4.
    assert list(found) == [6, 5, 4] and [length for length, _ in found.values()] == [3, 2, 1]
    # 6 is the only one after three tokens; 5 is one of two after two tokens, 4 one of three after one.
    assert [contested for _, contested in found.values()] == [False, True, True]
    assert list(store.continuations(store.matches(), 1)) == [6]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("letters", [2, 4, 7])
def test_continuations_are_counted_among_matches_about_as_long(seed: int, letters: int) -> None:
    """Against a plain count, for any number of matches, one and two among them."""
    store, rng = SuffixStore(random_text(seed, 150, letters)), random.Random(seed)
    whole = store.matches()
    for number in range(120):
        matches = sorted(rng.sample(whole, min(1 + number % 12, len(whole))))
        after = [(store.text[place + 1], length) for place, length in reversed(matches)]
        wanted = {}
        for token in sorted(dict(after), key=lambda token: -max(n for one, n in after if one == token)):
            length = max(n for one, n in after if one == token)
            rivals = [one for one, n in after if min(n, 3) >= min(length, 3)]
            wanted[token] = (length, 2 * rivals.count(token) <= len(rivals))
        assert list(store.continuations(matches, letters).items()) == list(wanted.items())


def test_only_the_latest_places_are_looked_at() -> None:
    store = SuffixStore([3] * (2 * RECENT))
    assert [place for place, _ in store.matches()] == list(range(RECENT - 1, 2 * RECENT - 1))
    assert len(store.follow([], 3)) <= ALONE


def test_a_store_that_grew_is_one_that_was_given_the_whole_text() -> None:
    text, grown = random_text(1), SuffixStore()
    for start in range(0, len(text), 7):
        grown.extend(text[start : start + 7])
    other = grown.copy()
    other.extend([0, 1])
    assert (grown.text, grown.places) == (text, SuffixStore(text).places)


# --- recycled lists ---


def test_a_list_after_the_pair_comes_before_one_after_the_token() -> None:
    lists, first, second = RecycledLists(), NextList([5, 6], [0.5, 0.25]), NextList([7], [0.9])
    lists.add(1, 2, first)
    lists.add(3, 2, second)
    found = lists.find(1, 2)
    assert found is not None and (found.probs, found.order, found.rest) == ({5: 0.5, 6: 0.25}, 2, 0.25)
    found = lists.find(9, 2)
    assert found is not None and (found.probs, found.order) == ({7: 0.9}, 1), "the latest one"
    assert lists.find(2, 1) is None
    other = lists.copy()
    other.add(1, 2, second)
    assert lists.after_pair[1, 2] == first and lists.after_token[2] == second


def test_impossible_tokens_are_not_listed() -> None:
    with np.errstate(divide="ignore"):
        logs = np.log(np.array([[0.75, 0.25], [1.0, 0.0]], dtype=np.float32))
    first, second = next_lists(np.array([[4, 2], [5, 3]]), logs)
    assert first.ids == [4, 2] and first.probs == pytest.approx([0.75, 0.25])
    assert second == NextList([5], [1.0])


# --- confidences ---


def test_confidences_are_rates_beside_their_priors() -> None:
    found, rng = Confidences(), random.Random(0)
    events = [(rng.randrange(5), rng.random() < 0.3) for _ in range(3000)]
    for cell, right in events:
        found.learn(cell, right)
    for cell in range(CELLS):
        mine = [right for number, right in events if number == cell]
        wanted = (WEIGHT * PRIORS[cell] + sum(mine)) / (WEIGHT + len(mine))
        assert found.rates[cell] == pytest.approx(wanted)
    assert all(abs(rate - 0.3) < 0.06 for rate in found.rates[:5])
    other = found.copy()
    other.learn(0, True)
    assert other.rates[0] > found.rates[0]


def test_every_kind_of_evidence_has_its_own_cell_and_a_sane_prior() -> None:
    lengths, listed = (
        (0, 1, 2, 3, 4, 6, 10),
        [0, 1, *(list_classes({7: p}, o)[7] for o in (1, 2) for p in (0.01, 0.1, 0.3, 0.6, 0.9))],
    )
    cells = [cell_of(*parts) for parts in itertools.product(lengths, (False, True), listed)]
    assert sorted(cells) == list(range(CELLS)) and len(listed) == LIST_CLASSES
    assert all(0 < rate < 1 for rate in PRIORS)
    for one, known in itertools.product((False, True), listed):
        rates = [PRIORS[cell_of(length, one, known)] for length in lengths[1:]]
        assert rates == sorted(rates), "a longer match is never worth less"
        assert PRIORS[cell_of(4, True, known)] < PRIORS[cell_of(4, False, known)]
    assert cell_of(11, True, 3) == cell_of(99, True, 3) and cell_of(7, True, 3) == cell_of(9, True, 3)


def test_a_prior_is_the_rate_of_its_list_class_or_has_the_odds_of_its_evidence() -> None:
    for listed in range(LIST_CLASSES):
        assert [PRIORS[cell_of(0, contested, listed)] for contested in (False, True)] == [
            ALONE_RATES[listed]
        ] * 2
        for length, of_length in zip((1, 2, 3, 4, 6, 10), OF_LENGTH[1:], strict=True):
            for contested in (False, True):
                rate = PRIORS[cell_of(length, contested, listed)]
                odds = of_length + contested * OF_CONTESTED + OF_LIST[listed]
                assert math.log(rate / (1 - rate)) == pytest.approx(odds)


def test_a_copy_is_filed_under_what_the_targets_list_says_of_it() -> None:
    """Nothing, where there is no list; that it is missing, or how likely it is, where there is one."""
    memory = TextMemory(Sources())
    memory.begin([1, 2, 3, 1], [])
    matches = memory.store.matches()
    assert memory.propose(3, 1, matches).cells == {2: cell_of(1, False, NO_LIST)}
    memory.lists.add(3, 1, NextList([5], [0.6]))
    unlisted, listed = memory.propose(3, 1, matches).cells, list_classes({5: 0.6}, 2)[5]
    assert unlisted == {2: cell_of(1, False, NOT_LISTED), 5: cell_of(0, False, listed)}
    memory.lists.add(3, 1, NextList([2], [0.6]))
    assert memory.propose(3, 1, matches).cells == {2: cell_of(1, False, listed)}


# --- trees ---


def memory_of(seed: int, sources: Sources | None = None) -> TextMemory:
    """A memory of a random text with random lists, and confidences that were learned from nonsense."""
    rng, text = random.Random(seed), random_text(seed, 60, 4)
    memory = TextMemory(sources or Sources())
    lists = []
    for _ in text[:-1]:
        ids = rng.sample(range(8), 4)
        probs = sorted((rng.random() for _ in ids), reverse=True)
        lists.append(NextList(ids, [prob / (sum(probs) + rng.random()) for prob in probs]))
    memory.begin(text, lists if memory.sources.recycled else [])
    for _ in range(300):
        memory.confidences.learn(rng.randrange(CELLS), rng.random() < 0.5)
    return memory


def all_paths(memory: TextMemory, depth: int, least: float) -> dict[tuple[int, ...], float]:
    """Every path of candidates down to a depth, with its confidence: a plain recursion."""
    found: dict[tuple[int, ...], float] = {}

    def go(path: tuple[int, ...], matches: list[tuple[int, int]], chance: float) -> None:
        if len(path) == depth:
            return
        before = (*memory.store.text, *path)[-2:]
        for token, one in memory.propose(before[0], before[1], matches).chances.items():
            if chance * one >= least:
                found[(*path, token)] = chance * one
                below = memory.store.follow(matches, token) if memory.sources.copied else []
                go((*path, token), below, chance * one)

    go((), memory.store.matches() if memory.sources.copied else [], 1.0)
    return found


def paths_of(tree: GrownTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("sources", [Sources(), Sources(recycled=False), Sources(copied=False)], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_tree_has_the_likeliest_paths(seed: int, sources: Sources) -> None:
    memory, config = memory_of(seed, sources), TreeConfig(12, 3, 60)
    tree = memory.grow(memory.store.text[-1], config)
    everything = all_paths(memory, 3, 0.0)
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths), "siblings are distinct"
    assert tree.chances[1:] == pytest.approx([everything[path] for path in paths])
    best = sorted(everything.values(), reverse=True)[: len(paths)]
    assert tree.chances[1:] == pytest.approx(best) and len(paths) == min(11, len(everything))
    if not (sources.copied and sources.recycled):
        assert set(tree.sources[1:]) == {SUFFIX if sources.copied else RECYCLED}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_trees_bounds_are_kept(seed: int) -> None:
    memory, config = memory_of(seed), TreeConfig(15, 4, 2, 0.05)
    tree = memory.grow(memory.store.text[-1], config)
    assert len(tree.tokens) <= 15 and max(tree.depths) <= 4
    assert max(Counter(tree.parents[1:]).values()) <= 2, "top_k children"
    expanded = Counter(tree.depths[node] for node in tree.proposals)
    assert max(expanded.values()) <= 2, "a beam of top_k nodes"
    assert min(tree.chances) >= 0.05
    for node, parent in enumerate(tree.parents):
        assert -1 <= parent < node and tree.chances[node] <= tree.chances[max(parent, 0)]
        assert tree.depths[node] == (tree.depths[parent] + 1 if node else 0)
    again = memory.grow(memory.store.text[-1], config)
    assert (tree.tokens, tree.parents, tree.chances) == (again.tokens, again.parents, again.chances)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tree_without_min_confidence_goes_on_where_one_with_it_ends(seed: int) -> None:
    memory, config = memory_of(seed), TreeConfig(15, 4, 2, 0.4)
    sure, whole = (memory.grow(memory.store.text[-1], size) for size in (config, config.unpruned))
    assert whole.tokens[: len(sure.tokens)] == sure.tokens and len(sure.tokens) < len(whole.tokens)
    assert max(whole.chances[len(sure.tokens) :]) < 0.4


@pytest.mark.parametrize("seed", SEEDS)
def test_q_and_the_chances_are_distributions(seed: int) -> None:
    for sources in (Sources(), Sources(recycled=False), Sources(copied=False)):
        tree = memory_of(seed, sources).grow(1, TreeConfig(16, 4, 4))
        for proposal in tree.proposals.values():
            q, rest = proposal.q()
            assert sum(q.values()) + rest == pytest.approx(1.0 if q else 0.0)
            assert min([*q.values(), rest], default=0.0) >= 0
            assert sum(proposal.chances.values()) <= 1 + 1e-9
            assert set(proposal.chances) == set(q)


def test_a_token_copied_alone_is_one_hot_and_a_list_is_the_targets_own() -> None:
    memory = TextMemory(Sources())
    memory.begin([1, 2, 3, 1], [])
    assert memory.propose(3, 1, memory.store.matches()).q() == ({2: 1.0}, 0.0)
    memory.lists.add(3, 1, NextList([2, 5], [0.5, 0.25]))
    assert memory.propose(3, 1, []).q() == ({2: 0.5, 5: 0.25}, 0.25)
    mixed = memory.propose(3, 1, memory.store.matches())
    trust = mixed.chances[2]  # of the copy; the list has the rest of q
    assert mixed.q()[0] == pytest.approx({2: trust + (1 - trust) * 0.5, 5: (1 - trust) * 0.25})
    assert mixed.q()[1] == pytest.approx((1 - trust) * 0.25)


def test_candidates_on_the_path_are_counted_and_lists_of_the_path_come_last() -> None:
    memory = TextMemory(Sources())
    memory.begin([1, 2, 3, 1], [])
    tree = memory.grow(1, TreeConfig(4, 3, 2))
    assert paths_of(tree)[:2] == [(2,), (2, 3)]
    cells = {node: dict(tree.proposals[node].cells) for node in tree.proposals}
    lists = [NextList([node], [0.5]) for node in range(len(tree.tokens))]
    memory.extend([2, 4], lists)  # 2 was accepted, and 4 is the target's own
    wanted = Counter({cells[0][2]: 1})
    seen = Counter({cells[0][2]: 1}) + Counter(cells[1].values())
    assert {cell: n for cell, n in enumerate(memory.confidences.right) if n} == wanted
    assert {cell: n for cell, n in enumerate(memory.confidences.seen) if n} == seen
    assert memory.lists.after_pair[3, 1] == lists[0] and memory.lists.after_pair[1, 2] == lists[1]
    assert memory.lists.after_pair[2, 3] == lists[2], "a rejected node's list is kept too"
    assert memory.store.text == [1, 2, 3, 1, 2, 4] and memory.tree is None
    # A rejected node with the same two tokens as a node of the path must not replace its list.
    memory.tree = GrownTree([4, 4, 4, 4], [-1, 0, 1, 0], [0, 1, 2, 1], [1.0] * 4)
    memory.tree.tokens[3] = 5
    memory.extend([4, 9], [NextList([node], [0.5]) for node in range(4)])
    assert memory.lists.after_pair[4, 4] == NextList([1], [0.5])


def test_a_source_is_needed() -> None:
    with pytest.raises(ValueError, match="turn one of them on"):
        Sources(False, False)
