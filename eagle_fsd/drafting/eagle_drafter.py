"""Drafting with an EAGLE-1/2 head (EAGLE, arXiv 2401.15077, section 4.1): the pairs it reads, and where.

Pair j is (feature f_j, token x_{j+1}). It is stored in slot j, at position j. For a text whose last token,
the root, is x_L, pairs 0..L-1 are committed. The root's pair is the last of them, so a tree node of depth
i >= 1 is read at position L - 1 + i. A predictor's state is the feature that the head predicts.
Shapes: B rows, d hidden size, K top_k, V vocabulary, W drafted tokens: all V, or those of the head's draft
vocabulary, and behind them what the texts have beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.tree import within_training
from eagle_fsd.drafting.draft_vocabulary import DraftVocabulary, OwnTokens, TargetVocabulary
from eagle_fsd.drafting.drafter import Embedder, Needs, Seen, Verifier
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.drafting.text_tokens import TextTokens
from eagle_fsd.drafting.tree_growth import NO_LIMIT, BeamDrafter, level_positions, read_view, slots_per_row
from eagle_fsd.files.fingerprints import digest_weights
from eagle_fsd.runtime.grouped_attention import grouped_attention
from eagle_fsd.runtime.kv_cache import KVCache, commit_in_chunks
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.block_cache import BlockCache
from eagle_fsd.runtime.openvino.network import Network
from eagle_fsd.runtime.openvino.traced_attention import TracedAttention
from eagle_fsd.runtime.step_recorder import EAGER, Stepper

Head = TypeVar("Head", bound=nn.Module)


class Vocabulary(Protocol):
    """Turns tokens into embeddings [..., d] and features into logits [..., W].

    It is a TargetModel if the head drafts all tokens, else the DraftVocabulary of its tokens.
    """

    def embed(self, tokens: Tensor) -> Tensor: ...

    def logits(self, features: Tensor) -> Tensor: ...


class HeadVerifier(Verifier, TargetVocabulary, Protocol):
    """The part of a TargetModel that drafting for it with a head uses."""

    hidden_size: int
    runtime: OpenVINO | None


@dataclass(frozen=True)
class EagleSpec:
    """A way to draft with one head.

    vocabulary: turns the head's features into logits. graph: computes the head instead of torch.
    """

    head: DraftHead
    vocabulary: Vocabulary
    device: torch.device
    stepper: Stepper = EAGER
    graph: Network | None = None
    name: str = "eagle"
    sparse: ClassVar[bool] = False
    rests: ClassVar[bool] = False
    longest: ClassVar[None] = None

    @classmethod
    def for_target(cls, head: DraftHead, target: HeadVerifier) -> EagleSpec:
        """Return the spec that drafts for this target with a head on the same device."""
        vocabulary: Vocabulary = target
        if head.draft_tokens is not None:
            vocabulary = DraftVocabulary(target, head.draft_tokens, head.fc.weight.dtype, target.runtime)
        graph = None if target.runtime is None else head_graph(head, target.runtime)
        return cls(head, vocabulary, target.device, target.stepper, graph)

    def with_head(self, head: DraftHead, target: HeadVerifier) -> EagleSpec:
        """Return the spec that drafts for the same target with other weights of the same head.

        Nothing of it is kept on disk.
        """
        graph = None if target.runtime is None else head_graph(head, target.runtime, kept=False)
        return replace(self, head=head, graph=graph)

    @property
    def network(self) -> DraftHead:
        return self.head

    @property
    def tokens(self) -> int:
        return self.head.config.drafted_tokens

    @property
    def identity(self) -> str:
        """A digest of the head's weights and draft vocabulary, and the number of texts' own tokens."""
        return head_identity(self.head, self.most_own)

    def make(self, batch: int, tokens: int, tree: TreeConfig) -> BeamDrafter:
        slots = slots_per_row(tokens, tree)
        if self.graph is None:
            cache = KVCache(batch, slots, self.device, self.stepper.view)
        else:
            cache = self.graph.new_cache(batch, slots)
        own = None
        if self.most_own and isinstance(self.vocabulary, DraftVocabulary):
            sizes = (self.head.config.vocab_size, batch, self.most_own)
            own = TextTokens(self.vocabulary, *sizes, fixed=self.stepper.records)
        predictor = EaglePredictor(self.head, self.vocabulary, cache, self.stepper, self.graph, own)
        return BeamDrafter(predictor, self.stepper)

    @property
    def most_own(self) -> int:
        """How many tokens of its own each text has drafted beside the list."""
        listed = isinstance(self.vocabulary, DraftVocabulary) and not self.vocabulary.split
        return (self.head.config.draft_text_tokens or 0) if listed else 0


def head_identity(head: DraftHead, own: int) -> str:
    """Return what a head is known by where it drafts up to `own` tokens of each text beside its list."""
    weights = digest_weights([*head.parameters(), *head.buffers()])
    return f"{weights}-text{own}" if own else weights


class EaglePredictor:
    """An EAGLE-1/2 head as a predictor. Its states are features [..., d], the target's or its own."""

    needs = Needs(features=True)
    longest = NO_LIMIT
    behind = 1  # no pair ends with a text's first token

    def __init__(
        self,
        head: DraftHead,
        vocabulary: Vocabulary,
        cache: KVCache,
        stepper: Stepper = EAGER,
        graph: Network | None = None,
        own: TextTokens | None = None,
    ) -> None:
        self.head, self.vocabulary, self.cache, self.graph = head, vocabulary, cache, graph
        self.drafted, self.own = head.draft_tokens, own
        self.width = head.config.hidden_size
        self._read = stepper.wrap(self._read_pairs, cache)

    def commit(self, seen: Seen, first: bool) -> Tensor:
        """Commit pairs with the target's features and return the features [B, d] predicted at the roots."""
        if self.own is not None:
            self.own.add(seen.on_host)
        return self.commit_pairs(*new_pairs(seen, self.cache, first), first, seen.media)

    def commit_pairs(
        self,
        features: Tensor,
        tokens: Tensor,
        counts: Sequence[int],
        first: bool = False,
        media: Embedder | None = None,
    ) -> Tensor:
        """Commit the first counts[row] pairs of features [B, P, d] and the tokens [B, P] that follow them.

        Rows are right-padded. Pairs past counts[row] are read, but masks hide them and later pairs overwrite
        them. media: embeds the tokens of prompts that have ids of images or sound among them.
        Returns the features [B, d] predicted at the last committed pair of each row.
        """
        # Prompts have any length, so a recording for one would hardly ever be replayed.
        read = partial(self._read_pairs, media=media) if first else self._read
        return commit_in_chunks(self.cache, read, (features, tokens), counts, first)

    def _read_pairs(
        self, features: Tensor, tokens: Tensor, start: int, media: Embedder | None = None
    ) -> Tensor:
        """Return the features [B, q, d] predicted at pairs [B, q], `start` slots past the committed ones."""
        # Pair j is in slot j, at position j.
        slots, visible, slot_positions = read_view(self.cache, tokens.shape[1], start)
        visible = within_training(visible, slots, slot_positions, self.head.config.longest_trained)
        embeddings = embed_prompts(tokens, self.vocabulary.embed, media)
        return self._forward(features, embeddings, slots, visible)

    def log_q(self, states: Tensor, own: OwnTokens | None = None) -> Tensor:
        """Return log-probabilities [..., W] at temperature 1 of predicted features [..., d]."""
        if own is not None:
            assert isinstance(self.vocabulary, DraftVocabulary)
            return F.log_softmax(self.vocabulary.logits(states, own), dim=-1)
        logits = self.vocabulary.logits(states)
        drafted = self.head.config.drafted_tokens
        assert logits.shape[-1] == drafted, "the vocabulary is not the head's: see DraftVocabulary"
        return F.log_softmax(logits, dim=-1)

    def step(self, tokens: Tensor, parents: Tensor, level: int, visible: Tensor) -> Tensor:
        """Read a level of pairs: drafted tokens [B, K] with the features predicted at their parents."""
        # The root's pair is committed at position L - 1, so its children, level 1, are at position L.
        positions = (self.cache.lengths[:, None] + level - 1).expand_as(tokens)
        if self.cache.view > (longest := self.head.config.longest_trained):  # else all of it is seen
            _, slot_positions = level_positions(self.cache, tokens, level)
            visible = within_training(visible, positions, slot_positions, longest)
        return self._forward(parents, self.vocabulary.embed(tokens), positions, visible)

    def _forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Run the head on pairs [B, n] under the mask visible [B, n, S]; keys go to the placed slots.

        features, embeddings: [B, n, d].
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return grouped_attention(q, *self.cache.update(k, v, layer_idx=0), visible[:, None])

        if self.graph is not None:
            assert isinstance(self.cache, BlockCache)
            inputs = (features.float(), embeddings.float(), positions)
            return self.graph(inputs, [visible], self.cache)
        dtype = self.head.fc.weight.dtype
        return self.head(features.to(dtype), embeddings.to(dtype), positions, attend)


def head_graph(head: DraftHead, runtime: OpenVINO, kept: bool = True) -> Network:
    """Compile a head. The graph takes features and embeddings [B, n, d] and positions [B, n].

    kept: on disk, for the next process. Raises ValueError unless the head is in float32.
    """
    require_float32(head.fc.weight.dtype, runtime)

    def work(inputs: Sequence[Tensor], attention: TracedAttention) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.attend(0, q, k, v, attention.masks[0], head.config.head_dim**-0.5)

        return head(*inputs, attend)

    rows = torch.zeros(1, 3, head.config.hidden_size, dtype=torch.float32, device="cpu")
    members = [(head.config.num_key_value_heads, head.config.head_dim)] * 2
    inputs = (rows, rows, torch.arange(3, device="cpu")[None])
    layout = runtime.layout(inputs, 1, members)
    return runtime.network("head", head, work, layout, asdict(head.config), kept)


def require_float32(dtype: torch.dtype, runtime: OpenVINO) -> None:
    """Raise ValueError unless a head is in the dtype that graphs take."""
    if dtype != torch.float32:
        raise ValueError(
            f"the head is in {str(dtype).removeprefix('torch.')} and the target's runtime is {runtime.name}: "
            "its graphs take a head in float32; leave head_dtype out, or use runtime torch (--runtime torch)"
        )


def embed_prompts(tokens: Tensor, embed: Callable[[Tensor], Tensor], media: Embedder | None) -> Tensor:
    """Return embeddings [B, n, d] of prompts' ids [B, n]. media: embeds those of images, if there are any."""
    return embed(tokens) if media is None else media.embed(tokens, embed)


def new_pairs(seen: Seen, cache: KVCache, first: bool) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Return the pairs of text that is new to a cache: features, the ids that follow them, and counts.

    Every token is in a pair with the feature before it, but for a text's first one, which has none. A text of
    one token gets a pair of a zero feature and that token all the same. first: see Predictor.commit.
    """
    features, counts = seen.features, seen.counts
    tokens = seen.tokens if seen.ids is None else seen.ids
    assert features is not None
    goes_on = not first or any(cache.row_lengths)
    if goes_on or tokens.shape[1] == 1:
        return features, tokens, counts
    alone = on_device(counts, tokens.device)[:, None] == 1  # [B, 1]
    return (
        features[:, 1:].masked_fill(alone[:, :, None], 0.0),
        torch.where(alone, tokens[:, :1], tokens[:, 1:]),
        [max(count - 1, 1) for count in counts],
    )


def require_fit(head: DraftHead, target: HeadVerifier) -> None:
    """Raise ValueError unless the head has the target's sizes."""
    require_equal("hidden_size", head.config.hidden_size, target.hidden_size)
    require_equal("vocab_size", head.config.vocab_size, target.vocab_size)


def require_equal(name: str, mine: int, its: int) -> None:
    """Raise ValueError unless a size of a head is the target's."""
    if mine != its:
        raise ValueError(
            f"the head's {name} is {mine} and the target's is {its}: a head drafts only for the "
            "target it was trained on; choose the head of this target"
        )


def place_head(head: Head, device: torch.device, dtype: torch.dtype) -> Head:
    """Return the head on this device and in this dtype: itself, or a copy that leaves it to other engines."""
    weight = next(head.parameters())
    return head if (weight.device, weight.dtype) == (device, dtype) else copy.deepcopy(head).to(device, dtype)
