"""The flags of penalties, bans, biases and stop strings, and the options that they make. Needs no model."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_fsd.core.checks import format_value
from eagle_fsd.core.processing import Processing, require_words

if TYPE_CHECKING:
    from eagle_fsd.decoding.options import GenerationOptions
    from eagle_fsd.engine import EagleFSD

# Flags that are options of the same name. One that is not given leaves it to the model's generation_config.
SAME_NAME = (
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size",
    "suppress_tokens", "logit_bias", "min_new_tokens", "json_schema", "regex",
)  # fmt: skip


def add_processing_flags(parser: argparse.ArgumentParser, of_one_text: bool = True) -> None:
    """Add the flags that change which tokens may come, and where a text ends.

    of_one_text: whether --help shows those of a text's form.
    """
    schema = "the answer is JSON of this schema, in a file or written out; needs the extra schema"
    pattern = "the whole answer fits this regular expression; needs the extra schema"
    group = parser.add_argument_group(
        "penalties and bans", "They change the target's distribution; lossless then means lossless to that."
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="divide the positive logits of tokens that are in the text already by X, and multiply negative "
        "ones; above 1 discourages repetition, 1 is off (default: the model's own)",
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="subtract X from the logits of tokens that the answer has (default: 0)",
    )
    group.add_argument(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="subtract X for each time that the answer has the token (default: 0)",
    )
    group.add_argument(
        "--no-repeat-ngram-size",
        type=int,
        metavar="N",
        help="no N tokens in a row come twice; 0 is off (default: the model's own)",
    )
    group.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        help="this never comes, at the beginning or after a space; may be given several times",
    )
    group.add_argument(
        "--suppress-tokens",
        type=parse_ids,
        metavar="ID,ID",
        help="these token ids never come (default: the model's own)",
    )
    group.add_argument(
        "--logit-bias",
        action="append",
        type=parse_bias,
        metavar="ID=X",
        help="add X to the logit of this token id; may be given several times",
    )
    group.add_argument(
        "--min-new-tokens",
        type=int,
        metavar="N",
        help="no end token comes before N new tokens (default: the model's own)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    group.add_argument(
        "--json-schema",
        type=parse_schema,
        metavar="FILE",
        help=schema if of_one_text else argparse.SUPPRESS,
    )
    group.add_argument(
        "--regex",
        metavar="PATTERN",
        help=pattern if of_one_text else argparse.SUPPRESS,
    )


def add_answer_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags that say how many answers there are to a prompt, and what is told of them."""
    group.add_argument(
        "--num-return-sequences",
        type=int,
        default=1,
        metavar="N",
        help="sample N answers to every prompt, each with a random stream of its own (default: 1)",
    )
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: the log-probability of every token under the target, and of the N likeliest there",
    )


def add_template_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag for arguments of the chat template."""
    group.add_argument(
        "--chat-template-args",
        type=parse_template,
        default={},
        metavar="JSON",
        help='arguments of the chat template, such as {"enable_thinking": false}, or tools and documents',
    )


def parse_ids(text: str) -> list[int]:
    """Return the token ids of a comma-separated list; an argparse type."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids, such as 3,7")
    return [int(part) for part in parts]


def parse_bias(text: str) -> tuple[int, float]:
    """Return the token id and the bias of ID=X; an argparse type."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=X, such as 42=-5") from error


def parse_object(text: str) -> dict[str, Any]:
    """Return a JSON object; an argparse type."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter for thousands of levels
        raise argparse.ArgumentTypeError(f"{format_value(text)} is no JSON: {error}") from error
    if not isinstance(found, dict):
        example = '{"enable_thinking": false}'
        raise argparse.ArgumentTypeError(f"{format_value(text)} is no JSON object, such as {example}")
    return found


def parse_template(text: str) -> dict[str, Any]:
    """Return arguments of the chat template, written as a JSON object; an argparse type."""
    from eagle_fsd.text.chat import require_template

    try:
        return require_template(parse_object(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_schema(text: str) -> dict[str, Any]:
    """Return the JSON schema that a text is, or that a file of this name holds; an argparse type."""
    if text.lstrip().startswith("{"):
        return parse_object(text)
    try:
        return parse_object(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no schema, and no file of one: {error}") from error


def check_processing(args: argparse.Namespace) -> None:
    """Raise ValueError for values of these flags that no model takes, as far as that shows without torch."""
    names = [field.name for field in fields(Processing)]
    given = {name: getattr(args, name) for name in SAME_NAME if name in names}
    Processing.of(**{name: value for name, value in given.items() if value is not None})
    require_words(args.bad_word)
    tokens = [token for token, _ in args.logit_bias or ()]
    if twice := [token for token in tokens if tokens.count(token) > 1]:
        raise ValueError(f"--logit-bias names the token {twice[0]} twice: a token has one bias; give one")


def processing_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a generation that these flags set."""
    given = {name: getattr(args, name) for name in SAME_NAME}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return {**given, "stop_strings": args.stop or None}


def with_bad_words(
    options: GenerationOptions, args: argparse.Namespace, model: EagleFSD
) -> GenerationOptions:
    """Return the options with the bad words as token ids, which takes a model's tokenizer."""
    from eagle_fsd.text.stop_strings import words_as_tokens

    if not args.bad_word:
        return options
    return replace(options, bad_words_ids=words_as_tokens(model.tokenizer, args.bad_word))
