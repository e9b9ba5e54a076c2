"""Generate with stop strings. Prompts are batched by length; batching never changes an answer.

Stop strings that are special tokens of the tokenizer end a text as end tokens do, for they are not shown in
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.core.config import AutoTree, SamplingConfig, TreeConfig
from eagle_fsd.core.padding import pad_left
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.prompt_sets import batches
from eagle_fsd.text.streamed import StreamedText


@dataclass(frozen=True)
class Ending:
    """How a text is made and where it ends; only what shares it goes into one batch."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: SamplingConfig


@dataclass(frozen=True)
class Ask:
    """One prompt (token ids) to answer. seed: of its own draws."""

    prompt: tuple[int, ...]
    ending: Ending
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """text: without the stop string. stats: of the steps up to the one that ended the text."""

    text: str
    stats: GenerationStats


def answers(
    engine: EagleFSD,
    asks: Sequence[Ask],
    rule: AcceptanceRule,
    tree: TreeConfig | AutoTree,
    batch_size: int,
) -> Iterator[dict[int, Answer]]:
    """Answer all, a batch at a time: yields each batch's answers by their place in `asks`.

    The longest prompts come first, so that what does not fit fails at once.
    """
    groups: dict[Ending, list[int]] = {}
    for place in sorted(range(len(asks)), key=lambda place: -len(asks[place].prompt)):
        groups.setdefault(asks[place].ending, []).append(place)
    for ending, places in groups.items():
        options = {"rule": rule, "tree": tree, "max_new_tokens": ending.max_new_tokens}
        options |= {"eos_token_id": end_tokens(engine, ending.until), **asdict(ending.sampling)}
        options["stop_strings"] = [stop for stop in ending.until if stop]
        for part in batches(places, batch_size):
            batch = [asks[place] for place in part]
            ids, mask = pad_left([ask.prompt for ask in batch], engine.pad_token_id)
            output = engine.generate(ids, mask, seed=[ask.seed for ask in batch], **options)
            found = zip(part, output.new_tokens, output.stats, strict=True)
            yield {
                place: Answer(text_of(engine, tokens, ending.until), stats) for place, tokens, stats in found
            }


def text_of(engine: EagleFSD, tokens: Sequence[int], until: Sequence[str]) -> str:
    """Return the text of new tokens before the first stop string."""
    assert engine.tokenizer is not None
    text = StreamedText(engine.tokenizer, until)
    text.add(tokens)
    text.finish()
    return text.text


def end_tokens(engine: EagleFSD, until: Sequence[str]) -> tuple[int, ...]:
    """Return the model's own end tokens, and the stop strings that are special tokens."""
    assert engine.tokenizer is not None
    added = engine.tokenizer.added_tokens_decoder.items()
    special = {token.content: place for place, token in added if token.special}
    ids = {*engine.target.eos_token_ids, *(special[stop] for stop in until if stop in special)}
    return tuple(sorted(token for token in ids if token < engine.target.vocab_size))
