"""What is remembered of one text, and the tree that is proposed from it.

At a node two sources propose children: the suffix store the tokens that followed the longest matches, and the
recycled lists the target's own earlier best tokens. They are merged by parent and token. Both are on one
scale, since a child's confidence is the rate of its cell, whatever proposed it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.tree import HEAD, RECYCLED, SUFFIX
from eagle_fsd.drafting.lookup.confidences import (
    NO_LIST,
    NOT_LISTED,
    PRIORS,
    Confidences,
    cell_of,
    list_classes,
)
from eagle_fsd.drafting.lookup.recycled_lists import FoundList, NextList, RecycledLists
from eagle_fsd.drafting.lookup.suffix_store import Continuation, Match, SuffixStore

COPIED = 4  # continuations of the text that compete at a node


@dataclass(frozen=True)
class Sources:
    """Which of the two sources propose tokens. Raises ValueError if none does."""

    copied: bool = True
    recycled: bool = True

    def __post_init__(self) -> None:
        if not (self.copied or self.recycled):
            raise ValueError("copied and recycled are False: a lookup needs a source; turn one of them on")


@dataclass(frozen=True)
class Proposal:
    """The candidates for the token after one node.

    chances: the confidence of each candidate; they sum to at most 1. cells: of the same candidates. copied:
    those that the text proposed. found: the target's list, if there is one. others: cells of other evidence
    for the same candidates, whose rates are learned too.
    """

    chances: dict[int, float]
    cells: dict[int, int]
    copied: dict[int, Continuation]
    found: FoundList | None
    others: dict[int, int] = field(default_factory=dict)

    def q(self) -> tuple[dict[int, float], float]:
        """Return the draft's distribution: the probability of each listed token, and of all others together.

        A token that was copied alone has probability 1. Where both sources speak, q is their mixture, and
        the weight of the copies is the confidence that one of them is right.
        """
        trust = sum(self.chances[token] for token in self.copied)
        if self.found is None:
            return {token: self.chances[token] / trust for token in self.copied}, 0.0
        doubt = max(1 - trust, 0.0)  # rounding must not make it negative
        probs = {token: doubt * prob for token, prob in self.found.probs.items()}
        for token in self.copied:
            probs[token] = probs.get(token, 0.0) + self.chances[token]
        return probs, doubt * self.found.rest


@dataclass(frozen=True)
class Mixture:
    """The draft's distribution at a node that the head expanded: the head's, and copies beside it.

    place: the node's number e. weights: of the copied tokens; the head has the rest of the weight.
    """

    place: int
    weights: dict[int, float]

    @property
    def kept(self) -> float:
        """The head's weight."""
        return 1.0 - sum(self.weights.values())


@dataclass
class GrownTree:
    """The tree of one text, root first. proposals: of the nodes that were expanded, by node.

    Beside a head: mixtures, of the nodes that the head expanded, by node; probs, of the copied tokens there,
    by node and token.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    chances: list[float] = field(default_factory=lambda: [1.0])
    proposals: dict[int, Proposal] = field(default_factory=dict)
    sources: list[int] = field(default_factory=lambda: [HEAD])  # the root's means nothing
    mixtures: dict[int, Mixture] = field(default_factory=dict)
    probs: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, parent: int, token: int, chance: float, source: int) -> int:
        """Append a node and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.chances.append(chance)
        self.sources.append(source)
        return len(self.tokens) - 1

    def path(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the nodes along emitted tokens, and the token that really followed each of them."""
        children = {key: node for node, key in enumerate(zip(self.parents, self.tokens, strict=True))}
        node: int | None = 0
        for token in tokens:
            if node is None:
                return
            yield node, token
            node = children.get((node, token))


class TextMemory:
    """What is remembered of one text: its tokens, the target's lists, the confidences and the last tree.

    priors: the confidences at first, by cell.
    """

    def __init__(self, sources: Sources, priors: Sequence[float] = PRIORS) -> None:
        self.sources = sources
        self.store = SuffixStore()
        self.lists = RecycledLists()
        self.confidences = Confidences(priors)
        self.tree: GrownTree | None = None

    def begin(self, tokens: Sequence[int], lists: Sequence[NextList]) -> None:
        """Read a prompt, or its next part.

        lists: what the target would say after each of the last tokens before the root.
        """
        self.store.extend(tokens)
        text = self.store.text
        for place, found in enumerate(lists, len(text) - 1 - len(lists)):
            if place >= 0:  # a text shorter than others of its batch has fewer
                self.lists.add(text[place - 1] if place else -1, text[place], found)

    def extend(self, tokens: Sequence[int], lists: Sequence[NextList]) -> None:
        """Read the tokens that a step emitted. lists: what the target said at every node of the tree."""
        tree = self.tree
        if tree is not None:
            path = list(tree.path(tokens))
            for node, token in path:
                if (proposal := tree.proposals.get(node)) is not None:
                    for candidate, cell in (*proposal.cells.items(), *proposal.others.items()):
                        self.confidences.learn(cell, candidate == token)
            if lists:
                # The lists of the path come last: they followed this text, others only something like it.
                on_path = [node for node, _ in path]
                others = set(range(len(tree.tokens))).difference(on_path)
                for node in [*sorted(others), *on_path]:
                    before = tree.tokens[tree.parents[node]] if node else self.before_root
                    self.lists.add(before, tree.tokens[node], lists[node])
        self.tree = None
        self.store.extend(tokens)

    @property
    def before_root(self) -> int:
        """The token before the root, -1 if there is none."""
        return self.store.text[-2] if len(self.store.text) > 1 else -1

    def propose(self, before: int, token: int, matches: Sequence[Match]) -> Proposal:
        """Return the candidates for the token after `token`, of a path with these matches."""
        copied = self.store.continuations(matches, COPIED) if matches else {}
        found = self.lists.find(before, token) if self.sources.recycled else None
        listed = {} if found is None else list_classes(found.probs, found.order)
        missing = NO_LIST if found is None else NOT_LISTED
        cells = {
            candidate: cell_of(length, contested, listed.get(candidate, missing))
            for candidate, (length, contested) in copied.items()
        }
        for candidate, cell in listed.items():
            cells.setdefault(candidate, cell)
        rates = self.confidences.rates
        chances = {candidate: rates[cell] for candidate, cell in cells.items()}
        # Cells are learned one by one, so nothing else keeps the sum over siblings below 1.
        if (whole := sum(chances.values())) > 1:
            chances = {candidate: chance / whole for candidate, chance in chances.items()}
        return Proposal(chances, cells, copied, found)

    def grow(self, root: int, config: TreeConfig) -> GrownTree:
        """Return the tree of the likeliest paths: best first, and at most top_k nodes of a level expanded.

        These are the nodes that EAGLE-2's beam and rerank would choose with the same confidences.
        """
        tree, reach = GrownTree([root]), config.reach
        matches = {0: self.store.matches() if self.sources.copied else []}
        heap: list[tuple[float, int, int, int]] = []  # -confidence, order, parent, token
        expanded = [0] * (reach + 1)  # by level
        order = itertools.count()  # equal confidences are taken in the order in which they were found

        def expand(node: int) -> None:
            parent, depth = tree.parents[node], tree.depths[node]
            if depth >= reach or expanded[depth] >= config.top_k:
                return
            expanded[depth] += 1
            before = tree.tokens[parent] if node else self.before_root
            proposal = self.propose(before, tree.tokens[node], matches[node])
            tree.proposals[node] = proposal
            # The sort is stable: of equal chances, the longer match and the earlier place in a list win.
            best = sorted(proposal.chances.items(), key=lambda item: -item[1])[: config.top_k]
            for token, chance in best:
                if (whole := chance * tree.chances[node]) >= config.min_confidence:
                    heapq.heappush(heap, (-whole, next(order), node, token))

        expand(0)
        while heap:
            chance, _, parent, token = heapq.heappop(heap)
            source = SUFFIX if token in tree.proposals[parent].copied else RECYCLED
            node = tree.add(parent, token, -chance, source)
            if len(tree.tokens) == config.total_tokens:
                break
            if self.sources.copied:
                matches[node] = self.store.follow(matches[parent], token)
            else:
                matches[node] = []
            expand(node)
        self.tree = tree
        return tree

    def prune(self) -> GrownTree:
        """Return the root alone, in place of the tree that was grown last. What was proposed there counts."""
        assert self.tree is not None
        proposals = {node: one for node, one in self.tree.proposals.items() if node == 0}
        self.tree = GrownTree(self.tree.tokens[:1], proposals=proposals)
        return self.tree

    def copy(self) -> TextMemory:
        """Return a memory of the same text that goes on by itself."""
        other = TextMemory(self.sources, self.confidences.priors)
        other.store, other.lists = self.store.copy(), self.lists.copy()
        other.confidences, other.tree = self.confidences.copy(), self.tree
        return other
