"""Turn the command line's flags into a rule, a tree and the options of a generation. Needs no model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eagle_fsd.cli.flags.processing import check_processing, processing_options
from eagle_fsd.cli.flags.types import AUTO, NO_HEAD
from eagle_fsd.core.checks import (
    flag_of,
    require_choice,
    require_different_texts,
    require_integer,
    require_texts,
    require_utf8,
)
from eagle_fsd.core.config import (
    DIVERGENCE_NAMES,
    AutoThreshold,
    AutoTree,
    SamplingConfig,
    TreeConfig,
    require_bound,
)

if TYPE_CHECKING:
    from eagle_fsd.acceptance.accept import AcceptanceRule
    from eagle_fsd.decoding.options import GenerationOptions

# Flags for the fields of the rules; fuzzy_min_p is min_p there. A flag that is not given is None, so that the
# rule's default applies.
FUZZY_FLAGS = (  # beside its threshold
    "divergence", "mode", "child", "fuzzy_min_p", "max_overshoot", "min_gain", "price", "cost",
    "max_consecutive", "exact_prefix",
)  # fmt: skip
RULE_FLAGS = (
    "threshold", "quality_budget", *FUZZY_FLAGS,
    "epsilon", "delta", "candidates", "margin", "single", "acc", "weight", "entropy", "window",
)  # fmt: skip

# Flags whose names are not those of the engine's values.
RENAMED = {"top_k of the tree": "tree_top_k", "stop_strings": "stop"}


@contextlib.contextmanager
def in_words_of_flags(args: argparse.Namespace, **renamed: str) -> Iterator[None]:
    """Let the engine's errors name flags, and no None, which cannot be typed.

    renamed: beside RENAMED, names of values and those of their flags.
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        flags = {**RENAMED, **renamed}
        name = next((name for name in flags if text.startswith(f"{name} ")), text.partition(" ")[0])
        flag = flags.get(name, name)
        if hasattr(args, flag):
            text = flag_of(flag) + text[len(name) :]
        raise ValueError(re.sub(r"; None [^;]*$", "; leave it out", text)) from error


def make_rule(args: argparse.Namespace) -> AcceptanceRule | AutoThreshold:
    """Make the rule that the flags name.

    Its fields have their defaults (fuzzy: threshold 0) unless given. Raises ValueError for a flag of another
    rule.
    """
    from eagle_fsd.acceptance.rule_names import RULES

    auto = asks_for_auto(args)
    rule: type[Any] = AutoThreshold if auto else RULES[args.rule]
    refuse_flags_of_others(args, rule, auto)
    usual = {"threshold": 0.0} if args.rule == "fuzzy" and not auto else {}
    with in_words_of_flags(args, min_p="fuzzy_min_p"):
        return rule(**usual | fields_given(args, rule))


def asks_for_auto(args: argparse.Namespace) -> bool:
    """Return whether the threshold comes from the head's calibration."""
    by_budget = args.threshold is None and args.quality_budget is not None
    return args.rule == "fuzzy" and (args.threshold == AUTO or by_budget)


def require_threshold(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag of the rule fuzzy without its threshold, where that cannot come later."""
    if args.rule != "fuzzy" or args.threshold not in (None, 0.0) or args.quality_budget is not None:
        return
    lack = "without --threshold" if args.threshold is None else "with --threshold 0"
    for name in FUZZY_FLAGS:
        if getattr(args, name) is not None:
            flag = flag_of(name)
            raise ValueError(
                f"{flag} {lack}: nothing is followed then, and it would have no effect; give a threshold "
                "above 0, inf for a plan alone"
            )


def require_price(args: argparse.Namespace) -> None:
    """Raise ValueError for a cost that nothing is paid for."""
    if args.rule == "fuzzy" and args.cost is not None and not args.price and not asks_for_auto(args):
        raise ValueError(
            f"--cost is {args.cost} without a --price above 0: it would have no effect; give a price such as "
            "1.5, or drop it"
        )


def refuse_flags_of_others(args: argparse.Namespace, rule: type, auto: bool) -> None:
    """Raise ValueError for a given flag that the rule has no field for."""
    takes = {field.name for field in dataclasses.fields(rule)} | ({"threshold"} if auto else set())
    for name in RULE_FLAGS:
        value = getattr(args, name)
        if value is None or name.removeprefix("fuzzy_") in takes:
            continue
        flag = flag_of(name)
        whose = "--threshold auto" if auto else f"--rule {args.rule}"
        if name == "quality_budget":
            raise ValueError(
                f"{flag} is {value}: it finds the threshold of the rule fuzzy; leave out "
                f"{'--threshold' if args.rule == 'fuzzy' else f'--rule {args.rule}'}, or {flag}"
            )
        raise ValueError(f"{flag} is {value} with {whose}: that rule has none; drop the flag")


def fields_given(args: argparse.Namespace, rule: type[Any]) -> dict[str, Any]:
    """Return the fields of a rule that flags were given for, and their values."""
    given = {flag.removeprefix("fuzzy_"): getattr(args, flag) for flag in RULE_FLAGS}
    names = [field.name for field in dataclasses.fields(rule)]
    return {name: given[name] for name in names if given.get(name) is not None}


def make_tree(args: argparse.Namespace) -> TreeConfig | AutoTree:
    """Make the tree that the flags name. With --total-tokens auto, sizes that are not given are measured."""
    if args.total_tokens == AUTO:
        return AutoTree(args.depth, args.tree_top_k, args.min_confidence)
    sizes = {"depth": args.depth, "top_k": args.tree_top_k, "min_confidence": args.min_confidence}
    return TreeConfig(args.total_tokens, **{name: size for name, size in sizes.items() if size is not None})


def check_early(args: argparse.Namespace) -> None:
    """Raise ValueError for values of flags that no model takes, as far as that shows without torch.

    Importing it takes seconds. `generation_options` checks the rest.
    """
    sampling = ((name, getattr(args, name)) for name in ("temperature", "top_k", "top_p", "min_p"))
    texts = getattr(args, "num_return_sequences", 1)
    for name in ("system", "regex", "stop", "bad_word"):
        value = getattr(args, name, None) or ()
        for text in (value,) if isinstance(value, str) else value:
            require_utf8(flag_of(name), text)
    with in_words_of_flags(args):
        require_drafter(args)
        require_texts(
            args.max_new_tokens, texts, args.min_new_tokens, getattr(args, "logprobs", None), args.stop
        )
        check_processing(args)
        config = SamplingConfig(**{name: value for name, value in sampling if value is not None})
        if args.temperature is not None:  # else the model's own is still to come
            require_different_texts(texts, config.greedy)
        make_tree(args)
        require_price(args)
        if args.divergence is not None:
            require_choice("divergence", args.divergence, DIVERGENCE_NAMES)
        if asks_for_auto(args):
            AutoThreshold(**fields_given(args, AutoThreshold))
        elif args.rule == "fuzzy" and args.threshold is not None:
            require_bound(args.threshold)
        if args.seed is not None:
            parse_stream(args.seed)


def check_answers(args: argparse.Namespace) -> None:
    """Raise ValueError for flags of `generate` that do not go together."""
    if args.baseline and args.stop:
        raise ValueError("--baseline with --stop: the target alone knows no stop strings; leave one out")
    for flag, value in (("--system", args.system), ("--chat-template-args", args.chat_template_args or None)):
        if args.raw and value is not None:
            raise ValueError(f"{flag} with --raw: a raw prompt has no chat template; leave one of them out")
    require_integer("--batch-size", args.batch_size, 1, "8 suits a CPU")
    for flag, value in (("--baseline", args.baseline), ("--adapt", args.adapt)):
        if value and args.batch_size > 1:
            raise ValueError(
                f"{flag} with --batch-size {args.batch_size}: it works between answers; leave one of them out"
            )
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs without --json: only that shows them; give both")


def generation_options(args: argparse.Namespace) -> GenerationOptions:
    """Make the options of a generation. What `check_early` leaves is checked here, also without a model."""
    from eagle_fsd.decoding.options import GenerationOptions

    with in_words_of_flags(args):
        options = GenerationOptions(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=None if args.seed is None else [parse_stream(args.seed)],
            tree=make_tree(args),
            rule=make_rule(args),
            logprobs=getattr(args, "logprobs", None),
            num_return_sequences=getattr(args, "num_return_sequences", 1),
            **processing_options(args),
        )
        if (form := options.form) is not None:
            from eagle_fsd.text.grammar import require_form

            require_form(form)
    return options


def require_drafter(args: argparse.Namespace) -> None:
    """Raise ValueError for a draft tree where nothing drafts, and for learning where no head does."""
    drafts = args.lookup or args.draft_model is not None or args.draft_layers is not None
    headless = {
        f"--ea-model {NO_HEAD}": args.ea_model == NO_HEAD,
        "--draft-model": args.draft_model is not None,
        "--draft-layers": args.draft_layers is not None,
    }
    if args.adapt and (flag := next(filter(headless.get, headless), None)):
        raise ValueError(f"--adapt with {flag}: only an EAGLE-1/2 head can adapt; leave one of them out")
    if args.ea_model == NO_HEAD and not drafts and args.total_tokens != 1:
        raise ValueError(
            f"--ea-model is {NO_HEAD} with --total-tokens {args.total_tokens}: nothing drafts a tree; add "
            "--lookup, or take a tree of one node (--total-tokens 1)"
        )


def parse_stream(text: str) -> tuple[int, int]:
    """Return the (seed, row) pair that is written as S or S/N."""
    seed, slash, row = text.partition("/")
    parts = (seed, row if slash else "0")
    if not all(part.isascii() and part.isdecimal() and int(part) < 2**63 for part in parts):
        raise ValueError(f"seed is {text}: it must be S or S/N, whole numbers from 0 below 2**63; choose one")
    return int(parts[0]), int(parts[1])
