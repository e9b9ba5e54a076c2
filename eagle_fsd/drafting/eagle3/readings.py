"""Which reading of an EAGLE-3 head's config is right: measured, since a wrong one only costs speed.

Every reading predicts a text of the target's own, and the one with the lowest loss is right. Taps change
every prediction. Whether the carried state is the normed one shows only from the second draft step on, so the
head drafts a chain at every position of the text, on its own states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle_fsd.drafting.eagle3.config import Reading
from eagle_fsd.drafting.eagle3.drafter import Eagle3Predictor, Eagle3Vocabulary
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_drafter import HeadVerifier
from eagle_fsd.runtime.kv_cache import KVCache

STEPS = 3  # draft steps that are measured: the first one knows nothing of what is carried


@torch.inference_mode()
def reading_losses(
    head: Eagle3Head,
    target: HeadVerifier,
    tokens: Tensor,
    features: Callable[[tuple[int, ...]], Tensor],
    steps: int = STEPS,
) -> dict[Reading, float]:
    """Return the mean loss of each of the head's readings, in nats per token. The head stays as it is.

    tokens: [n], a text of the target's own. features: returns the taps [n, taps * d_t] at its tokens, for
    which the target runs; it is asked once for each choice of taps.
    """
    features = functools.cache(features)
    config, losses = head.config, {}
    try:
        for reading in head.readings:
            head.config = replace(config, taps=reading.taps, norm_output=reading.norm_output)
            losses[reading] = chain_loss(head, target, tokens, features(reading.taps), steps)
    finally:
        head.config = config
    return losses


def chain_loss(head: Eagle3Head, target: HeadVerifier, tokens: Tensor, features: Tensor, steps: int) -> float:
    """Return the mean negative log q of the text's tokens, over `steps` draft steps at every position.

    A token outside the draft vocabulary has no q and does not count. tokens: [n]; features: [n, D].
    """
    pairs = len(tokens) - 1
    cache = KVCache(1, pairs * steps, target.device)
    predictor = Eagle3Predictor(head, Eagle3Vocabulary(head, target), cache)
    columns = torch.full((target.vocab_size,), -1, device=target.device)
    order = torch.arange(target.vocab_size, device=target.device)
    drafted = order if head.draft_tokens is None else head.draft_tokens.to(target.device)
    columns[drafted] = order[: len(drafted)]
    states = head.project(features[None, :-1].to(head.dtype))  # [1, n - 1, d]
    places = torch.arange(pairs, device=target.device)
    own = torch.zeros(pairs, 0, dtype=torch.bool, device=target.device)  # the chain's slots that each sees
    total, count = 0.0, 0
    for step in range(steps):
        left = pairs - step  # of the chains, the last ones have no token to read any more
        cache.reserve(pairs, offset=step * pairs)
        cache.place(left, offset=step * pairs)
        mine = places[:left, None] == torch.arange(pairs, device=target.device)  # [left, n - 1]
        if step:
            own = torch.cat((own[:left], mine), dim=1)
            seen = torch.cat((places[:left, None] >= places, own), dim=1)
        else:
            seen = places[:, None] >= places
        slot_positions = torch.cat([places + passed for passed in range(step + 1)])[None]
        embeddings = predictor.vocabulary.embed(tokens[None, step + 1 :])
        states = predictor.forward(
            states[:, :left], embeddings, places[None, :left] + step, seen[None], slot_positions
        )
        wanted = columns[tokens[step + 2 :]]  # what chain j drafts next is token j + step + 2
        log_q = predictor.log_q(states[0, : len(wanted)])
        known = wanted >= 0
        total -= float(log_q[known].gather(1, wanted[known, None]).sum())
        count += int(known.sum())
    return total / max(count, 1)


def take_reading(head: Eagle3Head, reading: Reading) -> Reading:
    """Give the head this reading, and return it. The head is changed in place."""
    head.config = replace(head.config, taps=reading.taps, norm_output=reading.norm_output)
    head.readings = (reading,)
    return reading


def shown_losses(losses: dict[Reading, float], best: Reading) -> str:
    """Return one line about what was measured."""
    parts: Sequence[str] = [f"{reading}: {loss:.2f}" for reading, loss in losses.items()]
    return f"{best} is the head's reading, by its loss on the target's own text ({'; '.join(parts)})"
