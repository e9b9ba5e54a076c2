"""Measure whether children drawn from q would be accepted more often: JSONL of rows, and a table to stdout.

    python eval/sampled_children.py --prompts data/prompts_*.jsonl --output runs/sampled_children.jsonl

The package takes the K likeliest tokens of q as a node's children, and draws once from p. Others draw the
children from q and try them one after the other, p being replaced by what is left of it. Lossless texts are
decoded, and p and q of every node on their paths that has children are read. The table has the chance that a
child is accepted, in per cent, as a mean over the contexts; the module acceptance beside this one says what
the columns are. All are exact but for draws without replacement of more than two children, which have a
standard error. A context is a node of the accepted path below which the tree has children: the root of every
step, and the nodes that the walk passed. Gains are over the likeliest children, and brackets are 95 %
intervals of a bootstrap over prompts. "the tree's" has as many children in each context as the tree has
there. A run that was stopped goes on at the first missing row.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Lossless, Verdict, Verified
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.sampling import warp
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap, Sums, changes
from eagle_fsd.evaluation.cli import check_sizes, load_engine, parsed, parser_of, say
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.measure.observers import Meter, inside
from eagle_fsd.evaluation.measure.sweep import Cell, Questions, run
from eagle_fsd.evaluation.sampled_children import acceptance
from eagle_fsd.files.provenance import provenance

LIKELIEST, WITHOUT, MIXED = WAYS = ("likeliest", "without_replacement", "likeliest_and_one_drawn")
COLUMNS = ("the likeliest", "drawn without replacement", "K - 1 likeliest, one drawn")
TREE = "the tree's"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Contexts:
    """Distributions in n contexts.

    rows: [n], the row of the batch. p: [n, W], the target's, after the warpers, of the tokens that the draft
    covers. q: [n, W] the draft's, warped as well. log_q: [n, W], as drafted. children: [n], how many the tree
    has there. own: [n], what p has on them.
    """

    rows: Tensor
    p: Tensor
    q: Tensor
    log_q: Tensor
    children: Tensor
    own: Tensor


def contexts(
    verified: Verified,
    verdict: Verdict,
    emitted: Mapping[int, int],
) -> Contexts:
    """Read the contexts of one step. emitted: by row, how many tokens the step gave it."""
    tree, sampling = verified.tree, verified.sampling
    nodes = verdict.path.masked_fill(~inside(verdict, emitted), -2)  # -1 marks unused rows of log_q
    row, place, owned = (nodes[:, :, None] == tree.owners[:, None, :]).nonzero(as_tuple=True)  # n each
    node = nodes[row, place]
    p = warp(verified.logits[row, node], sampling)  # [n, V]
    log_q = tree.log_q[row, owned]  # [n, W]
    mine = tree.parents[row] == node[:, None]  # [n, N]
    own = (p.gather(1, tree.tokens[row]) * mine).sum(1)
    drafted = p if tree.drafted is None else p[:, tree.drafted]
    return Contexts(row, drafted, warp(log_q, sampling), log_q, mine.sum(1), own)


class ChildrenMeter(Meter):
    """A meter of lossless texts: by row, sums over the contexts of what each way would accept.

    most: the largest number of children, and at least what the tree can have. draws, random: see
    `without_replacement`; all meters of a run share the random numbers.
    """

    def __init__(
        self,
        most: int,
        draws: int,
        random: np.random.Generator,
        mode: str,
        rows: int,
    ) -> None:
        self.most, self.draws, self.random = most, draws, random
        self.contexts = torch.zeros(rows, dtype=torch.int64)
        self.children = torch.zeros(rows, dtype=torch.int64)
        # Of the ways, and then the variance of the estimated one, by number of children. The last column is
        # for as many children as the tree has in each context.
        self.sums = torch.zeros(rows, len(WAYS) + 1, most + 1, dtype=torch.float64)

    def see(self, verified: Verified, verdict: Verdict, emitted: Mapping[int, int]) -> None:
        found = contexts(verified, verdict, emitted)
        if len(found.rows):
            rows = torch.tensor(list(emitted))[found.rows.cpu()]
            self.contexts.index_add_(0, rows, torch.ones_like(rows))
            self.children.index_add_(0, rows, found.children.cpu())
            self.sums.index_add_(0, rows, self.accepted(found).cpu())

    def accepted(self, found: Contexts) -> Tensor:
        """Return what every way accepts, and the variance: [n, ways + 1, most + 1]."""
        p, q, most = found.p, found.q, self.most
        drawn = acceptance.without_replacement(p, q, most, self.draws, self.random)
        ways = (acceptance.likeliest(p, found.log_q, most), drawn.mean)
        mixed = acceptance.likeliest_and_one_drawn(p, q, most)
        table = torch.stack([*ways, mixed, drawn.variance], dim=1)
        place = (found.children - 1)[:, None, None].expand(-1, table.shape[1], 1)
        own = table.gather(-1, place)
        own[:, WAYS.index(LIKELIEST), 0] = found.own.double()
        return torch.cat((table, own), dim=-1)

    def row(self, row: int) -> dict[str, Any]:
        """Return the sums of a row: a list by number of children, from 1, and "tree" for the tree's own."""
        sums = {
            name: {"by_children": table[:-1], "tree": table[-1]}
            for name, table in zip((*WAYS, "variance"), self.sums[row].tolist(), strict=True)
        }
        about = {"contexts": int(self.contexts[row]), "children": int(self.children[row])}
        return {"sampled_children": {**about, **sums}}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "float32")
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSONL of rows; a later run resumes from it")
    form = "T[/TOP_K[/TOP_P]]"
    add("--sampling", nargs="+", default=["0.6", "1"], metavar=form, help="default: %(default)s")
    add("--children", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers K; default: %(default)s")
    add("--tree", default=str(TreeConfig()), help=f"{TreeConfig.FORM}; default: %(default)s")
    add("--batch-size", type=int, default=1, help="default: %(default)s")
    add("--draws", type=int, default=8, help="runs of an estimate in each context; default: %(default)s")
    add("--seed", type=int, default=0, help="of the texts and of the estimates; default: %(default)s")
    with parsed(parser, argv) as arguments:
        samplings, tree = check(arguments)
        engine, most = load_engine(arguments), max(*arguments.children, tree.top_k)
        drafted = engine.draft_vocab_size or engine.target.vocab_size
        require_integer("children", most, 1, "the draft covers no more tokens", drafted)
        tokens = arguments.max_new_tokens
        questions = Questions.of_prompts(arguments.prompts, engine, arguments.limit, arguments.skip, tokens)
        rule = Lossless(share_noise=False)  # q is wanted as it is where nothing is known of the draws
        cells = [Cell(questions, rule, one, tree, tokens, arguments.seed) for one in samplings.values()]
        measured = [most, arguments.draws, None]  # None: rows of before may say a temperature of q's own
        meter = functools.partial(ChildrenMeter, *measured[:2], np.random.default_rng(arguments.seed))
        about = (provenance(engine.device), meter, measured)
        answers = run(engine, cells, arguments.output, arguments.batch_size, *about)
        shown = table(dict(zip(samplings, answers, strict=True)), arguments.children)
    say(shown)


def check(arguments: argparse.Namespace) -> tuple[dict[str, SamplingConfig], TreeConfig]:
    """Return the samplings, by their words, and the tree. Raises ValueError for what cannot be measured."""
    check_sizes(arguments, arguments.batch_size)
    for count in arguments.children:
        require_integer("children", count, 1, "1, 2, 4 and 8 are usual")
    require_integer("draws", arguments.draws, 2, "a standard error needs two; 8 is usual")
    if arguments.lookup:
        raise ValueError("lookup is set: a copied token has no q to draw from; leave --lookup out")
    tree = TreeConfig.parse(arguments.tree)
    if tree.total_tokens < 2:
        raise ValueError(f"tree is {arguments.tree!r}: it has no drafts to look at; 16/5/8 has")
    samplings = {word: SamplingConfig.parse(word) for word in arguments.sampling}
    if any(sampling.greedy for sampling in samplings.values()):
        raise ValueError("temperature is 0: nothing is drawn there; take one above 0, such as 0.6")
    return samplings, tree


def table(answers: Mapping[str, Sequence[Row]], numbers: Sequence[int]) -> str:
    """Write a line per sampling and number of children. answers: the rows of every sampling.

    Raises ValueError where no context was found.
    """
    gains = {way: f"{COLUMNS[WAYS.index(way)]}: gain" for way in (WITHOUT, MIXED)}
    titles = ["sampling", "contexts", "children K", *COLUMNS, *gains.values()]
    lines = []
    for sampling, rows in answers.items():
        found = [row["sampled_children"] for row in rows]
        contexts = sum(one["contexts"] for one in found)
        if not contexts:
            raise ValueError(f"sampling {sampling}: no node has drafts with a q; name a head (--ea-model)")
        for number in (*numbers, None):
            sums = {way: sums_of(found, way, number) for way in (*WAYS, "variance")}
            cells = [f"{100 * one.numerator.sum() / contexts:.1f}" for one in sums.values()][: len(WAYS)]
            error = 100 * math.sqrt(sums["variance"].numerator.sum()) / contexts
            if error:
                cells[WAYS.index(WITHOUT)] += f" ± {error:.2f}"
            gained = changes(
                {way: sums[way] for way in gains}, dict.fromkeys(gains, sums[LIKELIEST]), Bootstrap()
            )
            cells += [f"{gained[way].difference.scaled(100):+.1f}" for way in gains]
            mean = sum(one["children"] for one in found) / contexts
            shown = f"{TREE}, {mean:.1f}" if number is None else str(number)
            lines.append([sampling, str(contexts), shown, *cells])
    return markdown_table(titles, lines)


def sums_of(found: Sequence[Row], way: str, number: int | None) -> Sums:
    """Return a way's sums over the contexts of every prompt. number: of children; None: as the tree has."""
    values = [one[way]["tree"] if number is None else one[way]["by_children"][number - 1] for one in found]
    return Sums(np.array(values), np.array([float(one["contexts"]) for one in found]))
