"""Let the target answer prompts, into a file of conversations.

Prompts are given, or come from the target itself. A run that was stopped can be continued.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eagle_fsd.core.checks import flag_of, one_line, require_integer
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.files.atomic import read_records, write_atomically
from eagle_fsd.files.fingerprints import differences, digest_json
from eagle_fsd.files.jsonl import append_row, drop_torn_line, read_jsonl, write_rows
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.chat import REFUSALS, encode_as_trained, plain_text, system_turns
from eagle_fsd.training.data.examples import MARK, UNSPACED, turns_of
from eagle_fsd.training.data.synthesis import Answer, Question, write_answers

logger = logging.getLogger(__name__)

# For prompts that the target writes itself. top_k avoids sorting most of a large vocabulary.
PROMPT_SAMPLING = SamplingConfig(temperature=0.8, top_k=200, top_p=0.95)
LONGEST_OWN_PROMPT = 128
SHORTEST_OWN_PROMPT = 3  # words; of scripts without spaces every character counts as one
WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
LEFT_OUT = "left_out"
DRAWS = "seed, number"  # what names the stream that a row is drawn from
TEMPLATE = "chat_template"


@dataclass(frozen=True)
class Plan:
    """How prompts are answered.

    base_model: the target's name, which is recorded beside the answers. samplings: prompts use them in turn.
    seed: prompt i draws from seed + i.
    """

    base_model: str
    samplings: tuple[SamplingConfig, ...] = (SamplingConfig(),)
    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    rows: int = 64
    seed: int = 0
    system: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "rows"):
            require_integer(name, getattr(self, name), 1, f"change {flag_of(name)}")
        require_integer("seed", self.seed, 0, "any will do")


# --- prompts of the target's own ---


def user_opening(tokenizer: PreTrainedTokenizerBase, system: str | None) -> list[int]:
    """Return the token ids of an empty chat, up to where the user's words begin."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template, so that the target cannot write prompts in the "
            "user's place; give --prompts"
        )
    messages = [*system_turns(system), {"role": "user", "content": MARK}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    except REFUSALS as error:
        remedy = "leave --system out" if system is not None else "give --prompts"
        raise ValueError(
            f"the target's chat template refuses the chat ({one_line(error, 100)}); {remedy}"
        ) from error
    opening, mark, _ = rendered.partition(MARK)
    if not mark:
        raise ValueError(
            "the chat template drops the user's words: the target cannot write prompts; give --prompts"
        )
    return tokenizer(opening, add_special_tokens=False).input_ids


def self_prompts(
    target: TargetModel, tokenizer: PreTrainedTokenizerBase, count: int, plan: Plan, path: Path
) -> list[str]:
    """Let the target write prompts in the user's place (Magpie, arXiv 2406.08464), into the file `path`.

    Of `count` attempts, those are returned that ended, have a few words and are not repetitions.
    """
    if count <= 0:
        return []
    opening = user_opening(tokenizer, plan.system)
    rows = fill(
        RowFile(
            path,
            {
                "target": writer_identity(plan.base_model, target),
                "opening": opening,
                "sampling": asdict(PROMPT_SAMPLING),
                "max_new_tokens": LONGEST_OWN_PROMPT,
                "seed": plan.seed,
                "draws": DRAWS,
            },
        ),
        target,
        [Question(i, opening, PROMPT_SAMPLING, plan.seed) for i in range(count)],
        LONGEST_OWN_PROMPT,
        plan.rows,
        lambda answer: {"prompt": tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()},
    )
    asked = [row for row in rows if row["number"] < count]  # the file may have more than are wanted now
    prompts = dict.fromkeys(row["prompt"] for row in asked if row["complete"])
    return [prompt for prompt in prompts if len(WORD.findall(prompt)) >= SHORTEST_OWN_PROMPT]


# --- answers ---


def answer_prompts(
    target: TargetModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], plan: Plan, path: Path
) -> list[dict[str, Any]]:
    """Write the target's answers to the file `path`, one row per prompt, in the prompts' order.

    Rows are conversations, or pairs of prompt and completion where the tokenizer has no chat template.
    Returns the rows. Prompts that are too long and empty answers are left out and counted.
    """
    questions, asked = [], {}
    for number, prompt in enumerate(prompts):
        turns = [*system_turns(plan.system), {"role": "user", "content": prompt}]
        tokens = encode_as_trained(tokenizer, turns)
        if len(tokens) <= min(plan.max_prompt_tokens, target.max_positions - 1):
            sampling = plan.samplings[number % len(plan.samplings)]
            questions.append(Question(number, tokens, sampling, plan.seed))
            asked[number] = (turns, sampling.temperature)
    if len(questions) < len(prompts):
        logger.info(
            "%d prompts left out: longer than %d tokens",
            len(prompts) - len(questions),
            plan.max_prompt_tokens,
        )
    if not questions:
        raise ValueError(
            f"max_prompt_tokens is {plan.max_prompt_tokens}: all {len(prompts)} prompts are longer, or leave "
            "the target no position; raise --max-prompt-tokens, or give shorter prompts"
        )

    def conversation(answer: Answer) -> dict[str, Any]:
        turns, temperature = asked[answer.number]
        text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        if not tokenizer.chat_template:
            return {"temperature": temperature, "prompt": plain_text(turns), "completion": text}
        return {"temperature": temperature, "conversations": [*turns, {"role": "assistant", "content": text}]}

    settings = {name: value for name, value in asdict(plan).items() if name not in ("rows", "base_model")}
    identity = {
        "target": writer_identity(plan.base_model, target),
        "prompts": digest_json(prompts),
        TEMPLATE: digest_json(tokenizer.chat_template),
    }
    file = RowFile(path, identity | settings | {"draws": DRAWS})
    rows = fill(file, target, questions, plan.max_new_tokens, plan.rows, conversation)
    answered = [row for row in rows if turns_of(row, str(path))[-1]["content"].strip()]
    if len(answered) < len(rows):
        file.leave_out({row["number"] for row in rows} - {row["number"] for row in answered}, answered)
    if left_out := file.left_out():
        logger.info("%d conversations left out: the target's answer is empty", len(left_out))
    return answered


def writer_identity(name: str, target: TargetModel) -> dict[str, str]:
    """Return what a target's answers depend on: on its weights' format too, where OpenVINO computes."""
    identity = target.identity(name)
    return identity if target.runtime is None else identity | {"weight_format": target.weight_format}


def fill(
    file: RowFile,
    target: TargetModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    rows: int,
    row_of: Callable[[Answer], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Answer the questions that have no row in the file yet, and return all rows in the questions' order."""
    done = {row["number"] for row in file.read()} | set(file.left_out())
    left = [question for question in questions if question.number not in done]
    tokens = 0
    file.path.touch()
    settled = {"total": len(questions), "initial": len(questions) - len(left), "disable": not left}
    with tqdm(desc=file.path.name, unit="row", mininterval=2, **settled) as bar:
        start = time.monotonic()
        for answer in write_answers(target, left, max_new_tokens, rows):
            row = {"number": answer.number, "complete": answer.complete, **row_of(answer)}
            append_row(file.path, row)
            tokens += len(answer.tokens)
            bar.set_postfix_str(f"{tokens / (time.monotonic() - start):.0f} tokens/s", refresh=False)
            bar.update()
    return file.finish()


@dataclass(frozen=True)
class RowFile:
    """A JSONL file that grows row by row and can be continued later.

    identity: the target and the settings that make its rows. It is stored beside the file, and a run with
    another identity is refused, so that no file mixes two.
    """

    path: Path
    identity: Mapping[str, Any]

    @property
    def settings(self) -> Path:
        """The file of the identity, which also has the numbers of the rows that were left out."""
        return self.path.with_suffix(self.path.suffix + ".settings.json")

    def read(self) -> list[dict[str, Any]]:
        """Read the rows of an earlier run with the same settings. A row that was cut off is dropped."""
        identity = json.loads(json.dumps(self.identity))  # tuples become lists, as in the stored file
        if not self.path.is_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.settings, json.dumps(identity, indent=1) + "\n")
            return []
        changed = f"{self.settings.name} is missing"
        if self.settings.is_file():
            known = read_records(self.settings)  # empty if it is broken
            changed = f"{self.settings.name} holds nothing"
            if known:
                known.setdefault(TEMPLATE, identity.get(TEMPLATE))  # earlier releases did not note it
                changed = differences({name: known[name] for name in known if name != LEFT_OUT}, identity)
        if changed:
            raise ValueError(
                f"{self.path} was made by another target or with other prompts or settings ({changed}): name "
                "another --output, or remove it"
            )
        drop_torn_line(self.path)
        rows = list(read_jsonl(self.path))
        for line, row in rows:
            if not (isinstance(row.get("number"), int) and isinstance(row.get("complete"), bool)):
                raise ValueError(
                    f"{self.path}:{line} has no number, or does not say whether it is complete: every row of "
                    "this file has both; delete the line, and it is made again"
                )
        return [row for _, row in rows]

    def left_out(self) -> list[int]:
        """Return the numbers of the rows that were made and left out: nobody makes them again."""
        return list(read_records(self.settings).get(LEFT_OUT, []))

    def leave_out(self, numbers: Iterable[int], rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep these rows alone, and note the numbers of the others."""
        known = read_records(self.settings) | {LEFT_OUT: sorted({*self.left_out(), *numbers})}
        write_atomically(self.settings, json.dumps(known, indent=1) + "\n")
        write_rows(self.path, rows)

    def finish(self) -> list[dict[str, Any]]:
        """Sort the rows: a run that was stopped and resumed leaves the same file as one that was not."""
        rows = sorted(self.read(), key=lambda row: row["number"])
        write_rows(self.path, rows)
        return rows
