"""A chat at the terminal: its turns, its commands, and how several lines become one message."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.cli.flags.types import AUTO
from eagle_fsd.core.config import AutoThreshold
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.text.chat import system_turns

if TYPE_CHECKING:
    from eagle_fsd.decoding.options import GenerationOptions

PASTE, END, CONTINUED = "/paste", "/end", "\\"
BARE = ("/reset", "/help", "/exit", "/quit")  # commands that take nothing
HELP = """\
/threshold T   from now on follow the draft where divergence(p, q) <= T; 0 is exact, auto uses the calibration
/reset         forget the chat so far
/save FILE     write the chat to a file, as JSON
/paste         take all lines as one message, up to a line /end
/help          show this
/exit          end the chat; so does Ctrl-D
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer."""


class Exit(Exception):
    """The user wants to end the chat."""


class Dropped(Exception):
    """The user takes back a message of which there are lines already."""


@dataclass
class Conversation:
    """The turns so far, and the flags under which the next answer is made.

    args: the command line's flags, which /threshold changes. turns: {"role", "content"} each. check: raises
    ValueError for options that the models cannot follow.
    """

    args: argparse.Namespace
    turns: list[dict[str, str]] = field(default_factory=list)
    check: Callable[[GenerationOptions], object] = field(default=lambda options: None)

    def __post_init__(self) -> None:
        self.budget = self.args.quality_budget  # a number takes its place, until auto asks for it again
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system message."""
        self.turns = system_turns(self.args.system)

    @property
    def options(self) -> GenerationOptions:
        return generation_options(self.args)

    def command(self, line: str) -> str:
        """Obey a line that begins with a slash and return what to tell the user.

        Raises ValueError for a command that is unknown or cannot be obeyed, and Exit at the end.
        """
        name, *others = line.split(maxsplit=1)
        rest = others[0].strip() if others else ""
        if name == "/threshold":
            return self.set_threshold(rest)
        if name == "/save":
            return self.save(unquoted(rest))
        if name not in BARE:
            raise ValueError(
                f"{name} is no command: /help lists them; begin with a space to say it to the model"
            )
        if rest:
            raise ValueError(f"{name} takes nothing, and {rest!r} follows it: leave that out")
        if name == "/reset":
            self.reset()
            return "the chat is forgotten"
        if name == "/help":
            return HELP
        raise Exit

    def set_threshold(self, text: str) -> str:
        before = self.args.threshold, self.args.quality_budget
        try:
            if text == AUTO:
                self.args.threshold, self.args.quality_budget = AUTO, self.budget
            else:  # it takes a budget's place
                self.args.threshold, self.args.quality_budget = float(text), None
            if text == AUTO and self.args.adapt:
                raise ValueError(
                    "threshold is auto with --adapt: it holds for the head as it was; give a number"
                )
            options = self.options  # raises ValueError if the rule takes no such threshold
            self.check(options)
        except ValueError as error:
            self.args.threshold, self.args.quality_budget = before
            if not text or "could not convert" in str(error):
                raise ValueError(
                    f"threshold is {text!r}: it must be a number of at least 0, or auto"
                ) from error
            raise ValueError(str(error).removeprefix("--")) from error  # it came by the command, no flag
        means = "larger is faster and less exact"
        if isinstance(options.rule, AutoThreshold):
            means = f"the calibrated rule of the budget {options.rule.quality_budget:g}"
        elif self.args.threshold == 0:
            means = "exact"
        elif self.args.cost is not None and not self.args.price:  # a chat that began with auto
            means += f"; --cost {self.args.cost} has no effect on it without a --price"
        return f"threshold {text}: {means}"

    def save(self, name: str) -> str:
        if not name:
            raise ValueError("/save needs the name of a file: /save chat.json")
        try:
            path = Path(name).expanduser().resolve()  # a link stays, and what it points at is written
            if path.exists() and not path.is_file():
                raise ValueError(f"{name}: is no file; name another one")
            said = json.dumps({"messages": self.turns}, indent=1, ensure_ascii=False)  # to be read by people
            write_atomically(path, f"{said}\n")
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no such user, or links in a circle
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{name}: cannot be written ({reason}); name another file") from error
        return f"{len(self.turns)} turns are in {name}"


def unquoted(name: str) -> str:
    """Return the name of a file without quotes around it, which a shell would take away."""
    quoted = len(name) > 2 and name[0] == name[-1] and name[0] in "'\""
    return name[1:-1] if quoted else name


def as_utf8(name: str, text: str) -> str:
    """Return a text of a terminal or a pipe; bytes that its encoding could not read are read as UTF-8.

    They stand in it as the error handler surrogateescape leaves them. Raises ValueError if they are no UTF-8.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"{name} has the byte 0x{byte:02x}, which is no UTF-8 there: retype it where text is UTF-8"
        ) from error


def read_messages(read_line: Callable[[bool], str | None]) -> Iterator[tuple[str, bool]]:
    """Yield messages and commands of one or several lines, without blank ones, and whether it was pasted.

    What was pasted is a message, whatever it begins with. read_line: returns the next line without its end,
    None at the end of the input. It is told whether the line goes on with a message, and raises Dropped if
    that one is not to be sent.
    """
    while (line := read_line(False)) is not None:
        lines, pasted = [line], line.strip() == PASTE
        try:
            if pasted:
                lines = []
                while (line := read_line(True)) is not None and line.strip() != END:
                    lines.append(line)
            else:
                while lines[-1].endswith(CONTINUED):
                    lines[-1] = lines[-1].removesuffix(CONTINUED)
                    lines.append(read_line(True) or "")
        except Dropped:
            continue
        message = "\n".join(lines)
        if message.strip():
            yield message, pasted
