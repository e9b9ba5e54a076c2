"""Changes the target's logits at every node of a tree as if the text had gone on along the path to it.

So each node's logits are those that `generate` would choose from there, and lossless decoding stays lossless.
Rules see changed logits too: what they rule out is never followed. The draft knows nothing of it, so that
fewer of its tokens are accepted. Shapes: B rows, N nodes, V vocabulary, U different tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eagle_fsd.core.devices import fetch
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.processing import Bias, Processing
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.logits.constrained import ConstrainedText

Biases = dict[int, dict[tuple[int, ...], dict[int, float]]]


def process(logits: Tensor, tree: DraftTree, texts: Sequence[TextProcessor]) -> Tensor:
    """Return the changed logits [B, N, V] of trees whose roots are the texts' newest tokens.

    The tokens come to the host, which waits for them.
    """
    changed = logits.clone()
    known = (part.tolist() for part in fetch(tree.tokens, tree.parents))
    rows = zip(texts, changed, *known, strict=True)
    for text, of_row, tokens, parents in rows:
        text.apply(of_row, tokens, parents)
    return changed


class TextProcessor:
    """Knows one text, and changes the logits of the tokens that may come next.

    prompt: its token ids. eos_token_ids: tokens that end it. `text` grows: `add` is called with all tokens
    that it emits, in order.
    """

    def __init__(self, processing: Processing, prompt: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        self.processing = processing
        self.ends = list(eos_token_ids)
        self.text = list(prompt)
        self.prompt_length = len(self.text)
        self.biases = by_beginning(processing.logit_bias)
        ends = {(end,) for end in self.ends}
        bans = [(words, -torch.inf) for words in processing.bad_words_ids if words not in ends]
        self.bans = by_beginning(bans)
        self.constrained = None
        if processing.constraint is not None:
            self.constrained = ConstrainedText(processing.constraint, self.ends)
        self.ngrams: dict[tuple[int, ...], set[int]] = {}  # what has followed n - 1 tokens
        self.columns: dict[int, int] = {}  # the tokens of the text, each with its place among them
        self.counts: list[int] = []  # how often the answer has each of them
        self._note(0)

    @property
    def failure(self) -> str:
        """Why its constraint cannot be followed any further; "": it can."""
        return "" if self.constrained is None else self.constrained.failure

    def add(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the text has emitted."""
        before = len(self.text)
        self.text += tokens
        self._note(before)
        if self.constrained is not None:
            self.constrained.add(tokens)

    def _note(self, start: int) -> None:
        if size := self.processing.no_repeat_ngram_size:
            for end in range(max(start, size - 1), len(self.text)):
                before = tuple(self.text[end - size + 1 : end])
                self.ngrams.setdefault(before, set()).add(self.text[end])
        if self.processing.counts:
            for place in range(start, len(self.text)):
                column = self.columns.setdefault(self.text[place], len(self.columns))
                if column == len(self.counts):
                    self.counts.append(0)
                self.counts[column] += place >= self.prompt_length

    def apply(self, logits: Tensor, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Change the logits [N, V] of a tree in place. tokens, parents: of its N nodes, the root first."""
        paths: list[list[int]] = []  # the tokens below the root, which the text has already
        for node, parent in enumerate(parents):
            paths.append([*paths[parent], tokens[node]] if node and parent >= 0 else [])
        processing = self.processing
        only_ends: set[int] = set()
        if self.constrained is not None:
            refused, only_ends = self.constrained.refused(tokens, parents, logits.shape[-1])
        self._bias(logits, paths, self.biases)
        if processing.counts:
            self._penalise(logits, paths)
        if processing.no_repeat_ngram_size:
            self._ban_ngrams(logits, paths)
        self._bias(logits, paths, self.bans)
        short = processing.min_new_tokens - (len(self.text) - self.prompt_length)
        if self.ends and short > 0:
            early = [node for node, path in enumerate(paths) if len(path) < short and node not in only_ends]
            logits[on_device(early, logits.device)[:, None], on_device(self.ends, logits.device)] = -torch.inf
        if processing.suppress_tokens:
            logits[:, on_device(processing.suppress_tokens, logits.device)] = -torch.inf
        if processing.own:
            self._apply_own(logits, paths)
        if self.constrained is not None:
            logits.masked_fill_(refused.to(logits.device, non_blocking=True), -torch.inf)

    def _bias(self, logits: Tensor, paths: Sequence[Sequence[int]], biases: Biases) -> None:
        """Add biases to the last tokens of sequences that have begun; see `by_beginning`."""
        for length, of_length in biases.items():
            for node, path in enumerate(paths):
                found = of_length.get(tuple(self._last(path, length)))
                if found is None:
                    continue
                added = torch.tensor(list(found.values()), dtype=logits.dtype, device="cpu")
                # Without a beginning they are the same everywhere.
                at = node if length else slice(None), on_device(list(found), logits.device)
                logits[at] += added.to(logits.device, non_blocking=True)
                if not length:
                    break

    def _last(self, path: Sequence[int], count: int) -> list[int]:
        """Return the last tokens of the text gone on along a path; fewer if it is shorter."""
        of_text = count - len(path)
        return [*(self.text[-of_text:] if of_text > 0 else ()), *path[max(0, -of_text) :]]

    def _penalise(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        columns = dict(self.columns)
        for path in paths:
            for token in path:
                columns.setdefault(token, len(columns))
        places = [(node, columns[token]) for node, path in enumerate(paths) for token in path]
        added = torch.tensor(places, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
        size = (len(paths), len(columns))
        counts = torch.zeros(size, dtype=torch.float32, device="cpu")  # [N, U], in the answer
        counts[:, : len(self.counts)] = counts.new_tensor(self.counts)
        counts.index_put_(added, counts.new_ones(len(places)), accumulate=True)
        seen = torch.zeros(counts.shape, dtype=torch.bool, device="cpu")  # in the text
        seen[:, : len(self.counts)] = True
        seen[added] = True
        ids = on_device(list(columns), logits.device)
        found = logits[:, ids]
        if (penalty := self.processing.repetition_penalty) != 1:
            penalised = torch.where(found < 0, found * penalty, found / penalty)
            found = torch.where(seen.to(logits.device, non_blocking=True), penalised, found)
        times = counts.to(logits.device, non_blocking=True)
        found = found - self.processing.frequency_penalty * times
        logits[:, ids] = found - self.processing.presence_penalty * (times > 0)

    def _ban_ngrams(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        size = self.processing.no_repeat_ngram_size
        for node, path in enumerate(paths):
            before = self._last(path, size - 1)
            banned = set(self.ngrams.get(tuple(before), ()))
            recent = self._last(path, len(path) + size - 1)  # all n-grams that end on the path
            for start in range(len(recent) - size + 1):
                if recent[start : start + size - 1] == before:
                    banned.add(recent[start + size - 1])
            if banned:
                logits[node, on_device(list(banned), logits.device)] = -torch.inf

    def _apply_own(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Call the caller's processors, once for all nodes of a length."""
        for length in sorted({len(path) for path in paths}):
            nodes = [node for node, path in enumerate(paths) if len(path) == length]
            texts = on_device([[*self.text, *paths[node]] for node in nodes], logits.device)
            index = on_device(nodes, logits.device)
            scores = logits[index]
            for processor in self.processing.own:
                made = processor(texts, scores)
                if not isinstance(made, Tensor) or made.shape != scores.shape:
                    shape = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
                    raise ValueError(
                        f"logits_processor {type(processor).__name__} returned {shape}: it must return "
                        f"logits of the shape that it got, {list(scores.shape)}; fix it"
                    )
                scores = made
            logits[index] = scores.to(logits.dtype)


def by_beginning(biases: Iterable[Bias]) -> Biases:
    """Sort biases by how many tokens come before the last, then by these, then by the last."""
    found: Biases = {}
    for words, bias in biases:
        found.setdefault(len(words) - 1, {}).setdefault(words[:-1], {})[words[-1]] = bias
    return found
