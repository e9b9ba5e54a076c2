"""Divergences between the target p and the draft q: pure functions on logits, in nats (tv: a probability).

Every function takes (p_logits, q_logits), both [..., V] in any floating dtype, and returns float32 [...]
(leading dimensions broadcast). Log-probabilities are logits too. The arithmetic is float32, without
gradients.

| name       | value                                             | range     | symmetric |
| ---------- | ------------------------------------------------- | --------- | --------- |
| reverse_kl | KL(q || p)                                        | [0, inf]  | no        |
| forward_kl | KL(p || q)                                        | [0, inf]  | no        |
| js         | 1/2 KL(p || m) + 1/2 KL(q || m), m = (p + q) / 2  | [0, ln 2] | yes       |
| tv         | 1/2 sum |p - q|                                   | [0, 1]    | yes       |
| ag         | 1/2 KL(m || p) + 1/2 KL(m || q)                   | [0, inf]  | yes       |

js + ag = (forward_kl + reverse_kl) / 4. `ag`, the arithmetic-geometric divergence, is what the code published
with the FSD paper calls js_div. `<name>_top10` is the same quantity after merging the vocabulary into the
target's TOP_K = 10 most likely tokens and one bin for all others; it never exceeds the full-vocabulary value.
A threshold for one name means nothing for another.

Zeros. A probability counts as zero where its logit is -inf or where exp(log-probability) underflows float32
(below about 1e-45). A term whose weight is zero is 0. In the KLs and ag, a weight above zero against a logit
of -inf gives +inf, which is the true value. Against an underflowed but finite log-probability it gives a
finite value, because no logarithm of a probability is taken. js and tv are always finite. A value is NaN only
if a row is not a distribution at all (a NaN or +inf logit, or nothing but -inf).

A head with a draft vocabulary gives most tokens no probability, so it meets that infinity: in forward_kl and
ag always, because p is above zero on some of those tokens; in their top variants where one of the ten best
tokens is not drafted, however unlikely it is. SPARSE_DIVERGENCES are the others, which stay finite.

A draft may also say how much probability its other tokens have together, and not how it is spread. They are
then one outcome, as they are for p. The value is a lower bound of the divergence, since merging outcomes
never raises it, and exact where q has the same ratio to p on all of them. LISTED_DIVERGENCES allow this.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from eagle_fsd.core.checks import require_choice
from eagle_fsd.core.config import DIVERGENCE_NAMES
from eagle_fsd.core.long_rows import logsumexp, topk

Divergence = Callable[[Tensor, Tensor], Tensor]

TOP_K = 10

_TINY = torch.finfo(torch.float32).tiny
_LN2 = 0.69314712  # the largest float32 below ln 2, so that js <= ln 2 also holds in float64


@torch.no_grad()
def reverse_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return KL(q || p) = sum q (log q - log p): large where the draft puts mass and the target does not."""
    log_p, log_q = _log_probs(p_logits, q_logits)
    return _kl(log_q, log_p)


@torch.no_grad()
def forward_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return KL(p || q) = sum p (log p - log q): large where the draft misses mass that the target has."""
    log_p, log_q = _log_probs(p_logits, q_logits)
    return _kl(log_p, log_q)


@torch.no_grad()
def js(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence, at most ln 2."""
    p, q = _probs(p_logits, q_logits)
    m = (p + q).mul_(0.5).clamp_min_(_TINY)
    # Clamped ratios make 0 log 0 an exact 0; p == q gives log 1, an exact 0 as well.
    terms = (p / m).clamp_min_(_TINY).log_().mul_(p)
    terms += torch.div(q, m, out=m).clamp_min_(_TINY).log_().mul_(q)
    return terms.sum(-1).mul_(0.5).clamp_(0.0, _LN2)


@torch.no_grad()
def tv(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return the total variation distance, at most 1: how much p and q differ at most on a set of tokens."""
    p, q = _probs(p_logits, q_logits)
    return (p - q).abs_().sum(-1).mul_(0.5).clamp_(0.0, 1.0)


@torch.no_grad()
def ag(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return 1/2 KL(m || p) + 1/2 KL(m || q).

    This equals sum m log(m / sqrt(p q)) = sum m log cosh((log q - log p) / 2).
    """
    log_p, log_q = _log_probs(p_logits, q_logits)
    gap = (log_q - log_p).abs_()
    m = (log_p.exp() + log_q.exp()).mul_(0.5)
    # log cosh(gap / 2) by way of exp(-gap), which cannot overflow.
    log_cosh = torch.exp(-gap).add_(1.0).mul_(0.5).log_().add_(gap, alpha=0.5)
    return log_cosh.mul_(m).masked_fill_(m == 0.0, 0.0).sum(-1).clamp_min_(0.0)


def over_top_k(divergence: Divergence, k: int = TOP_K) -> Divergence:
    """Return a divergence over k + 1 outcomes: the target's k likeliest tokens and one bin for the rest."""

    @torch.no_grad()
    def coarse(p_logits: Tensor, q_logits: Tensor) -> Tensor:
        _check(p_logits, q_logits)
        p_logits, q_logits = torch.broadcast_tensors(p_logits.float(), q_logits.float())
        _, top = topk(p_logits, min(k, p_logits.shape[-1]))  # [..., k]
        return divergence(_merge_rest(p_logits, top), _merge_rest(q_logits, top))

    coarse.__name__ = f"{divergence.__name__}_top{k}"
    coarse.__doc__ = f"{divergence.__name__} over the target's {k} likeliest tokens and one bin for the rest."
    return coarse


_FULL: tuple[Divergence, ...] = (reverse_kl, forward_kl, js, tv, ag)
_INFINITE_WHERE_Q_IS_ZERO = (forward_kl, ag)
DIVERGENCES: dict[str, Divergence] = {f.__name__: f for f in (*_FULL, *(over_top_k(f) for f in _FULL))}
SPARSE_DIVERGENCES: tuple[str, ...] = tuple(
    name
    for name in DIVERGENCES
    if name.removesuffix(f"_top{TOP_K}") not in {f.__name__ for f in _INFINITE_WHERE_Q_IS_ZERO}
)


LISTED_DIVERGENCES: tuple[str, ...] = tuple(f.__name__ for f in _FULL if f.__name__ in SPARSE_DIVERGENCES)

_LARGEST = {"js": _LN2, "tv": 1.0}


def largest_value(name: str) -> float:
    """Return a divergence's largest value. A threshold this large lets every child through."""
    get_divergence(name)
    return _LARGEST.get(name.removesuffix(f"_top{TOP_K}"), math.inf)


def get_divergence(name: str) -> Divergence:
    """Return the divergence of this name. Raises ValueError with all names if there is none."""
    require_choice("divergence", name, DIVERGENCE_NAMES)
    return DIVERGENCES[name]


def sparse_divergence(
    name: str, p_logits: Tensor, log_q: Tensor, drafted: Tensor | None, rest: Tensor | None = None
) -> Tensor:
    """Return the divergence of p_logits [..., V] and log_q [..., W] of the tokens drafted [W]; None: all V.

    rest: [...], the log of q's mass on tokens without log_q; None: no mass. See DraftTree.

    All of _FULL are f-divergences, which do not change when outcomes with the same ratio p / q are merged.
    The outcomes with q = 0 are such a set, so W + 1 outcomes replace V. The top variants rank single tokens
    and need all V.
    """
    divergence = get_divergence(name)
    if drafted is None:
        return divergence(p_logits, log_q)
    if rest is not None:
        return _listed_divergence(divergence, p_logits, log_q, drafted, rest)
    if divergence not in _FULL:
        whole = log_q.new_full((*log_q.shape[:-1], p_logits.shape[-1]), -math.inf)
        return divergence(p_logits, whole.index_copy_(-1, drafted, log_q))
    largest = p_logits.amax(-1, keepdim=True).float()
    listed = p_logits.gather(-1, drafted.expand(*p_logits.shape[:-1], -1)).float() - largest  # [..., W]
    # The rest is summed, not taken as 1 - sum(listed): rounding could make that 0. The divergence norms both.
    rest = (p_logits.float() - largest).exp_().index_fill_(-1, drafted, 0.0).sum(-1, keepdim=True)
    nothing = torch.full_like(log_q[..., :1], -math.inf)
    return divergence(torch.cat((listed, rest.log()), dim=-1), torch.cat((log_q, nothing), dim=-1))


def _listed_divergence(
    divergence: Divergence, p_logits: Tensor, log_q: Tensor, drafted: Tensor, rest: Tensor
) -> Tensor:
    """Return the divergence over the tokens with log_q, and one outcome for all others."""
    largest = p_logits.amax(-1, keepdim=True).float()
    weights = (p_logits.float() - largest).exp_()
    listed = weights.gather(-1, drafted.expand(*p_logits.shape[:-1], -1))  # [..., W]
    # Every row has a list of its own; tokens that only other rows list are among its others.
    mine = log_q > -math.inf
    others = weights.index_fill_(-1, drafted, 0.0).sum(-1) + listed.masked_fill(mine, 0.0).sum(-1)
    p = torch.cat((listed.masked_fill(~mine, 0.0), others[..., None]), dim=-1).log()
    return divergence(p, torch.cat((log_q, rest[..., None]), dim=-1))


def require_listed(name: str) -> None:
    """Raise ValueError if a divergence does not work for drafts that list a few tokens of their own."""
    if name not in LISTED_DIVERGENCES:
        raise ValueError(
            f"divergence is {name!r}: a looked-up draft lists only a few tokens, and nothing is known of the "
            f"others; choose one of {', '.join(LISTED_DIVERGENCES)}, or, where there is a head, "
            "let it draft alone (lookup=False, --no-lookup)"
        )


def require_sparse(name: str, tokens: int) -> None:
    """Raise ValueError if a divergence is infinite for a draft over `tokens` of the target's tokens only."""
    if name not in SPARSE_DIVERGENCES:
        raise ValueError(
            f"divergence is {name!r}: it is infinite where the draft has no probability, that is outside the "
            f"head's draft vocabulary of {tokens} tokens; choose one of {', '.join(SPARSE_DIVERGENCES)}, "
            "or draft over all tokens (full_vocabulary, --full-vocabulary)"
        )


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return KL(a || b) of log-probabilities."""
    a = log_a.exp()
    # Where a is 0, the difference may be -inf or NaN (if both are -inf), so the product is set to 0.
    return (log_a - log_b).mul_(a).masked_fill_(a == 0.0, 0.0).sum(-1).clamp_min_(0.0)


def _merge_rest(logits: Tensor, top: Tensor) -> Tensor:
    """Return the logits of k + 1 outcomes: those at `top`, and one for all others.

    The log-sum-exp is exact however small the others are; 1 - sum would lose them to rounding.
    """
    rest = logsumexp(logits.scatter(-1, top, -math.inf))
    return torch.cat((logits.gather(-1, top), rest), dim=-1)


def _log_probs(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    _check(p_logits, q_logits)
    return p_logits.log_softmax(-1, dtype=torch.float32), q_logits.log_softmax(-1, dtype=torch.float32)


def _probs(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    _check(p_logits, q_logits)
    return p_logits.softmax(-1, dtype=torch.float32), q_logits.softmax(-1, dtype=torch.float32)


def _check(p_logits: Tensor, q_logits: Tensor) -> None:
    p, q = p_logits.shape[-1], q_logits.shape[-1]
    if p != q:
        raise ValueError(
            f"p_logits cover {p} tokens and q_logits {q}: a divergence needs one vocabulary; "
            "cut off the padding"
        )
