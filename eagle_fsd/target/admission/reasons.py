"""Why a model cannot be a target, as far as its own plain forward and its classes tell."""

from __future__ import annotations

from eagle_fsd.core.checks import one_line
from eagle_fsd.target.admission.small_tree import (
    Candidate,
    difference_of_logits,
    plain_forward,
    small_tree,
    tolerance,
)

BIDIRECTIONAL = "its tokens attend to those that follow, as an encoder's do; use a decoder-only causal LM"
ALIBI = "it has ALiBi for positions, which counts slots of the cache; use another target"
# What a forward may raise if it cannot take our cache, masks or positions.
FORWARD_ERRORS = (
    *(TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError),
    *(IndexError, KeyError, AssertionError),
)


def reason_of(target: Candidate, seen: str) -> str:
    """Return why a target cannot verify trees, and a remedy.

    seen: what was seen of it, which is the reason if nothing better is known.
    """
    if target.graphs is not None:
        return f"{seen}; use another target"
    try:
        if sees_the_future(target):
            return BIDIRECTIONAL
    except FORWARD_ERRORS as error:
        return f"its own forward of a text fails ({one_line(error)}); use another target"
    return ALIBI if uses_alibi(target) else f"{seen}; use another target"


def sees_the_future(target: Candidate) -> bool:
    """Return whether the logits of a text's first tokens depend on those that follow, in a plain forward."""
    prefix, tokens, _ = small_tree(target)
    plain = plain_forward(target)
    alone, followed = plain(prefix + tokens[:1]), plain(prefix + tokens)
    return not difference_of_logits(followed[: len(alone)], alone) < tolerance(target)


def uses_alibi(target: Candidate) -> bool:
    """Return whether the config asks for ALiBi, or a method or buffer of the decoder is named after it."""
    names = [*dir(type(target.decoder)), *vars(target.decoder), *dict(target.decoder.named_buffers())]
    return bool(getattr(target.config, "alibi", False)) or any("alibi" in name for name in names)
