"""A Hugging Face decoder as a target: its features, logits, embeddings and limits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from eagle_fsd.core.tree import additive
from eagle_fsd.files.fingerprints import target_identity
from eagle_fsd.runtime.flash_attention import FlashPlan
from eagle_fsd.runtime.kv_cache import KVCache
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.fixed_shapes import FixedShapes
from eagle_fsd.runtime.ranks import ALONE, Ranks, local_bytes, look_up
from eagle_fsd.runtime.step_recorder import EAGER, Stepper
from eagle_fsd.target.admission.checks import (
    check_taps,
    check_tree_verification,
    compute_with,
    flash_verifies,
    run_quantised,
    show_taps,
)
from eagle_fsd.target.architecture import (
    FULL,
    NARROWED,
    SLIDING,
    attention_kinds,
    cache_argument,
    check_model,
    decoder_of,
    end_tokens,
    feature_device,
    ignored_defaults,
    layer_kinds,
    logits_transform,
    longest_text,
    named_sampling,
    own_defaults,
    quantised_by,
    report_defaults,
    vocabulary_size,
    weights_read,
    window_sizes,
)
from eagle_fsd.target.graph_decoder import GraphDecoder, read_graphs
from eagle_fsd.target.hf_attention import with_grouped_attention
from eagle_fsd.target.kept.kept_model import KeptModel, whole
from eagle_fsd.target.kept.outline import Outline, class_names, outline_of
from eagle_fsd.target.media.table import MediaTable
from eagle_fsd.target.states.mixers import find_mixers
from eagle_fsd.target.states.state_cache import StateCache
from eagle_fsd.target.taps import TappedDecoder, joined

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TargetModel:
    """A causal LM with everything that decoding needs. Raises ValueError if it cannot verify trees.

    held: the model as it was given: whole, or with a runtime a KeptModel. model: the whole model, which is
    loaded when it is first asked for if only its graphs were. hidden_size, vocab_size: of features and
    logits. max_positions: the longest text, prompt included. kinds: of its attention. recurrent: whether
    layers have states. slots_of_states: see SavedRow. media: the images and sounds in prompts. stepper: how
    the parts of a step are run. ranks: the processes that hold a part of it each. pages: whether its graphs
    may attend over pages. Draft models need False: pages show a token all slots before its own.
    ignored_defaults: options of the generation_config that are not applied here, such as typical_p. The model
    is never changed, not even temporarily.
    """

    def __init__(
        self,
        model: PreTrainedModel | KeptModel,
        stepper: Stepper = EAGER,
        runtime: OpenVINO | None = None,
        ranks: Ranks = ALONE,
        pages: bool = True,
    ) -> None:
        if not isinstance(model, KeptModel):
            check_model(model)
            run_quantised(model)
        self.ranks = ranks
        self.held = model.eval()
        self.stepper, self.recurrent, self.slots_of_states = stepper, False, 0
        self.config = model.config.get_text_config(decoder=True)
        self.lm_head = model.get_output_embeddings()
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size = vocabulary_size(self.lm_head)
        self.max_positions = longest_text(self.config)
        self.kinds = attention_kinds(self.config)
        self.windows = window_sizes(self.config)
        self.logits_transform = logits_transform(self.config)
        self.ignored_defaults = ignored_defaults(getattr(model, "generation_config", None))
        self.media = MediaTable.of(model, self.vocab_size)
        self._tapped: dict[tuple[int, ...], TappedDecoder] = {}
        self._admitted_taps: set[tuple[int, ...]] = set()
        self.graphs: GraphDecoder | None = None
        self.flash = False  # the model must pass the test without flash-attn first
        if isinstance(model, KeptModel):
            assert runtime is not None, "only a runtime's graphs are kept"
            self.device = model.device
            self.graphs = read_graphs(model, runtime)
            self.stepper = FixedShapes()
            self.kinds, self.windows[SLIDING] = set(self.graphs.kinds), model.outline.graphs.window
        else:
            self.device = feature_device(model)
            self.recurrent = bool(find_mixers(self.decoder))
            self.stepper = EAGER if self.recurrent else stepper
            self._admit(runtime, pages)
        report_defaults(self.ignored_defaults, self.own_defaults)

    def _admit(self, runtime: OpenVINO | None, pages: bool) -> None:
        """Test the model, and let a runtime compute it. Raises ValueError if that cannot be."""
        if runtime is None or self.kinds != {FULL}:  # else graphs are tested alone
            check_tree_verification(self)  # which also finds out whether windows are real
        self.flash = flash_verifies(self)
        if runtime is not None:
            compute_with(self, runtime, pages)

    @property
    def model(self) -> PreTrainedModel:
        """The whole model; loaded now if only its graphs were."""
        return whole(self.held)

    @functools.cached_property
    def decoder(self) -> nn.Module:
        return decoder_of(self.model)

    @functools.cached_property
    def _masked_decoder(self) -> nn.Module:
        return with_grouped_attention(self.decoder)

    @functools.cached_property
    def _same_modules(self) -> PreTrainedModel:
        """A copy for all calls of `generate`, which keeps what it compiled on it."""
        return copy.copy(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def runtime(self) -> OpenVINO | None:
        """What computes instead of torch; None: torch does."""
        return None if self.graphs is None else self.graphs.runtime

    @property
    def weight_format(self) -> str:
        """The format that forwards multiply with: a dtype, "int8", "packed", or what quantised_by says."""
        dtype = quantised_by(self.held) or str(self.dtype).removeprefix("torch.")
        return dtype if self.graphs is None else self.graphs.runtime.weight_format

    @property
    def input_device(self) -> torch.device:
        return self.held.get_input_embeddings().weight.device

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a text, by the rules of `generate`; empty if there is none."""
        return end_tokens(self.config, getattr(self.held, "generation_config", None))

    @property
    def pad_token_id(self) -> int | None:
        """The padding token of the model's generation_config, if it names one."""
        return getattr(getattr(self.held, "generation_config", None), "pad_token_id", None)

    @property
    def own_defaults(self) -> dict[str, Any]:
        """What the model's generation_config says about sampling and processing; see GenerationOptions."""
        return own_defaults(getattr(self.held, "generation_config", None))

    @property
    def named_sampling(self) -> dict[str, Any]:
        """The sampling that the model's generation_config names, whether it asks for sampling or not."""
        return named_sampling(getattr(self.held, "generation_config", None))

    @property
    def parameter_count(self) -> int:
        """The number of weights that a forward reads; of a mixture of experts, all of them."""
        if isinstance(self.held, KeptModel):
            return self.held.parameter_count
        return sum(weight.numel() for weight in weights_read(self.model))

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights that a forward reads on this rank."""
        if self.graphs is not None:
            return self.graphs.weight_bytes
        return sum(map(local_bytes, weights_read(self.model)))

    def identity(self, name: str) -> dict[str, str]:
        """Return what answers depend on, for a target of this name; see files.fingerprints."""
        if isinstance(self.held, KeptModel):
            return self.held.identity(name)
        return target_identity(name, self.held)

    @property
    def layer_classes(self) -> list[str]:
        """The names of the classes of all modules."""
        return list(self.held.outline.layers) if isinstance(self.held, KeptModel) else class_names(self.held)

    def outline(self, tokenizer: str) -> Outline | None:
        """Return what a KeptModel needs to stand for this model at the next start; None if it cannot.

        tokenizer: the name of its tokenizer's class.
        """
        kept = None if self.graphs is None else self.graphs.kept(self.windows[SLIDING])
        if kept is None or isinstance(self.held, KeptModel):
            return None
        return outline_of(self.held, kept, target_identity("", self.held)["weights"], tokenizer)

    def without_generation_defaults(self) -> PreTrainedModel:
        """Return the model for its own `generate`, without the defaults that its repository sets.

        Whoever calls it says what applies. The caller's model is not changed.
        """
        pad = next(iter(self.eos_token_ids), 0)
        self._same_modules.generation_config = GenerationConfig(
            eos_token_id=list(self.eos_token_ids) or None, pad_token_id=pad
        )
        return self._same_modules

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of tokens [...], unscaled, as EAGLE's heads read them."""
        weight = self.held.get_input_embeddings().weight
        return look_up(tokens.to(weight.device), weight).to(self.device)

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [..., V] float32 of features [..., d], with the model's own scaling and soft-cap.

        The draft's features go through the same function; lm_head alone would give another distribution.
        """
        return self.transform_logits(self.raw_logits(features))

    def raw_logits(self, features: Tensor) -> Tensor:
        """Return the output [..., V] float32 of lm_head alone."""
        features = features.to(self.lm_head.weight.device, self.dtype)  # a head may draft in another dtype
        if self.graphs is not None:
            return self.graphs.logits(features)
        return self.lm_head(features).to(self.device).float()

    def transform_logits(self, logits: Tensor) -> Tensor:
        """Apply the model's own scaling and soft-cap to the output of its lm_head, for any tokens."""
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
        """Run one masked forward; return post-norm hidden states [B, q, d] of tokens [B, q].

        positions: [B, q]. visible: [B, q, S] bool over cache slots, before any sliding window.
        slot_positions: [B, S]. relation: [B, q, q] bool, which of the new tokens each one sees behind the
        committed slots; None: all slots up to its own.
        """
        masks = self._masks(positions, visible, slot_positions)
        if self.graphs is not None:
            return self.graphs.features(tokens, positions, masks, cache)
        # A decoder that the user compiled keeps the attention that it was compiled with.
        compiled = self.decoder._compiled_call_impl is not None and not self.recurrent
        decoder = self.decoder if compiled else self._masked_decoder
        output = decoder(**self._inputs(tokens, positions, masks, cache, relation))
        return output.last_hidden_state.to(self.device)

    def tapped_features(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        slot_positions: Tensor,
        cache: KVCache,
        relation: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Run one masked forward; return what `features` returns and the taps side by side, [B, q, taps * d].

        taps: see target.taps. `admit_taps` says whether they can be read.
        """
        masks = self._masks(positions, visible, slot_positions)
        if self.graphs is not None:
            return self.graphs.tapped_features(tokens, positions, masks, cache, taps)
        if taps not in self._tapped:  # of two threads, either's will do
            decoder = with_grouped_attention(self.decoder)
            self._tapped[taps] = TappedDecoder(decoder, self.config.num_hidden_layers, taps)
        output, found = self._tapped[taps](**self._inputs(tokens, positions, masks, cache, relation))
        return output.last_hidden_state.to(self.device), joined(found, self.device)

    def admit_taps(self, taps: tuple[int, ...]) -> None:
        """Raise ValueError unless taps can be read, and equal a plain forward's, in a tree as well."""
        if self.graphs is not None:
            show_taps(self, taps)
        elif taps and taps not in self._admitted_taps:
            check_taps(self, taps)
            self._admitted_taps.add(taps)

    def _masks(self, positions: Tensor, visible: Tensor, slot_positions: Tensor) -> dict[str, Tensor]:
        """Return the mask [B, q, S] bool of each kind of layer."""
        seen, kinds = (visible, positions, slot_positions), self.kinds & NARROWED.keys()
        return {FULL: visible, **{kind: NARROWED[kind][1](*seen, self.windows[kind]) for kind in kinds}}

    def _inputs(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Mapping[str, Tensor],
        cache: KVCache,
        relation: Tensor | None,
    ) -> dict[str, Any]:
        """Return the arguments of the decoder's forward."""
        masks = {kind: additive(visible[kind], self.dtype) for kind in self.kinds or (FULL,)}
        mask = next(iter(masks.values()))
        if len(masks) > 1:  # by kind of layer; those without attention have none
            mask = {**dict.fromkeys(layer_kinds(self.config)), **masks}
        plan = {}
        if self.flash and (relation is not None or cache.span is not None):
            plan["flash_plan"] = FlashPlan(masks[FULL], cache.lengths.to(torch.int32), relation)
        return {
            "input_ids": tokens.to(self.input_device),
            "attention_mask": mask,
            "position_ids": positions,
            cache_argument(type(self.decoder)): cache,
            "use_cache": True,
            **self.media.arguments(tokens, positions, cache, relation, self.held.get_input_embeddings()),
            **plan,
        }

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache for `batch` texts, with `capacity` slots each at first."""
        if self.graphs is not None:
            return self.graphs.new_cache(batch, capacity)
        if self.recurrent:
            return StateCache(batch, capacity, self.device)
        return KVCache(batch, capacity, self.device, self.stepper.view)

    def expect(self, rows: int, nodes: int, again: bool = True) -> None:
        """Prepare for many forwards over trees of this many nodes; again: the next process may, too."""
        if self.graphs is not None:
            self.graphs.expect(rows, nodes, again)
