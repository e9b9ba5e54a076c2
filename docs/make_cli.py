"""Write the generated parts of docs/cli.md from the command line's own parser: python docs/make_cli.py

A part stands between two marks of its name, such as <!-- flags --> and <!-- /flags -->. The rest of the page
is written by hand.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from eagle_fsd.cli.answer_report import JSON_KEYS
from eagle_fsd.cli.flags import build_parser


def flags() -> str:
    """Return a table for each group of flags, with the help that the parser prints."""
    parser = build_parser()
    formatter = argparse.HelpFormatter(parser.prog)
    parts = []
    for group in parser._action_groups:
        if group._group_actions:
            parts += [f"### {(group.title or '').capitalize()}", "", "| flag | meaning |", "| --- | --- |"]
            for action in group._group_actions:
                meaning = formatter._expand_help(action).replace("|", "\\|")
                parts.append(f"| {typed(action)} | {meaning} |")
            parts.append("")
    return "\n".join(parts[:-1])


def typed(action: argparse.Action) -> str:
    """Return an argument as it is typed, under all its names."""
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    return ", ".join(f"`{f'{name} {value}'.strip()}`" for name in action.option_strings or [""])


def keys() -> str:
    """Return the keys of an object of --json."""
    return textwrap.fill(", ".join(f"`{key}`" for key in JSON_KEYS), 108)


PARTS = {"flags": flags, "keys": keys}


def filled(page: str) -> str:
    """Return the page with its generated parts made anew."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"the page has no {begin} ... {end}: mark where that part belongs")
        page = f"{before}{begin}\n{make()}\n{end}{after}"
    return page


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("cli.md")
    target.write_text(filled(target.read_text(encoding="utf-8")), encoding="utf-8")
