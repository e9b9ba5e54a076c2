"""Write the generated parts of docs/cli.md from the command line's own parser: python docs/make_cli.py

A part stands between two marks of its name, such as <!-- flags --> and <!-- /flags -->. The rest of the page
is written by hand.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from eagle_fsd.cli.answer_report import JSON_KEYS
from eagle_fsd.cli.console import COMMANDS, PROGRAM, Command, Group
from eagle_fsd.cli.flags.parser import build_parser

ROOT = Path(__file__).parents[1]


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


def programs() -> str:
    """Return a table of the console command's subcommands, and the scripts that do the same in a checkout."""
    lines = ["| installed | in a checkout | what it does |", "| --- | --- | --- |"]
    for words, command in listed(COMMANDS):
        script = in_checkout(command.target.partition(":")[0])
        lines.append(f"| `{PROGRAM} {words}` | `{script}` | {command.text} |")
    return "\n".join(lines)


def listed(commands: Mapping[str, Command | Group], before: str = "") -> Iterator[tuple[str, Command]]:
    """Yield every subcommand and the words that call it."""
    for word, entry in commands.items():
        words = f"{before} {word}".strip()
        if isinstance(entry, Command):
            yield words, entry
        else:
            yield from listed(entry.commands, words)


def in_checkout(module: str) -> str:
    """Return how a checkout runs a module: by the thin script that imports its main, or as a module."""
    for script in sorted((*(ROOT / "train").glob("*.py"), *(ROOT / "eval").glob("*.py"))):
        if f"from {module} import main" in script.read_text(encoding="utf-8"):
            return f"python {script.relative_to(ROOT).as_posix()}"
    return f"python -m {module}"


PARTS = {"flags": flags, "keys": keys, "programs": programs}


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
