"""Chains of drafted tokens as trees, and what the package's own acceptance makes of them. Needs no vLLM.

vLLM drafts one token after the other: node i's only child is node i + 1. Its last node, where every drafted
token has been accepted, is vLLM's to draw from (its bonus token); at all nodes above, `accept` draws and
walks. Shapes: B requests, T drafted tokens of all requests in order, N nodes of the longest chain (root
included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.integrations.vllm.settings import EXACT, Terms

NO_TOKEN = -1  # vLLM's mark of a place without a token


@dataclass(frozen=True)
class Row:
    """A request in a step. drafted: its drafted tokens. emitted: how many tokens its text has.

    generator: the source of its random numbers; None: torch's own, as for a request without a seed in vLLM.
    """

    drafted: int
    terms: Terms = EXACT
    emitted: int = 0
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class Chains:
    """The drafted tokens of a step, of all requests in order, and what is known of them.

    tokens: [T] int64. logits: [T, V] float32, the target's where each token was drafted, after vLLM's
    processors and before the temperature. log_q: [T, V] float32, the draft's log-probabilities at
    temperature 1; None if they are not known. No relaxed rule that reads q follows a token then.
    """

    tokens: Tensor
    logits: Tensor
    log_q: Tensor | None


@dataclass
class Counts:
    """Counts of accepted tokens. They stay on the device until they are read."""

    steps: int = 0
    drafted: int = 0
    accepted: Tensor | int = 0
    fuzzy: Tensor | int = 0

    def add(self, rows: Sequence[Row], verdict: Verdict) -> None:
        self.steps += len(rows)
        self.drafted += sum(row.drafted for row in rows)
        self.accepted = self.accepted + (verdict.length - 1).sum()
        self.fuzzy = self.fuzzy + verdict.fuzzy.sum()

    def read(self) -> dict[str, int]:
        """Return the numbers; exact are the accepted tokens that the target drew itself."""
        accepted, fuzzy = int(self.accepted), int(self.fuzzy)
        return {"steps": self.steps, "drafted": self.drafted, "exact": accepted - fuzzy, "fuzzy": fuzzy}


class GeneratorUniforms:
    """Uniform random numbers from torch's generators, those of each row from its own."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows, self.device = rows, device

    def uniform(self, n: int) -> Tensor:
        """Return the next n of every row: [B, n] float64 in [0, 1)."""
        drawn = [
            torch.rand(n, generator=row.generator, dtype=torch.float64, device=self.device)
            for row in self.rows
        ]
        return torch.stack(drawn)


def chain_tree(
    tokens: Tensor, counts: Tensor, sound: Tensor, log_q: Tensor | None, vocab_size: int, most: int
) -> DraftTree:
    """Return chains as trees: the root, and below it the drafted tokens [B, N - 1], one below the other.

    counts: [B], the drafted tokens of each row; what is beyond is a filler. sound: [B, N - 1] bool, whether
    the target's logits at each node but the last are a distribution. Where they are not, nothing is known
    about the token below: it is nobody's child, so that it is rejected. log_q: [B, N - 1, V]. most: the
    nodes of the longest chain that vLLM drafts.
    """
    rows, depth = tokens.shape
    place = torch.arange(depth, device=tokens.device).expand(rows, depth)  # of each token's parent
    drafted = place < counts[:, None]
    return DraftTree(
        tokens=torch.constant_pad_nd(tokens, (1, 0)),  # no rule reads the root's token
        parents=torch.constant_pad_nd(torch.where(drafted & sound, place, -1), (1, 0), -1),
        depths=torch.constant_pad_nd(torch.where(drafted, place + 1, 0), (1, 0)),
        log_q=tokens.new_empty(rows, 0, vocab_size, dtype=torch.float32) if log_q is None else log_q,
        owners=tokens.new_empty(rows, 0) if log_q is None else torch.where(drafted, place, -1),
        depth=depth,
        most=most,
    )


def accept_chains(
    rows: Sequence[Row], chains: Chains, bonus: Tensor, most: int, counts: Counts | None = None
) -> Tensor:
    """Return the tokens that every request emits: [B, N] int32, NO_TOKEN padded.

    bonus: [B], vLLM's draw after all drafted tokens of a request. most: see `chain_tree`. counts: is added
    to. Requests of the same terms go through `accept` together; a request's random numbers, and so its text,
    do not depend on the others.
    """
    width = max((row.drafted for row in rows), default=0) + 1
    out = torch.full((len(rows), width), NO_TOKEN, dtype=torch.int32, device=bonus.device)
    # Where nothing was drafted, vLLM's draw is the text's next token.
    out[:, 0] = bonus.flatten()
    starts, groups = [0], dict[Terms, list[int]]()
    for number, row in enumerate(rows):
        starts.append(starts[-1] + row.drafted)
        if row.drafted:
            groups.setdefault(row.terms, []).append(number)
    for terms, numbers in groups.items():
        mine = [rows[number] for number in numbers]
        verdict = accept_group(terms, mine, [starts[number] for number in numbers], chains, most)
        where = on_device(numbers, bonus.device)
        drafted = on_device([row.drafted for row in mine], bonus.device)
        # The walk has drawn a token at the last node too. vLLM's takes its place.
        final = torch.where(verdict.length > drafted, bonus.flatten()[where], verdict.next_token)
        emitted = verdict.tokens.scatter(1, verdict.length[:, None] - 1, final[:, None])
        out[where, : emitted.shape[1]] = emitted.to(torch.int32)
        if counts is not None:
            counts.add(mine, verdict)
    return out


def accept_group(
    terms: Terms, rows: Sequence[Row], starts: Sequence[int], chains: Chains, most: int
) -> Verdict:
    """Return the verdict on requests of the same terms. starts: where each one's tokens begin in `chains`."""
    device, depth = chains.tokens.device, max(row.drafted for row in rows)
    drafted = on_device([row.drafted for row in rows], device)
    place = torch.arange(depth, device=device)
    beyond = place >= drafted[:, None]  # [B, N - 1]
    # A place beyond a chain repeats the chain's first one; it is a filler.
    index = on_device(starts, device)[:, None] + torch.where(beyond, 0, place)
    logits = chains.logits[index].float()  # [B, N - 1, V]
    log_q = None if chains.log_q is None else chains.log_q[index]
    sound = logits.amax(-1).isfinite()  # NaN, +inf, or nothing but -inf among the logits makes it False
    vocab_size = logits.shape[-1]
    tree = chain_tree(chains.tokens[index].long(), drafted, sound, log_q, vocab_size, most)
    # The last node's logits are vLLM's to draw from. Any others will do: what is drawn there is not used.
    verified = Verified(
        tree,
        torch.cat((logits, logits[:, :1]), dim=1),
        terms.sampling,
        torch.tensor(terms.ends, dtype=torch.int64, device=device),
    )
    emitted = on_device([row.emitted for row in rows], device)
    return accept(terms.rule, verified, GeneratorUniforms(rows, device), emitted)
