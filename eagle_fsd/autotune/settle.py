"""Settle what a caller leaves open: the threshold of a quality budget, and the size of the draft tree."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless, require_rule
from eagle_fsd.acceptance.calibration import (
    FILE,
    Calibration,
    TooWarm,
    device_kind,
    find_calibration,
    format_sampling,
    plan_holds,
    read_calibrations,
)
from eagle_fsd.acceptance.divergence import require_listed, require_sparse
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.acceptance.other_rules import PublishedFSD
from eagle_fsd.autotune.tree_chooser import TreeChooser
from eagle_fsd.autotune.tree_search import Choice, usual_tree
from eagle_fsd.core.config import AutoThreshold, AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.decoding.options import GenerationOptions
from eagle_fsd.decoding.request import Prompts, Request, end_token_ids
from eagle_fsd.drafting.drafter import DrafterSpec
from eagle_fsd.files.fingerprints import models_identity, state_of
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.chat import encode_as_trained
from eagle_fsd.text.grammar import compile_form
from eagle_fsd.text.stop_strings import make_stoppers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
WITHOUT_HEAD = (
    "name one, turn lookup on (--lookup, lookup=True), or take a tree of one node (--total-tokens 1, "
    "TreeConfig(1))"
)

# The drafter is observed on these texts while a tree is chosen for it.
EXAMPLE_PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that reverses the words of a sentence.",
    "Tom has 3 boxes with 12 pencils each. He gives 7 pencils away. How many are left?",
    "Write a short story about a lighthouse keeper and a storm.",
)


class Settler:
    """Settles rules and trees for one target and drafter.

    drafter: None for plain decoding only. name: what the target was loaded from. tokenizer: encodes the
    example prompts to observe the drafter on. folder: where the drafter's calibration is.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DrafterSpec | None,
        name: str = "",
        tokenizer: PreTrainedTokenizerBase | None = None,
        folder: Path | None = None,
    ) -> None:
        self.target, self.drafter, self.name = target, drafter, name
        self.tokenizer, self.folder = tokenizer, folder
        # What a TreeChooser is to be asked, see AutoTree.later.
        self._postponed: tuple[Any, ...] | None = None
        self._chooser: TreeChooser | None = None
        self._told: set[str] = set()  # what was said about budgets
        self._identity: tuple[Any, dict[str, Any]] | None = None  # and the state of the weights then
        self._choosing = threading.Lock()  # concurrent measurements would slow each other down

    def draft_with(self, drafter: DrafterSpec) -> None:
        """Settle for other weights of the same head: trees stay those chosen, its calibration is void."""
        self.drafter, self._identity = drafter, None

    def settle(
        self, options: GenerationOptions, prompts: Prompts, together: int | None = None
    ) -> tuple[AcceptanceRule, TreeConfig]:
        """Return the rule and tree for these prompts. Raises ValueError if the drafter cannot serve them.

        together: how many of them are decoded together; None: all.
        """
        rule, tree, sampling, calibrated = options.rule, options.tree, options.sampling, None
        if isinstance(rule, AutoThreshold):
            given = tree if isinstance(tree, TreeConfig) else None
            rule, calibrated = self.within_budget(rule, sampling, given)
            if tree in (None, AutoTree()):  # sizes that are given are kept
                tree = calibrated or tree
        rule, tree = Lossless() if rule is None else rule, tree or TreeConfig()
        self.require_rule(rule)
        if isinstance(tree, AutoTree):
            setting = (sampling, together or len(prompts), prompts.context, prompts.rows[:4])
            tree = self._tree_now(tree, rule, *setting)
            plans = isinstance(rule, Fuzzy) and rule.price > 0
            holds = calibrated is None or (plans and plan_holds(calibrated, tree))
            if isinstance(options.rule, AutoThreshold) and not holds:
                rule, _ = self.within_budget(options.rule, sampling, tree)
        self.check_tree(tree, prompts.lengths)
        return rule, tree

    def request(self, options: GenerationOptions, prompts: Prompts, together: int | None = None) -> Request:
        """Return the request for these prompts, with all that was left open; see `settle`."""
        rows, kept = prompts.rows, options.prompt_cache is not None
        self.target.ranks.check_alike("generate", rows, prompts.limits, options.sampling, options.seed, kept)
        rule, tree = self.settle(options, prompts, together)
        ends = end_token_ids(self.target, options.eos_token_id)
        stoppers = make_stoppers(self.tokenizer, options.stops, rows)
        constraint = compile_form(options.form, self.tokenizer, self.target.vocab_size)
        return options.request(prompts, ends, rule, tree, stoppers, constraint)

    def choose_tree(
        self,
        wanted: AutoTree,
        rule: AcceptanceRule,
        sampling: SamplingConfig,
        batch: int,
        context: int,
        prompts: Sequence[Sequence[int]] = (),
    ) -> Choice:
        """Choose the draft tree with the most tokens per second; see EagleFSD.choose_tree."""
        if not isinstance(wanted, AutoTree):
            raise ValueError(f"wanted is {wanted!r}: it must be an AutoTree, such as AutoTree(depth=5)")
        chooser = self._chooser_of(wanted)
        with self._choosing:
            choice = chooser(wanted, partial(self._texts, prompts), rule, sampling, batch, context)
        logger.info("%s", choice)
        return choice

    @property
    def postpones(self) -> bool:
        """Whether a tree is to be chosen that texts did not wait for."""
        return self._postponed is not None

    def measure_postponed(
        self, goes_on: Callable[[], bool] = lambda: True, more: str = "Ctrl-C puts it off"
    ) -> Choice | None:
        """Choose the tree that texts did not wait for; return None if there is none, or not yet.

        A machine that is busy, or becomes so, is left alone: its times would not be remembered. Then, or once
        goes_on() is false, the tree is chosen another time. more: what ends it early, for its first line.
        """
        asked, self._postponed = self._postponed, None
        if asked is None:
            return None
        chooser = self._chooser_of(asked[0])
        announced = chooser.announced
        with self._choosing:
            choice = chooser.if_quiet(*asked, goes_on=goes_on, more=f"; {more}")
        if choice is not None:
            logger.info("%s", choice)
            return choice
        self._postponed = asked
        if goes_on():
            level = logging.INFO if announced == chooser.announced else logging.WARNING
            logger.log(level, "the machine is busy: the draft tree's size is measured another time")
        return None

    def _tree_now(self, wanted: AutoTree, *asked: Any) -> TreeConfig:
        """Return the tree that `choose_tree` chooses, or a usual one where measuring it is put off."""
        if wanted.later:
            chooser, (*terms, prompts) = self._chooser_of(wanted), asked
            with self._choosing:
                known = chooser.remembered(wanted, partial(self._texts, prompts), *terms)
            if known is None:  # encoded now: another thread may measure, while this one encodes others
                self._postponed = (wanted, partial(list, self._texts(prompts)), *terms)
                return usual_tree(wanted, self.target.device.type, self.tokens)
        return self.choose_tree(wanted, *asked).tree

    def _chooser_of(self, wanted: AutoTree) -> TreeChooser:
        """Return what chooses trees. Raises ValueError if such a tree cannot be drafted."""
        if self.drafter is None:
            raise ValueError(f"there is no draft head to choose a tree for: {WITHOUT_HEAD}")
        self.check_beam(wanted.top_k or 1)
        with self._choosing:
            if self._chooser is None:
                self._chooser = TreeChooser(self.target, self.drafter, self.name)
        return self._chooser

    def _texts(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the texts to observe the drafter on: the example prompts, or else these."""
        return encode_example_prompts(self.tokenizer) or prompts

    def within_budget(
        self, wanted: AutoThreshold, sampling: SamplingConfig, tree: TreeConfig | None = None
    ) -> tuple[AcceptanceRule, TreeConfig | None]:
        """Return the fastest rule that the calibration puts inside a budget, and the tree it was found with.

        tree: of the text; None: it will be the calibration's. The rule is Lossless(), and the tree None,
        where lossless text is faster, since its draft knows the noise (see core/randomness/noise.py), at a
        warm sampling that no calibration covers, and without a draft. Raises ValueError if there is no rule
        inside the budget.
        """
        if tree is not None and tree.total_tokens == 1:
            return Lossless(), None
        asked = format_sampling(sampling)
        try:
            whole = self._find_calibration(sampling, wanted, tree)
        except TooWarm:
            if not (wanted.free and sampling.warm):
                raise
            logger.warning(
                "no calibration is as warm as %s: the text is lossless, which is inside every budget; "
                "eval/calibrate.py --sampling %s measures a threshold",
                asked,
                asked,
            )
            return Lossless(), None
        found = whole.for_tree(wanted, tree)
        if found.lossless_is_fastest(wanted, sampling):
            budget = wanted.quality_budget
            logger.info("no rule inside the budget of %g is as fast as lossless text at %s", budget, asked)
            return Lossless(), None
        self._say_what_differs(whole, sampling, wanted, tree)
        return Fuzzy.from_calibration(found, **asdict(wanted)), found.tree

    def calibration(self, sampling: SamplingConfig) -> Calibration:
        """Return the thresholds found for this target and head with this sampling; see find_calibration."""
        found = self._find_calibration(sampling)
        self._say_what_differs(found, sampling)
        return found

    def _find_calibration(
        self, sampling: SamplingConfig, wanted: AutoThreshold | None = None, tree: TreeConfig | None = None
    ) -> Calibration:
        if self.folder is None:
            raise ValueError(
                "quality_budget (or threshold auto): it is looked up in the calibration in a draft head's "
                "folder, and no head was loaded from one; give a threshold in its place"
            )
        known, device = read_calibrations(self.folder / FILE), device_kind(self.target.device.type)
        return find_calibration(known, self.identity(), sampling, device, wanted, tree)

    def _say_what_differs(
        self,
        found: Calibration,
        sampling: SamplingConfig,
        wanted: AutoThreshold | None = None,
        tree: TreeConfig | None = None,
    ) -> None:
        """Log once in what texts differ from those that a calibration was made with."""
        if tree is not None and found.fitting(wanted, None) and not found.fitting(wanted, tree):
            self._tell(
                logging.WARNING,
                "the quality budget was measured with trees of %s: with %s a text may change more; take that "
                "tree, or measure this one with eval/calibrate.py --tree %s",
                *(found.tree, tree, tree),
            )
        if found.sampling != sampling:
            self._tell(
                logging.WARNING,
                "no calibration at %s: the threshold is that of %s, the next warmer sampling that was "
                "measured, which moves more as a rule; eval/calibrate.py --sampling %s measures this one",
                *(format_sampling(one) for one in (sampling, found.sampling, sampling)),
            )
        made_in, mine = found.weight_format, self.target.weight_format
        if made_in != mine:  # the shipped head's budgets held in another format, too: see docs/quality.md
            self._tell(
                logging.INFO,
                "the quality budget was measured with weights in %s, and these are in %s: what a threshold "
                "costs may differ a little; eval/calibrate.py --weight-format %s measures it",
                *(made_in, mine, mine),
            )

    def _tell(self, level: int, message: str, *parts: object) -> None:
        text = message % parts
        if text not in self._told:
            self._told.add(text)
            logger.log(level, "%s", text)

    def identity(self) -> dict[str, Any]:
        """Return a fingerprint of this target and drafter. The first call reads all of the drafter's weights.

        The others do so after a change of weights. If the target is split among ranks, all must call this
        the first time, and its answer is kept.
        """
        network = None if self.drafter is None else self.drafter.network
        state = None if self.target.ranks.several else state_of((self.target.held, network))
        if self._identity is None or self._identity[0] != state:
            self._identity = state, models_identity(self.target.identity(self.name), self.drafter)
        return copy.deepcopy(self._identity[1])

    def require_rule(self, rule: object) -> None:
        """Raise ValueError unless this is an acceptance rule that works with this drafter's drafts."""
        require_rule(rule)
        if not isinstance(rule, (Fuzzy, PublishedFSD)) or rule.exact:
            return
        if self.drafter is not None and self.drafter.sparse:
            require_listed(rule.divergence)
        elif self.drafts_some_tokens:
            require_sparse(rule.divergence, self.tokens)

    def check_tree(self, tree: TreeConfig, lengths: Sequence[int]) -> None:
        """Raise ValueError for a tree that cannot be drafted; warn of prompts too long for drafts."""
        if tree.total_tokens == 1:
            return
        if self.drafter is None:
            raise ValueError(f"there is no draft head to draft a tree with: {WITHOUT_HEAD}")
        self.check_beam(tree.top_k)
        longest = self.drafter.longest
        if longest is not None and max(lengths) > longest:
            logger.warning(
                "prompt of %d tokens: the draft model reads up to %d, so it drafts nothing behind it",
                max(lengths),
                longest,
            )

    def check_beam(self, top_k: int) -> None:
        """Raise ValueError for a beam wider than the number of tokens that can be drafted."""
        if top_k > self.tokens:
            whose = "head's draft vocabulary" if self.drafts_some_tokens else "vocabulary"
            raise ValueError(
                f"top_k of the tree is {top_k}: the {whose} has {self.tokens} tokens; lower top_k"
            )

    @property
    def tokens(self) -> int:
        """The number of tokens that can be drafted."""
        return self.target.vocab_size if self.drafter is None else self.drafter.tokens

    @property
    def drafts_some_tokens(self) -> bool:
        """Whether the drafter proposes only some tokens; its distribution is zero at the others."""
        return self.tokens < self.target.vocab_size


def encode_example_prompts(tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Return the example prompts as token ids; an empty list without a tokenizer that can encode them."""
    try:
        return [encode_as_trained(tokenizer, prompt) for prompt in EXAMPLE_PROMPTS]
    except ValueError:
        return []
