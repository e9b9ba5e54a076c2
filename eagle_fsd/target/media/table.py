"""Images and sound in prompts: what a target's towers made of them, and where each place of theirs stands.

A processor of transformers writes one placeholder token for each embedding that a tower makes. Here each such
place of a prompt has a token id of its own, beyond the vocabulary. So prompts stay lists of ids, and two are
the same only if their images are. Shapes: n places, d the width of an embedding, A axes of positions, B rows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from eagle_fsd.runtime.kv_cache import KVCache

LIMIT = 2**30  # bytes of embeddings that are kept
AT_PLACES, BY_LAYER = "visual_pos_masks", "deepstack_visual_embeds"  # arguments of Qwen3-VL's text part


@dataclass(frozen=True)
class Media:
    """The places of all images and sounds of a prompt, in order.

    first: the token id of the first place. words: [n], the placeholder in each. embeddings: [n, d]. offsets:
    [n, A], how far a place's positions are beyond that of a token of text there. turns: [n], how much farther
    all later positions are beyond their slots than those before the place. by_layer: [n, d] each, what is
    added to the states behind the first layers.
    """

    first: int
    words: Tensor
    embeddings: Tensor
    offsets: Tensor
    turns: Tensor
    by_layer: tuple[Tensor, ...] = ()

    @property
    def end(self) -> int:
        return self.first + len(self.words)

    @property
    def nbytes(self) -> int:
        return self.embeddings.nbytes + sum(part.nbytes for part in self.by_layer)


class MediaPrompt(list[int]):
    """The token ids of a prompt. Its media stay as long as it does. Copies are plain lists."""

    def __init__(self, ids: Iterable[int], media: Sequence[Media]) -> None:
        super().__init__(ids)
        self.media = media


Places = Sequence[tuple[Media, Tensor]]  # media among tokens, each with where its places are, bool


class MediaTable:
    """The media that a target has read, each under a key. Several threads may use it.

    vocab_size: the first id of a place; none is given twice. by_axes: whether positions behind an image are
    not those of slots, as in Qwen2-VL and others after it. limit: the bytes that embeddings may take; the
    least recently used go first, but stay as long as somebody holds them. admitted: of which kinds prompts
    with media were read right: with one image (False), with several (True). apart: whether the model reads
    each image by itself; None: that is not known yet.
    """

    def __init__(self, vocab_size: int, by_axes: bool = False, limit: int = LIMIT) -> None:
        self.vocab_size, self.by_axes, self.limit = vocab_size, by_axes, limit
        self.admitted: set[bool] = set()
        self.apart: bool | None = None
        self._next = vocab_size
        self._kept: OrderedDict[str, Media] = OrderedDict()
        self._found: WeakValueDictionary[str, Media] = WeakValueDictionary()  # those that others hold as well
        self._words: Tensor = torch.empty(0, dtype=torch.int64, device="cpu")  # all placeholders so far
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name not in ("_lock", "_found")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _found=WeakValueDictionary(state["_kept"]))

    @classmethod
    def of(cls, model: object, vocab_size: int) -> MediaTable:
        """Return an empty table for a model."""
        parts = (model, getattr(model, "model", None))
        return cls(vocab_size, any(hasattr(part, "get_rope_index") for part in parts))

    @property
    def end(self) -> int:
        """The id behind the last that was given."""
        return self._next

    def placeholders(self, tokens: Tensor) -> Tensor:
        """Return which tokens on the host are placeholders of any media that were read."""
        return torch.isin(tokens, self._words)

    def find(self, key: str) -> Media | None:
        """Return the media under a key; None if they are not there."""
        with self._lock:
            found = self._found.get(key)
            return None if found is None else self._keep(key, found)

    def add(self, key: str, words: Tensor, *parts: Any) -> Media:
        """Return the media under a key, kept from now on, with ids of their own.

        Those of another thread stay, for prompts may hold their ids. words, parts: the fields of Media, in
        order.
        """
        with self._lock:
            if (found := self._found.get(key)) is not None:
                return self._keep(key, found)
            self._words = torch.cat((self._words, words)).unique()
            made = self._found[key] = Media(self._next, words, *parts)
            self._next = made.end
            return self._keep(key, made)

    def _keep(self, key: str, media: Media) -> Media:
        """Return media, which are now those used last. The lock is held."""
        self._kept[key] = media
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > self.limit:
            self._kept.popitem(last=False)
        return media

    def of_prompt(self, prompt: Sequence[int]) -> list[Media]:
        """Return the media of a prompt, for whoever holds them until it is read."""
        if self._next == self.vocab_size:
            return []
        return [one for one, _ in self.among(torch.tensor(prompt, device="cpu"))]

    def among(self, tokens: Tensor) -> Places:
        """Return the media that have places among tokens [...].

        Raises ValueError for a place whose medium is not kept.
        """
        if self._next == self.vocab_size or not bool((beyond := tokens >= self.vocab_size).any()):
            return []
        with self._lock:
            known = list(self._found.items())
        found = []
        for key, one in known:
            where = (tokens >= one.first) & (tokens < one.end)
            if bool(where.any()):
                found.append((one, where))
                beyond = beyond & ~where
                self.find(key)  # it is in use
        if bool(beyond.any()):
            raise ValueError(
                f"input_ids holds {int(tokens[beyond][0])}, which stands for no image or sound that is kept: "
                "it must be read again, or among fewer; call read_chat for it"
            )
        return found

    def words(self, tokens: Tensor) -> Tensor:
        """Return tokens [...] as a processor writes them: with a placeholder in each place of a medium."""
        return with_placeholders(tokens, self.among(tokens))

    def words_of(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return a prompt's tokens as a processor writes them; see `words`."""
        if self._next == self.vocab_size:
            return prompt
        words: list[int] = self.words(torch.tensor(prompt, device="cpu")).tolist()
        return words

    def require_whole(self, prompt: Sequence[int], name: str) -> None:
        """Raise ValueError unless a prompt's images and sounds are whole and kept, and text ends it.

        name: what an error calls the prompt. The first forward over a tree reads a prompt's last token.
        """
        if self._next == self.vocab_size or max(prompt, default=0) < self.vocab_size:
            return
        ids = torch.tensor(prompt, device="cpu")
        for one, where in self.among(ids):
            places, count = ids[where], len(one.words)
            if not torch.equal(places, torch.arange(one.first, one.end).repeat(-(-len(places) // count))):
                raise ValueError(
                    f"{name} has {len(places)} places of an image or a sound that takes {count}: all must be "
                    "there, in order, and so must images that were read together; call read_chat for it"
                )
        if prompt[-1] >= self.vocab_size:
            raise ValueError(
                f"{name} ends with an image or a sound: its last token must be one of text; let words "
                "follow, such as what a chat template writes before an answer"
            )

    def arguments(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        relation: Tensor | None,
        embed: Callable[[Tensor], Tensor],
    ) -> dict[str, Any]:
        """Return what a decoder's forward is given in the place of its usual arguments; none as a rule.

        tokens, positions, relation: see TargetModel.features. embed: the model's own embeddings of tokens.
        """
        found = self.among(tokens) if relation is None else []
        inputs = self._embedded(tokens, found, embed) if found else {}
        if not self.by_axes:
            return inputs
        if found or (relation is None and any(cache.marks)):
            return {**inputs, "position_ids": self._positions(tokens, found, positions, cache)}
        return {"position_ids": positions + cache.shifts[:, None]}

    def embed(self, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings of tokens [...], media among them, as a head reads them.

        embed: embeds text; media have its width, or their placeholders stand for them.
        """
        return self._merged(tokens, self.among(tokens), embed)

    def _merged(self, tokens: Tensor, found: Places, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings of tokens [...], among which these media were found."""
        embedded = embed(with_placeholders(tokens, found))
        found = [pair for pair in found if pair[0].embeddings.shape[-1] == embedded.shape[-1]]
        embedded = embedded.clone() if found else embedded
        for one, where in found:
            places = (tokens[where] - one.first).to(one.embeddings.device)
            embedded[where.to(embedded.device)] = one.embeddings[places].to(embedded)
        return embedded

    def _embedded(self, tokens: Tensor, found: Places, embed: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the embeddings of tokens [B, q], media among them, and what is added behind first layers."""
        embedded = self._merged(tokens, found, embed)
        by_layer: list[Tensor] = []
        for one, where in found:
            at, places = where.to(embedded.device), (tokens[where] - one.first).to(one.embeddings.device)
            for number, part in enumerate(one.by_layer):
                by_layer += [torch.zeros_like(embedded)] if len(by_layer) == number else []
                by_layer[number][at] = part[places].to(embedded)
        inputs: dict[str, Any] = {"input_ids": None, "inputs_embeds": embedded}
        if by_layer:
            at = (tokens >= self.vocab_size).to(embedded.device)
            inputs |= {AT_PLACES: at, BY_LAYER: [part[at] for part in by_layer]}
        return inputs

    def _positions(self, tokens: Tensor, found: Places, slots: Tensor, cache: KVCache) -> Tensor:
        """Return the positions [B, q] or [A, B, q] of tokens of prompts [B, q] that go to these slots.

        The cache notes how far later tokens are beyond their slots.
        """
        turns, offsets = torch.zeros_like(tokens), None
        for one, where in found:
            places = (tokens[where] - one.first).to(one.turns.device)
            turns[where] = one.turns[places].to(tokens.device)
            if offsets is None:
                offsets = tokens.new_zeros(*tokens.shape, one.offsets.shape[1])
            offsets[where] = one.offsets[places].to(tokens.device)
        begun = [cache.shift_at(row, start) for row, start in enumerate(slots[:, 0].tolist())]
        before = turns.cumsum(1) - turns + torch.tensor(begun, device=turns.device)[:, None]
        for row, place in turns.nonzero().tolist():
            cache.note_shift(row, int(slots[row, place]) + 1, int(before[row, place] + turns[row, place]))
        positions = slots + before
        return positions if offsets is None else positions + offsets.permute(2, 0, 1)


def with_placeholders(tokens: Tensor, found: Places) -> Tensor:
    """Return tokens [...] with a placeholder in each place of the media that were found among them."""
    for one, where in found:
        words = one.words.to(tokens.device)
        tokens = torch.where(where, words[(tokens - one.first).clamp(0, len(words) - 1)], tokens)
    return tokens
