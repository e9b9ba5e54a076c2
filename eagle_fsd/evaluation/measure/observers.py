"""How far a rule's next-token distribution is from the target's, and how likely the target finds a text.

One lossless text serves all rules, in closed form. At a verified tree the target's p is known at every node,
and a rule's chances follow from it. So the expected number of tokens that the step would emit under the rule,
and the expected TV and KL of their distributions, need no draw: with g(c) the probability that the walk goes
from a node to its child c,

    reach(root) = 1,  reach(c) = reach(parent) g(c),  tokens = sum of reach(n),  TV = sum of reach(n) TV(n).

Rules are compared on the same trees, so that the luck of their own draws and texts does not tell them apart.
What a rule's text would do to later trees is left out: compare few rules by texts of their own as well.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict, Verified, choices_of
from eagle_fsd.acceptance.output_distribution import output_distribution
from eagle_fsd.acceptance.rule_names import describe
from eagle_fsd.core.config import FIRST_FAILURE
from eagle_fsd.core.long_rows import logsumexp
from eagle_fsd.core.padding import pad_right
from eagle_fsd.decoding.prompts.prefill import read_prompts
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession


class TimedObserver(ABC):
    """An observer of steps whose time can be taken out of theirs. seconds: what observing took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        start = time.perf_counter()
        self.observe(verified, verdict, emitted)
        self.seconds += time.perf_counter() - start

    @abstractmethod
    def observe(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        """Take in a step; see Observer. On a GPU the host may wait for it."""


class Meter(TimedObserver):
    """An observer of a batch, with fields of each row's JSON object.

    tokens: by row, how many it has got so far.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tokens = [0] * rows
        self._log_p = torch.zeros(rows, dtype=torch.float64)

    def observe(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        self.see(verified, verdict, emitted)
        self._log_p[list(emitted)] += emitted_log_p(verified, verdict, emitted).cpu()
        for row, count in emitted.items():
            self.tokens[row] += count

    @abstractmethod
    def see(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        """Look at a step. emitted: by row, how many tokens the step gives it; `tokens` lacks them yet."""

    def row(self, row: int) -> dict[str, Any]:
        """Return what a row's JSON object says: log_p per token at temperature 1, null without tokens."""
        count = self.tokens[row]
        return {"log_p": float(self._log_p[row]) / count if count else None}


def emitted_log_p(verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> Tensor:
    """Return the sum of raw log p [B] of the tokens that a step gives its rows, float64."""
    path, tokens = verdict.path.clamp(min=0), verdict.tokens.clamp(min=0)  # [B, D + 1] each
    log_p = verified.logits[verified.rows, path, tokens] - logsumexp(verified.logits)[..., 0].gather(1, path)
    counts = torch.tensor(list(emitted.values()), device=path.device)
    given = torch.arange(path.shape[1], device=path.device) < counts[:, None]
    return torch.where(given, log_p.double(), 0.0).sum(1)


class DistanceMeter(Meter):
    """A meter of KL(r || p) and TV(r, p), summed over every context that got a token.

    r is the rule's next-token distribution, p the target's after the user's warpers. sums: of KL and TV.
    fuzzy_at: by row, the places of the tokens that were fuzzy accepts.
    """

    def __init__(self, mode: str, rows: int) -> None:
        super().__init__(rows)
        self.mode = mode
        self.sums = torch.zeros(rows, 2, dtype=torch.float64)
        self.fuzzy_at: list[list[int]] = [[] for _ in range(rows)]

    def see(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        for row, nodes in zip(emitted, verdict.fuzzy.tolist(), strict=True):
            start, count = self.tokens[row], emitted[row]
            # A node's token is emitted in its parent's context, so that the root has no part in it.
            self.fuzzy_at[row] += [start + place for place, fuzzy in enumerate(nodes[1 : count + 1]) if fuzzy]
        if verdict.chances is None:
            return
        r = output_distribution(verified, verdict.chances, verdict.weak, self.mode)
        path = verdict.path.clamp(min=0)  # [B, D]
        counts = torch.tensor(list(emitted.values()), device=path.device)
        moved = (torch.arange(path.shape[1], device=path.device) < counts[:, None]) & verdict.asked
        both = [torch.where(moved, each.gather(1, path), 0.0).sum(1) for each in (r.kl, r.tv)]
        self.sums[list(emitted)] += torch.stack(both, dim=-1).cpu()

    def row(self, row: int) -> dict[str, Any]:
        """Return the sums of a row as JSON can hold them: an infinite KL is null."""
        kl, tv = self.sums[row].tolist()
        law = {"kl": kl if math.isfinite(kl) else None, "tv": tv}
        return {**super().row(row), "law": law, "fuzzy_at": self.fuzzy_at[row]}


class Expected(NamedTuple):
    """What a step is expected to emit: tokens, and their sums of TV(r, p) and KL(r || p): [B] each."""

    tokens: Tensor
    tv: Tensor
    kl: Tensor


def expected_step(rule: AcceptanceRule, verified: Verified) -> Expected:
    """Return what this rule does with a tree, on average over the target's draws and its own."""
    tree = verified.tree
    chances, weak = choices_of(rule, verified)
    r = output_distribution(verified, chances, weak, rule.mode)
    goes = r.token  # from the parent to the node; not of the root
    if rule.mode == FIRST_FAILURE and chances is not None:  # without any, the walk follows the draws
        goes = chances.double()
    reach = start = torch.zeros_like(goes)
    start[:, 0] = 1.0  # fillers have no parent either, and are never reached
    for _ in range(tree.depth):  # each round carries reaches one level down
        reach = torch.where(tree.parents < 0, start, verified.at_parent(reach) * goes)
    return Expected(reach.sum(-1), (reach * r.tv).sum(-1), torch.where(reach > 0, reach * r.kl, 0.0).sum(-1))


class StepMeter(Meter):
    """A meter of a lossless batch: what each rule is expected to do in its steps, by row.

    Raises ValueError for a rule whose guards depend on the text so far.
    """

    def __init__(self, rules: Sequence[AcceptanceRule], rows: int) -> None:
        for rule in rules:
            if rule.max_consecutive is not None or rule.exact_prefix:
                raise ValueError(
                    f"rule is {describe(rule)}: max_consecutive and exact_prefix depend on what was accepted "
                    "before, which lossless texts do not say; leave them out, or sweep without --same-trees"
                )
        super().__init__(rows)
        self.rules = rules
        self.sums = torch.zeros(rows, len(rules), 3, dtype=torch.float64)

    def see(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        columns = [torch.stack(expected_step(rule, verified), dim=-1) for rule in self.rules]
        self.sums[list(emitted)] += torch.stack(columns, dim=1).cpu()

    def row(self, row: int) -> dict[str, Any]:
        """Return every rule's expected tokens and distances as JSON can hold them: an infinite KL is null."""
        found = []
        for rule, (tokens, tv, kl) in zip(self.rules, self.sums[row].tolist(), strict=True):
            law = {"tv": tv, "kl": kl if math.isfinite(kl) else None}
            found.append({"rule": describe(rule), "new_tokens": tokens, "law": law})
        return {**super().row(row), "expected": found}


@torch.inference_mode()
def likelihoods(
    target: TargetModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[float | None]:
    """Return every answer's mean log-probability per token at temperature 1; None if it is empty."""
    found: list[float | None] = []
    for answer, features in zip(answers, answer_features(target, prompts, answers), strict=True):
        log_p = target.logits(features).log_softmax(-1)  # of one answer at a time: they are large
        mine = log_p.gather(1, torch.tensor(answer, dtype=torch.int64, device=target.device)[:, None])
        found.append(float(mine.mean()) if answer else None)
    return found


@torch.inference_mode()
def answer_features(
    target: TargetModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return the features [n, d] before each of an answer's n tokens, which are read as parts of prompts."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    counts = [len(text) - 1 for text in texts]
    session = TargetSession(target, len(texts), max(counts))
    features = read_prompts(pad_right(texts, 0)[:, :-1].to(target.device), counts, session)
    return [
        mine[len(prompt) - 1 : count] for mine, prompt, count in zip(features, prompts, counts, strict=True)
    ]
