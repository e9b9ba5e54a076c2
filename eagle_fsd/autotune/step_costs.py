"""The measurements behind a choice of tree: the parts of a step are timed, and a few texts are observed.

They take half a minute for a small target. A large one on a slow device is measured less often, and may
still take minutes.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.accept_step import AcceptStep
from eagle_fsd.autotune.tree_search import DEPTHS, Costs, Forwards, Observation, StepOverhead, TreeObserver
from eagle_fsd.core.config import WIDEST, SamplingConfig, TreeConfig
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.stats import Stopwatch
from eagle_fsd.core.tree import DraftTree, root_only
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.loop import decode
from eagle_fsd.decoding.request import Observer, Request
from eagle_fsd.drafting.drafter import DrafterSpec, NoDrafter, Seen
from eagle_fsd.runtime.timing import (
    RECORDED,
    Call,
    CoreWait,
    Key,
    disagreement,
    synchronizer,
    time_in_turn,
)
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, WIDEST)
BEAMS = (1, 2, 4, 8, 10)
LEVELS = 5  # a draft of this many levels is timed, to get the cost of each level after the first
WIDE = (max(WIDTHS), max(DEPTHS), max(BEAMS))  # nodes, depth, top_k of the observed tree
NEW_TOKENS = 80  # of each observed text
TIMED_TOKENS = 32  # of each text that only times accept and keep
TIMED_TREES = ((3, 2, 1), (16, 5, 8))  # nodes, depth, top_k: accept and keep take longer for more nodes
LONGEST = 20.0  # seconds that texts are observed; the step that is running is finished
SHORTEST = 128  # contexts up to this length cost the same
REPEATS = 7  # of each forward that is timed
TELLING = 8  # calls whose repeats show together whether the machine is busy
SLOW = 0.1  # seconds of a forward over one node from which on it is timed once: it reads all weights anew

# Is told again and again how much other work slows a measurement down, 0 while that is unknown. It may raise.
Check = Callable[[float], None]


def unchecked(spread: float) -> None:
    """Let a measurement go on, whatever slows it down."""


def decode_sample(
    target: TargetModel,
    drafting: DrafterSpec,
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    sampling: SamplingConfig,
    tree: TreeConfig,
    new_tokens: int = NEW_TOKENS,
    eos_token_ids: Sequence[int] = (),
    observer: Observer | None = None,
    check: Check = unchecked,
) -> float:
    """Decode the prompts as one batch and return the median seconds that accept and keep took in a step."""
    longest = max(map(len, prompts)) + new_tokens + 1
    drafter = drafting.make(len(prompts), longest, tree)
    session = TargetSession(target, len(prompts), longest + tree.total_tokens, drafter.needs.taps)
    request = Request(
        prompts=prompts,
        limits=[max(1, min(new_tokens, target.max_positions - len(prompt))) for prompt in prompts],
        eos_token_ids=eos_token_ids,
        rule=rule,
        tree=tree,
        sampling=sampling,
    )
    watch, start = Stopwatch(synchronizer(target.device)), time.monotonic()
    random, accept_step = RowRandom(0, len(prompts), target.device), AcceptStep(target.stepper)
    batch = Batch(session, drafter, random, tree, watch, accept_step, observer)
    rests, before = [], 0.0
    for _ in decode(batch, request.texts()):
        spent = watch.seconds["accept"] + watch.seconds["keep"]
        rests.append(spent - before)
        before = spent
        check(0.0)
        if target.ranks.lead(time.monotonic() - start > LONGEST):
            break
    return target.ranks.lead(statistics.median(rests))


def observe(
    target: TargetModel,
    drafting: DrafterSpec,
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    sampling: SamplingConfig,
    wide: TreeConfig,
    check: Check = unchecked,
) -> list[Observation]:
    """Decode a few texts with the wide tree and return their steps."""
    observer, ends = TreeObserver(), target.eos_token_ids
    decode_sample(target, drafting, prompts, rule, sampling, wide, NEW_TOKENS, ends, observer, check)
    return target.ranks.lead(observer.observations)  # only rank 0 sees what is accepted


def measure_costs(
    target: TargetModel,
    drafting: DrafterSpec,
    beams: Sequence[int],
    batch: int,
    context: int,
    rule: AcceptanceRule,
    sampling: SamplingConfig,
) -> Costs:
    """Measure all the costs of a step: its forwards and its overhead."""
    forwards, _ = measure_forwards(target, drafting, beams, batch, context)
    overhead, _ = measure_overhead(target, drafting, max(beams), batch, rule, sampling)
    return forwards.with_overhead(overhead)


class BesideOneNode:
    """Times calls in turn with a forward over one node, as multiples of it.

    A machine that others share may be half as fast for a second, in which all of a call's repeats are made.
    A slow forward over one node is timed with the first calls only. check: is called before each call, so
    that whoever waits for a measurement to end does not wait for a round, and after each round.
    """

    def __init__(self, one_node: Call, target: TargetModel, check: Check = unchecked) -> None:
        self.one_node, self.target, self.check = one_node, target, check
        self._seconds: list[float] = []  # of one node, each time
        self._spreads: list[float] = []
        self._waiting = CoreWait()

    def __call__(self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        """Return the median seconds of each call over those of one node."""
        untimed = RECORDED if self.target.stepper.view else 1
        in_turn: dict[Key | None, Call] = {} if self.slow else {None: self.one_node}
        in_turn.update(calls.items())
        in_turn = {key: self._checked(call) for key, call in in_turn.items()}
        target, waiting = self.target, self._waiting
        repeats = time_in_turn(
            in_turn, target.device, untimed, REPEATS, agree=target.ranks.lead, waiting=waiting
        )
        median = {key: statistics.median(seconds) for key, seconds in repeats.items()}
        if not self.slow:
            self._seconds.append(median[None])
        self._spreads += map(disagreement, repeats.values())
        self.check(self.spread if len(self._spreads) >= TELLING else 0.0)
        return {key: median[key] / self._seconds[-1] for key in calls}

    def _checked(self, call: Call) -> Call:
        def before() -> None:
            self.check(0.0)
            call.before()

        return Call(call.work, before)

    @property
    def slow(self) -> bool:
        return bool(self._seconds) and self._seconds[0] >= SLOW

    @property
    def one_node_seconds(self) -> float:
        return statistics.median(self._seconds)

    @property
    def spread(self) -> float:
        """How much other work slows calls down: see `measure_forwards`."""
        return max(statistics.median(self._spreads), disagreement(self._seconds), self._waiting.share)


@torch.inference_mode()
def disturbance(target: TargetModel, check: Check = unchecked) -> float:
    """Return how much other work slows forwards down at this moment; see `measure_forwards`."""
    session, roots = TargetSession(target, 1, 4), torch.zeros(1, dtype=torch.int64, device=target.device)
    session.prefill(roots[:, None], [1])
    one_node = functools.partial(session.verify, root_only(roots, target.vocab_size))
    with target.stepper.running(1):
        times = BesideOneNode(Call(one_node, one_node), target, check)
        times({})
    return times.spread


@torch.inference_mode()
def measure_forwards(
    target: TargetModel,
    drafting: DrafterSpec,
    beams: Sequence[int],
    batch: int,
    context: int,
    check: Check = unchecked,
) -> tuple[Forwards, float]:
    """Time the forwards of a step on a cache of `context` slots, whose contents do not matter.

    The times depend neither on the rule nor on the sampling. The second value says how much other work slowed
    them down: how much the repeats of a call disagree in the median, or one node's from first to last, or how
    long threads waited for a core. Above timing.BUSY the times are unreliable.
    """
    deepest, widest = max(DEPTHS), max(WIDTHS)
    room = max(2, min(context, target.max_positions - deepest - 2))
    roots = torch.zeros(batch, dtype=torch.int64, device=target.device)
    drafter = drafting.make(batch, room, TreeConfig(1 + deepest, deepest, max(beams)))
    session = TargetSession(target, batch, room + widest + 1, drafter.needs.taps)
    features = session.prefill(roots[:, None], [1] * batch)  # allocates the cache's buffers
    session.cache.reserve(room - 1)
    session.cache.advance([room - 1] * batch)
    # Tokens that do not repeat, as far as the vocabulary goes: a copied chain would need no draft of a head.
    texts = (torch.arange(room, device=target.device) % target.vocab_size).expand(batch, -1)
    drafter.begin(Seen(texts, [room] * batch, features.new_zeros(*texts.shape, features.shape[-1])))

    def verify(width: int, warm: bool = True) -> Call:
        run = functools.partial(session.verify, timed_tree(roots, width, target.vocab_size, target.recurrent))
        # As in decoding, the same graph ran just before: what a large cache has of its weights is not read.
        return Call(run, run) if warm else Call(run)

    def draft(beam: int, depth: int) -> Call:
        # As in a step, a verify forward runs before the draft and evicts the head from a CPU's caches.
        verify_root = functools.partial(session.verify, root_only(roots, target.vocab_size))
        return Call(lambda: drafter.draft(roots, TreeConfig(1 + depth, depth, beam)), verify_root)

    times = BesideOneNode(verify(1), target, check)
    verified = {1: 1.0}
    with target.stepper.running(batch):
        for width in WIDTHS:
            check(0.0)  # what follows may be compiled first
            for nodes in (1, width):
                # A tree that is decoded with has a graph of its own size; only few are kept at a time.
                target.expect(batch, nodes, again=False)
            verified |= times({width: verify(width, warm=not times.slow)})
        drafted = times({(beam, depth): draft(beam, depth) for beam in beams for depth in (1, LEVELS)})
    one, drafts = times.one_node_seconds, {}
    for beam in beams:
        first, all_levels = (one * drafted[beam, depth] for depth in (1, LEVELS))
        drafts[beam] = (first, max(all_levels - first, 0.0) / (LEVELS - 1))
    return Forwards({width: one * ratio for width, ratio in verified.items()}, drafts), times.spread


def measure_overhead(
    target: TargetModel,
    drafting: DrafterSpec,
    beam: int,
    batch: int,
    rule: AcceptanceRule,
    sampling: SamplingConfig,
    check: Check = unchecked,
) -> tuple[StepOverhead, float]:
    """Time the work of a step beside its forwards, with a small draft, with a usual one, and without one.

    beam: the widest beam that the head drafts. The time depends on the kind of rule and on which warpers are
    on, and not on a threshold, the temperature, or the values of top-k and top-p. The second value says how
    much other work slowed them down: how much two runs disagree, or how long threads waited for a core. A run
    before them is not counted: graphs are compiled in it.
    """
    plain, prompts = TreeConfig(1), [[0] * 4] * batch
    trees = [TreeConfig.within(nodes, depth, min(top_k, beam)) for nodes, depth, top_k in TIMED_TREES]

    def run(tree: TreeConfig) -> float:
        spec = NoDrafter(target.vocab_size) if tree is plain else drafting
        return decode_sample(target, spec, prompts, rule, sampling, tree, TIMED_TOKENS, check=check)

    found: dict[TreeConfig, list[float]] = {tree: [] for tree in (*trees, plain)}
    for tree in found:
        run(tree)
    waiting = CoreWait()
    with waiting.counted():
        for _ in range(2):
            for tree, seconds in found.items():
                seconds.append(run(tree))
    median_of = {tree.total_tokens: statistics.median(seconds) for tree, seconds in found.items()}
    overhead = StepOverhead(plain=median_of.pop(plain.total_tokens), drafted=median_of)
    return overhead, max(*(disagreement(found[tree]) for tree in trees), waiting.share)


def timed_tree(roots: Tensor, width: int, vocab_size: int, recurrent: bool = False) -> DraftTree:
    """Return a tree of `width` nodes that costs what usual ones do: a root and its children, of attention.

    recurrent: whether layers are. Then each level may cost something, so the first LEVELS nodes are a chain.
    """
    depth = LEVELS if recurrent else 1
    tree = root_only(roots, vocab_size)
    nodes = torch.arange(width, device=roots.device).expand(len(roots), -1)
    in_chain = nodes <= depth
    return DraftTree(
        tokens=tree.tokens.expand(-1, width),
        parents=torch.where(in_chain, nodes - 1, 0),
        depths=torch.where(in_chain, nodes, 1),
        log_q=tree.log_q,
        owners=tree.owners,
        depth=depth,
    )


def round_context(tokens: int) -> int:
    """Round the length of texts up to a power of two, the context length that stands for them."""
    return max(SHORTEST, 2 ** math.ceil(math.log2(max(tokens, 1))))
