"""EagleFSD: a target, a draft head and the decoding loop behind `generate` and `stream`, as in Hugging Face.

It turns padded batches into requests and back. It works on token ids; the tokenizer is there for callers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle_fsd import hub
from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.calibration import Calibration
from eagle_fsd.autotune.head_reading import settle_head
from eagle_fsd.autotune.settle import Settler
from eagle_fsd.autotune.tree_search import Choice
from eagle_fsd.core.checks import override, require_integer
from eagle_fsd.core.config import AutoTree, SamplingConfig
from eagle_fsd.core.padding import Array, Rows, as_ids
from eagle_fsd.decoding.alone import run_alone
from eagle_fsd.decoding.many import TextStream
from eagle_fsd.decoding.on_ranks.held_memory import held_memory
from eagle_fsd.decoding.options import GenerationOptions, settle_batch, settle_options
from eagle_fsd.decoding.outputs import BatchStream, GenerationOutput, Streamer, TokenStream, run_to_end
from eagle_fsd.decoding.request import Prompts, Request, end_token_ids
from eagle_fsd.decoding.workspace import Workspaces
from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_drafter import EagleSpec
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.drafting.specs import spec_for, with_head, with_lookup
from eagle_fsd.hub.loading.options import LoadOptions
from eagle_fsd.hub.loading.pair import load_pair
from eagle_fsd.hub.media.processor import has_media, prepare_chat
from eagle_fsd.runtime.packed_linear import repack_changed
from eagle_fsd.target.media.reading import read_media
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.chat import encode_chat


class EagleFSD:
    """Fuzzy speculative decoding on draft trees, for one target and one way to draft.

    Several threads may use one engine, engines of one model, and the model itself at the same time.

    target: a TargetModel. head: a DraftHead or Eagle3Head that fits it, another DrafterSpec, or None for
    plain decoding only. A head is never changed; it is copied if it has another device or dtype. tokenizer:
    for callers. base_model, ea_model: the sources of target and head, for reports. head_dtype: the dtype of
    drafts; None means the target's. head_folder: has the head's calibration. lookup: draft with tokens
    that the text repeats as well; without a head, with them and the target's own earlier distributions.
    processor: of images and sound, for `read_chat`.
    """

    def __init__(
        self,
        target: TargetModel,
        head: DraftHead | Eagle3Head | DrafterSpec | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        base_model: str = "",
        ea_model: str = "",
        head_dtype: torch.dtype | None = None,
        head_folder: str | os.PathLike[str] | None = None,
        lookup: bool = False,
        processor: Any = None,
    ) -> None:
        self.target, self.tokenizer, self.processor = target, tokenizer, processor
        self.drafter = spec_for(head, target, head_dtype or target.dtype)
        self.head = self.drafter.head if isinstance(self.drafter, EagleSpec) else None
        if lookup:
            self.drafter = with_lookup(self.drafter, target)
            ea_model = self.drafter.name if head is None else ea_model
        self.base_model, self.ea_model = base_model, ea_model
        folder = None if head_folder is None else Path(head_folder)
        self.settler = Settler(target, self.drafter, base_model, tokenizer, folder)
        self._workspaces = Workspaces(target)

    @classmethod
    def from_pretrained(
        cls,
        base_model: str | os.PathLike[str] = hub.DEFAULT_TARGET,
        ea_model: str | os.PathLike[str] | None = None,
        options: LoadOptions | None = None,
        **keywords: Any,
    ) -> EagleFSD:
        """Load a target and its head.

        base_model: a Hub id (optionally `@revision`), a folder, a .gguf file, or "smollm2-135m". ea_model: a
        Hub id, a folder, "none" for no head, or None for the head that ships with the package. options: see
        LoadOptions. keywords: its fields, which override `options`: `device="cpu", weight_format="packed"`.
        Raises ValueError for anything that is missing, does not fit or is not supported.
        """
        settled = override(LoadOptions, options, keywords, others=("base_model", "ea_model"))
        pair = load_pair(base_model, ea_model, settled)
        if isinstance(pair.head, Eagle3Head):
            settle_head(pair.head, pair.target, pair.tokenizer)
        sources = (pair.base_model, pair.ea_model, pair.head_dtype, pair.folder)
        return cls(pair.target, pair.head, pair.tokenizer, *sources, pair.lookup, pair.processor)

    def __repr__(self) -> str:
        drafts = "none" if self.drafter is None else self.drafter.name
        computed = f"{self.weight_format} on {self.runtime}, {self.device}"
        return f"<EagleFSD {self.base_model!r}, drafts {drafts}, {computed}>"

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def runtime(self) -> str:
        """What computes target and head: "torch" or "openvino"."""
        return "torch" if self.target.runtime is None else self.target.runtime.name

    @property
    def weight_format(self) -> str:
        """The format of the target's weights: a dtype, "int8" or "packed"."""
        return self.target.weight_format

    @property
    def draft_vocab_size(self) -> int | None:
        """The number of tokens that can be drafted; None if all can, or if there is no drafter."""
        return self.settler.tokens if self.settler.drafts_some_tokens else None

    @property
    def head_folder(self) -> Path | None:
        """The folder with the head's calibration."""
        return self.settler.folder

    @property
    def pad_token_id(self) -> int:
        """The token that fills short rows: a pad token, tokenizer's or model's, else an end token, else 0."""
        pads = (getattr(self.tokenizer, "pad_token_id", None), self.target.pad_token_id)
        return next(one for one in (*pads, *self.target.eos_token_ids, 0) if one is not None)

    @overload
    def generate(
        self,
        input_ids: Rows,
        attention_mask: Rows | None = None,
        options: GenerationOptions | None = None,
        *,
        streamer: Streamer | None = None,
        return_dict_in_generate: Literal[True] = True,
        **keywords: Any,
    ) -> GenerationOutput: ...

    @overload
    def generate(
        self,
        input_ids: Rows,
        attention_mask: Rows | None = None,
        options: GenerationOptions | None = None,
        *,
        streamer: Streamer | None = None,
        return_dict_in_generate: Literal[False],
        **keywords: Any,
    ) -> Tensor: ...

    def generate(
        self,
        input_ids: Rows,
        attention_mask: Rows | None = None,
        options: GenerationOptions | None = None,
        *,
        streamer: Streamer | None = None,
        return_dict_in_generate: bool = True,
        **keywords: Any,
    ) -> GenerationOutput | Tensor:
        """Generate for a batch of prompts [B, L], left- or right-padded as attention_mask [B, L] says.

        options: see GenerationOptions. keywords: its fields, which override `options`:
        `max_new_tokens=64, temperature=0.6, rule=Fuzzy(0.3), tree=TreeConfig(16, 5, 8), seed=1`.
        streamer: of Hugging Face's kind, for one prompt; it is shown the prompt and each step's tokens.
        return_dict_in_generate: False returns the sequences [B, L + new] alone, as Hugging Face does unless
        it is asked for more. Without an attention_mask the model's pad tokens are padding, as in Hugging
        Face. Texts end after an end token, at max_new_tokens, or at the model's last position. Raises
        ValueError for bad arguments, and NonFiniteLogits if no token can be chosen from a step's logits.
        """
        input_ids = as_ids(input_ids)
        started = self._start(input_ids, attention_mask, options, keywords)
        output = run_to_end(self.target.media.words(input_ids), started, streamer, self.pad_token_id)
        return output if return_dict_in_generate else output.sequences

    def stream(
        self,
        input_ids: Rows,
        attention_mask: Rows | None = None,
        options: GenerationOptions | None = None,
        **keywords: Any,
    ) -> TokenStream:
        """Generate for one prompt [1, L] and yield its new token ids as each step emits them.

        options, keywords: as for `generate`.
        """
        input_ids = as_ids(input_ids)
        if input_ids.ndim != 2 or len(input_ids) != 1:
            raise ValueError(
                f"input_ids has shape {list(input_ids.shape)}: a stream takes one prompt, [1, L]; use "
                "generate for a batch"
            )
        started = self._start(input_ids, attention_mask, options, keywords)
        if (texts := len(started.stats)) != 1:
            raise ValueError(
                f"num_return_sequences is {texts}: a stream gives one text; leave it out, or use stream_batch"
            )
        return TokenStream(started)

    def stream_batch(
        self,
        input_ids: Rows,
        attention_mask: Rows | None = None,
        options: GenerationOptions | None = None,
        **keywords: Any,
    ) -> BatchStream:
        """Generate for a batch of prompts [B, L] step by step, for callers that stop early.

        options, keywords: as for `generate`.
        """
        return self._start(as_ids(input_ids), attention_mask, options, keywords)

    def generate_many(
        self,
        prompts: Tensor | Iterable[Sequence[int] | Array],
        options: GenerationOptions | None = None,
        batch_size: int = 8,
        **keywords: Any,
    ) -> TextStream:
        """Generate for any number of prompts, `batch_size` of them at a time, and yield each text as it ends.

        prompts: token ids of each, of any lengths, without padding; or a tensor [B, L], whose pad tokens are
        padding as for `generate` without a mask. What they begin with alike is read once.
        options, keywords: as for `generate`; the text of a prompt is the same, up to rounding. A default tree
        shrinks on a CPU where many texts fill it and any tree gives the same text.
        """
        require_integer("batch_size", batch_size, 1, "8 suits a CPU")
        settled = settle_options(options, keywords, self.target)
        ends = end_token_ids(self.target, settled.eos_token_id)
        found = Prompts.from_lists(self.target, prompts, settled.max_new_tokens, ends)
        found = found.repeated(settled.num_return_sequences)
        rows = min(batch_size, len(found))
        request = self._request(settled, found, rows)
        return TextStream(self.target, self.drafter, request, settled.seed, rows, settled.tree is None)

    def read_chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Return the token ids of a chat that waits for its answer, and let the target see its images.

        messages: {"role", "content"}. A content is a text or a list of parts, as the model's processor takes
        them: {"type": "text", "text": "What is this?"}, {"type": "image", "image": "cat.png"}. template:
        arguments of the chat template, and beside images of the processor, such as max_pixels. In the places
        of images the ids are beyond the vocabulary; `generate` and the others take them. A head sees the
        images as the target does, other drafts see placeholders.
        """
        if not has_media(messages):
            return encode_chat(self.tokenizer, messages, template)[0].tolist()
        return read_media(self.target, prepare_chat(self.processor, messages, template))

    def target_alone(
        self,
        input_ids: Rows,
        attention_mask: Rows | None = None,
        options: GenerationOptions | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> GenerationOutput:
        """Run the baseline: the same prompts through the target's own Hugging Face `generate`.

        options, keywords: as for `generate`, but seed is one number, end tokens are the model's own, and
        rule, tree and prompt_cache have no effect. Random numbers are Hugging Face's, so sampled texts have
        the same distribution but not the same tokens. Stats count one step per token. All rows end where the
        longest prompt's positions do. inputs: what a processor made of one chat with images, input_ids too.
        """
        input_ids = as_ids(input_ids)
        settled = settle_batch(options, keywords, self.target, input_ids, attention_mask)
        return run_alone(self.target, input_ids, *settled, self.pad_token_id, inputs)

    def choose_tree(
        self,
        wanted: AutoTree,
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        batch: int,
        context: int,
        prompts: Sequence[Sequence[int]] = (),
    ) -> Choice:
        """Choose the draft tree with the most tokens per second for `batch` texts of about `context` tokens.

        The first time takes half a minute or more of measurements; the choice is remembered on disk.
        prompts: token ids of texts to observe the head on if the example prompts cannot be encoded.
        """
        return self.settler.choose_tree(wanted, rule, sampling, batch, context, prompts)

    def calibration(self, sampling: SamplingConfig) -> Calibration:
        """Return the thresholds found for this target, head and sampling, or raise ValueError."""
        return self.settler.calibration(sampling)

    def identity(self) -> dict[str, Any]:
        """Return a fingerprint of this target and head. The first call reads all of the head's weights."""
        return self.settler.identity()

    def draft_with(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with other weights of the same head from the next text on. Its calibration is void then.

        Raises ValueError if there is no EAGLE-1/2 head.
        """
        if self.head is None:
            raise ValueError("there is no EAGLE-1/2 head: only the weights of one can be replaced; load one")
        head = copy.deepcopy(self.head)  # other engines may draft with it too
        head.load_state_dict(weights)
        self.head = head
        self.drafter = with_head(self.drafter, self.head, self.target)
        self.settler.draft_with(self.drafter)
        self._workspaces.clear()

    def memory(self) -> list[dict[str, int]]:
        """Return the bytes that each rank holds; see docs/targets-and-heads.md. All ranks must call this."""
        return held_memory(self.target, self.drafter, self._workspaces.cache_bytes)

    def free_memory(self) -> None:
        """Drop the caches and recordings that are kept for the next batch (on a GPU, or with OpenVINO)."""
        self._workspaces.clear()

    def _start(
        self,
        input_ids: Tensor,
        attention_mask: Rows | None,
        options: GenerationOptions | None,
        keywords: dict[str, Any],
    ) -> BatchStream:
        """Check the arguments, settle rule and tree and set up a batch, whose texts run at the first step."""
        settled, prompts = settle_batch(options, keywords, self.target, input_ids, attention_mask)
        return self._workspaces.start(self._request(settled, prompts), settled.seed, self.drafter)

    def _request(self, options: GenerationOptions, prompts: Prompts, together: int | None = None) -> Request:
        """Settle what the options leave open. together: how many prompts are decoded at a time; None: all."""
        request = self.settler.request(options, prompts, together)
        for network in filter(None, (self.target.held, self.drafter and self.drafter.network)):
            repack_changed(network)
        return request
