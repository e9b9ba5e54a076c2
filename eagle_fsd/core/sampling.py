"""From logits to probabilities and draws: temperature, top-k and top-p.

Knows nothing about trees or models. `warp` gives the distribution of Hugging Face's `generate`: temperature,
then top-k (every token that ties with the k-th stays), then top-p (the smallest set of likeliest tokens whose
mass reaches top_p, at least one token), then min-p (tokens of at least that share of the likeliest one's
probability). `draw` turns a probability vector and one uniform number into a token, and never returns a token
of probability zero. All random numbers come from core/randomness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.devices import host_can_read
from eagle_fsd.core.long_rows import first_largest, logsumexp, topk

_BLOCK = 256  # draw() looks for the block first, then inside it
_SPARE = 14  # how many tokens after the top-k ones are looked at for ties with the last of them
_HEAD = 1024  # how many of the likeliest tokens top-p without top-k looks at first
_SMALL_TEMPERATURE = 1e-3  # below it logits / temperature may overflow: the largest logit moves to 0 first
_LEAST_TEMPERATURE = 1e-30  # below it float32 division fails; the result has reached its limit


def warp(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Return the probabilities [..., V] float32 of the next token.

    At temperature 0 they are one-hot at the first largest logit. On an accelerator nothing here makes the
    host wait. Logits may hold -inf, but every row needs one finite logit.
    """
    return Warped.from_logits(logits, config).whole(logits.shape[-1])


@dataclass(frozen=True)
class Warped:
    """Distributions of the next token after the warpers, over all tokens or over those that can be drawn.

    probs: [..., K] float32. largest: [...], the largest logit before the warpers. ids: [..., K] int64, the
    tokens that probs belong to, ascending; all others have probability zero. None: K is V, all in order.
    """

    probs: Tensor
    largest: Tensor
    ids: Tensor | None = None

    @classmethod
    def from_logits(cls, logits: Tensor, config: SamplingConfig) -> Warped:
        """Warp logits [..., V]; see `warp`."""
        if config.temperature == 0.0:
            largest, best = first_largest(logits)
            return cls(torch.ones_like(largest, dtype=torch.float32)[..., None], largest, best[..., None])
        found = cls._without_min_p(logits.float(), config)
        return found if not config.min_p else replace(found, probs=_min_p(found.probs, config.min_p))

    @classmethod
    def _without_min_p(cls, logits: Tensor, config: SamplingConfig) -> Warped:
        # On a CPU the ties are read at no cost. If all that tie with the k-th are among the next few, no
        # other token can be drawn, and only these need the work below.
        if 0 < config.top_k < logits.shape[-1] - _SPARE and host_can_read(logits):
            values, ids = topk(logits, config.top_k + _SPARE)
            scores = temper(values, config.temperature)
            least = scores[..., config.top_k - 1, None]
            if bool((least > scores[..., -1:]).all()):
                ids, order = ids.sort(dim=-1)
                scores = _of_those(scores >= least, scores).gather(-1, order)
                if config.top_p < 1.0:
                    scores = _of_those(_heaviest(scores, 1.0 - config.top_p), scores)
                return cls(scores.softmax(-1), values[..., 0], ids)
        scores = temper(logits, config.temperature)
        alone = not config.top_k and config.top_p < 1.0
        if alone and host_can_read(logits) and (few := _few_of_top_p(scores, 1.0 - config.top_p)):
            return cls(few[0], logits.amax(-1), few[1])
        keep = None
        if config.top_k:
            keep = _top_k(scores, min(config.top_k, scores.shape[-1]), config.top_p)
        elif config.top_p < 1.0:
            # Of equal scores at the cut, the highest ids stay. Hugging Face's own sort does not define which
            # of them do; how many stay is the same.
            keep = _heaviest(scores, 1.0 - config.top_p)
        if keep is not None:
            scores = _of_those(keep, scores)
        return cls(scores.softmax(-1), logits.amax(-1))

    def whole(self, vocab_size: int) -> Tensor:
        """Return the probabilities of all tokens: [..., V]."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(*self.probs.shape[:-1], vocab_size).scatter_(-1, self.ids, self.probs)

    def draw(self, u: Tensor) -> Tensor:
        """Draw tokens [...] at u [...] in [0, 1); see `draw`."""
        if self.ids is None:
            return draw(self.probs, u)
        weights = self.probs.double()
        place, _ = _first_beyond(weights, weights.cumsum(-1), u.double() * weights.sum(-1))
        return self.ids.gather(-1, place).squeeze(-1)

    def drawn_by(self, noise: Tensor, levels: Tensor) -> Tensor:
        """Return the tokens [B, N] that Gumbel noise [B, D, V] draws; see core/randomness/noise.py.

        levels: [B, N], the place along D whose noise each distribution takes.
        """
        rows = torch.arange(len(noise), device=noise.device)[:, None]
        if self.ids is None:
            return (self.probs.log() + noise[rows, levels]).argmax(-1)
        best = (self.probs.log() + noise[rows[..., None], levels[..., None], self.ids]).argmax(-1)
        return self.ids.gather(-1, best[..., None]).squeeze(-1)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Draw tokens [...] int64 by the inverse CDF of probs [..., V] at u [...] in [0, 1).

    Weights need not sum to 1. A token of probability zero is never drawn, whatever u is. A row whose weights
    are all zero gives token 0; the caller must rule such rows out.
    """
    vocab = probs.shape[-1]
    size = min(_BLOCK, vocab)
    # The block is found first: a float64 running sum over the whole vocabulary would be slow.
    missing = -vocab % size
    padded = F.pad(probs, (0, missing)) if missing else probs
    blocks = padded.unflatten(-1, (-1, size))  # [..., V / 256, 256]
    masses = blocks.sum(-1, dtype=torch.float64)
    running = masses.cumsum(-1)
    block, point = _first_beyond(masses, running, u.double() * masses.sum(-1))
    before = running.gather(-1, block) - masses.gather(-1, block)
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, size)).squeeze(-2).double()
    rest = (point - before.squeeze(-1)).clamp_min(0.0)
    token, _ = _first_beyond(inside, inside.cumsum(-1), rest)
    return (block * size + token).squeeze(-1)


def _first_beyond(weights: Tensor, running: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first positive weight [..., n] whose running sum exceeds `point` [...].

    Returns its index [..., 1], and the point, moved where rounding had put it past the last weight.
    """
    # A parallel scan may round so that the sum rises over a zero weight, so zero weights are excluded
    # explicitly. Rounding may also put a point at or beyond the end: it then belongs to the last weight.
    reach = running.masked_fill(weights <= 0.0, -1.0)
    end = reach.amax(-1)
    point = torch.minimum(point, torch.nextafter(end, torch.zeros_like(end)))
    return (reach > point[..., None]).to(torch.uint8).argmax(-1, keepdim=True), point


def temper(scores: Tensor, temperature: float) -> Tensor:
    """Divide scores by the temperature, shifted first where the quotient could overflow."""
    if temperature == 1.0:
        return scores
    if temperature < _SMALL_TEMPERATURE:
        return (scores - scores.amax(-1, keepdim=True)) / max(temperature, _LEAST_TEMPERATURE)
    return scores / temperature


def _of_those(keep: Tensor, scores: Tensor) -> Tensor:
    """Return the scores of the tokens that are kept, and -inf for the others."""
    return scores.masked_fill(~keep, -math.inf)


def _min_p(probs: Tensor, min_p: float) -> Tensor:
    """Drop tokens of less than min_p times the largest probability; the others sum to 1 again."""
    probs = torch.where(probs < min_p * probs.amax(-1, keepdim=True), 0.0, probs)
    return probs / probs.sum(-1, keepdim=True)


def _few_of_top_p(scores: Tensor, budget: float) -> tuple[Tensor, Tensor] | None:
    """Return the probabilities after top-p of the likeliest 1,024 tokens, and their ids, ascending.

    Sorting a large vocabulary costs as much as a small model, and the likeliest tokens are usually enough: if
    all others together fit in the budget, none of them survives. None: they are not enough, or the cut may
    go through equal scores of which some are not among them.
    """
    if scores.shape[-1] <= 4 * _HEAD:
        return None
    top, ids = topk(scores, _HEAD)
    probs = (top - logsumexp(scores)).exp()
    below = (1.0 - probs.sum(-1, keepdim=True)).clamp_min(0.0)
    if not bool((below <= budget).all()):
        return None
    least = top[..., -1:]
    ids, order = ids.sort(dim=-1)
    top, probs = top.gather(-1, order), probs.gather(-1, order)
    ordered, places = top.sort(dim=-1, stable=True)
    kept = probs.gather(-1, places).cumsum(-1).add_(below) > budget
    kept[..., -1].fill_(True)
    if bool((kept & (ordered <= least)).any()):
        return None
    keep = torch.empty_like(kept).scatter_(-1, places, kept)
    return _of_those(keep, top).softmax(-1), ids


def _heaviest(scores: Tensor, budget: float) -> Tensor:
    """Return all tokens but the lightest, whose mass together is at most `budget`: bool [..., n]."""
    ordered, places = scores.sort(dim=-1, stable=True)
    kept = ordered.softmax(-1).cumsum(-1) > budget
    kept[..., -1].fill_(True)
    return torch.empty_like(kept).scatter_(-1, places, kept)


def _top_k(scores: Tensor, k: int, top_p: float) -> Tensor:
    """Return which tokens survive top-k and then top-p: bool [..., V], without sorting the vocabulary."""
    top = scores.topk(k, dim=-1).values  # [..., k], descending
    least = top[..., -1:]
    if top_p == 1.0:
        return scores >= least
    budget = 1.0 - top_p
    # Top-k also keeps this many tokens beyond k that tie with the k-th: the first ones in ascending order.
    ties = (scores >= least).sum(-1, keepdim=True) - k  # [..., 1]
    weights = (top - top[..., :1]).exp().flip(-1)  # [..., k], ascending
    probs = weights / (weights.sum(-1, keepdim=True) + ties * weights[..., :1])
    least_prob = probs[..., :1]
    cut_ties = (budget / least_prob).floor().clamp(max=scores.shape[-1]).long()
    return _survivors(
        scores, top, probs.cumsum(-1).add_(ties * least_prob) > budget, (ties - cut_ties).clamp_min(0)
    )


def _survivors(scores: Tensor, top: Tensor, kept: Tensor, ties: Tensor) -> Tensor:
    """Return the tokens that `kept` (ascending) keeps of the best scores `top` (descending): bool [..., V].

    `ties` more tokens survive at the lowest of those scores. If the cut goes through equal scores, the
    highest ids stay, as in an ascending stable sort.
    """
    kept[..., -1].fill_(True)
    kept = kept.flip(-1)
    lowest = top.gather(-1, kept.sum(-1, keepdim=True) - 1)  # [..., 1]
    equal = scores == lowest
    places = ((top == lowest) & kept).sum(-1, keepdim=True) + ties
    surplus = equal.sum(-1, keepdim=True) - places  # [..., 1], 0 unless the cut goes through a tie
    if host_can_read(surplus) and not surplus.any():
        return scores >= lowest
    return (scores > lowest) | (equal & (equal.cumsum(-1, dtype=torch.int32) > surplus))
