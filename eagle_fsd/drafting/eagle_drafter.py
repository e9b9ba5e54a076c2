"""Drafting with an EAGLE head: its cache, its pairs, the growth of a tree (EAGLE-2, section 4.1).

Pair j is (feature f_j, token x_{j+1}) and sits in slot j, at position j. For a text whose last token, the
root, is x_L, pairs 0..L-1 are committed; the root's pair is the last, so a tree node of depth i >= 1 is fed
at position L - 1 + i. Shapes: B rows, d hidden size, K top_k, V vocabulary, W the tokens that are drafted:
all V, or those of the head's draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.devices import host_can_read
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.tree import Candidates, DraftTree, build_tree, visible_slots
from eagle_fsd.drafting.drafter import Vocabulary
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.runtime.grouped_attention import grouped_attention
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.runtime.step_recorder import EAGER, Stepper

EXTEND_CHUNK = 512  # pairs per forward while a prompt is read: bounds the mask to chunk x context


class EagleDrafter:
    """Grows EAGLE-2 trees for one batch of texts with an EAGLE-1/2 head."""

    def __init__(
        self,
        head: DraftHead,
        vocabulary: Vocabulary,
        batch: int,
        capacity: int,
        device: torch.device,
        stepper: Stepper = EAGER,
    ) -> None:
        self.head = head
        self.vocabulary = vocabulary
        self.cache = KVCache(batch, capacity, device, stepper.view)
        self._read_step = EAGER.of(self._extend)
        self._extend_step = stepper.of(self._extend)
        self._draft_step = stepper.of(self._draft)
        # What the head predicts at each root
        self.root_features = torch.zeros(batch, head.config.hidden_size, device=device)

    def extend(self, features: Tensor, tokens: Tensor, counts: Sequence[int]) -> None:
        """Commit new true pairs to the head's cache and predict the roots' features.

        Rows are right-padded: what lies past counts[row] is read, hidden by the masks and overwritten later.
        """
        cache, outputs = self.cache, []
        prompt = not any(cache.row_lengths)  # prompts are of any length: no recording would come again
        step = self._read_step if prompt else self._extend_step
        for start in range(0, tokens.shape[1], EXTEND_CHUNK):
            chunk = slice(start, start + EXTEND_CHUNK)
            cache.reserve(tokens[:, chunk].shape[1], offset=start, exact=prompt)
            static = (start, cache.view)
            outputs.append(step(cache.buffers, static, features[:, chunk], tokens[:, chunk]))
        last = on_device([max(count, 1) for count in counts], tokens.device)[:, None, None] - 1
        output = torch.cat(outputs, dim=1)
        self.root_features = output.gather(1, last.expand(-1, -1, output.shape[-1]))[:, 0]
        cache.advance(counts)

    def _extend(self, static: tuple[int, int], features: Tensor, tokens: Tensor) -> Tensor:
        """What the head predicts behind pairs [B, q]; where they start and the cache's view are static."""
        start, view = static
        slots = self.cache.place(tokens.shape[1], offset=start)  # [B, q]
        visible = torch.arange(view, device=slots.device) <= slots[:, :, None]
        return self._forward(features, tokens, slots, visible)

    def draft(self, roots: Tensor, config: TreeConfig) -> DraftTree:
        """Grow levels of `top_k` beam nodes by cumulative log-probability, then keep the best nodes of all.

        A kept node's ancestors are kept, so no level beyond `config.reach` could have a part in the tree.
        """
        self.cache.reserve(config.top_k * (config.reach - 1))
        return self._draft_step(self.cache.buffers, (config, self.cache.view), roots, self.root_features)

    def _draft(self, static: tuple[TreeConfig, int], roots: Tensor, root_features: Tensor) -> DraftTree:
        """`draft`; the tree's size and the cache's view are static."""
        config, view = static
        top_k, depth, batch = config.top_k, config.reach, len(roots)
        lengths = self.cache.lengths
        every = torch.arange(batch, device=roots.device)[:, None]  # [B, 1]

        log_q = self._log_q(root_features[:, None])  # [B, 1, W]
        scores, columns = (best[:, 0] for best in best_children(log_q, top_k))  # [B, K] of the beam
        below_root = torch.full_like(columns, -1)
        levels = [Candidates(columns, below_root, scores, torch.ones_like(columns[0]))]
        log_qs, owners = [log_q], [below_root[:, :1]]

        beam = torch.arange(top_k, device=roots.device).expand(batch, -1)  # [B, K] indices of candidates
        features = root_features[:, None].expand(-1, top_k, -1)  # each beam node's parent's prediction
        own = torch.eye(top_k, dtype=torch.bool, device=roots.device).expand(batch, -1, -1)
        ancestry = own  # [B, K, K * level]: of all levels so far
        for level in range(1, depth):
            # [B, 1]: of the beam's best, and no child is better
            done = scores[:, :1] < config.min_parent_score
            if host_can_read(done) and bool(done.all()):
                depth = level
                break
            self.cache.place(top_k, offset=(level - 1) * top_k)
            slots = lengths[:, None] + torch.arange(level * top_k, device=roots.device)
            visible = visible_slots(lengths, slots, ancestry, view)
            positions = (lengths[:, None] + level - 1).expand(-1, top_k)
            hidden = self._forward(features, self._tokens(columns), positions, visible)  # [B, K, d]

            log_q = self._log_q(hidden)  # [B, K, W]
            child_scores, children = best_children(log_q, top_k)  # [B, K, K]
            flat_scores = (scores[:, :, None] + child_scores).flatten(1)  # [B, K * K]
            flat_scores = flat_scores.masked_fill(done, -torch.inf)
            flat_columns = children.flatten(1)
            levels.append(
                Candidates(
                    columns=flat_columns,
                    parents=beam.repeat_interleave(top_k, dim=1),
                    scores=flat_scores,
                    depths=torch.full((top_k**2,), level + 1, device=roots.device),
                )
            )
            log_qs.append(log_q)
            owners.append(beam)

            picked = flat_scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]  # [B, K]
            parent = picked // top_k  # index within the beam
            beam = top_k + (level - 1) * top_k**2 + picked
            columns, scores = flat_columns.gather(1, picked), flat_scores.gather(1, picked)
            features = hidden[every, parent]
            ancestry = torch.cat((ancestry[every, parent], own), dim=2)

        pool = Candidates(
            columns=torch.cat([level.columns for level in levels], dim=1),
            parents=torch.cat([level.parents for level in levels], dim=1),
            scores=torch.cat([level.scores for level in levels], dim=1),
            depths=torch.cat([level.depths for level in levels]),
        )
        log_q, owner = torch.cat(log_qs, dim=1), torch.cat(owners, dim=1)
        return build_tree(
            roots, pool, config.total_tokens, depth, log_q, owner, self.head.draft_tokens, config.min_score
        )

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.root_features = self.root_features[list(rows)]

    def _forward(self, features: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Run the head on pairs [B, n] that see visible [B, n, S]; keys go where the cache was placed."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return grouped_attention(q, *self.cache.update(k, v, layer_idx=0), visible[:, None])

        dtype = self.head.fc.weight.dtype
        return self.head(features.to(dtype), self.vocabulary.embed(tokens).to(dtype), positions, attend)

    def _log_q(self, features: Tensor) -> Tensor:
        """Log-probabilities [..., W] at temperature 1 of predicted features [..., d]."""
        logits = self.vocabulary.logits(features)
        drafted = self.head.config.draft_vocab_size or self.head.config.vocab_size
        assert logits.shape[-1] == drafted, "the vocabulary is not the head's: see DraftVocabulary"
        return F.log_softmax(logits, dim=-1)

    def _tokens(self, columns: Tensor) -> Tensor:
        """The target's ids of drafted tokens by their places among the W."""
        return columns if self.head.draft_tokens is None else self.head.draft_tokens[columns]


def best_children(log_q: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and places of the top_k most likely tokens of log_q [..., W]; each [..., top_k]."""
    return torch.nan_to_num(log_q, nan=-torch.inf).topk(top_k, dim=-1)
