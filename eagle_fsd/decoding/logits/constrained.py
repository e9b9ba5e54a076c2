"""A text under a constraint: which tokens may come next at every node of a tree, walked along its paths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_fsd.core.processing import Constraint


class ConstrainedText:
    """Follows one text. ends: the tokens that end it, which may come only where the constraint lets it end.

    Raises ValueError without end tokens: a text whose form is complete could not stop.
    """

    def __init__(self, constraint: Constraint, ends: Sequence[int]) -> None:
        require_ends(constraint.name, ends)
        self.constraint, self.ends = constraint, list(ends)
        self.walk = constraint.begin()
        self.text: list[int] = []
        self._failed = ""  # why the last draft that could not be followed could not

    @property
    def failure(self) -> str:
        """Why the text, or a draft that it may have taken, cannot be followed any further; "": it can."""
        return self.walk.failure or self._failed

    def add(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the text has emitted. An end token is its last."""
        if tokens:
            self._failed = ""
        for token in tokens:
            if token not in self.ends:
                self.walk.advance(token)
                self.text.append(token)

    def refused(
        self, tokens: Sequence[int], parents: Sequence[int], vocab_size: int
    ) -> tuple[Tensor, set[int]]:
        """Return which tokens may not come after each node [N, V] bool, and the nodes where only an end may.

        tokens, parents: of a tree whose root is the text's newest token. A node whose own token is refused,
        or ends the text, is never on an emitted path: nothing is refused after it or below it.
        """
        children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents):
            if node and parent >= 0:
                children[parent].append(node)
        refused = torch.zeros(len(parents), vocab_size, dtype=torch.bool, device="cpu")
        only_ends: set[int] = set()
        steps = [(0, False)]  # nodes to visit, or to leave again
        while steps:
            node, leaving = steps.pop()
            if leaving:
                self.walk.back()
                continue
            if node:
                self.walk.advance(tokens[node])
            walk = self.walk
            allowed = walk.allowed()[:vocab_size]
            if node and walk.failure:  # it would stay, though the text may never come here
                refused[node], self._failed = True, walk.failure
                self._begin_again([tokens[one] for one, leaving in steps if leaving])
                continue
            if node:
                steps.append((node, True))
            allowed[self.ends] = False
            if walk.complete:
                if not allowed.any():
                    only_ends.add(node)
                allowed[self.ends] = True
            refused[node] = ~allowed
            wanted = [child for child in children[node] if tokens[child] not in self.ends]
            steps += [(child, False) for child in wanted if allowed[tokens[child]]]
        return refused, only_ends

    def _begin_again(self, path: Sequence[int]) -> None:
        """Follow the text from its beginning, then these tokens: a walk that has failed cannot go back."""
        self.walk = self.constraint.begin()
        for token in (*self.text, *path):
            self.walk.advance(token)


def require_ends(name: str, ends: Sequence[int]) -> None:
    """Raise ValueError unless there is a token that ends a text whose form is complete."""
    if not ends:
        raise ValueError(
            f"{name} needs an end token: no token ends these texts; name one (eos_token_id, stop_token_ids)"
        )
