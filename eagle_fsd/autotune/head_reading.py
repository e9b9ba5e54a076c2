"""Settle how an EAGLE-3 head's files are to be read, on a short text of its target's own."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle3.readings import reading_losses, shown_losses, take_reading
from eagle_fsd.files.fingerprints import digest_json, digest_weights, dtype_name
from eagle_fsd.files.records import recall, record_key, remember
from eagle_fsd.target.admission.small_tree import plain_taps
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession
from eagle_fsd.text.chat import encode_as_trained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROMPT = "Explain in a few sentences why the sky is blue, and why it turns red in the evening."
MOST = 160  # new tokens of the text: with the prompt about 200, whose losses differ clearly
LEAST = 24  # of a text that can tell readings apart


def settle_head(head: Eagle3Head, target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Give the head the reading under which it predicts its target's text best, if its files leave that open.

    It is measured once for each target and head, and remembered, unless the measurement tells nothing.
    Without a text that is long enough the likeliest reading stays. The head is on the target's device.
    """
    if len(head.readings) == 1:
        return
    ranks, readings = target.ranks, {str(reading): reading for reading in head.readings}
    weights = digest_weights([*head.parameters(), *head.buffers()])
    known_by = (weights, dtype_name(head), digest_json(asdict(head.config)), list(readings))
    key = record_key("reading of a head", target.identity("")["weights"], *known_by)
    known = ranks.lead(recall(key, readings.__getitem__) if ranks.leads else None)
    if known is not None:
        logger.info("%s is the head's reading, as an earlier start measured", take_reading(head, known))
        return
    text = own_text(target, tokenizer)
    if len(text) < LEAST:
        logger.warning(
            "the target's own text ends after %d tokens: its head's files can be read in %d ways, and %s is "
            "taken; name the taps if it drafts badly (head_taps)",
            *(len(text), len(head.readings), head.config.reading),
        )
        return
    tokens = torch.tensor(text, device=target.device)

    losses = reading_losses(head, target, tokens, lambda taps: states_of(target, tokens, taps))
    best = min(losses, key=lambda one: losses[one] if math.isfinite(losses[one]) else math.inf)
    settled = take_reading(head, best)
    ranks.check_alike("the reading of a head", settled)
    if ranks.leads and all(map(math.isfinite, losses.values())) and len(set(losses.values())) > 1:
        remember(key, str(settled))
    logger.info("%s", shown_losses(losses, settled))


def states_of(target: TargetModel, tokens: Tensor, taps: tuple[int, ...]) -> Tensor:
    """Return the states [n, D] of a text [n] that a head with these taps reads.

    Taps come from Hugging Face's own forward: a runtime's graphs show only those of the head they are made
    for.
    """
    if not taps:
        return TargetSession(target, 1, len(tokens)).prefill(tokens[None], [len(tokens)])[0]
    return plain_taps(target, tokens[None], taps)[0]


def own_text(target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return a prompt and the target's greedy answer to it."""
    prompt = example_prompt(target, tokenizer)
    text = Text(0, MOST, Terms(target.eos_token_ids), prompt=prompt)
    scheduler = Scheduler(target, None, TreeConfig(1), rows=1)
    scheduler.admit(text)
    return [*prompt, *(token for _, tokens in scheduler.run() for token in tokens)]


def example_prompt(target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[int]:
    """Return the tokens of PROMPT, as a chat where there is a template; one token if it cannot be encoded."""
    try:
        return encode_as_trained(tokenizer, PROMPT)[: max(target.max_positions // 2, 1)]
    except ValueError:  # there is no tokenizer, or its template does not take such a chat
        return [next(iter(target.eos_token_ids), 0)]
