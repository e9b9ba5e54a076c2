"""Gives each text the tokens of a step: up to its limit, and to the token that ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict
from eagle_fsd.core.devices import fetch
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.tree import HEAD
from eagle_fsd.decoding.request import FAILED, Text, TokenLogprob
from eagle_fsd.decoding.steps.failures import NonFiniteLogits, NothingAllowed


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


def emit_or_fail(
    text: Text, row: int, step: Step, logits: Tensor, verdict: Verdict, alone: bool
) -> list[int]:
    """Emit a text's tokens. A text that is not done with them and can get no further one has failed.

    row: the text's. logits: [B, N, V], the target's own. alone: whether there are no other ranks. Raises
    NonFiniteLogits if the logits are to blame, since the caches may then hold such numbers as well.
    """
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
    if not alone:  # the other ranks do not know this text's options
        raise failure
    text.failure, text.stats.finish_reason = failure, FAILED
    return emitted


def note_logprobs(
    texts: Sequence[Text], emitted: Mapping[Text, Sequence[int]], logits: Tensor, verdict: Verdict
) -> None:
    """Add the log-probabilities of a step's tokens to the texts that want them. logits: [B, N, V]."""
    parts: list[Tensor] = []
    wanted = [
        (row, text, emitted[text], text.top_logprobs)
        for row, text in enumerate(texts)
        if text.top_logprobs is not None and emitted.get(text)
    ]
    for row, _, tokens, count in wanted:
        # A node's logits are of the token that comes after it.
        chosen = logits[row, verdict.path[row, : len(tokens)]].float().log_softmax(-1)
        values, ids = chosen.topk(min(count, chosen.shape[-1]))
        parts += [chosen.gather(1, on_device(list(tokens), chosen.device)[:, None])[:, 0], ids, values]
    found = (part.tolist() for part in fetch(*parts)) if parts else iter(())
    for _, text, tokens, _ in wanted:
        for token, logprob, *top in zip(tokens, next(found), next(found), next(found), strict=True):
            text.logprobs.append(TokenLogprob(token, logprob, list(zip(*top, strict=True))))
