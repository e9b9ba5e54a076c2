"""Test doubles: targets of known distribution, drafters right always, never or sometimes, random trees.

`Chain` is a language whose next token depends on the last two tokens, so that its distribution can be written
down and a node verified under the wrong parent is noticed. `ChainTarget` replaces a TargetSession on it and
`ChainDrafter` an EAGLE drafter; both take tens of thousands of rows at once. `ForesightDrafter` runs a real
model to find the next token, then drafts it or its opposite. Nothing here is random without a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.randomness.noise import DraftNoise
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.drafting.drafter import Drafter, Seen
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.runtime.ranks import ALONE
from eagle_fsd.target.media.table import MediaTable
from support.drafters import StandIn


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- a language whose distribution is known ---


@dataclass(frozen=True)
class Chain:
    """Next-token logits [V, V, V] of (token before last, last token)."""

    table: Tensor

    @classmethod
    def random(cls, vocab_size: int, seed: int, scale: float = 2.0) -> Chain:
        """Return independent normal logits; `scale` sets how peaked the distributions are."""
        return cls(torch.randn(vocab_size, vocab_size, vocab_size, generator=generator(seed)) * scale)

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    def blend(self, other: Chain, share: float) -> Chain:
        """Return a language between the two, with `share` of the other one's logits."""
        return Chain((1 - share) * self.table + share * other.table)

    def opposite(self) -> Chain:
        """Return the language whose likeliest tokens are this one's least likely ones."""
        return Chain(-self.table)

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        """Return the greedy continuation of a text of at least one token; 0 stands before its first token."""
        text = [0, *text]
        for _ in range(count):
            text.append(int(self.table[text[-2], text[-1]].argmax()))
        return text[-count:] if count else []


class ChainTarget:
    """A TargetSession on a Chain. The feature of a token is (the token before it, itself), as two floats.

    texts: the committed tokens of each row, if `record` is set (slow), so that a test sees them.
    """

    ranks = ALONE
    device = torch.device("cpu")

    def __init__(self, chain: Chain, batch: int, record: bool = False) -> None:
        self.chain = chain
        self.last = torch.zeros(batch, dtype=torch.int64)  # the last committed token; 0 before the first
        self.texts: list[list[int]] | None = [[] for _ in range(batch)] if record else None
        self.tree: DraftTree | None = None
        self.verified_nodes: list[int] = []
        self.media = MediaTable(self.vocab_size)

    @property
    def vocab_size(self) -> int:
        return self.chain.table.shape[-1]

    def prefill(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        if self.texts is not None:
            for text, row, length in zip(self.texts, tokens.tolist(), lengths, strict=True):
                text.extend(row[:length])
        padded = torch.cat((torch.zeros_like(self.last)[:, None], tokens), dim=1)
        self.last = padded.gather(1, torch.tensor(lengths)[:, None])[:, 0]
        return torch.stack((padded[:, :-1], padded[:, 1:]), dim=-1).float()

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        self.tree = tree
        self.verified_nodes.append(tree.tokens.shape[1])
        before = tree.tokens.gather(1, tree.parents.clamp(min=0))
        before = torch.where(tree.parents < 0, self.last[:, None], before)
        return self.chain.table[before, tree.tokens], torch.stack((before, tree.tokens), dim=-1).float()

    def keep(self, path: Tensor, counts: Sequence[int]) -> None:
        assert self.tree is not None
        tokens = self.tree.tokens.gather(1, path.clamp(min=0))
        # A row that is done commits nothing, and its logits are not read any more.
        self.last = tokens.gather(1, torch.tensor(counts).clamp(min=1)[:, None] - 1)[:, 0]
        if self.texts is not None:
            for text, row, count in zip(self.texts, tokens.tolist(), counts, strict=True):
                text.extend(row[:count])

    def select(self, rows: Sequence[int]) -> None:
        self.last = self.last[list(rows)]
        if self.texts is not None:
            self.texts = [self.texts[row] for row in rows]


class ChainDrafter(StandIn):
    """Drafts from a Chain of its own, q, on a tree of fixed shape: the children of a node are q's likeliest
    tokens there, so siblings are distinct and deterministic.

    With q the target's own chain it is an oracle (divergence exactly 0), with its `opposite()` an
    anti-oracle, with another random chain it is right sometimes.
    """

    def __init__(self, chain: Chain, batch: int) -> None:
        self.chain = chain
        self.before = torch.zeros(batch, dtype=torch.int64)  # the token before each root
        self.followers = torch.zeros(batch, dtype=torch.int64)  # the roots, as extend() gave them

    def begin(self, seen: Seen) -> None:
        last = torch.tensor(seen.counts) - 1
        rows = torch.arange(len(last))
        self.before = seen.features[rows, last, 1].long()
        self.followers = seen.tokens[rows, last]

    def extend(self, seen: Seen) -> None:
        self.begin(seen)

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        assert torch.equal(self.followers, roots), "a drafter is told each root as the last follower"
        parents, ranks = fixed_shape(config)
        batch, nodes, vocab = len(roots), len(parents), self.chain.vocab_size
        depths = depths_of(parents)
        tokens = roots[:, None].expand(-1, nodes).clone()
        log_q = torch.zeros(batch, nodes, vocab)
        for node in range(nodes):
            if node:
                order = log_q[:, parents[node]].sort(dim=-1, descending=True, stable=True).indices
                tokens[:, node] = order[:, ranks[node]]
            before = tokens[:, parents[node]] if node else self.before
            log_q[:, node] = self.chain.table[before, tokens[:, node]].log_softmax(-1)
        owners = sorted(set(parents) - {-1})
        return DraftTree(
            tokens=tokens,
            parents=torch.tensor(parents).expand(batch, -1),
            depths=torch.tensor(depths).expand(batch, -1),
            log_q=log_q[:, owners],
            owners=torch.tensor(owners, dtype=torch.int64).expand(batch, -1),
            depth=config.depth,
        )

    def select(self, rows: Sequence[int]) -> None:
        self.before = self.before[list(rows)]
        self.followers = self.followers[list(rows)]


def fixed_shape(config: TreeConfig) -> tuple[list[int], list[int]]:
    """Return parents and sibling ranks of total_tokens nodes, in breadth-first order.

    The nodes are a chain as deep as depth allows, then siblings, shallow ones first.
    """
    chain = min(config.depth, config.total_tokens - 1)
    paths: list[tuple[int, ...]] = [(0,) * depth for depth in range(chain + 1)]  # ranks from the root down
    for path in paths:  # it grows while it is read: breadth first below the chain
        for rank in range(config.top_k):
            child = (*path, rank)
            if len(paths) < config.total_tokens and len(child) <= config.depth and child not in paths:
                paths.append(child)
    paths.sort(key=lambda path: (len(path), path))
    place = {path: node for node, path in enumerate(paths)}
    return [place[path[:-1]] if path else -1 for path in paths], [path[-1] if path else 0 for path in paths]


def depths_of(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


# --- drafters beside a real model ---


class ForesightDrafter(StandIn):
    """Drafts the tokens that `model` itself would choose greedily, or wrong ones, whatever the head.

    The tree is one chain of `depth` tokens with wrong siblings at the root.

    prompts: the rows' prompts. right: whether the drafted token at (row, position in the text) shall be the
    true one. q is the model's own distribution, so that a divergence is 0 up to the kernel's rounding.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        prompts: Sequence[Sequence[int]],
        right: Callable[[int, int], bool] = lambda row, position: True,
    ) -> None:
        self.model = model
        self.texts = [list(prompt) for prompt in prompts]
        self.names = list(range(len(prompts)))  # rows by their place in the first batch
        self.right = right

    def begin(self, seen: Seen) -> None:
        pass

    def extend(self, seen: Seen) -> None:
        for text, row, count in zip(self.texts, seen.tokens.tolist(), seen.counts, strict=True):
            text.extend(row[:count])

    @torch.no_grad()
    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        assert [text[-1] for text in self.texts] == roots.tolist(), "the root is the last emitted token"
        chain = min(config.depth, config.total_tokens - 1)
        siblings = min(config.total_tokens - 1 - chain, config.top_k - 1)
        tokens, log_q = [], []
        for name, text in zip(self.names, self.texts, strict=True):
            path, distributions, wrong = list(text), [], []
            for level in range(chain):
                logits = self.model(torch.tensor([path]), use_cache=False).logits[0, -1].float()
                ranked = logits.sort(descending=True, stable=True).indices.tolist()
                path.append(ranked[0] if self.right(name, len(path)) else ranked[-1])
                distributions.append(logits.log_softmax(-1))
                if level == 0:
                    wrong = [token for token in ranked[:0:-1] if token != path[-1]][:siblings]
            tokens.append([text[-1], path[len(text)], *wrong, *path[len(text) + 1 :]])
            log_q.append(torch.stack(distributions))
        # Root, its true child, that one's siblings, then the rest of the chain.
        below = [1, *range(2 + siblings, chain + siblings)][: chain - 1]
        parents, owners = [-1, 0, *[0] * siblings, *below], [0, *below]
        batch = len(roots)
        return DraftTree(
            tokens=torch.tensor(tokens),
            parents=torch.tensor(parents).expand(batch, -1),
            depths=torch.tensor(depths_of(parents)).expand(batch, -1),
            log_q=torch.stack(log_q),
            owners=torch.tensor(owners).expand(batch, -1),
            depth=config.depth,
        )

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.names = [self.names[row] for row in rows]


class RecordingDrafter(StandIn):
    """Wraps any drafter and records the texts it was shown and the trees it proposed."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.told: list[Seen] = []
        self.trees: list[DraftTree] = []

    def begin(self, seen: Seen) -> None:
        self.told.append(copy_seen(seen))
        self.drafter.begin(seen)

    def extend(self, seen: Seen) -> None:
        self.told.append(copy_seen(seen))
        self.drafter.extend(seen)

    def draft(self, roots: Tensor, config: TreeConfig, noise: DraftNoise | None = None) -> DraftTree:
        self.trees.append(self.drafter.draft(roots, config, noise))
        return self.trees[-1]

    def select(self, rows: Sequence[int]) -> None:
        self.drafter.select(rows)


def copy_seen(seen: Seen) -> Seen:
    return Seen(seen.tokens.clone(), list(seen.counts), seen.features.clone())


# --- tiny models ---


def tiny_llama(
    vocab_size: int = 64, hidden_size: int = 32, layers: int = 2, seed: int = 0, peak: float = 1.0
) -> LlamaForCausalLM:
    """A random Llama in float32; `peak` scales its lm_head, and so how peaked its distributions are."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float().eval()
        for weight in model.parameters():
            if weight.ndim > 1:  # Llama's own 0.02 is too small for tokens and context to matter
                torch.nn.init.normal_(weight, std=1.0 / weight.shape[1] ** 0.5)
        torch.nn.init.normal_(model.model.embed_tokens.weight)
        torch.nn.init.normal_(model.lm_head.weight, std=peak / hidden_size**0.5)
    return model


def tiny_head(
    vocab_size: int = 64,
    hidden_size: int = 32,
    seed: int = 0,
    kv_heads: int = 2,
    trained: int | None = None,
) -> DraftHead:
    """A random head of the width of `tiny_llama`. trained: the longest text of its training."""
    config = HeadConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=hidden_size // 4,
        vocab_size=vocab_size,
        trained_positions=trained,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DraftHead(config).float().eval()
        for weight in head.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=1.0 / weight.shape[1] ** 0.5)
    return head


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to every earlier position and the own one: the plain `attend` of a head for a whole sequence."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class TinyVocabulary:
    """A vocabulary without a target: random embeddings [V, d] and a random lm_head [V, d]."""

    def __init__(self, vocab_size: int = 64, hidden_size: int = 32, seed: int = 0, peak: float = 1.0) -> None:
        weights = torch.randn(2, vocab_size, hidden_size, generator=generator(seed))
        self.embeddings, self.lm_head = weights[0], weights[1] * peak / hidden_size**0.5

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embeddings[tokens]

    def logits(self, features: Tensor) -> Tensor:
        return features.float() @ self.lm_head.T


# --- random trees ---


def random_parents(nodes: int, depth: int, width: int, draw: torch.Generator) -> list[int]:
    """Return random parents: parents come first, no path exceeds depth, no node has over width children."""
    parents, depths = [-1], [0]
    while len(parents) < nodes:
        free = [n for n in range(len(parents)) if depths[n] < depth and parents.count(n) < width]
        parent = free[int(torch.randint(len(free), (), generator=draw))]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def random_tree(
    batch: int, nodes: int, depth: int, width: int, vocab_size: int, seed: int, scale: float = 1.5
) -> DraftTree:
    """Return a tree of another shape in every row.

    Siblings hold distinct random tokens. The rows of log_q are in random order, with unused ones among them.
    """
    draw = generator(seed)
    rows = nodes  # at least one more than can be used
    tokens = torch.randint(vocab_size, (batch, nodes), generator=draw)
    log_q = (torch.randn(batch, rows, vocab_size, generator=draw) * scale).log_softmax(-1)
    all_parents, owners = [], torch.full((batch, rows), -1)
    for row in range(batch):
        parents = random_parents(nodes, depth, width, draw)
        for parent in set(parents) - {-1}:
            family = [node for node in range(nodes) if parents[node] == parent]
            tokens[row, family] = torch.randperm(vocab_size, generator=draw)[: len(family)]
        owning = torch.tensor(sorted(set(parents) - {-1}), dtype=torch.int64)
        owners[row, torch.randperm(rows, generator=draw)[: len(owning)]] = owning
        all_parents.append(parents)
    return DraftTree(
        tokens=tokens,
        parents=torch.tensor(all_parents),
        depths=torch.tensor([depths_of(parents) for parents in all_parents]),
        log_q=log_q,
        owners=owners,
        depth=depth,
    )
