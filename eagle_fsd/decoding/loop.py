"""The decoding loop: draft, verify, accept, keep, until every row is done. It knows token ids and no text.

The last prompt token is the first root: it is the newest token not yet run through the target, like every
root after it. So every step, the first included, emits the tokens of its tree, and tau needs no exception for
the prompt.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict
from eagle_fsd.core.padding import pad_right
from eagle_fsd.core.tree import DraftTree, root_only
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.logits.shared_noise import draft_noise
from eagle_fsd.decoding.on_ranks.agreement import check_step, rank_0_tree, rank_0_verdict
from eagle_fsd.decoding.prompts.prefill import prefill
from eagle_fsd.decoding.prompts.prefix_cache import PrefixCache
from eagle_fsd.decoding.request import Text
from eagle_fsd.decoding.steps.emission import Step, emit_or_fail, note_logprobs, to_host
from eagle_fsd.decoding.steps.rules import Group, apply_rules, show
from eagle_fsd.drafting.drafter import Drafter, NextTokens, Seen
from eagle_fsd.target.session import TargetSession


@torch.inference_mode()
def decode(
    batch: Batch, texts: Sequence[Text], prefixes: PrefixCache | None = None
) -> Generator[list[list[int]]]:
    """Decode texts in an empty batch of as many rows.

    Yields, after every step, the tokens that each text emitted in it (none once it is done). prefixes: kept
    texts, from one of which a single text goes on; its own is kept when it ends, unless by an error.
    """
    prompts = [text.prompt for text in texts]
    with batch.watch("prefill"):
        if prefixes is not None:
            roots, texts[0].stats.reused_tokens = prefixes.read(prompts[0], batch.target, batch.drafter)
        else:
            tokens = pad_right(prompts, 0).to(batch.target.device)
            roots = prefill(tokens, list(map(len, prompts)), batch.target, batch.drafter)
        batch.begin(texts, roots)
    try:
        while batch.active:
            emitted = step(batch)
            yield [emitted.get(text, []) for text in texts]
            for text in texts:
                if text.failure is not None:
                    raise text.failure
    except GeneratorExit:  # the caller leaves it between two steps
        keep_text(batch, prefixes)
        raise
    keep_text(batch, prefixes)


def keep_text(batch: Batch, prefixes: PrefixCache | None) -> None:
    """Keep the text of a batch's only row; None keeps nothing."""
    if prefixes is not None:
        tokens = batch.shown_tokens(0)
        prefixes.keep(tokens, len(tokens), prefixes.limit, batch.target, batch.drafter, 0)


def step(batch: Batch, keep_done: bool = False) -> dict[Text, list[int]]:
    """Run one step of a batch and return the tokens that each unfinished text emitted in it.

    keep_done: keep the rows of finished texts, for waiting texts to take their places. A text whose options
    leave it no token has failed, see Text; the others go on. Raises NonFiniteLogits if the target's own
    logits are to blame.
    """
    with batch.accept_step.stepper.running(len(batch.texts)):
        tree = draft(batch)
        with batch.watch("verify"):
            logits, features = batch.target.verify(tree)
        verdict, steps, emitted = accept(batch, tree, logits)
        with batch.watch("keep"):
            if batch.active:
                pairs = zip(batch.texts, steps, strict=True)
                shown = [[] if text.done else of_text.tokens for text, of_text in pairs]
                batch.roots = keep(batch.target, batch.drafter, verdict, features, shown, logits)
                if not keep_done:
                    batch.drop_done_rows()
    return emitted


def draft(batch: Batch) -> DraftTree:
    """Draft a tree on every row's root. On several ranks it is rank 0's."""
    target, ranks = batch.target, batch.target.ranks
    check_step(ranks, [text.stats.new_tokens for text in batch.texts])
    with batch.watch("accept"):  # it is a part of drawing tokens, and no forward
        noise = draft_noise(batch.texts, batch.random, batch.tree, target.vocab_size)
    with batch.watch("draft"):
        if batch.tree.total_tokens == 1:  # the drafter is not asked, but is still shown what is emitted
            tree = root_only(batch.roots, 0)
        else:
            tree = batch.drafter.draft(batch.roots, batch.tree, noise)
        return rank_0_tree(ranks, tree, batch.tree.total_tokens)


def accept(
    batch: Batch, tree: DraftTree, logits: Tensor
) -> tuple[Verdict, list[Step], dict[Text, list[int]]]:
    """Apply each text's rule to its tree, and give each unfinished text the tokens of its path.

    logits: [B, N, V]. Returns the verdict, its part of every row on the host, and the tokens emitted.
    """
    ranks, groups = batch.target.ranks, list[Group]()
    with batch.watch("accept"):
        verdict = rank_0_verdict(ranks, tree, lambda: apply_rules(batch, tree, logits, groups))
        steps = to_host(verdict, tree.sources)  # the one place where a step waits
        emitted = {
            text: emit_or_fail(text, row, steps[row], logits, verdict, alone=not ranks.several)
            for row, text in enumerate(batch.texts)
            if not text.done
        }
        note_logprobs(batch.texts, emitted, logits, verdict)
    if batch.observer is not None:
        show(batch.observer, batch.texts, groups, emitted)
    return verdict, steps, emitted


def keep(
    target: TargetSession,
    drafter: Drafter,
    verdict: Verdict,
    features: Tensor,
    tokens: Sequence[Sequence[int]],
    logits: Tensor | None = None,
) -> Tensor:
    """Commit the path, show the drafter what it needs of the step, and return the next roots [B].

    features: [B, N, d], and logits: [B, N, V], of all nodes. tokens: those that each row emits, one for each
    node of its path to commit.
    """
    counts = [len(row) for row in tokens]
    target.keep(verdict.path, counts)
    before = None
    if drafter.needs.features:
        # The token after a node was chosen from the node's feature.
        nodes = verdict.path.clamp(min=0)[:, :, None].expand(-1, -1, features.shape[-1])
        before = features.gather(1, nodes)
    lists = None
    if drafter.needs.next_tokens and logits is not None:
        lists = NextTokens.from_logits(logits, drafter.needs.next_tokens)
    drafter.extend(Seen(verdict.tokens.clamp(min=0), counts, before, lists, tokens))
    return verdict.next_token
