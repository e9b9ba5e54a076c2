"""The decoding loop: draft, verify, accept, keep, until every row is done. It knows token ids and no text.

The last prompt token is the first root: it is the newest token not yet run through the target, like every
root after it. So every step, the first included, emits the tokens of its tree, and tau needs no exception for
the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.acceptance.accept_step import AcceptStep
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.stats import GenerationStats, Stopwatch
from eagle_fsd.core.tree import HEAD, DraftTree, root_only
from eagle_fsd.decoding.failures import NonFiniteLogits, NothingAllowed
from eagle_fsd.decoding.logits.processing import process
from eagle_fsd.decoding.logits.shared_noise import draft_noise, draw_noise
from eagle_fsd.decoding.on_ranks.agreement import check_step, rank_0_tree, rank_0_verdict
from eagle_fsd.decoding.prompts.prefill import prefill
from eagle_fsd.decoding.request import FAILED, Observer, Request, Terms, Text, TokenLogprob
from eagle_fsd.drafting.drafter import Drafter, NextTokens, Seen
from eagle_fsd.target.session import TargetSession


@torch.inference_mode()
def decode(
    request: Request,
    target: TargetSession,
    drafter: Drafter,
    random: RowRandom,
    stats: Sequence[GenerationStats],
    watch: Stopwatch,
    accept_step: AcceptStep | None = None,
    texts_made: list[Text] | None = None,
) -> Iterator[list[list[int]]]:
    """Yield, after every step, the tokens that each of the B rows emitted in it (none once a row is done).

    texts_made: the texts are added to it, for those who want more of them than their tokens.
    """
    texts = request.texts(stats)
    if texts_made is not None:
        texts_made += texts
    batch = Batch(target, drafter, random, request.tree, watch, accept_step, request.observer)
    with watch("prefill"):
        batch.begin(texts, prefill(request.tokens, request.lengths, target, drafter))
    while batch.active:
        emitted = batch.step()
        yield [emitted.get(text, []) for text in texts]
        for text in texts:
            if text.failure is not None:
                raise text.failure


class Batch:
    """Texts that are decoded together. Rows leave when their text is done, and others may take their places.

    texts: by row. roots: [B], the newest token of each row, which the target has not read yet. tree: of the
    next step; a smaller tree than the batch was made for may be set between any two steps.
    """

    def __init__(
        self,
        target: TargetSession,
        drafter: Drafter,
        random: RowRandom,
        tree: TreeConfig,
        watch: Stopwatch | None = None,
        accept_step: AcceptStep | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.target, self.drafter, self.random, self.tree = target, drafter, random, tree
        self.watch = watch or Stopwatch()
        self.accept_step = accept_step or AcceptStep()
        self.observer = observer
        self.texts: list[Text] = []
        self.roots: Tensor
        self._ends: dict[tuple[int, ...], Tensor] = {}  # end tokens, on the device

    @property
    def active(self) -> list[Text]:
        """The texts that are not done."""
        return [text for text in self.texts if not text.done]

    def begin(self, texts: Sequence[Text], roots: Tensor) -> None:
        """Start with these texts. Target and drafter have read their prompts up to the roots [B]."""
        self.texts, self.roots = list(texts), roots

    def step(self, keep_done: bool = False) -> dict[Text, list[int]]:
        """Run one step and return the tokens that each unfinished text emitted in it.

        keep_done: keep the rows of finished texts, for waiting texts to take their places. A text whose
        options leave it no token has failed, see Text; the others go on. Raises NonFiniteLogits if the
        target's own logits are to blame.
        """
        with self.accept_step.stepper.running(len(self.texts)):
            return self._step(keep_done)

    def _step(self, keep_done: bool) -> dict[Text, list[int]]:
        watch, ranks = self.watch, self.target.ranks
        check_step(ranks, [text.stats.new_tokens for text in self.texts])
        with watch("accept"):  # it is a part of drawing tokens, and no forward
            noise = draft_noise(self.texts, self.random, self.tree, self.target.vocab_size)
        with watch("draft"):
            if self.tree.total_tokens == 1:  # the drafter is not asked, but is still shown what is emitted
                tree = root_only(self.roots, 0)
            else:
                tree = self.drafter.draft(self.roots, self.tree, noise)
            tree = rank_0_tree(ranks, tree, self.tree.total_tokens)
        with watch("verify"):
            logits, features = self.target.verify(tree)
        with watch("accept"):
            groups: list[tuple[list[int], Verified, Verdict]] = []
            verdict = rank_0_verdict(ranks, tree, lambda: self._accept(tree, logits, groups))
            on_host = to_host(verdict, tree.sources)  # the one place where a step waits
            steps = dict(zip(self.texts, on_host, strict=True))
            active = [(row, text) for row, text in enumerate(self.texts) if not text.done]
            emitted = {text: self._emit(row, steps[text], logits, verdict) for row, text in active}
            note_logprobs(self.texts, emitted, logits, verdict)
        if self.observer is not None:
            for rows, verified, part in groups:
                texts = [self.texts[row] for row in rows]
                going = [place for place, text in enumerate(texts) if text in emitted]
                if 0 < len(going) < len(rows):
                    verified, part = verified.select(going), part.select(going)
                if going:
                    self.observer(verified, part, {texts[at].number: len(emitted[texts[at]]) for at in going})
        with watch("keep"):
            if self.active:
                shown = [[] if text.done else steps[text].tokens for text in self.texts]
                self.roots = keep(self.target, self.drafter, verdict, features, shown, logits)
                if not keep_done:
                    self.drop_done_rows()
        return emitted

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        for part in (self.target, self.drafter, self.random):
            part.select(rows)
        self.texts = [self.texts[row] for row in rows]
        self.roots = self.roots[on_device(rows, self.roots.device)]

    def join(self, other: Batch) -> None:
        """Take in the texts of another batch on the same models, in the places of finished texts first.

        The other batch has read its prompts and made no step.
        """
        places = [place for place, text in enumerate(self.texts) if text.done][: len(other.texts)]
        if more := len(other.texts) - len(places):
            count = len(self.texts)
            self.select([*range(count), *[0] * more])  # rows to be overwritten
            places += range(count, count + more)
        self.target.replace(places, other.target)
        self.drafter.replace(places, other.drafter)
        self.random.replace(places, other.random)
        self.roots = self.roots.index_copy(0, on_device(places, self.roots.device), other.roots)
        for place, text in zip(places, other.texts, strict=True):
            self.texts[place] = text

    def _accept(
        self, tree: DraftTree, logits: Tensor, found: list[tuple[list[int], Verified, Verdict]]
    ) -> Verdict:
        """Apply each text's rule and return the verdict. found: receives (rows, tree, verdict) per Terms."""
        emitted = on_device([text.stats.new_tokens for text in self.texts], logits.device)
        groups: list[tuple[Terms, list[int]]] = []
        for row, text in enumerate(self.texts):
            mine = next((rows for terms, rows in groups if terms is text.terms or terms == text.terms), None)
            if mine is None:
                groups.append((text.terms, [row]))
            else:
                mine.append(row)
        for terms, rows in groups:  # almost always one, whose tensors need no copy
            trees, of_rows, random, counts, several = tree, logits, self.random, emitted, len(groups) > 1
            if several:
                index = on_device(rows, logits.device)
                trees, of_rows = tree.select(rows), logits[index]
                random, counts = self.random.at(rows), emitted[index]
            if terms.processing.active:
                of_rows = process(of_rows, trees, [self.texts[row].processor for row in rows])
            ends = self._end_tokens(terms, logits.device)
            part = (trees, of_rows, random, counts)
            noise = draw_noise([self.texts[row] for row in rows], random, trees, logits.shape[-1])
            found.append((rows, *self.accept_step(terms.rule, terms.sampling, ends, *part, several, noise)))
        return merge_verdicts([(rows, verdict) for rows, _, verdict in found])

    def _emit(self, row: int, step: Step, logits: Tensor, verdict: Verdict) -> list[int]:
        """Emit a row's tokens. A text that is not done with them and can get no further one has failed.

        logits: [B, N, V], the target's own. Raises NonFiniteLogits if these are to blame, since the caches
        may then hold such numbers as well.
        """
        text = self.texts[row]
        if step.sound == step.count:
            return emit(text, step)
        # Before the tokens are emitted: both describe the step that has just been verified.
        number, failure = text.stats.steps + 1, NothingAllowed(text)
        emitted = emit(text, step)
        if text.done:
            return emitted
        at_fault = logits[row, verdict.path[row, step.sound]]
        if not (text.terms.processing.active and bool(at_fault.amax().isfinite())):
            raise NonFiniteLogits(number, text.number)
        if self.target.ranks.several:  # the other ranks do not know this text's options
            raise failure
        text.failure, text.stats.finish_reason = failure, FAILED
        return emitted

    def _end_tokens(self, terms: Terms, device: torch.device) -> Tensor:
        ends = terms.eos_token_ids
        if ends not in self._ends:
            self._ends[ends] = torch.tensor(ends, dtype=torch.int64, device=device)
        return self._ends[ends]

    def drop_done_rows(self, few_sizes: bool = False) -> None:
        """Drop rows whose texts are done; see `choose_rows`. few_sizes: as if steps were recorded."""
        kept = choose_rows([text.done for text in self.texts], few_sizes or self.accept_step.stepper.records)
        if len(kept) < len(self.texts):
            self.select(kept)


def choose_rows(done: Sequence[bool], recorded: bool) -> list[int]:
    """Choose the rows of the next step's batch, in order. done: by row, whether its text is done.

    Without recording, only unfinished rows stay. A recording works for one number of rows only, so with
    recording, finished rows stay until half of the batch can leave at once. They commit no token: their texts
    and caches do not grow, and nothing of theirs is emitted or counted.
    """
    active = done.count(False)
    count = active
    if recorded:
        count = len(done)
        while (half := (count + 1) // 2) < count and active <= half:
            count = half
    idle = [row for row, is_done in enumerate(done) if is_done][: count - active]
    return [row for row, is_done in enumerate(done) if not is_done or row in idle]


def keep(
    target: TargetSession,
    drafter: Drafter,
    verdict: Verdict,
    features: Tensor,
    tokens: Sequence[Sequence[int]],
    logits: Tensor | None = None,
) -> Tensor:
    """Commit the path, show the drafter what it needs of the step, and return the next roots [B].

    features: [B, N, d], and logits: [B, N, V], of all nodes. tokens: those that each row emits, one for each
    node of its path to commit.
    """
    counts = [len(row) for row in tokens]
    target.keep(verdict.path, counts)
    before = None
    if drafter.needs.features:
        # The token after a node was chosen from the node's feature.
        nodes = verdict.path.clamp(min=0)[:, :, None].expand(-1, -1, features.shape[-1])
        before = features.gather(1, nodes)
    lists = None
    if drafter.needs.next_tokens and logits is not None:
        lists = NextTokens.from_logits(logits, drafter.needs.next_tokens)
    drafter.extend(Seen(verdict.tokens.clamp(min=0), counts, before, lists, tokens))
    return verdict.next_token


def merge_verdicts(parts: Sequence[tuple[Sequence[int], Verdict]]) -> Verdict:
    """Merge verdicts on groups of rows into one, in the order of the rows, without `chances` and `weak`."""
    if len(parts) == 1:
        return parts[0][1]
    order = [row for rows, _ in parts for row in rows]
    back = on_device(sorted(range(len(order)), key=order.__getitem__), parts[0][1].path.device)
    whole = {
        field.name: torch.cat([getattr(verdict, field.name) for _, verdict in parts])[back]
        for field in fields(Verdict)
        if field.name not in ("chances", "weak")
    }
    return replace(parts[0][1], **whole, chances=None, weak=None)


@dataclass(frozen=True)
class Step:
    """One row's part of a verdict, on the host.

    count: the nodes on the path. tokens: the `count` tokens that it emits. fuzzy: for each token but the
    last, whether it was a fuzzy accept. sound: see Verdict. sources: of the same tokens; see DraftTree.
    """

    count: int
    tokens: list[int]
    fuzzy: list[bool]
    sound: int
    sources: list[int]


def to_host(verdict: Verdict, sources: Tensor | None = None) -> list[Step]:
    """Copy the parts of a verdict that the host needs, in one transfer. sources: the tree's."""
    parts = [verdict.sound[:, None], verdict.length[:, None], verdict.tokens, verdict.fuzzy[:, 1:]]
    if sources is not None:
        parts.append(sources.gather(1, verdict.path[:, 1:].clamp(min=0)))
    packed = torch.cat([part.long() for part in parts], dim=1).tolist()
    width = verdict.tokens.shape[1]
    steps = []
    for sound, count, *row in packed:
        fuzzy = [bool(flag) for flag in row[width : width + count - 1]]
        of_row = [HEAD] * (count - 1) if sources is None else row[2 * width - 1 : 2 * width + count - 2]
        steps.append(Step(count, row[:count], fuzzy, sound, of_row))
    return steps


def emit(text: Text, step: Step) -> list[int]:
    """Cut a step's sound tokens at the limit and after the first one that ends the text, and record them."""
    stats, ends = text.stats, text.terms.eos_token_ids
    limit = text.limit - stats.new_tokens
    sound = step.tokens[: step.sound]
    if not sound:
        return []
    end = next((place for place, token in enumerate(sound) if token in ends), limit)
    emitted = sound[: min(limit, end + 1)]
    taken = None if text.stopper is None else text.stopper(emitted)
    emitted = emitted[:taken]
    accepted = min(len(emitted), step.count - 1)  # the last token is the target's own, not an accepted one
    relaxed = sum(step.fuzzy[:accepted])
    stats.record(len(emitted), accepted - relaxed, relaxed, step.sources[:accepted])
    if taken is not None or emitted[-1] in ends:
        stats.finish_reason = "stop"
    elif stats.new_tokens == text.limit:
        stats.finish_reason = "length"
    text.new_tokens += emitted
    return emitted


def note_logprobs(
    texts: Sequence[Text], emitted: Mapping[Text, Sequence[int]], logits: Tensor, verdict: Verdict
) -> None:
    """Add the log-probabilities of a step's tokens to the texts that want them. logits: [B, N, V]."""
    for row, text in enumerate(texts):
        if text.top_logprobs is None or not (tokens := emitted.get(text)):
            continue
        # A node's logits are of the token that comes after it.
        chosen = logits[row, verdict.path[row, : len(tokens)]].float().log_softmax(-1)
        of_tokens = chosen.gather(1, on_device(list(tokens), chosen.device)[:, None])[:, 0].tolist()
        values, ids = chosen.topk(min(text.top_logprobs, chosen.shape[-1]))
        for token, logprob, *top in zip(tokens, of_tokens, ids.tolist(), values.tolist(), strict=True):
            text.logprobs.append(TokenLogprob(token, logprob, list(zip(*top, strict=True))))
