"""Prompts are read by target and drafter, whole or in parts.

After every part, target and drafter are where they are between steps: the last token shown to the drafter is
a root, which the target has not read yet. So the next part is read as the tokens of a step would be.
Shapes: B rows, L tokens of the longest prompt, d the width of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle_fsd.core.padding import on_device
from eagle_fsd.drafting.drafter import Drafter, Needs, NextTokens, Resumable, Seen
from eagle_fsd.target.session import TargetSession

# Tokens at the end of a prompt whose next-token lists are shown to a drafter that needs lists. More of them
# were measured to bring little, and each costs a row of logits over the vocabulary.
LISTED = 64
# Prompts that begin with so many tokens alike have these read once. With fewer, the forward that this takes
# more costs what it saves.
SHARED = 64


def prefill(tokens: Tensor, lengths: Sequence[int], target: TargetSession, drafter: Drafter) -> Tensor:
    """Run prompts [B, L] except the last token of each, and return those tokens, the first roots [B]."""
    counts = [length - 1 for length in lengths]
    features = read_prompts(tokens[:, :-1], counts, target)
    lists = list_next_tokens(target, features, counts, drafter.needs)
    drafter.begin(seen_by(drafter, target, tokens, lengths, features_before(features, drafter), lists))
    last = on_device(counts, tokens.device)[:, None]
    return tokens.gather(1, last)[:, 0]


def read_prompts(tokens: Tensor, counts: Sequence[int], target: TargetSession) -> Tensor:
    """Let an empty target read the first counts[row] of tokens [B, L]; return their features [B, L, d].

    What all rows begin with is read once, in a row of its own, and copied: the example questions of a task,
    a long system prompt, or one prompt that gets several answers.
    """
    shared = count_shared(tokens[:, : min(counts)])
    if shared < SHARED:
        return target.prefill(tokens, counts)
    alone = target.another(1, shared)
    features = alone.prefill(tokens[:1, :shared], [shared]).expand(len(tokens), -1, -1)
    saved = alone.save_row(0, shared)
    for row in range(len(tokens)):
        target.load_row(row, saved, shared)
    if shared == tokens.shape[1]:
        return features
    own = target.prefill(tokens[:, shared:], [count - shared for count in counts])
    return torch.cat((features, own), dim=1)


def count_shared(tokens: Tensor) -> int:
    """Return with how many tokens all rows [B, L] begin alike; 0 for a single row."""
    if len(tokens) == 1:
        return 0
    alike = (tokens[1:] == tokens[:1]).all(0)
    return int(alike.long().cumprod(0).sum())


class PromptReader:
    """Reads one prompt in parts.

    tokens: [1, L] of the whole prompt. start: how many of them target and drafter hold already, the root
    included; 0: none. position: how many the target has read.
    """

    def __init__(self, tokens: Tensor, target: TargetSession, drafter: Drafter, start: int = 0) -> None:
        self.tokens, self.target, self.drafter = tokens, target, drafter
        self.position = max(start - 1, 0)
        self._begun = start > 0
        self._in_parts = isinstance(drafter, Resumable)
        self._all_at_once = drafter.needs.features and not self._in_parts  # it is shown all features together
        self._features: list[Tensor] = []  # [1, n, d] of the tokens read, as far as they are still needed

    @property
    def shown(self) -> int:
        """How many tokens the drafter has been shown."""
        return self.position + 1 if self._begun else 0

    @property
    def left(self) -> int:
        """How many tokens the target has yet to read."""
        return self.tokens.shape[1] - 1 - self.position

    def read(self, most: int) -> int:
        """Read the next part, of at most `most` tokens and at least one, and return how many it has."""
        count = min(self.left, max(most, 1))
        start, end = self.position, self.position + count
        features = self.target.prefill(self.tokens[:, start:end], [count])
        self.position = end
        self._features.append(features)
        if self._in_parts:
            shown, before = self.tokens[:, : end + 1], features_before(features, self.drafter)
            if self._begun:
                shown, before = self.tokens[:, start + 1 : end + 1], features
            self._show(shown, before)
        elif not self.left:
            whole = torch.cat(self._features, dim=1)
            self._show(self.tokens, features_before(whole, self.drafter))
        if self.drafter.needs.next_tokens and not self._all_at_once:
            self._features = [torch.cat(self._features, dim=1)[:, -LISTED:]]
        elif not self._all_at_once:
            self._features.clear()
        return count

    def _show(self, tokens: Tensor, before: Tensor | None) -> None:
        """Show the drafter the tokens of a part, with the features before them."""
        lists = None
        if not self.left:
            known = torch.cat(self._features, dim=1)
            lists = list_next_tokens(self.target, known, [known.shape[1]], self.drafter.needs)
        seen = seen_by(self.drafter, self.target, tokens, [tokens.shape[1]], before, lists)
        if self._begun and isinstance(self.drafter, Resumable):
            self.drafter.read_on(seen)
        else:
            self.drafter.begin(seen)
        self._begun = True


def seen_by(
    drafter: Drafter,
    target: TargetSession,
    ids: Tensor,
    counts: Sequence[int],
    before: Tensor | None,
    lists: NextTokens | None,
) -> Seen:
    """Return parts of prompts [B, P] as a drafter is shown them. before: the features before the tokens."""
    words = target.media.words(ids)
    features = before if drafter.needs.features else None
    seen = Seen(words, counts, features, lists)
    return seen if words is ids else replace(seen, ids=ids, media=target.media)


def features_before(features: Tensor, drafter: Drafter) -> Tensor | None:
    """Return the features before a prompt's tokens if the drafter needs them: there is none at first."""
    if not drafter.needs.features:
        return None
    return torch.cat((features.new_zeros(len(features), 1, features.shape[-1]), features), dim=1)


def list_next_tokens(
    target: TargetSession, features: Tensor, counts: Sequence[int], needs: Needs
) -> NextTokens | None:
    """Return the target's likeliest next tokens after each of the last LISTED tokens of every row.

    features: [B, L, D], of the rows' tokens. counts: the tokens of each row. None: none are needed, or taps
    stand in the place of the states that the target's logits are read from.
    """
    width = min(LISTED, features.shape[1])
    if not needs.next_tokens or needs.taps or not width:
        return None
    ends = on_device(counts, features.device)[:, None]
    places = (ends - width + torch.arange(width, device=features.device)).clamp(min=0)  # [B, X]
    few = features.gather(1, places[:, :, None].expand(-1, -1, features.shape[-1]))
    return NextTokens.from_logits(target.logits(few), needs.next_tokens)
