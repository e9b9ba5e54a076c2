"""The decoding loop: draft, verify, accept, keep, until every row is done. It knows token ids and no text.

The last prompt token is the first root: it is the newest token not yet run through the target, like every
root after it. So each step, the first included, emits what its tree yields, and tau needs no exception for
the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle_fsd.acceptance import AcceptanceRule, Verdict, Verified
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.draft import Drafter
from eagle_fsd.judge import Judge
from eagle_fsd.padding import on_device
from eagle_fsd.sampling import RowRandom
from eagle_fsd.stats import GenerationStats, Stopwatch
from eagle_fsd.target import TargetSession


class Observer(Protocol):
    """Looks at every step of a batch and changes nothing.

    emitted: how many tokens each row of the tree, by its place in the request, got of the verdict's.
    """

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None: ...


@dataclass(frozen=True)
class Request:
    """One batch to decode.

    tokens: [B, L] right-padded prompts; lengths: each at least 1; limits: most new tokens per row.
    observer: is shown every step.
    """

    tokens: Tensor
    lengths: Sequence[int]
    limits: Sequence[int]
    eos_token_ids: Sequence[int]
    rule: AcceptanceRule
    tree: TreeConfig
    sampling: SamplingConfig
    observer: Observer | None = None


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
    rows = list(range(len(request.lengths)))  # the rows still decoding, by their place in the request
    eos = torch.tensor(request.eos_token_ids, dtype=torch.int64, device=roots.device)
    while rows:
        with watch("draft"):
            tree = drafter.draft(roots, request.tree)
        with watch("verify"):
            logits, features = target.verify(tree)
        with watch("accept"):
            emitted = on_device([stats[row].new_tokens for row in rows], roots.device)
            verified, verdict = judge(request.rule, request.sampling, eos, tree, logits, random, emitted)
            steps = to_host(verdict)  # the one place where a step waits for the device
            news = {row: emit(request, row, stats[row], *step) for row, step in zip(rows, steps, strict=True)}
        if request.observer is not None:
            request.observer(verified, verdict, {row: len(news[row]) for row in rows})
        with watch("keep"):
            counts = [count for count, _, _ in steps]
            going = [i for i, row in enumerate(rows) if stats[row].finish_reason is None]
            if going:
                roots = keep(target, drafter, verdict, features, counts)
            if 0 < len(going) < len(rows):
                for part in (target, drafter, random):
                    part.select(going)
                roots = roots[going]
            rows = [rows[i] for i in going]
        yield [news.get(row, []) for row in range(len(request.lengths))]


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


def to_host(verdict: Verdict) -> list[tuple[int, list[int], list[bool]]]:
    """Per row: the path's length, the tokens emitted, and which drafted ones were fuzzy accepts."""
    packed = torch.cat((verdict.length[:, None], verdict.tokens, verdict.fuzzy[:, 1:].long()), dim=1).tolist()
    width = verdict.tokens.shape[1]
    return [
        (row[0], row[1 : 1 + row[0]], [bool(flag) for flag in row[1 + width : width + row[0]]])
        for row in packed
    ]


def emit(
    request: Request, row: int, stats: GenerationStats, count: int, tokens: list[int], fuzzy: list[bool]
) -> list[int]:
    """Cut a step's tokens at the row's limit and after its first end token, and record what is left."""
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
