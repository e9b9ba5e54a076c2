"""A text read by a target, teacher-forced: its next-token distributions, and how far two targets' are apart.

Products with few bits round their activations, and what is rounded depends on how many tokens a forward has.
So a text is read in two ways: all at once, as a prompt is, and some tokens a forward, as trees are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle_fsd.acceptance.divergence import tv
from eagle_fsd.core.tree import DraftTree, root_only
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

NODES = 8  # tokens of a forward as trees have them
AT_ONCE, AS_TREES = "at_once", "as_trees"
Tokens = Sequence[int]


@torch.inference_mode()
def read_at_once(target: TargetModel, prompt: Tokens, answer: Tokens) -> Tensor:
    """Return the logits [n, V] float32 of the answer's n tokens, which are read as a part of the prompt."""
    text = torch.tensor([[*prompt, *answer[:-1]]], device=target.device)
    session = TargetSession(target, 1, text.shape[1])
    features = session.prefill(text, [text.shape[1]])[0, len(prompt) - 1 :]
    return target.logits(features)


@torch.inference_mode()
def read_as_trees(target: TargetModel, prompt: Tokens, answer: Tokens, nodes: int = NODES) -> Tensor:
    """Return the same logits of forwards over `nodes` nodes each, chains that are verified and kept.

    The last chain is filled up, so that all forwards have one size.
    """
    start = torch.tensor([prompt[:-1]], dtype=torch.int64, device=target.device)
    rest = [prompt[-1], *answer[:-1]]
    session = TargetSession(target, 1, len(prompt) + len(rest) + nodes)
    session.prefill(start, [start.shape[1]])
    logits = []
    for place in range(0, len(rest), nodes):
        part = rest[place : place + nodes]
        found, _ = session.verify(chain(part, target, nodes))
        session.keep(torch.arange(len(part), device=target.device)[None], [len(part)])
        logits.append(found[0, : len(part)])
    return torch.cat(logits)


READINGS: dict[str, Callable[[TargetModel, Tokens, Tokens], Tensor]] = {
    AT_ONCE: read_at_once,
    AS_TREES: read_as_trees,
}


def chain(tokens: Tokens, target: TargetModel, nodes: int) -> DraftTree:
    """Return the tree in which every token is the only child of the one before, filled up to `nodes`."""
    places = torch.arange(len(tokens), device=target.device)[None]
    root = root_only(torch.tensor(tokens[:1], device=target.device), target.vocab_size)
    return DraftTree(
        tokens=torch.tensor([list(tokens)], device=target.device),
        parents=places - 1,
        depths=places,
        log_q=root.log_q,
        owners=root.owners,
        depth=nodes - 1,
        most=nodes,
    ).filled_up()


def distances(found: Tensor, reference: Tensor) -> tuple[list[float], list[bool]]:
    """Return the total variation of two next-token distributions at temperature 1, and whether both have the
    same likeliest token, by position of their logits [n, V]."""
    same = found.argmax(-1) == reference.argmax(-1)
    return tv(reference, found).tolist(), same.tolist()
