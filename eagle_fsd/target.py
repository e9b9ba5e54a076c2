"""Any Hugging Face decoder as a target: prefill, verify a tree in one masked forward, keep a path. Nothing
but this and `layer_attention` touches HF internals.

`TargetModel` is the model seen from outside: features, logits, embeddings, limits. `TargetSession` is one
batch of texts on it, with a cache of our own. A model is admitted by evidence: on construction one small tree
is verified and compared with plain forwards over its paths, which refuses positions taken from slots (ALiBi),
attention that ignores masks, recurrence and unknown logits transforms alike.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from eagle_fsd.architecture import (
    FULL,
    SLIDING,
    check_model,
    end_tokens,
    layer_kinds,
    logits_transform,
    longest_text,
    named_layer_kinds,
    suggested_sampling,
    unheeded,
)
from eagle_fsd.cache import KVCache
from eagle_fsd.flash import FlashPlan, flash_available
from eagle_fsd.graphs import EAGER, Stepper
from eagle_fsd.layer_attention import private_copy, with_grouped_attention
from eagle_fsd.messages import one_line
from eagle_fsd.tree import DraftTree, additive, ancestors, visible_slots, within_window

logger = logging.getLogger(__name__)

PREFILL_CHUNK = 512  # tokens per prefill forward: bounds the mask to chunk x context
NARROW_WINDOW = 3  # slots of a sliding window while a model is admitted
# What a forward raises that cannot take our cache, masks or positions.
FORWARD_ERRORS = (
    *(TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError),
    *(IndexError, KeyError, AssertionError),
)


class TargetModel:
    """A causal LM and what decoding needs of it; ValueError if trees cannot be verified on it.

    hidden_size, vocab_size: of features and logits. max_positions: the longest text, prompt included.
    stepper: how the parts of a step are run on it. unheeded: what the model's generation_config asks for that
    is not done here, such as a repetition penalty. The model itself is never changed, also not for a moment.
    """

    def __init__(self, model: PreTrainedModel, stepper: Stepper = EAGER) -> None:
        check_model(model)
        self.model = model.eval()
        self.stepper = stepper
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = model.get_decoder()
        self._same_modules = copy.copy(model)  # one for all calls, since `generate` keeps what it compiled
        self._masked_decoder = with_grouped_attention(self.decoder)
        self.lm_head = model.get_output_embeddings()
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.max_positions = longest_text(self.config)
        self.kinds = set(layer_kinds(self.config))
        self.window: int = getattr(self.config, "sliding_window", None) or 0
        self.logits_transform = logits_transform(self.config)
        self.device = self._feature_device()
        self.unheeded = unheeded(getattr(model, "generation_config", None))
        self.flash = False  # until the model is admitted without it
        self._check_tree_verification()
        self._try_flash()
        self._say_what_is_not_done()

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def input_device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a text, as `generate` sees it; empty if there is none."""
        return end_tokens(self.config, getattr(self.model, "generation_config", None))

    @property
    def pad_token_id(self) -> int | None:
        """What the model's generation_config takes for padding, if anything."""
        return getattr(getattr(self.model, "generation_config", None), "pad_token_id", None)

    def without_generation_defaults(self) -> PreTrainedModel:
        """The model for its own `generate`, without the penalties and warpers that its repository sets as
        defaults: decoding here applies none either. The model's owner sees nothing of it.
        """
        pad = next(iter(self.eos_token_ids), 0)
        self._same_modules.generation_config = GenerationConfig(
            eos_token_id=list(self.eos_token_ids) or None, pad_token_id=pad
        )
        return self._same_modules

    def embed(self, tokens: Tensor) -> Tensor:
        """Embedding rows [..., d] of tokens [...], unscaled, as EAGLE's heads read them."""
        weight = self.model.get_input_embeddings().weight
        return F.embedding(tokens.to(weight.device), weight).to(self.device)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [..., V] float32 of features [..., d], with the model's own scaling and soft-cap.

        The draft's features go through the same function; lm_head alone would give it another law.
        """
        features = features.to(self.lm_head.weight.device, self.dtype)  # a head may draft in another dtype
        return self.transformed(self.lm_head(features).to(self.device).float())

    def transformed(self, logits: Tensor) -> Tensor:
        """Logits of any tokens as the model gives them, from what its lm_head gives."""
        return self.logits_transform(logits)

    def features(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        slot_positions: Tensor,
        cache: KVCache,
        relation: Tensor | None = None,
    ) -> Tensor:
        """One masked forward: post-norm hidden states [B, q, d] of tokens [B, q].

        positions: [B, q]. visible: [B, q, S] bool over cache slots, before any sliding window.
        slot_positions: [B, S]. relation: [B, q, q] bool, which of the new tokens each one sees behind the
        committed slots; None: all slots up to its own.
        """
        masks = {FULL: visible}
        if SLIDING in self.kinds:
            masks[SLIDING] = within_window(visible, positions, slot_positions, self.window)
        masks = {kind: additive(masks[kind], self.dtype) for kind in self.kinds}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        plan = {}
        if self.flash and (relation is not None or cache.span is not None):
            lengths = cache.lengths.to(torch.int32)
            plan["flash_plan"] = FlashPlan(masks[FULL], lengths, relation)
        # A decoder that its owner compiled runs as it is, under the attention that it was compiled with.
        compiled = self.decoder._compiled_call_impl is not None
        output = (self.decoder if compiled else self._masked_decoder)(
            input_ids=tokens.to(self.input_device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **plan,
        )
        return output.last_hidden_state.to(self.device)

    @torch.inference_mode()
    def _feature_device(self) -> torch.device:
        """Where features come out: the last layer's device, which under `device_map` only a forward tells."""
        if not getattr(self.model, "hf_device_map", None):
            return self.model.device
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.input_device)
        return self.decoder(input_ids=token, use_cache=False).last_hidden_state.device

    @torch.inference_mode()
    def _check_tree_verification(self) -> None:
        """Raise ValueError unless a small tree comes out of `verify` as it does of plain forwards."""
        kind = self.config.model_type
        try:
            if SLIDING in self.kinds and self.window:
                with self._narrow_window():
                    difference = self._tree_difference()
                    if not difference < self._tolerance and not named_layer_kinds(self.config):
                        self.kinds = {FULL}  # the config has a window that this class of models ignores
                        difference = self._tree_difference()
            else:
                difference = self._tree_difference()
        except FORWARD_ERRORS as error:
            reason = one_line(error)
            raise ValueError(
                f"target is a {kind!r} model, which cannot verify draft trees here: {reason}; use "
                "another target"
            ) from error
        if not difference < self._tolerance:
            raise ValueError(
                f"target is a {kind!r} model whose tree verification differs from its plain forward by "
                f"{difference:.2g} (relative): its positions (ALiBi, say), masks or logits follow rules "
                "that are not supported; use another target"
            )

    @torch.inference_mode()
    def _try_flash(self) -> None:
        """Use flash-attn in layers with full attention, if it is there and a small tree comes out right."""
        if self.config._attn_implementation != "sdpa" or FULL not in self.kinds:
            return
        if not flash_available(self.device, self.dtype):
            return
        self.flash = True
        try:
            difference = self._tree_difference()
            reason = f"a tree differs from plain forwards by {difference:.2g} (relative)"
        except FORWARD_ERRORS as error:
            difference, reason = math.nan, one_line(error)
        if not difference < self._tolerance:
            self.flash = False
            logger.warning("flash-attn is not used on this %r model: %s", self.config.model_type, reason)

    def _say_what_is_not_done(self) -> None:
        """Warn of what the model's defaults ask of `generate` and do not get here."""
        if self.unheeded:
            asked = ", ".join(f"{name}={value!r}" for name, value in self.unheeded.items())
            logger.warning(
                "the model's generation_config asks for %s, which is not done here: texts are those of "
                "generate without it",
                one_line(asked, 200),
            )
        if sampling := suggested_sampling(getattr(self.model, "generation_config", None)):
            asked = ", ".join(f"{name}={value}" for name, value in sampling.items())
            logger.info("the model's generation_config suggests %s: give them as arguments", asked)

    @property
    def _tolerance(self) -> float:
        """Kernels differ in the last bits; a sibling that leaks or a wrong position differs in the first."""
        return 1e-3 if self.dtype == torch.float32 else 0.1

    @contextlib.contextmanager
    def _narrow_window(self) -> Iterator[None]:
        """Let a short text outgrow the sliding window of our masks, for a while."""
        window, self.window = self.window, NARROW_WINDOW
        try:
            yield
        finally:
            self.window = window

    def _tree_difference(self) -> float:
        """How far the logits of the tree a(b(d), c(e)) behind a two-token prefix are from those of plain
        forwards over its two paths, relative."""
        prefix = [1 % self.vocab_size, 2 % self.vocab_size]
        tokens = [token % self.vocab_size for token in (3, 4, 5, 6, 7)]
        tree = DraftTree(
            tokens=torch.tensor([tokens], device=self.device),
            parents=torch.tensor([[-1, 0, 0, 1, 2]], device=self.device),
            depths=torch.tensor([[0, 1, 1, 2, 2]], device=self.device),
            log_q=torch.empty(1, 0, self.vocab_size, device=self.device),
            owners=torch.empty(1, 0, dtype=torch.int64, device=self.device),
            depth=2,
        )
        plain_model = private_copy(self.model)
        if self.window:
            plain_model.config.get_text_config(decoder=True).sliding_window = self.window
        session = TargetSession(self, batch=1, capacity=16)
        session.prefill(torch.tensor([prefix], device=self.device), [2])
        logits, _ = session.verify(tree)
        differences = []
        for path in ([0, 1, 3], [0, 2, 4]):
            ids = torch.tensor([prefix + [tokens[node] for node in path]], device=self.input_device)
            plain = plain_model(input_ids=ids, use_cache=False).logits[0, len(prefix) :].float()
            plain = plain.to(self.device)
            differences.append(float((logits[0, path] - plain).norm() / plain.norm()))
        return math.nan if any(map(math.isnan, differences)) else max(differences)


class TargetSession:
    """One batch of texts on a target: what is committed, and the tree being verified."""

    def __init__(self, target: TargetModel, batch: int, capacity: int) -> None:
        self.target = target
        self.cache = KVCache(batch, capacity, target.device, target.stepper.view)
        self._verify_step = target.stepper.of(self._verify)
        self._compact_step = target.stepper.of(self._compact, repeatable=False)

    def prefill(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run and commit the first lengths[row] of right-padded tokens [B, L]; their features [B, L, d].

        What lies past a row's length is padding: its features mean nothing and its slots are overwritten.
        """
        batch, width = tokens.shape
        parts = [
            torch.empty(batch, 0, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
        ]
        for start in range(0, width, PREFILL_CHUNK):
            chunk = tokens[:, start : start + PREFILL_CHUNK]
            self.cache.reserve(chunk.shape[1], offset=start, exact=True)
            slots = self.cache.place(chunk.shape[1], offset=start)  # [B, q]
            slot_positions = torch.arange(self.cache.view, device=slots.device).expand(batch, -1)
            visible = slot_positions[:, None, :] <= slots[:, :, None]
            parts.append(self.target.features(chunk, slots, visible, slot_positions, self.cache))
        self.cache.advance(lengths)
        return torch.cat(parts, dim=1)

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """One forward over all nodes under the tree mask: logits [B, N, V] float32 and features [B, N, d]."""
        self.cache.reserve(tree.tokens.shape[1])
        static = (tree.depth, self.cache.view)
        logits, features, self.cache.slots = self._verify_step(
            self.cache.buffers, static, tree.tokens, tree.parents, tree.depths
        )
        return logits, features

    def _verify(
        self, static: tuple[int, int], tokens: Tensor, parents: Tensor, depths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, features and the nodes' slots [B, N]; the tree's depth and the cache's view are static."""
        cache, (depth, view) = self.cache, static
        slots = cache.place(tokens.shape[1])  # [B, N]
        # A node past the last position is never emitted, but a learned embedding must not be read out of
        # range.
        positions = (cache.lengths[:, None] + depths).clamp(max=self.target.max_positions - 1)
        relation = ancestors(parents, depth)
        visible = visible_slots(cache.lengths, slots, relation, view)
        slot_positions = torch.arange(view, device=slots.device).expand(len(slots), -1)
        slot_positions = slot_positions.scatter(1, slots, positions)
        features = self.target.features(tokens, positions, visible, slot_positions, cache, relation)
        return self.target.logits(features), features, slots

    def keep(self, path: Tensor, counts: Sequence[int]) -> None:
        """Commit counts[row] nodes of the path [B, P] (node indices, -1 padded), root included."""
        self._compact_step(self.cache.buffers, None, path, self.cache.slots)
        self.cache.advance(counts)

    def _compact(self, _: None, path: Tensor, slots: Tensor) -> None:
        self.cache.compact(path, slots)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.cache.select(rows)
