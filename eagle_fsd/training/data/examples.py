"""Turn text into training examples: token ids and a mask of what the head learns from. It knows no tensors.

A row is either a conversation (`conversations` or `messages`: [{role, content}, ...], or ShareGPT's
[{from, value}, ...]) or a pair: `prompt` and `completion`, each a text or TRL's list of messages, or Alpaca's
`instruction` and `output` with an optional `input`. A turn may say its text in parts. The mask marks the
tokens after which the target writes a token of the answer, from the prompt's last token on: the head learns
to predict the target's feature *at* these tokens. An end token is context for later turns and is never
marked.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from eagle_fsd.core.checks import find_half_character, one_line, require_integer
from eagle_fsd.files.jsonl import read_jsonl
from eagle_fsd.text.chat import REFUSALS, plain_text
from eagle_fsd.text.prompt_files import find_prompt, instruction_of, is_chat, joined_parts, read_asked

MARK = "\u241e"  # takes the place of the user's words while the chat template is examined
# Scripts that put no spaces between words: Thai to Burmese, Khmer, Kana, and Chinese characters.
UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff"
UNSPACED += "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
RUN = 8  # words in a row that two texts may not share
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names, beside the roles' own
NO_TEXT = "an answer without text, such as a call of a tool"
logger = logging.getLogger(__name__)


class NoSingleText(ValueError):
    """Raised if no single token sequence holds all answers of a row; says why."""


@dataclass(frozen=True)
class Example:
    """One token sequence; `learn[i]` says whether the head learns the feature at token i."""

    tokens: list[int]
    learn: list[bool]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.learn)

    @classmethod
    def of_answer(cls, prompt: Sequence[int], answer: Sequence[int], ends: Collection[int]) -> Example:
        """Return an answer that was generated after a prompt, without the end token that it may have."""
        kept = answer[:-1] if answer and answer[-1] in ends else answer
        # The token before the answer is marked too: after it the target writes the first of them.
        return cls([*prompt, *kept], [False] * (len(prompt) - 1) + [True] * (len(kept) + 1))

    def cut(self, longest: int) -> Example:
        """Return the first tokens, at most so many."""
        return Example(self.tokens[:longest], self.learn[:longest])


def turns_of(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    """Return the chat turns of a row of any kind, checked, each with its role and content.

    A chat ends with the answer before one that has no text. Raises NoSingleText if there is none.
    """
    turns = find_turns(row)
    if turns is None:
        remedy = "see eagle-fsd train head --help"
        if find_prompt(row) is not None:
            remedy = "let the target answer the file first, with eagle-fsd train synthesize --prompts"
        raise ValueError(
            f"{where}: no 'conversations', no 'messages', no 'prompt' with 'completion' and no 'instruction' "
            f"with 'output' (keys: {sorted(row)}); {remedy}"
        )
    made: list[dict[str, str]] = []
    for given in turns if isinstance(turns, list) else [None]:
        try:
            turn = normalize_turn(given, where)
        except NoSingleText:  # the turns after it go on from what is not there
            while made and made[-1]["role"] != "assistant":
                made.pop()
            if not made:
                raise
            break
        if turn is None:
            raise ValueError(
                f"{where}: turns must be a list of objects with strings 'role' and 'content', or 'from' and "
                "'value', and both sides of a pair must be texts or such lists; remove the row"
            )
        made.append(turn)
    return made


def find_turns(row: dict[str, Any]) -> Any:
    """Return the turns of a row as they are there, which may be malformed; None for a row of no known kind.

    A merged table has the fields of all kinds, most of them null. A null says nothing, as an empty list does.
    """
    chats = [row[name] for name in ("conversations", "messages") if name in row]
    pairs = [
        (question, row[answer])
        for name, answer, question in (
            ("prompt", "completion", row.get("prompt")),
            ("instruction", "output", instruction_of(row)),
        )
        if name in row and answer in row
    ]
    if chat := next((chat for chat in chats if chat is not None and chat != []), None):
        return chat
    for question, answer in pairs:
        if question is not None and answer is not None:
            return [*said_by("user", question), *said_by("assistant", answer)]
    return next((chat for chat in chats if chat is not None), []) if chats or pairs else None


def said_by(role: str, words: Any) -> list[Any]:
    """Return one side of a pair as turns: what is no list of messages is said in one turn of this role."""
    return words if is_chat(words) else [{"role": role, "content": words}]


def normalize_turn(turn: Any, where: str) -> dict[str, str] | None:
    """Return a turn with `role` and `content`, from ShareGPT's names and text in parts too.

    None if it is malformed. Raises NoSingleText for an answer without text.
    """
    if not isinstance(turn, dict):
        return None
    if turn.get("role") is None and isinstance(speaker := turn.get("from"), str):
        role = ROLES.get(speaker, speaker)
        if role not in ("user", "assistant", "system"):
            raise ValueError(
                f"{where}: from is {speaker!r}: it must be human, user, gpt, assistant or system; rename it, "
                "or remove the row"
            )
        turn = {"role": role, "content": turn.get("value")}
    if turn.get("role") == "assistant" and turn.get("content", ...) is None:
        raise NoSingleText(NO_TEXT)
    if isinstance(parts := turn.get("content"), list):
        turn = {**turn, "content": joined_parts(parts)}
    well_formed = isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
    return turn if well_formed else None


def encode_turns(turns: list[dict[str, str]], tokenizer: Any, learn_all: bool = False) -> Example:
    """Encode a conversation with the tokenizer's chat template, the last answer without its end token.

    Each answer is encoded on its own, after the rendered text before it, as when the target writes it. Its
    tokens are marked, and so is the token before them, after which the target writes the first of them.
    `learn_all` marks every token after the template's own opening (everything before the first turn's
    content) instead of the answers alone.

    Raises NoSingleText if the template refuses the turns, or renders an earlier one differently, such as one
    that drops the thinking of earlier answers: then no single token sequence holds all answers. Also raises
    it for half a character, as broken files have them.
    """
    if any(find_half_character(turn["content"]) is not None for turn in turns):
        raise NoSingleText("it holds half a character, which is no text")
    if not tokenizer.chat_template:
        return encode_plain(turns, tokenizer, learn_all)
    tokens: list[int] = []
    learn: list[bool] = []
    rendered = ""

    def append(text: str, mark: bool) -> None:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        tokens.extend(ids)
        learn.extend([mark] * len(ids))

    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        try:
            before = tokenizer.apply_chat_template(turns[:index], tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the target's chat template is broken ({error}): fix it") from error
        except REFUSALS as error:  # of a system turn, say, or two turns of one role
            raise NoSingleText(f"the chat template refuses it ({one_line(error, 80)})") from error
        if not before.startswith(rendered):
            raise NoSingleText("the chat template renders earlier turns differently")
        start = len(rendered)
        if learn_all and not rendered:
            # The first turn's words may stand in the template's own text as well.
            marked = [{**turns[0], "content": MARK}, *turns[1:index]]
            shown = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
            pairs = zip(before, shown, strict=False)
            start = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        append(before[len(rendered) : start], False)
        append(before[start:], learn_all)
        answer = len(tokens)
        append(turn["content"], True)
        if 0 < answer < len(tokens):
            learn[answer - 1] = True
        rendered = before + turn["content"]
    return Example(tokens, learn)


def encode_plain(turns: list[dict[str, str]], tokenizer: Any, learn_all: bool = False) -> Example:
    """Encode a row for a base model, which has no chat template: its answer continues the text before it.

    `learn_all` marks every token but the first, which may be the tokenizer's own. Raises NoSingleText for a
    row that is not one answer after its questions, since no template says how turns follow each other.
    """
    if [turn["role"] == "assistant" for turn in turns] != [False] * (len(turns) - 1) + [True]:
        raise NoSingleText("not one answer at the end, and the tokenizer has no chat template")
    before = tokenizer(plain_text(turns[:-1])).input_ids
    after = tokenizer(turns[-1]["content"], add_special_tokens=False).input_ids
    learn = [learn_all] * len(before) + [True] * len(after)
    learn[0] = False
    if len(before) > 1 and after:
        learn[len(before) - 1] = True
    return Example([*before, *after], learn)


def load_examples(
    path: str | Path, tokenizer: Any, max_length: int, learn_all: bool = False, limit: int | None = None
) -> tuple[list[Example], dict[str, int]]:
    """Read a JSONL file into examples, cut to `max_length` tokens.

    Rows with nothing to learn are skipped. Returns how many were, by reason, beside the examples.
    """
    require_cut(max_length, limit)
    examples: list[Example] = []
    skipped: Counter[str] = Counter()
    shortened = 0
    for number, row in read_jsonl(Path(path)):
        if limit is not None and len(examples) >= limit:
            break
        try:
            turns = turns_of(row, f"{path}:{number}")
        except NoSingleText as why:
            skipped[str(why)] += 1
            continue
        if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns):
            skipped["empty answer"] += 1
            continue
        if turns[0]["role"] == "assistant":  # ShareGPT's rows that are the later part of a conversation
            skipped["answer before any question"] += 1
            continue
        try:
            example = encode_turns(turns, tokenizer, learn_all).cut(max_length)
        except NoSingleText as why:
            skipped[str(why)] += 1
            continue
        if not any(example.learn[1:]):
            skipped["nothing to learn within max_length"] += 1
            continue
        examples.append(example)
        shortened += len(turns) < len(find_turns(row))
    if skipped:
        logger.warning("%s: skipped rows: %s", path, dict(skipped))
    if shortened:
        logger.warning("%s: chats used up to %s: %d", path, NO_TEXT, shortened)
    if not examples:
        raise no_usable_row(path, skipped)
    return examples, dict(skipped)


def check_rows(path: Path, limit: int | None = None) -> int:
    """Return how many rows of a JSONL file may become examples, counted up to `limit`, without a tokenizer.

    Raises ValueError for a file that cannot be read or has no such row, and for a row of no known kind.
    """
    usable = 0
    skipped: Counter[str] = Counter()
    for number, row in read_jsonl(path):
        try:
            turns_of(row, f"{path}:{number}")
        except NoSingleText as why:
            skipped[str(why)] += 1
            continue
        usable += 1
        if usable == limit:  # no further row is surely read
            break
    if not usable:
        raise no_usable_row(path, skipped)
    return usable


def no_usable_row(path: str | Path, skipped: Mapping[str, int]) -> ValueError:
    reasons = dict(skipped) or "the file is empty"
    return ValueError(f"{path}: no usable row ({reasons}); give a file with answers")


def require_cut(max_length: int, limit: int | None) -> None:
    """Raise ValueError unless something can be learned from rows of this length, this many of a file."""
    if max_length < 3:
        raise ValueError(
            f"max_length is {max_length}: it must be at least 3, for a feature, a token and a prediction; "
            "raise --max-length"
        )
    if limit is not None:
        require_integer("rows", limit, 1, "change --rows")


def banned_runs(files: Sequence[Path]) -> frozenset[tuple[str, ...]]:
    """Return the runs of words of all that users ask in evaluation files: text files, or rows of JSONL.

    Raises ValueError for a row in which nobody asks anything: it would let everything pass.
    """
    return frozenset(run for path in files for text in read_asked(path) for run in word_runs(text))


def overlap(text: str, others: frozenset[tuple[str, ...]]) -> bool:
    """Return whether the text shares RUN words in a row with the texts that `others` was made of."""
    return not others.isdisjoint(word_runs(text))


def word_runs(text: str) -> Iterator[tuple[str, ...]]:
    """Return every RUN words in a row, in lower case. A shorter text counts as one run.

    Of scripts without spaces between words every character counts as one.
    """
    words = WORD.findall(text.lower())
    return (tuple(words[start : start + RUN]) for start in range(max(len(words) - RUN, 0) + 1))


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield groups of indices, by length: a padded batch holds at most `max_tokens`, or is a single row."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * lengths[index] > max_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
