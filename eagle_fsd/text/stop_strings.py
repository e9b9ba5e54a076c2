"""Stop strings and bad words, in the form that a batch of token ids needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from eagle_fsd.core.checks import require_utf8
from eagle_fsd.core.processing import require_words
from eagle_fsd.text.streamed import StreamedText


def make_stoppers(
    tokenizer: PreTrainedTokenizerBase | None, stops: Sequence[str], prompts: Sequence[Sequence[int]]
) -> list[Callable[[Sequence[int]], int | None]]:
    """Return a function for each prompt that says where its text ends; none without stop strings.

    It takes the tokens of a step and returns how many of them there are up to the one that completes a stop
    string, None if none does. Raises ValueError without a tokenizer.
    """
    if not stops:
        return []
    if tokenizer is None:
        raise ValueError("stop_strings need a tokenizer: the target has none; name one that does")
    return [make_stopper(tokenizer, stops, prompt) for prompt in prompts]


def make_stopper(
    tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], context: Sequence[int]
) -> Callable[[Sequence[int]], int | None]:
    """Return such a function for one text. context: token ids that it continues."""
    written = StreamedText(tokenizer, stops, context)

    def take(tokens: Sequence[int]) -> int | None:
        before = written.tokens
        written.add(tokens)
        return written.tokens - before if written.stopped else None

    return take


def words_as_tokens(tokenizer: PreTrainedTokenizerBase | None, words: Sequence[str]) -> list[list[int]]:
    """Return the token ids of words that must not come, at the beginning of a text and after a space.

    A word that is cut into tokens in another way may still come. Raises ValueError for a word that is empty
    or holds half a character.
    """
    if tokenizer is None:
        raise ValueError("bad words need a tokenizer: the target has none; name one that does")
    for word in words:
        require_utf8("a bad word", word)
    found = [
        tokenizer.encode(form, add_special_tokens=False) for word in words for form in (word, f" {word}")
    ]
    require_words((*words, *found))
    return list(map(list, dict.fromkeys(map(tuple, found))))
