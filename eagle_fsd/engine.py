"""EagleFSD: target, draft head and loop behind `generate` and `stream`, called as in Hugging Face.

It turns padded batches into requests and back, and holds no text: a tokenizer comes along for the callers.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle_fsd import hub
from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless
from eagle_fsd.acceptance.calibration import FILE as CALIBRATION
from eagle_fsd.acceptance.calibration import Calibration, read_calibration
from eagle_fsd.acceptance.divergence import require_sparse
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.autotune.tree_chooser import TreeChooser
from eagle_fsd.autotune.tree_search import Choice
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import AutoThreshold, AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.core.devices import resolve_device, resolve_dtype
from eagle_fsd.core.padding import as_ids, pad_right
from eagle_fsd.core.sampling import RowRandom, Seed, fresh_seed
from eagle_fsd.core.stats import GenerationStats, Stopwatch
from eagle_fsd.decoding.loop import decode
from eagle_fsd.decoding.outputs import BatchStream, GenerationOutput, TokenStream
from eagle_fsd.decoding.request import Observer, Prompts, Request, end_token_ids
from eagle_fsd.decoding.workspace import Workspace, Workspaces
from eagle_fsd.drafting.draft_vocabulary import DraftVocabulary
from eagle_fsd.drafting.drafter import Vocabulary
from eagle_fsd.drafting.eagle_drafter import EagleDrafter
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.files.fingerprints import models_identity
from eagle_fsd.runtime.cuda_graphs import cuda_recorder
from eagle_fsd.runtime.matmul_backends import find_fastest_backend
from eagle_fsd.runtime.packed_linear import pack_linears, repack_changed
from eagle_fsd.runtime.step_recorder import EAGER, Graphs
from eagle_fsd.target.hf_generate import generate_alone
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.chat import encode_example_prompts

logger = logging.getLogger(__name__)

DEFAULT_MAX_NEW_TOKENS = 256


class EagleFSD:
    """Fuzzy speculative decoding on EAGLE-2 trees for one target and one head.

    Threads may use one engine, or engines of one model, at the same time, and the model meanwhile as well.

    target: a TargetModel. head: a DraftHead that fits it, or None for plain decoding only; it stays as it is,
    a copy is made where it has another device or dtype. tokenizer: for the callers. base_model, ea_model:
    what they were loaded from, for reports. head_dtype: what drafts are computed in; None is the target's
    dtype.
    """

    def __init__(
        self,
        target: TargetModel,
        head: DraftHead | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        base_model: str = "",
        ea_model: str = "",
        head_dtype: torch.dtype | None = None,
    ) -> None:
        if head is not None:
            for name, mine, its in (
                ("hidden_size", head.config.hidden_size, target.hidden_size),
                ("vocab_size", head.config.vocab_size, target.vocab_size),
            ):
                if mine != its:
                    raise ValueError(
                        f"the head's {name} is {mine} and the target's is {its}: a head drafts only for the "
                        "target it was trained on; choose the head of this target"
                    )
        self.target = target
        self.head = None if head is None else placed(head, target.device, head_dtype or target.dtype)
        self.vocabulary: Vocabulary = target
        if self.head is not None and self.head.draft_tokens is not None:
            self.vocabulary = DraftVocabulary(target, self.head.draft_tokens, self.head.fc.weight.dtype)
        self.tokenizer = tokenizer
        self.base_model = base_model
        self.ea_model = ea_model
        self.head_folder: Path | None = None  # where its calibration is looked for
        self._chooser: TreeChooser | None = None
        self._choosing = threading.Lock()  # times measured beside each other would be too long
        self._workspaces = Workspaces(target)

    @classmethod
    def from_pretrained(
        cls,
        base_model: str | os.PathLike[str] = hub.DEFAULT_TARGET,
        ea_model: str | os.PathLike[str] | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        head_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        device_map: str | dict[str, object] | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        pack: bool = True,
        graphs: bool = True,
        full_vocabulary: bool = False,
        weights_cache: bool = True,
    ) -> EagleFSD:
        """Load a target and its head.

        base_model: a Hub id (optionally `@revision`), a folder, a .gguf file, or "smollm2-135m". ea_model: a
        Hub id, a folder, or None for the head that ships with the package. dtype: None is float32 on a CPU
        and bfloat16 on CUDA. head_dtype: None is the target's; a head in bfloat16 drafts faster beside a
        target in float32, q is rounded, and lossless decoding stays lossless. pack: on a CPU keep a second,
        blocked copy of the weights where a short measurement finds that faster; not with a device_map.
        graphs: on CUDA record the parts of a step as CUDA graphs when they come a second time; not with a
        device_map.
        full_vocabulary: draft over all of the target's tokens, also with a head that has a list of frequent
        ones. weights_cache: keep what was converted of a .gguf file on disk and read that the next time.
        Raises ValueError for anything that cannot be had, does not fit or is not supported.
        """
        base_model = os.fspath(base_model)
        ea_model = None if ea_model is None else os.fspath(ea_model)
        # First what fails faster than a download.
        head_dtype = None if head_dtype is None else resolve_dtype(head_dtype, resolve_device(device))
        head_source = hub.resolve_head(ea_model, base_model)
        source = hub.resolve_target(base_model, trust_remote_code=trust_remote_code)
        model, tokenizer = hub.load_target(
            source,
            dtype=dtype,
            device=device,
            device_map=device_map,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            weights_cache=weights_cache,
        )
        movable = device_map is not None  # a packed layer would be packed again wherever it goes
        backend = find_fastest_backend(model) if pack and not movable else None
        pack_linears(model, backend)
        graphs = graphs and device_map is None and model.device.type == "cuda"
        target = TargetModel(model, Graphs(cuda_recorder(model.device)) if graphs else EAGER)
        drafts_in = head_dtype or target.dtype
        head = hub.load_head(head_source, target.hidden_size, target.vocab_size, drafts_in, target.device)
        if full_vocabulary:
            head.restrict(None)
        engine = cls(target, head, tokenizer, source.name, head_source.name, drafts_in)
        pack_linears(engine.head, backend)  # after its last move, which would pack it again
        engine.head_folder = head_source.folder
        return engine

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def draft_vocab_size(self) -> int | None:
        """How many tokens the head drafts; None where it drafts them all, or where there is no head."""
        return None if self.head is None else self.head.config.draft_vocab_size

    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        rule: AcceptanceRule | AutoThreshold | None = None,
        tree: TreeConfig | AutoTree | None = None,
        seed: Seed | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        observer: Observer | None = None,
    ) -> GenerationOutput:
        """Generate for a batch of prompts [B, L], left- or right-padded as attention_mask [B, L] says.

        rule: when a drafted token is accepted; None is Lossless(), and AutoThreshold() reads the threshold
        of a quality budget from the head's calibration. tree: the draft tree's size; total_tokens=1 is plain
        decoding, and AutoTree() measures which is fastest here, or takes the calibration's. seed: the same
        one and the same tree give the same texts; None draws a fresh one, which the output names. Row r of
        an int seed s draws from the stream (s, r), whatever else is in the batch. A sequence names each
        row's stream, so that seed=[(s, r)] gives row r again on its own. eos_token_id: None is the model's
        own. observer: is shown every step, for measurements. Without an attention_mask the model's pad
        tokens are padding, as in Hugging Face. Texts end after an end token, at max_new_tokens, or where the
        model's positions end. Raises ValueError for bad arguments, NonFiniteLogits where a step's logits are
        no numbers to choose a token by.
        """
        input_ids = as_ids(input_ids)
        started = self._start(
            input_ids,
            attention_mask,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            rule=rule,
            tree=tree,
            seed=seed,
            eos_token_id=eos_token_id,
            observer=observer,
        )
        start = time.perf_counter()  # what choosing a tree took is not part of it
        new_tokens: list[list[int]] = [[] for _ in started.stats]
        with started:
            for chunks in started.steps:
                for row, chunk in enumerate(chunks):
                    new_tokens[row] += chunk
        for row in started.stats:
            row.set_times(started.watch, time.perf_counter() - start)
        settled = {"tree": started.tree, "rule": started.rule, "seed": started.seed}
        return self._output(input_ids, new_tokens, started.stats, **settled)

    def stream(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> TokenStream:
        """Generate for one prompt [1, L] and yield its new token ids as each step emits them.

        options: the keyword arguments of `generate`, with the same defaults.
        """
        input_ids = as_ids(input_ids)
        if input_ids.ndim != 2 or len(input_ids) != 1:
            raise ValueError(
                f"input_ids has shape {list(input_ids.shape)}: a stream takes one prompt, [1, L]; use "
                "generate for a batch"
            )
        return TokenStream(self._start(input_ids, attention_mask, **options))

    def stream_batch(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> BatchStream:
        """Generate for a batch of prompts [B, L] step by step, for callers with their own reasons to end it.

        options: the keyword arguments of `generate`, with the same defaults.
        """
        return self._start(as_ids(input_ids), attention_mask, **options)

    def target_alone(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> GenerationOutput:
        """The baseline: the same prompts through the target's own Hugging Face `generate`, without drafting.

        Its random numbers are Hugging Face's: sampled texts have the same law, not the same tokens. Stats
        count one step a token. All rows end where the longest prompt leaves no position.
        """
        input_ids = as_ids(input_ids)
        seed = fresh_seed() if seed is None else seed
        require_integer("seed", seed, 0, "any will do")
        sampling = SamplingConfig(temperature, top_k, top_p)
        prompts = Prompts.of(self.target, input_ids, attention_mask, max_new_tokens)
        limit = min(prompts.limits)
        new_tokens, stats = generate_alone(
            self.target, prompts.rows, limit, sampling, seed, self.pad_token_id
        )
        return self._output(input_ids, new_tokens, stats, seed=None if sampling.greedy else seed)

    def choose_tree(
        self,
        wanted: AutoTree,
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        batch: int,
        context: int,
        prompts: Sequence[Sequence[int]] = (),
    ) -> Choice:
        """The draft tree with the most tokens per second for texts of about `context` tokens, `batch` at a
        time: measured the first time, which takes half a minute and more, and remembered on disk.

        prompts: token ids of texts to watch the head on, where our own cannot be had: without a tokenizer, or
        where its chat template takes no lone user turn.
        """
        if self.head is None:
            raise ValueError("there is no draft head to choose a tree for: pass one to EagleFSD")
        self._check_beam(wanted.top_k or 1)
        with self._choosing:
            if self._chooser is None:
                self._chooser = TreeChooser(
                    self.target, self.head, self.make_drafter, self._drafted, self.base_model
                )
            choice = self._chooser(
                wanted,
                lambda: encode_example_prompts(self.tokenizer) or prompts,
                rule,
                sampling,
                batch,
                context,
            )
        logger.info("%s", choice)
        return choice

    def free_memory(self) -> None:
        """Drop the caches and recordings that are kept on a GPU for the next batch; it makes its own."""
        self._workspaces.clear()

    def calibration(self, sampling: SamplingConfig) -> Calibration:
        """The thresholds found for this target and head, sampled so; ValueError where there are none."""
        if self.head_folder is None:
            raise ValueError(
                "threshold is auto: the head was not loaded from a folder, where its calibration would be; "
                "give a number"
            )
        found = read_calibration(self.head_folder / CALIBRATION)
        found.require(self.identity(), sampling)
        return found

    def identity(self) -> dict[str, Any]:
        """What tells this pair of target and head from another; it reads all of the head."""
        return models_identity(self.base_model, self.target.model, self.head)

    def require_rule(self, rule: object) -> None:
        """ValueError for what is no acceptance rule, or none that this head's drafts can be held to."""
        if isinstance(rule, type) or not hasattr(rule, "chances"):
            raise ValueError(f"rule is {rule!r}: it must be a rule, such as Fuzzy(threshold=0.3)")
        if isinstance(rule, Fuzzy) and rule.threshold > 0 and self.draft_vocab_size is not None:
            require_sparse(rule.divergence, self.draft_vocab_size)

    @property
    def pad_token_id(self) -> int:
        """What fills short rows: the tokenizer's pad token, else the first end token, else 0."""
        known = getattr(self.tokenizer, "pad_token_id", None)
        return known if known is not None else next(iter(self.target.eos_token_ids), 0)

    def _start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        rule: AcceptanceRule | AutoThreshold | None = None,
        tree: TreeConfig | AutoTree | None = None,
        seed: Seed | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        observer: Observer | None = None,
    ) -> BatchStream:
        """Check the arguments, settle rule and tree and set one batch up; nothing of the texts runs before
        the first step is asked for."""
        prompts = Prompts.of(self.target, input_ids, attention_mask, max_new_tokens)
        tree = TreeConfig() if tree is None else tree
        if not isinstance(tree, (TreeConfig, AutoTree)):
            raise ValueError(
                f"tree is {tree!r}: it must be a TreeConfig, such as TreeConfig(16, 5, 8), or AutoTree()"
            )
        sampling = SamplingConfig(temperature, top_k, top_p)
        if isinstance(rule, AutoThreshold):
            found = self.calibration(sampling)
            rule = Fuzzy.from_calibration(found, **asdict(rule))
            tree = found.tree if isinstance(tree, AutoTree) else tree
        if rule is not None:
            self.require_rule(rule)
        rule = Lossless() if rule is None else rule
        if isinstance(tree, AutoTree):
            tree = self.choose_tree(
                tree, rule, sampling, len(prompts), prompts.context, prompts.rows[:4]
            ).tree
        self._check_tree(tree, prompts.lengths)
        for part in filter(None, (self.target.model, self.head)):
            repack_changed(part)
        request = Request(
            tokens=prompts.tokens.to(self.device),
            lengths=prompts.lengths,
            limits=prompts.limits,
            eos_token_ids=end_token_ids(self.target, eos_token_id),
            rule=rule,
            tree=tree,
            sampling=sampling,
            observer=observer,
        )
        if seed is None:  # what draws nothing leaves torch's generator alone
            seed = 0 if sampling.greedy else fresh_seed()
        random = RowRandom(seed, len(prompts), self.device)
        workspace = self._workspaces.take(
            len(prompts), max(prompts.lengths), prompts.longest_text, tree, self.make_drafter
        )
        stats = [GenerationStats() for _ in prompts.lengths]
        watch = Stopwatch()
        steps = self._decode(request, workspace, random, stats, watch)
        return BatchStream(steps, stats, watch, tree, rule, None if sampling.greedy else seed)

    def _decode(
        self,
        request: Request,
        workspace: Workspace,
        random: RowRandom,
        stats: Sequence[GenerationStats],
        watch: Stopwatch,
    ) -> Iterator[list[list[int]]]:
        """The loop's steps; the workspace is spare afterwards."""
        try:
            parts = (workspace.session, workspace.drafter, random, stats, watch, workspace.judge)
            yield from decode(request, *parts)
        finally:
            self._workspaces.give_back(workspace)

    def _check_tree(self, tree: TreeConfig, lengths: Sequence[int]) -> None:
        """ValueError for a tree that cannot be drafted; a warning where the head was not trained so far."""
        if tree.total_tokens == 1:
            return
        if self.head is None:
            raise ValueError(
                "there is no draft head: pass one to EagleFSD, or a tree of one node, TreeConfig(1)"
            )
        self._check_beam(tree.top_k)
        trained = self.head.config.trained_positions or self.head.config.max_position_embeddings
        if max(lengths) > trained:
            logger.warning(
                "prompt of %d tokens: the head was trained up to position %d, so it may draft worse; the "
                "text is not affected",
                max(lengths),
                trained,
            )

    def _check_beam(self, top_k: int) -> None:
        if top_k > self._drafted:
            whose = "vocabulary" if self.draft_vocab_size is None else "head's draft vocabulary"
            raise ValueError(
                f"top_k of the tree is {top_k}: the {whose} has {self._drafted} tokens; lower top_k"
            )

    @property
    def _drafted(self) -> int:
        """How many tokens the draft scores."""
        return self.draft_vocab_size or self.target.vocab_size

    def make_drafter(self, batch: int, capacity: int) -> EagleDrafter:
        """A drafter for so many texts, of at most so many pairs and beam nodes each."""
        return EagleDrafter(self.head, self.vocabulary, batch, capacity, self.device, self.target.stepper)

    def _output(
        self,
        input_ids: Tensor,
        new_tokens: list[list[int]],
        stats: list[GenerationStats],
        **settled: Any,
    ) -> GenerationOutput:
        added = pad_right(new_tokens, self.pad_token_id).to(input_ids.device)
        sequences = torch.cat((input_ids, added), dim=1)
        return GenerationOutput(sequences, new_tokens, stats, **settled)


def placed(head: DraftHead, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """The head there; a copy where that is elsewhere, for another engine may use the given one."""
    weight = head.fc.weight
    return head if (weight.device, weight.dtype) == (device, dtype) else copy.deepcopy(head).to(device, dtype)
