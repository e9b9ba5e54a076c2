"""The flags of the command line, with their help texts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eagle_fsd.cli.flags.model import add_adapt_flags, add_model_flags
from eagle_fsd.cli.flags.processing import add_answer_flags, add_processing_flags, add_template_flag
from eagle_fsd.cli.flags.types import (
    AUTO,
    PRESETS,
    RULE_NAMES,
    OneLineParser,
    parse_auto_or,
)
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import CHILDREN, COSTS, MODES, AutoThreshold, TreeConfig
from eagle_fsd.version import __version__

DESCRIPTION = """\
Answer a prompt with a target model, several tokens per step: a small draft head proposes a tree of tokens
(EAGLE-2), the target checks it in one forward, and a rule decides what to keep. --threshold 0, the default,
keeps the target's own text; above 0 (fuzzy speculative decoding) the draft is also followed where the two
distributions are that close."""

EPILOG = """\
examples:
  python -m eagle_fsd.generate "Why is the sky blue?"
  python -m eagle_fsd.generate --threshold 0.3 --temperature 0.6 --top-p 0.9 --top-k 50 "Tell me a story."
  echo "Why is the sky blue?" | python -m eagle_fsd.generate --json -

A threshold belongs to its divergence: 0.3 means something else in js than in reverse_kl. In EAGLE's own
scripts --depth is one less than here, and --top-k is the tree's (here --tree-top-k)."""


def new_parser(module: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for `python -m eagle_fsd.MODULE`, or for the `eagle-fsd` command that runs it."""
    name = Path(sys.argv[0]).stem
    parser = OneLineParser(
        prog=name if name.startswith("eagle-fsd") else f"python -m eagle_fsd.{module}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"eagle_fsd {__version__}")
    return parser


def add_prefix_flag(group: argparse._ArgumentGroup) -> None:
    """Add the flag of what a chat keeps between its turns."""
    group.add_argument(
        "--prefix-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of ended texts that are kept, so that the next turn of a chat reads only what is new; 0 "
        "keeps none (default: 8192)",
    )


def check_prefix_flag(args: argparse.Namespace) -> None:
    """Raise ValueError for a number of tokens that cannot be kept."""
    require_integer("--prefix-tokens", args.prefix_tokens, 0, "0 keeps no text")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    parser = new_parser("generate", DESCRIPTION, EPILOG)
    group = parser.add_argument_group("prompt (one of the three)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("text", nargs="?", metavar="TEXT", help="the prompt; -, or none with a pipe: stdin")
    source.add_argument("--prompt", metavar="TEXT", help="the same, as a flag")
    source.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a text file is one prompt; a .jsonl file has one per line: `prompt`, `question`, `turns` ...",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="answer so many prompts of a .jsonl file together, which is faster over all; a text that ends "
        "gives its place to the next prompt (default: 1)",
    )
    group.add_argument(
        "--skip",
        type=int,
        default=0,
        metavar="N",
        help="leave out the first N prompts of a file, to go on where a run ended; the other answers are the "
        "same for the same --seed (default: 0)",
    )
    group.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image that every prompt begins with; may be repeated. The target must be one that reads "
        'images, and torch computes it; needs pillow (pip install "eagle-fsd[images]")',
    )
    group.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    add_template_flag(group)
    group.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without a chat template"
    )

    add_model_flags(parser)
    add_generation_flags(parser)
    add_adapt_flags(parser)

    group = parser.add_argument_group("output")
    add_answer_flags(group)
    group.add_argument("--json", action="store_true", help="write only one JSON object per prompt to stdout")
    group.add_argument(
        "--baseline",
        action="store_true",
        help="also run the target alone with Hugging Face generate, and report the ratio of speeds",
    )
    add_verbose_flag(group)
    return parser


def add_generation_flags(parser: argparse.ArgumentParser, of_one_text: bool = True) -> None:
    """Add the flags of rule, sampling and draft tree.

    of_one_text: whether --help shows those that a server leaves to each request: its seed and its form.
    """
    tree = TreeConfig()
    group = parser.add_argument_group("acceptance")
    group.add_argument(
        "--preset",
        choices=PRESETS,
        help="fsd-paper: the FSD paper's algorithm and settings: --rule fsd_paper, a chain of 5 drafted "
        "tokens, --temperature 0.6 --top-k 50 --top-p 0.9 --no-lookup. Flags given with it override it",
    )
    group.add_argument(
        "--threshold",
        type=parse_auto_or(float, "a number"),
        metavar="T",
        help="follow the draft where divergence(p, q) <= T (default: 0, lossless, and 0.3 with --rule "
        "fsd_paper); auto: the T and the --price with the most tokens per step inside --quality-budget, by "
        "the head's calibration, or lossless text where a warm sampling makes that faster",
    )
    group.add_argument(
        "--quality-budget",
        type=float,
        metavar="B",
        help="--threshold auto, with this share of tokens that may differ: the mean total variation distance "
        "between the rule's distribution and the target's "
        f"(default with --threshold auto: {AutoThreshold().quality_budget:g})",
    )
    group.add_argument(
        "--divergence",
        metavar="D",
        help="js, reverse_kl, forward_kl, tv, ag, or over the target's ten likeliest tokens: js_top10 ... "
        "(default: js); with --lookup: js, tv or reverse_kl",
    )
    group.add_argument(
        "--mode",
        choices=MODES,
        help="hybrid: the target's own draw comes first; paper: the divergence does; swap: the draw comes "
        "first, but a plan (--price) may take a child that is worth more (default: hybrid)",
    )
    group.add_argument(
        "--child",
        choices=CHILDREN,
        help="which child is followed. draft: one drawn from q; likeliest: the one with the largest q; "
        "target: the one with the largest p (default: draft)",
    )
    group.add_argument(
        "--fuzzy-min-p",
        type=float,
        metavar="X",
        help="never follow a token whose p is below X times the largest p (default: 0)",
    )
    group.add_argument(
        "--max-overshoot",
        type=float,
        metavar="C",
        help="never follow a token whose q exceeds C times its p (default: inf, off)",
    )
    group.add_argument(
        "--min-gain",
        type=float,
        metavar="G",
        help="follow a token only if the target is expected to accept at least G more tokens below it "
        "(default: 0, off)",
    )
    group.add_argument(
        "--price",
        type=float,
        metavar="X",
        help="plan: follow the best child for the whole tree, if it brings X more tokens a unit of --cost, "
        "where --threshold lets it (inf: anywhere) (default: 0, no plan)",
    )
    group.add_argument(
        "--cost",
        choices=COSTS,
        help="what --price is paid for: tokens (total variation), kl, or divergence (default: tokens)",
    )
    group.add_argument(
        "--max-consecutive",
        type=int,
        metavar="N",
        help="allow at most N fuzzy accepts in a row (default: no limit)",
    )
    group.add_argument(
        "--exact-prefix",
        type=int,
        metavar="N",
        help="keep the first N tokens lossless (default: 0)",
    )
    group.add_argument(
        "--rule",
        default="fuzzy",
        choices=RULE_NAMES,
        help="the acceptance rule; others than fuzzy and lossless are from other programs and papers, for "
        "comparison (default: fuzzy)",
    )
    group.add_argument("--epsilon", type=float, metavar="E", help="for --rule typical (default: 0.3)")
    group.add_argument(
        "--delta", type=float, metavar="D", help="for --rule typical (default: 0.09) or cactus (default: 0.1)"
    )
    group.add_argument("--candidates", type=int, metavar="N", help="for --rule relaxed_topk (default: 3)")
    group.add_argument("--margin", type=float, metavar="X", help="for --rule relaxed_topk (default: 0.2)")
    group.add_argument("--single", type=float, metavar="P", help="for --rule sglang (default: 0.5)")
    group.add_argument("--acc", type=float, metavar="P", help="for --rule sglang (default: 1, off)")
    group.add_argument(
        "--weight", type=float, metavar="W", help="for --rule ensemble: the target's weight (default: 0.8)"
    )
    group.add_argument("--entropy", type=float, metavar="H", help="for --rule fly (default: 0.3)")
    group.add_argument("--window", type=int, metavar="N", help="for --rule fly (default: 3)")

    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, metavar="X", help="0 is greedy (default: the model's own, else 0)"
    )
    group.add_argument(
        "--top-k", type=int, metavar="K", help="0 keeps every token (default: the model's own, else 0)"
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", help="1 keeps every token (default: the model's own, else 1)"
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="drop tokens with less than P times the probability of the likeliest; 0 keeps every token "
        "(default: the model's own, else 0)",
    )
    group.add_argument(
        "--seed",
        metavar="S[/N]",
        help="the same seed and tree give the same texts. Prompt n, counted from 0 (or from N), draws from "
        "the stream S/n, so one of many prompts can be repeated alone; --json and the summary show it "
        "(default: a new seed each time)"
        if of_one_text
        else argparse.SUPPRESS,
    )
    group.add_argument(
        "--max-new-tokens",
        "--max-new-token",
        type=int,
        default=256,
        metavar="N",
        help="stop after N new tokens (default: %(default)s)",
    )

    add_processing_flags(parser, of_one_text)

    group = parser.add_argument_group("draft tree")
    group.add_argument(
        "--total-tokens",
        "--total-token",
        type=parse_auto_or(int, "a number of nodes"),
        default=AUTO,
        metavar="N",
        help="nodes in a verify forward, root included; 1: plain decoding; auto: the fastest size on this "
        "machine, measured the first time (default: auto)",
    )
    group.add_argument(
        "--depth",
        type=int,
        metavar="N",
        help=f"the most drafted tokens on a path (default: {tree.depth}, or measured with auto)",
    )
    group.add_argument(
        "--tree-top-k",
        type=int,
        metavar="N",
        help=f"beam width (default: {tree.top_k}, or measured with auto)",
    )
    group.add_argument(
        "--min-confidence",
        type=float,
        metavar="P",
        help="draft further only below paths of twice this probability, and verify only nodes that have it, "
        "so that a tree is larger where the draft is surer; OpenVINO and GPUs fill the tree up nevertheless "
        f"(default: {tree.min_confidence:g}, or measured with auto)",
    )

    group.add_argument(
        "--full-vocabulary",
        action="store_true",
        help="draft over all tokens even if the head has a draft vocabulary (slower)",
    )


def add_verbose_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--verbose", action="store_true", help="show libraries' messages, and tracebacks of all errors"
    )
