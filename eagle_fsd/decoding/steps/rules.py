"""Applies each text's rule to its row of a verified tree. Texts of one batch may have different ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.core.padding import on_device
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.logits.processing import process
from eagle_fsd.decoding.logits.shared_noise import draw_noise
from eagle_fsd.decoding.request import Observer, Terms, Text

Group = tuple[list[int], Verified, Verdict]  # rows that have the same Terms, with their tree and verdict
Emitted = Mapping[Text, Sequence[int]]  # the tokens of a step, by the unfinished texts that it had


def apply_rules(batch: Batch, tree: DraftTree, logits: Tensor, groups: list[Group]) -> Verdict:
    """Apply each text's rule and return the verdict. logits: [B, N, V]. groups: receives one per Terms."""
    emitted = on_device([text.stats.new_tokens for text in batch.texts], logits.device)
    rows_of: list[tuple[Terms, list[int]]] = []
    for row, text in enumerate(batch.texts):
        mine = next((rows for terms, rows in rows_of if terms is text.terms or terms == text.terms), None)
        if mine is None:
            rows_of.append((text.terms, [row]))
        else:
            mine.append(row)
    for terms, rows in rows_of:  # almost always one, whose tensors need no copy
        trees, of_rows, random, counts, several = tree, logits, batch.random, emitted, len(rows_of) > 1
        if several:
            index = on_device(rows, logits.device)
            trees, of_rows = tree.select(rows), logits[index]
            random, counts = batch.random.at(rows), emitted[index]
        texts = [batch.texts[row] for row in rows]
        if terms.processing.active:
            of_rows = process(of_rows, trees, [text.processor for text in texts])
        verified = Verified(trees, of_rows, terms.sampling, end_tokens(terms.eos_token_ids, logits.device))
        noise = draw_noise(texts, random, trees, logits.shape[-1])
        verdict = batch.accept_step(
            terms.rule, verified, random, counts, noise, several, changed=terms.processing.active
        )
        groups.append((rows, verified, verdict))
    return merge_verdicts([(rows, verdict) for rows, _, verdict in groups])


@functools.lru_cache(maxsize=64)  # a copy to a GPU at every step would be waited for
def end_tokens(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Return end tokens on a device, in a tensor that all callers share."""
    return torch.tensor(ids, dtype=torch.int64, device=device)


def show(observer: Observer, texts: Sequence[Text], groups: Sequence[Group], emitted: Emitted) -> None:
    """Show an observer the rows of a step's texts that emitted tokens, one call for each group."""
    for rows, verified, verdict in groups:
        mine = [texts[row] for row in rows]
        going = [place for place, text in enumerate(mine) if text in emitted]
        if 0 < len(going) < len(rows):
            verified, verdict = verified.select(going), verdict.select(going)
        if going:
            observer(verified, verdict, {mine[at].number: len(emitted[mine[at]]) for at in going})


def merge_verdicts(parts: Sequence[tuple[Sequence[int], Verdict]]) -> Verdict:
    """Merge verdicts on groups of rows into one, in the order of the rows, without `chances` and `weak`."""
    if len(parts) == 1:
        return parts[0][1]
    order = [row for rows, _ in parts for row in rows]
    back = on_device(sorted(range(len(order)), key=order.__getitem__), parts[0][1].path.device)
    whole = {
        field.name: torch.cat([getattr(verdict, field.name) for _, verdict in parts])[back]
        for field in fields(Verdict)
        if field.name not in ("chances", "weak")
    }
    return replace(parts[0][1], **whole, chances=None, weak=None)
