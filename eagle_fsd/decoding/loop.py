"""The decoding loop: draft, verify, accept, keep, until every row is done. It knows token ids and no text.

The last prompt token is the first root: it is the newest token not yet run through the target, like every
root after it. So each step, the first included, emits what its tree yields, and tau needs no exception for
the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict
from eagle_fsd.acceptance.accept_step import Judge
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.sampling import RowRandom
from eagle_fsd.core.stats import GenerationStats, Stopwatch
from eagle_fsd.decoding.request import Request
from eagle_fsd.drafting.drafter import Drafter
from eagle_fsd.target.session import TargetSession


class NonFiniteLogits(FloatingPointError):
    """The target's logits on an accepted path are NaN, +inf or all -inf, so that no token can be emitted.

    step: counted from 1; row: by its place in the request.
    """

    def __init__(self, step: int, row: int) -> None:
        super().__init__(
            f"step {step} of row {row}: the target's logits are not finite, as where float16 overflows or "
            "weights are damaged; load the model in bfloat16 or float32 (dtype), or check its files"
        )
        self.step, self.row = step, row


@torch.inference_mode()
def decode(
    request: Request,
    target: TargetSession,
    drafter: Drafter,
    random: RowRandom,
    stats: Sequence[GenerationStats],
    watch: Stopwatch,
    judge: Judge | None = None,
) -> Iterator[list[list[int]]]:
    """Yield, after every step, the tokens that each of the B rows emitted in it (none once a row is done)."""
    judge = judge or Judge()
    with watch("prefill"):
        roots = prefill(request, target, drafter)
    rows = list(range(len(request.lengths)))  # the batch, by place in the request; see `rows_kept`
    going = rows  # those that are not done
    eos = torch.tensor(request.eos_token_ids, dtype=torch.int64, device=roots.device)
    while going:
        with watch("draft"):
            tree = drafter.draft(roots, request.tree)
        with watch("verify"):
            logits, features = target.verify(tree)
        with watch("accept"):
            emitted = on_device([stats[row].new_tokens for row in rows], roots.device)
            verified, verdict = judge(request.rule, request.sampling, eos, tree, logits, random, emitted)
            steps = dict(zip(rows, to_host(verdict), strict=True))  # the one place where a step waits
            news = {row: emit(request, row, stats[row], steps[row]) for row in going}
        if request.observer is not None:
            request.observer(verified, verdict, {row: len(news[row]) for row in rows})
        with watch("keep"):
            going = [row for row in going if stats[row].finish_reason is None]
            if going:
                counts = [steps[row].count if row in going else 0 for row in rows]
                roots = keep(target, drafter, verdict, features, counts)
                kept = rows_kept(rows, going, judge.stepper.records and request.observer is None)
                if len(kept) < len(rows):
                    places = [rows.index(row) for row in kept]
                    for part in (target, drafter, random):
                        part.select(places)
                    rows, roots = kept, roots[places]
        yield [news.get(row, []) for row in range(len(request.lengths))]


def rows_kept(rows: Sequence[int], going: Sequence[int], recorded: bool) -> list[int]:
    """Choose the rows of the next step's batch, in order. going: the rows that are not done.

    Without recording only these stay. A recording is good for one number of rows: with recording, rows that
    are done stay until half of the batch can leave at once. They commit no token, so that neither their texts
    nor their caches grow, and nothing of theirs is emitted or counted.
    """
    count = len(going)
    if recorded:
        count = len(rows)
        while (half := (count + 1) // 2) < count and len(going) <= half:
            count = half
    done = [row for row in rows if row not in going][: count - len(going)]
    return [row for row in rows if row in going or row in done]


def prefill(request: Request, target: TargetSession, drafter: Drafter) -> Tensor:
    """Run every prompt but its last token, the first root [B], which is returned."""
    counts = [length - 1 for length in request.lengths]
    features = target.prefill(request.tokens[:, :-1], counts)
    last = torch.tensor(counts, device=request.tokens.device)[:, None]
    # A one-token prompt has no feature yet: its first pair carries a zero feature and the root.
    empty = last == 0
    pairs = features if features.shape[1] else features.new_zeros(len(counts), 1, features.shape[2])
    followers = request.tokens[:, 1:] if features.shape[1] else request.tokens
    drafter.extend(
        pairs.masked_fill(empty[:, :, None], 0.0),
        torch.where(empty, request.tokens[:, :1], followers),
        [max(count, 1) for count in counts],
    )
    return request.tokens.gather(1, last)[:, 0]


def keep(
    target: TargetSession, drafter: Drafter, verdict: Verdict, features: Tensor, counts: Sequence[int]
) -> Tensor:
    """Commit the path, show the drafter its true features [B, N, d]; returns the next roots [B]."""
    target.keep(verdict.path, counts)
    nodes = verdict.path.clamp(min=0)[:, :, None].expand(-1, -1, features.shape[-1])
    drafter.extend(features.gather(1, nodes), verdict.tokens.clamp(min=0), counts)
    return verdict.next_token


class Step(NamedTuple):
    """One row's part of a verdict, on the host.

    count: nodes on the path. tokens: the `count` tokens that it emits. fuzzy: for each but the last, whether
    it was a fuzzy accept. finite: see Verdict.
    """

    count: int
    tokens: list[int]
    fuzzy: list[bool]
    finite: bool


def to_host(verdict: Verdict) -> list[Step]:
    """Fetch what the host needs of a verdict, in one transfer."""
    parts = (verdict.finite[:, None], verdict.length[:, None], verdict.tokens, verdict.fuzzy[:, 1:])
    packed = torch.cat([part.long() for part in parts], dim=1).tolist()
    width = verdict.tokens.shape[1]
    return [
        Step(count, row[:count], [bool(flag) for flag in row[width : width + count - 1]], bool(finite))
        for finite, count, *row in packed
    ]


def emit(request: Request, row: int, stats: GenerationStats, step: Step) -> list[int]:
    """Cut a step's tokens at the row's limit and after its first end token, and record what is left."""
    if not step.finite:
        raise NonFiniteLogits(stats.steps + 1, row)
    count, tokens, fuzzy, _ = step
    room = request.limits[row] - stats.new_tokens
    ends = [i for i, token in enumerate(tokens) if token in request.eos_token_ids]
    emitted = tokens[: min(room, ends[0] + 1 if ends else room)]
    accepted = min(len(emitted), count - 1)  # the step's last token is the target's own, not an accepted one
    relaxed = sum(fuzzy[:accepted])
    stats.record(len(emitted), accepted - relaxed, relaxed)
    if emitted[-1] in request.eos_token_ids:
        stats.finish_reason = "stop"
    elif stats.new_tokens == request.limits[row]:
        stats.finish_reason = "length"
    return emitted
