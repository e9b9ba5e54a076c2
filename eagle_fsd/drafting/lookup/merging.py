"""One tree of a head's candidates and of what a text repeats, grown on the host for one text.

At a node the head's children and the continuations of the text are merged by token. Where the head has a
distribution, a copied token's confidence is learned beside the head's own probability of it: of copies with
the same evidence, the share that turned out right. If it is more than the head's probability, the draft's
distribution there becomes a mixture of the head's and of the copies, in which the token has just this
confidence; else the copy changes nothing. So all scores are log-probabilities of one kind, and a head that
knows better keeps its nodes. Below nodes that the head did not expand, drafts are looked up alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.tree import HEAD, RECYCLED, SUFFIX
from eagle_fsd.drafting.lookup.confidences import CELLS, LENGTHS, NO_LIST, PRIORS, PROBS, cell_of
from eagle_fsd.drafting.lookup.suffix_store import Continuation, Match
from eagle_fsd.drafting.lookup.text_memory import COPIED, GrownTree, Mixture, Proposal, TextMemory
from eagle_fsd.drafting.tree_growth import LOWEST

LEAST = 2  # tokens of a match whose continuations count beside a head
DEEPEST = 16  # copied chains may be this deep where the config's depth, which is for the head, is less
SURE = 0.7  # the head is not asked where a copied chain as deep as its tree has this confidence
MOST = 0.999  # the most weight of copies beside a head's distribution

# The prior of a copied token beside a head: the log-odds are the sum of one number for each part of the
# evidence. They were fitted to greedy answers of SmolLM2-135M-Instruct with its shipped head, to 55 prompts,
# two thirds of which ask to repeat most of the prompt. Classes of the head's probability: it cannot propose
# the token, then those of PROBS.
UNKNOWN = 0
HEAD_CLASSES = 2 + len(PROBS)
OF_LENGTH = (-1.2, -0.23, 0.05, 0.59, 1.25, 2.58)
OF_CONTESTED = -1.32
OF_HEAD = (0.34, -1.27, 0.17, 0.62, 2.08, 3.69)


def cell_beside_head(length: int, contested: bool, known: int) -> int:
    """Return the cell of a copied token. length: of its match, at least 1. known: the head's class."""
    return CELLS + (2 * (bisect_right(LENGTHS, length) - 1) + contested) * HEAD_CLASSES + known


def head_class(prob: float | None) -> int:
    """Return the class of a token's probability in the head's distribution; None: it has none there."""
    return UNKNOWN if prob is None else 1 + bisect_right(PROBS, prob)


def priors_beside_head() -> tuple[float, ...]:
    """Return the priors of all cells: those of looked-up drafts alone, then those beside a head."""
    odds = (
        of_length + OF_CONTESTED * contested + of_head
        for of_length in OF_LENGTH
        for contested in (False, True)
        for of_head in OF_HEAD
    )
    return (*PRIORS, *(1 / (1 + math.exp(-value)) for value in odds))


ALL_PRIORS = priors_beside_head()


@dataclass(frozen=True)
class HeadDraft:
    """What a head drafted for one text. Candidates are numbered as in the pool, the root is -1.

    tokens, scores: of all candidates; the children of the e-th expanded node are the e-th `width` of them.
    place: the number e of each expanded candidate. prob: the head's probability of a token at the e-th
    expanded node, None if the head cannot propose it.
    """

    tokens: Sequence[int]
    scores: Sequence[float]
    width: int
    place: dict[int, int]
    prob: Callable[[int, int], float | None]

    def expanded(self, candidate: int | None) -> int | None:
        """Return the number e of a candidate that has children, None for any other node."""
        place = None if candidate is None else self.place.get(candidate)
        # If its best child has no probability, the head's numbers are broken, of no use, or masked since this
        # text's tree was done while others of the batch went on.
        return None if place is None or self.scores[place * self.width] < LOWEST else place


def copies_weights(chances: dict[int, float], probs: dict[int, float | None]) -> dict[int, float]:
    """Return the weights of copied tokens beside a head's distribution.

    chances: the confidence of each token. probs: the head's probability. Alone, each weight lifts its token
    to its confidence. Tokens that the head thinks likelier have none.
    """
    weights = {}
    for token, chance in chances.items():
        prob = probs[token] or 0.0
        if chance > prob:
            weights[token] = (chance - prob) / (1.0 - prob)
    if (whole := sum(weights.values())) > MOST:
        weights = {token: weight * MOST / whole for token, weight in weights.items()}
    return weights


def deepest(config: TreeConfig) -> int:
    """Return the most levels of a merged tree: the config's depth, or more of copied tokens."""
    return min(config.total_tokens - 1, max(config.depth, DEEPEST))


def is_sure(memory: TextMemory, config: TreeConfig) -> bool:
    """Return whether a copied chain as deep as the head's tree is likely enough to do without the head."""
    store, rates, chance = memory.store, memory.confidences.rates, 1.0
    if not memory.sources.copied:
        return False
    matches = store.matches()
    for _ in range(config.reach):
        if not matches:
            return False
        ((token, (length, contested)),) = store.continuations(matches, 1).items()
        chance *= rates[cell_of(length, contested, NO_LIST)]
        if chance < SURE:
            return False
        matches = store.follow(matches, token)
    return True


def merge(memory: TextMemory, root: int, head: HeadDraft, config: TreeConfig) -> GrownTree:
    """Return the tree of the likeliest paths among the head's candidates and the looked-up tokens.

    The best nodes of all come first, as EAGLE-2's rerank takes them, and a node has at most top_k children.
    """
    tree, reach, store = GrownTree([root]), deepest(config), memory.store
    matches: dict[int, list[Match]] = {0: store.matches() if memory.sources.copied else []}
    candidate_of: list[int | None] = [-1]  # by node; None where the head drafted nothing
    heap: list[tuple[float, int, int, int, int | None, int]] = []
    order = itertools.count()  # equal scores are taken in the order in which they were found

    def expand(node: int) -> None:
        if tree.depths[node] >= reach:
            return
        place = head.expanded(candidate_of[node])
        long = [match for match in matches[node] if match[1] >= LEAST]
        children: list[tuple[float, int, int | None, int]] = []  # confidence, token, candidate, source
        if place is None:
            before = tree.tokens[tree.parents[node]] if node else memory.before_root
            proposal = memory.propose(before, tree.tokens[node], long)
            for token, chance in proposal.chances.items():
                source = SUFFIX if token in proposal.copied else RECYCLED
                children.append((chance, token, None, source))
        else:
            proposal, children = beside(node, place, long)
        if not children:
            return
        tree.proposals[node] = proposal
        children.sort(key=lambda child: -child[0])  # stable: of equal ones the head's come first
        for chance, token, candidate, source in children[: config.top_k]:
            whole = chance * tree.chances[node]
            if whole >= config.min_confidence and whole > 0.0:
                heapq.heappush(heap, (-whole, next(order), node, token, candidate, source))

    def beside(
        node: int, place: int, long: list[Match]
    ) -> tuple[Proposal, list[tuple[float, int, int | None, int]]]:
        copied = store.continuations(long, COPIED) if long else {}
        probs = {token: head.prob(place, token) for token in copied}
        proposal = propose_beside(memory, copied, probs)
        mixture = Mixture(place, copies_weights(proposal.chances, probs))
        tree.mixtures[node] = mixture
        kept, candidate = mixture.kept, candidate_of[node]
        above = 0.0 if candidate == -1 or candidate is None else head.scores[candidate]
        children: list[tuple[float, int, int | None, int]] = []
        left = dict(mixture.weights)
        first = place * head.width
        for number in range(first, first + head.width):
            token = head.tokens[number]
            prob = math.exp(min(head.scores[number] - above, 0.0))
            children.append((kept * prob + left.pop(token, 0.0), token, number, HEAD))
        for token, weight in left.items():
            children.append((kept * (probs[token] or 0.0) + weight, token, None, SUFFIX))
        for token in mixture.weights:
            tree.probs[node, token] = kept * (probs[token] or 0.0) + mixture.weights[token]
        return proposal, children

    expand(0)
    while heap:
        chance, _, parent, token, candidate, source = heapq.heappop(heap)
        node = tree.add(parent, token, -chance, source)
        candidate_of.append(candidate)
        if len(tree.tokens) == config.total_tokens:
            break
        matches[node] = store.follow(matches[parent], token) if memory.sources.copied else []
        expand(node)
    memory.tree = tree
    return tree


def propose_beside(
    memory: TextMemory, copied: dict[int, Continuation], probs: dict[int, float | None]
) -> Proposal:
    """Return copied tokens with their confidences beside a head, given the head's probabilities."""
    cells, others = {}, {}
    for token, (length, contested) in copied.items():
        cells[token] = cell_beside_head(length, contested, head_class(probs[token]))
        others[token] = cell_of(length, contested, NO_LIST)
    rates = memory.confidences.rates
    return Proposal({token: rates[cell] for token, cell in cells.items()}, cells, copied, None, others)
