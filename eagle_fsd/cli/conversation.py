"""A chat at the terminal: its turns, its commands, and how several lines become one message."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.cli.flags.types import AUTO
from eagle_fsd.core.checks import one_line, require_utf8
from eagle_fsd.core.config import AutoThreshold, SamplingConfig
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.text.chat import system_turns

if TYPE_CHECKING:
    from eagle_fsd.decoding.options import GenerationOptions

PASTE, END, CONTINUED = "/paste", "/end", "\\"
BARE = ("/again", "/undo", "/reset", "/help", "/exit", "/quit")  # commands that take nothing
ROLES = ("system", "user", "assistant")
SAVED = "name a file that /save wrote"
HELP = """\
/threshold T   from now on follow the draft where divergence(p, q) <= T; 0 is exact, auto uses the calibration
/temperature X from now on sample at this temperature; 0 is greedy. Either of these two alone shows what holds
/image FILE    ask about a picture in the next message; may be given again
/again         answer the last message anew, at another threshold, say
/undo          forget the last message and its answer
/reset         forget the chat so far, but for its system message
/save FILE     write the chat to a file, as JSON
/load FILE     go on with a chat of such a file
/paste         take all lines as one message, up to a line /end
/help          show this
/exit          end the chat; so does Ctrl-D
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer."""


# What a turn says: a text, or parts of a message of which one at least is an image, by its path.
Content = str | list[dict[str, str]]
Turn = dict[str, Any]  # {"role", "content"}


class Exit(Exception):
    """The user wants to end the chat."""


class Again(Exception):
    """The user wants another answer to a message. before: the turns that it follows."""

    def __init__(self, before: list[Turn], message: Content) -> None:
        super().__init__(text_of(message))
        self.before, self.message = before, message


class Dropped(Exception):
    """The user takes back a message of which there are lines already."""


@dataclass
class Conversation:
    """The turns so far, and the flags under which the next answer is made.

    args: the command line's flags, which commands change. turns: {"role", "content"} each. images: the paths
    of those that the next message is about. check: returns options with what the target has of its own, or
    raises ValueError if the models cannot follow them.
    """

    args: argparse.Namespace
    turns: list[Turn] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    check: Callable[[GenerationOptions], GenerationOptions] = field(default=lambda options: options)

    def __post_init__(self) -> None:
        self.budget = self.args.quality_budget  # a number takes its place, until auto asks for it again
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system message: of a chat that was loaded, its own if it has one."""
        said = list(takewhile(lambda turn: turn["role"] == "system", self.turns))
        self.turns = said or [*system_turns(self.args.system)]
        self.images.clear()

    @property
    def options(self) -> GenerationOptions:
        return generation_options(self.args)

    def command(self, line: str) -> str:
        """Obey a line that begins with a slash and return what to tell the user.

        Raises ValueError for a command that is unknown or cannot be obeyed, Again where another answer is
        wanted, and Exit at the end.
        """
        name, *others = line.split(maxsplit=1)
        rest = others[0].strip() if others else ""
        takers = {
            "/threshold": self.set_threshold,
            "/temperature": self.set_temperature,
            "/image": self.add_image,
            "/save": self.save,
            "/load": self.load,
        }
        if name in takers:
            return takers[name](rest)
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
        if name == "/again":
            raise Again(*self.last_message())
        if name == "/undo":
            self.turns, message = self.last_message()
            return f"forgotten: {one_line(text_of(message), 60)}"
        raise Exit

    def take(self, message: str) -> Content:
        """Return what the user says with a message: its text, behind the images that waited for it."""
        images = [{"type": "image", "image": path} for path in self.images]
        self.images.clear()
        return [*images, {"type": "text", "text": message}] if images else message

    def add_image(self, name: str) -> str:
        """Let the next message be about the image in a file, too."""
        from eagle_fsd.hub.media.pictures import open_picture

        name = unquoted(name)
        if not name:
            raise ValueError("/image needs the name of a file: /image cat.png")
        with naming(name, "read"):
            path = Path(name).expanduser().resolve(strict=True)
        open_picture(path, name)
        self.images.append(str(path))
        return f"the next message is about {len(self.images)} image{'s' * (len(self.images) > 1)}"

    def last_message(self) -> tuple[list[Turn], Content]:
        """Return the turns before the user's last message, and that message."""
        for place in reversed(range(len(self.turns))):
            if self.turns[place]["role"] == "user":
                return self.turns[:place], self.turns[place]["content"]
        raise ValueError("there is no message yet: write one first")

    @contextmanager
    def changed(self, **flags: object) -> Iterator[None]:
        """Give flags these values, and take them back if that raises ValueError, whose flag was a command."""
        before = {name: getattr(self.args, name) for name in flags}
        vars(self.args).update(flags)
        try:
            yield
        except ValueError as error:
            vars(self.args).update(before)
            raise ValueError(str(error).removeprefix("--")) from error

    def set_temperature(self, text: str) -> str:
        rule = "a number of at least 0; 0 is greedy"
        flags = {"temperature": number_in("temperature", text, rule)} if text else {}
        with self.changed(**flags):
            sampling = self.check(self.options).sampling
        if sampling.greedy:
            return "temperature 0: greedy"
        off = SamplingConfig()  # what cuts nothing
        cuts = [name for name in ("top_k", "top_p", "min_p") if getattr(sampling, name) != getattr(off, name)]
        kept = ", ".join(f"{name.replace('_', '-')} {getattr(sampling, name):g}" for name in cuts)
        return f"temperature {sampling.temperature:g}: sampled" + (f" with {kept}" if kept else "")

    def set_threshold(self, text: str) -> str:
        flags: dict[str, object] = {}
        if text == AUTO:
            if self.args.adapt:
                raise ValueError(
                    "threshold is auto with --adapt: it holds for the head as it was; give a number"
                )
            flags = {"threshold": AUTO, "quality_budget": self.budget}
        elif text:  # it takes a budget's place
            given = number_in("threshold", text, "a number of at least 0, or auto")
            flags = {"threshold": given, "quality_budget": None}
        with self.changed(**flags):
            options = self.options  # raises ValueError if the rule takes no such threshold
            self.check(options)
        means = "larger is faster and less exact"
        if self.args.threshold is None and self.args.rule != "fuzzy":
            return f"the rule is {self.args.rule}, with what the flags gave it"
        if isinstance(options.rule, AutoThreshold):
            text, means = AUTO, f"the calibrated rule of the budget {options.rule.quality_budget:g}"
        elif not self.args.threshold:
            text, means = "0", "exact"
        elif self.args.cost is not None and not self.args.price:  # a chat that began with auto
            means += f"; --cost {self.args.cost} has no effect on it without a --price"
        return f"threshold {text or format(self.args.threshold, 'g')}: {means}"

    def load(self, name: str) -> str:
        name = unquoted(name)
        if not name:
            raise ValueError("/load needs the name of a file: /load chat.json")
        with naming(name, "read"):
            text = Path(name).expanduser().read_text(encoding="utf-8")
        self.turns = turns_in(name, text)
        return f"{len(self.turns)} turns of {name}; the chat goes on behind them"

    def save(self, name: str) -> str:
        name = unquoted(name)
        if not name:
            raise ValueError("/save needs the name of a file: /save chat.json")
        with naming(name, "written"):
            path = Path(name).expanduser().resolve()  # a link stays, and what it points at is written
            if path.exists() and not path.is_file():
                raise ValueError(f"{name}: is no file; name another one")
            said = json.dumps({"messages": self.turns}, indent=1, ensure_ascii=False)  # to be read by people
            write_atomically(path, f"{said}\n")
        return f"{len(self.turns)} turns are in {name}"


def number_in(name: str, text: str, rule: str) -> float:
    """Return the number that a command gives. Raises ValueError for what is none."""
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}: it must be {rule}") from error


@contextmanager
def naming(name: str, done: str) -> Iterator[None]:
    """Raise ValueError for a file that cannot be read or written. done: which of the two is tried."""
    try:
        yield
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        # RuntimeError: there is no such user, or links go in a circle.
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{name}: cannot be {done} ({reason}); name another file") from error


def text_of(content: Content) -> str:
    """Return what a turn says in words."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def is_content(value: object) -> bool:
    """Return whether this is a text, or a list of parts as `take` makes them."""
    if not isinstance(value, list):
        return isinstance(value, str)
    parts = [part if isinstance(part, dict) else {} for part in value]
    kinds = [part.get("type") for part in parts]
    return bool(parts) and all(
        kind in ("text", "image") and part.keys() == {"type", kind} and isinstance(part[kind], str)
        for kind, part in zip(kinds, parts, strict=True)
    )


def turns_in(name: str, text: str) -> list[Turn]:
    """Return the turns of a saved chat. Raises ValueError for what is no chat. name: of the file."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is no JSON ({one_line(error, 80)}); {SAVED}") from error
    turns = read.get("messages") if isinstance(read, dict) else read
    if not isinstance(turns, list):
        raise ValueError(f'{name}: has no list "messages"; {SAVED}')
    found = []
    for number, turn in enumerate(turns, 1):
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if role not in ROLES or not is_content(content):
            roles = ", ".join(ROLES)
            raise ValueError(f"{name}: turn {number} is no text of one of {roles}; {SAVED}")
        require_utf8(f"{name}: turn {number}", text_of(content))
        found.append({"role": role, "content": content})
    return found


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
