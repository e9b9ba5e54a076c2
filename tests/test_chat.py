"""The chat in the terminal: its turns, commands, colours, and Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import select
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.full_disk import FullDisk
from support.tiny_engine import CHAT, TREE, chat_ids, text_alone, tiny_engine
from support.tiny_tokenizer import tiny_tokenizer
from torch import Tensor

from eagle_fsd import AutoThreshold, EagleFSD, Fuzzy, chat
from eagle_fsd.acceptance.calibration import FILE, CalibratedThreshold, Calibration, write_calibrations
from eagle_fsd.autotune.tree_chooser import TreeChooser
from eagle_fsd.cli import mistakes
from eagle_fsd.cli.conversation import Conversation, Exit, read_messages
from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.core.process.signals import ENDING
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.target.session import TargetSession
from eagle_fsd.text import streamed
from eagle_fsd.text.streamed import Piece, StreamedText

FLAGS = ["--total-tokens", "8", "--depth", "3", "--tree-top-k", "3", "--max-new-tokens", "15"]


def say(monkeypatch: pytest.MonkeyPatch, text: str, *flags: str) -> int:
    """Run the chat on piped input."""
    monkeypatch.setattr(chat, "load_model", lambda args: tiny_engine())
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return chat.main([*FLAGS, *flags])


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_answers_are_the_engines_own_and_turns_build_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "chat.json"
    lines = [
        "Hi",
        "",
        "a\\",
        "b",
        "/paste",
        "c",
        "/d",
        "/end",
        f"/save {saved}",
        "/reset",
        "Hi",
        "/exit",
        "no",
    ]
    assert say(monkeypatch, "\n".join(lines) + "\n") == 0
    turns: list[dict[str, str]] = []
    for message in ("Hi", "a\nb", "c\n/d"):
        turns.append(turn("user", message))
        turns.append(turn("assistant", text_alone(chat_ids(turns), max_new_tokens=15)))
    said, told = capsys.readouterr()
    assert said == "".join(f"{one['content']}\n" for one in [*turns[1::2], turns[1]])
    assert json.loads(saved.read_text()) == {"messages": turns}
    assert told.count("tok/s") == 4 and "\033" not in said + told and ">>>" not in said + told


def test_a_chat_is_saved_where_a_link_points_and_over_no_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, link, pipe = tmp_path / "chat.json", tmp_path / "link.json", tmp_path / "pipe"
    file.write_text("old")
    link.symlink_to(file)
    os.mkfifo(pipe)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert say(monkeypatch, f"/save {link}\n/save {pipe}\n/save {tmp_path}\n/save ~/home.json\n") == 0
    assert link.is_symlink() and json.loads(file.read_text()) == {"messages": []}
    assert stat.S_ISFIFO(pipe.stat().st_mode) and (tmp_path / "home.json").is_file()
    told = capsys.readouterr().err
    assert f"{pipe}: is no file; name another one" in told and f"{tmp_path}: is no file" in told


def test_a_chat_needs_a_stdout_that_takes_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mistakes, "report_stdout", functools.partial(reported, mistakes.report_stdout))
    for out, words in (
        (None, "stdout is closed"),
        (FullDisk(), "stdout takes no more (No space left on device)"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            assert say(patch, "Hi\n") == 2
        (line,) = [one for one in capsys.readouterr().err.splitlines() if "error" in one]
        assert words in line


def reported(report: Any, program: str, error: OSError) -> int:
    """Report a full stdout, which here is no stdout of a process that could be sent nowhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mistakes, "discard_stdout", lambda: None)
        return report(program, error)


def test_the_threshold_and_the_seed_change_what_follows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "Hi\n/reset\n/threshold 0.4\nHi\n/threshold -1\n/threshold x\n/threshold\n/what\n/reset now\n/save\n"
    )
    assert say(monkeypatch, text, "--temperature", "1", "--seed", "5") == 0
    said, told = capsys.readouterr()
    asked = {"max_new_tokens": 15, "temperature": 1.0}
    assert (
        said.splitlines()
        == "\n".join(
            (
                text_alone(chat_ids(), seed=[(5, 0)], **asked),
                text_alone(chat_ids(), seed=[(5, 1)], rule=Fuzzy(0.4), **asked),
            )
        ).splitlines()
    )
    for message in (
        "threshold 0.4: larger is faster",
        "threshold is -1.0: it must be a number at least 0",
        "threshold is 'x': it must be a number of at least 0, or auto",
        "/what is no command: /help lists them",
        "/reset takes nothing, and 'now' follows it",
        "/save needs the name of a file",
    ):
        assert message in told


def test_a_budget_has_its_own_tree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It holds for the calibration's tree, and not for one that was chosen for other rules before.

    No answer waits for a measurement: the first one has a usual tree.
    """
    model, measured = tiny_engine(), []
    one = CalibratedThreshold("js", "hybrid", "draft", 0.3, 0.01, 0.015, 2.5, 2.2)
    made = Calibration(model.identity(), SamplingConfig(0.5), TreeConfig(6, 3, 2), 0.95, 40, (one,))
    write_calibrations(tmp_path / FILE, [made])
    monkeypatch.setattr(model.settler, "folder", tmp_path)
    chosen = SimpleNamespace(tree=TreeConfig(12, 3, 4))
    monkeypatch.setattr(TreeChooser, "if_quiet", lambda *_, **__: measured.append(1) or chosen)
    monkeypatch.setattr(TreeChooser, "remembered", lambda *_: chosen if measured else None)
    monkeypatch.setattr(model.settler, "choose_tree", lambda *_: measured.append(1) or chosen)
    monkeypatch.setattr(chat, "load_model", lambda args: model)
    lines = "Hi\n/threshold auto\nHi\n/threshold 0.2\nHi\n/threshold auto\nHi\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert chat.main(["--temperature", "0.5", "--max-new-tokens", "4"]) == 0
    told = capsys.readouterr().err
    assert re.findall(r"tree ([0-9/.]+)", told) == ["8/6/4/0.1", "6/3/2", "12/3/4", "6/3/2"]
    assert measured == [1, 1], "after the first answer, and for the third"


def test_a_chat_that_is_too_long_is_said_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, f"{'x' * 300}\nHi\n") == 0
    said, told = capsys.readouterr()
    assert said == text_alone(chat_ids(), max_new_tokens=15) + "\n"
    assert re.search("the chat has [0-9]+ tokens with this message: at most 255 are .* with /reset\n", told)


@pytest.mark.parametrize("steps", [0, 2])
def test_memory_that_ends_in_an_answer_does_not_end_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    """What is there of the answer keeps its line."""
    tiny_engine()  # which verifies a tree as it is made
    left, verify = iter([False] * steps + [True]), TargetSession.verify

    def full_at_first(session: TargetSession, tree: DraftTree) -> tuple[Tensor, Tensor]:
        if next(left, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return verify(session, tree)

    monkeypatch.setattr(TargetSession, "verify", full_at_first)
    assert say(monkeypatch, "Tell me all\nHi\n") == 0
    said, told = capsys.readouterr()
    answer = text_alone(chat_ids(), max_new_tokens=15) + "\n"
    assert said.endswith(answer) and "out of memory (CUDA" in told
    begun = said.removesuffix(answer)
    assert (begun == "") == (steps == 0)
    if begun:
        whole = text_alone(chat_ids([{"role": "user", "content": "Tell me all"}]), max_new_tokens=15)
        assert len(begun) > 1 and begun[-1] == "\n" and whole.startswith(begun[:-1])


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Put a pseudo-terminal in the places of stdin and stdout, and yield its other end."""
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals on this system")
    ours, theirs = pty.openpty()
    monkeypatch.setattr(chat, "load_model", lambda args: tiny_engine())
    monkeypatch.delenv("NO_COLOR", raising=False)
    with open(theirs, encoding="utf-8", closefd=False) as reader, open(theirs, "w", closefd=False) as writer:
        monkeypatch.setattr(sys, "stdin", reader)
        monkeypatch.setattr(sys, "stdout", writer)
        yield ours
        monkeypatch.undo()
    os.close(theirs)
    os.close(ours)


def shown(terminal: int) -> str:
    """Return all that was written to a terminal; the kernel may hand it on in parts."""
    sys.stdout.flush()
    found = os.read(terminal, 2**16)
    while select.select([terminal], [], [], 0.5)[0]:
        found += os.read(terminal, 2**16)
    return found.decode().replace("\r\n", "\n")


def test_a_terminal_shows_how_every_token_came(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as end:
        os.write(end, b"Hi\n/exit\n")
        assert chat.main([*FLAGS, "--threshold", "0.1", "--temperature", "1", "--seed", "2"]) == 0
        page = shown(end)
    model = tiny_engine()
    made = model.generate(
        [chat_ids()], max_new_tokens=15, temperature=1.0, seed=2, rule=Fuzzy(0.1), tree=TREE
    )
    stats = made.stats[0]
    text = text_alone(chat_ids(), max_new_tokens=15, temperature=1.0, seed=2, rule=Fuzzy(0.1))
    assert text in re.sub(r"\033\[[\d;]*m", "", page)
    count = {
        origin: sum(map(len, re.findall(re.escape(colour) + r"([^\033]*)", page)))
        for origin, colour in chat.COLOURS.items()
        if colour
    }
    assert count == {"drafted": stats.exact_accepts, "fuzzy": stats.fuzzy_accepts}
    assert all(count.values()) and ">>> " in page


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.usefixtures("interrupts_arrive")
def test_ctrl_c_stops_the_answer_and_not_the_program(
    presses: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also a second one in the same step. What was shown is a turn of the chat."""
    stream = EagleFSD.stream

    class Interrupted:
        def __init__(self, inner: Any) -> None:
            self.inner, self.tree, self.rule, self.stats = inner, inner.tree, inner.rule, inner.stats
            self.seed = inner.seed

        def __iter__(self) -> Iterator[list[int]]:
            for number, tokens in enumerate(self.inner):
                for _ in range(presses * (number == 2)):
                    signal.raise_signal(signal.SIGINT)
                yield tokens

    started: list[int] = []

    def once(model: EagleFSD, *args: Any, **options: Any) -> Any:
        started.append(1)
        found = stream(model, *args, **options)
        return Interrupted(found) if len(started) == 1 else found

    monkeypatch.setattr(EagleFSD, "stream", once)
    saved = tmp_path / "chat.json"
    assert say(monkeypatch, f"Hi\n/save {saved}\n/reset\nHi\n", "--max-new-tokens", "40") == 0
    said, told = capsys.readouterr()
    whole = text_alone(chat_ids(), max_new_tokens=40)
    begun = said.removesuffix(f"{whole}\n").removesuffix("\n")
    assert said == f"{begun}\n{whole}\n" and whole.startswith(begun) and 0 < len(begun) < len(whole)
    assert told.count("interrupted") == 1
    turns = [turn("user", "Hi"), turn("assistant", begun)]
    assert json.loads(saved.read_text()) == {"messages": turns}


@pytest.mark.usefixtures("interrupts_arrive")
def test_ctrl_c_while_the_model_is_freed_does_not_wait_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[object] = []

    def end(complete: bool = False) -> None:
        handlers.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr(chat.HEAD_START, "end", end)
    before = signal.getsignal(signal.SIGINT)
    assert say(monkeypatch, "Hi\n") == 0
    assert handlers == [before, signal.SIG_DFL] and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.usefixtures("interrupts_arrive")
def test_ctrl_c_while_the_tree_is_measured_does_not_end_the_chat(
    presses: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One stops the answer at its first step, and two stop the measurement."""
    stream, rest = EagleFSD.stream, [presses]

    def measured(model: EagleFSD, *args: Any, **options: Any) -> Any:
        for _ in range(rest.pop() if rest else 0):
            signal.raise_signal(signal.SIGINT)
        return stream(model, *args, **options)

    monkeypatch.setattr(EagleFSD, "stream", measured)
    assert say(monkeypatch, "Hi\n/reset\nHi\n") == 0
    said, told = capsys.readouterr()
    whole = text_alone(chat_ids(), max_new_tokens=15)
    begun = said.removesuffix(f"{whole}\n")
    assert said == f"{begun}{whole}\n" and told.count("interrupted") == 1
    assert whole.startswith(begun.rstrip("\n")) and (begun != "") == (presses == 1)
    assert ("the chat goes on" in told) == (presses == 2)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_neither_bytes_nor_characters_outside_an_encoding_end_the_chat(
    encoding: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Bytes that the encoding cannot read are read as UTF-8, or the message is refused; the chat goes on."""

    class Accented(StreamedText):
        def finish(self) -> list[Piece]:
            shown = [*super().finish(), Piece("\u00e9\u2026")]
            self.text += "\u00e9\u2026"
            return shown

    saved, out = tmp_path / "chat.json", io.BytesIO()
    typed = "latin-1" if encoding == "latin-1" else "utf-8"
    lines = ["Hi", "caf\u00e9", f"/save {saved}"]
    wrong = b"" if encoding == "latin-1" else b"caf\xe9\nab\xc3\n"  # it has no byte that is none
    text = "\n".join(lines[:2]).encode(typed) + b"\n" + wrong + f"{lines[2]}\n".encode()
    monkeypatch.setattr(streamed, "StreamedText", Accented)
    monkeypatch.setattr(chat, "load_model", lambda args: tiny_engine())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
    assert chat.main(FLAGS) == 0
    turns = json.loads(saved.read_text())["messages"]
    assert [one["content"] for one in turns[::2]] == lines[:2]
    answers = [one["content"] for one in turns[1::2]]
    assert len(answers) == 2 and all(one.endswith("\u00e9\u2026") for one in answers)
    assert out.getvalue() == "".join(f"{one}\n" for one in answers).encode(encoding, "replace")
    told = capsys.readouterr().err
    assert told.count("the message has the byte 0x") == wrong.count(b"\n") and told.count("tok/s") == 2
    assert ("0xe9" in told) == ("0xc3" in told) == bool(wrong)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert chat.main([*FLAGS, "--system", "caf\udce9"]) == 2
    assert "--system has the byte 0xe9" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--threshold -1", "--prefix-tokens -1", "--threshold 0.3 --cost kl"])
def test_mistakes_in_the_flags_end_in_one_line(
    flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, "", *flags.split()) == 2
    told = capsys.readouterr().err
    flag, value = flags.split()[-2:]
    assert f"error: {flag} is {value}" in told and told.count("\n") == 1


@pytest.mark.parametrize("kept", [0, 8192])
def test_a_turn_reads_only_what_is_new(
    kept: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[int] = []
    plain, target = TargetSession.prefill, tiny_engine().target

    def counted(session: TargetSession, tokens: Tensor, counts: list[int]) -> Tensor:
        if session.target is target:
            read.append(sum(counts))
        return plain(session, tokens, counts)

    monkeypatch.setattr(TargetSession, "prefill", counted)
    assert say(monkeypatch, "Hi\nWhy is it so?\n", "--prefix-tokens", str(kept)) == 0
    first, second = read
    answer = text_alone(chat_ids(), max_new_tokens=15)
    turns = [turn("user", "Hi"), turn("assistant", answer), turn("user", "Why is it so?")]
    whole = len(chat_ids(turns)) - 1
    assert first == len(chat_ids()) - 1
    assert capsys.readouterr().out == f"{answer}\n{text_alone(chat_ids(turns), max_new_tokens=15)}\n"
    assert second <= whole - first if kept else second == whole  # the answer may be spelled otherwise


def test_messages_of_several_lines() -> None:
    lines = iter(["one", "  ", "a\\", "b\\", "c", "/paste", "x", "", "/exit", "/end", "/paste", "open"])
    read = list(read_messages(lambda goes_on: next(lines, None)))
    assert read == [("one", False), ("a\nb\nc", False), ("x\n\n/exit", True), ("open", True)]


@pytest.mark.parametrize("begun", ["/paste\nno", "no\\"])
def test_ctrl_c_takes_a_message_back(begun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line begins another one, and Ctrl-D ends the chat on a line of its own."""
    lines = iter([*begun.split("\n"), KeyboardInterrupt, "Hi", "/exit", EOFError])

    def read(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    with terminal(monkeypatch) as end:
        monkeypatch.setattr("builtins.input", read)
        errors = io.StringIO()
        monkeypatch.setattr(sys, "stderr", errors)
        assert chat.main([*FLAGS, "--no-colour"]) == 0
        page = shown(end)
    assert page == f"{text_alone(chat_ids(), max_new_tokens=15)}\n"
    assert "the message is dropped" in errors.getvalue() and next(lines) is EOFError


def test_ctrl_d_leaves_the_line_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as end:
        errors = io.StringIO()
        monkeypatch.setattr(sys, "stderr", errors)
        os.write(end, b"\x04")
        assert chat.main(FLAGS) == 0
    assert errors.getvalue().endswith("\n\n")


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, True),
    ],
)
def test_colours_are_for_terminals_that_show_them(variables: dict[str, str], coloured: bool) -> None:
    assert chat.shows_colours(variables) == coloured


def test_a_message_is_answered_again_and_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = [tmp_path / f"{name}.json" for name in "abc"]
    lines = f"Hi\nYou\n/save {saved[0]}\n/threshold 0.4\n/again\n/save {saved[1]}\n/undo\n/save {saved[2]}\n"
    assert say(monkeypatch, lines + "/undo\n/undo\n/again\nHi\n", "--temperature", "1", "--seed", "5") == 0
    asked = {"max_new_tokens": 15, "temperature": 1.0}
    first = turn("assistant", text_alone(chat_ids(), seed=[(5, 0)], **asked))
    turns = [*CHAT, first, turn("user", "You")]
    second = text_alone(chat_ids(turns), seed=[(5, 1)], **asked)
    third = text_alone(chat_ids(turns), seed=[(5, 2)], rule=Fuzzy(0.4), **asked)
    fourth = text_alone(chat_ids(), seed=[(5, 3)], rule=Fuzzy(0.4), **asked)
    said, told = capsys.readouterr()
    assert said == "".join(f"{text}\n" for text in (first["content"], second, third, fourth))
    for file, messages in zip(
        saved,
        ([*turns, turn("assistant", second)], [*turns, turn("assistant", third)], turns[:2]),
        strict=True,
    ):
        assert json.loads(file.read_text(encoding="utf-8")) == {"messages": messages}
    assert "forgotten: You" in told and "forgotten: Hi" in told
    assert told.count("there is no message yet: write one first") == 2


def test_an_answer_that_fails_when_asked_again_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conversation = Conversation(chat.build_parser().parse_args(FLAGS))
    talk = chat.Chat(tiny_engine(), conversation, io.StringIO(), coloured=False)
    talk.answer("Hi")
    before = list(conversation.turns)
    monkeypatch.setattr(talk.model, "stream", lambda *_, **__: (_ for _ in ()).throw(ValueError("no")))
    with pytest.raises(ValueError, match=r"^no$"):
        talk.obey("/again")
    assert conversation.turns == before and len(before) == 2


def test_a_saved_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved, bad = tmp_path / "a chat.json", tmp_path / "bad.json"
    assert say(monkeypatch, f"Hi\n/save {saved}\nYou\n") == 0
    wanted = capsys.readouterr().out.splitlines()[-1]
    files = [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("3", 'has no list "messages"'),
        ('{"messages": [3]}', "turn 1 is no text of one of system, user, assistant"),
        ('[{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]', "turn 2 is no text"),
        ('[{"role": "user", "content": [1]}]', "turn 1 is no text"),
        ('[{"role": "user", "content": "\\ud800"}]', "turn 1 is not UTF-8 at character 0"),
    ]
    conversation = Conversation(chat.build_parser().parse_args(FLAGS))
    conversation.turns = list(CHAT)
    for text, words in files:
        bad.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(words)):
            conversation.command(f"/load {bad}")
    for line, words in ((f"/load {tmp_path}", "cannot be read"), ("/load", "/load needs the name of a file")):
        with pytest.raises(ValueError, match=words):
            conversation.command(line)
    assert conversation.turns == CHAT
    assert say(monkeypatch, f"/load '{saved}'\nYou\n") == 0
    said, told = capsys.readouterr()
    assert said.splitlines()[-1] == wanted and f"2 turns of {saved}; the chat goes on behind them" in told


def test_a_temperature_changes_what_follows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "/temperature\nHi\n/reset\n/temperature 1.5\nHi\n/temperature -1\n/temperature x\n/temperature\n"
    assert say(monkeypatch, lines + "/temperature 0\n", "--seed", "5", "--top-k", "9") == 0
    said, told = capsys.readouterr()
    warm = text_alone(chat_ids(), seed=[(5, 1)], max_new_tokens=15, temperature=1.5, top_k=9)
    assert said == f"{text_alone(chat_ids(), max_new_tokens=15)}\n{warm}\n"
    assert told.count("temperature 0: greedy") == 2
    assert told.count("temperature 1.5: sampled with top-k 9") == 2
    assert "temperature is -1.0: it must be" in told and "temperature is 'x': it must be" in told


def test_what_holds_is_shown() -> None:
    def shown(*flags: str) -> str:
        return Conversation(chat.build_parser().parse_args(flags)).command("/threshold")

    assert shown() == "threshold 0: exact" == shown("--threshold", "0")
    assert shown("--threshold", "0.25") == "threshold 0.25: larger is faster and less exact"
    assert shown("--quality-budget", "0.05") == "threshold auto: the calibrated rule of the budget 0.05"
    assert shown("--rule", "typical") == "the rule is typical, with what the flags gave it"
    for flags, cuts in (("--top-p 0.9", "top-p 0.9"), ("--top-k 5 --min-p 0.05", "top-k 5, min-p 0.05")):
        sampled = Conversation(chat.build_parser().parse_args(["--temperature", "0.7", *flags.split()]))
        assert sampled.command("/temperature") == f"temperature 0.7: sampled with {cuts}"


def test_a_pasted_message_is_no_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, "/paste\n/exit\n/end\n/nonsense\n") == 0
    told = capsys.readouterr()
    assert told.out.strip() and "/nonsense is no command" in told.err


def test_a_calibrated_threshold_is_refused_for_a_head_that_adapts() -> None:
    conversation = Conversation(chat.build_parser().parse_args(["--adapt", "--threshold", "0.3"]))
    with pytest.raises(ValueError, match="auto with --adapt"):
        conversation.command("/threshold auto")
    assert conversation.args.threshold == 0.3


def test_the_end_of_a_chat() -> None:
    conversation = Conversation(chat.build_parser().parse_args(["--system", "Be brief."]))
    assert conversation.turns == [turn("system", "Be brief.")]
    conversation.turns += CHAT
    conversation.command("/reset")
    assert conversation.turns == [turn("system", "Be brief.")]
    with pytest.raises(Exit):
        conversation.command("/exit")


@pytest.mark.parametrize("flags", [[], ["--system", "Be brief."]])
def test_a_chat_that_was_loaded_keeps_its_system_message(flags: list[str], tmp_path: Path) -> None:
    """It goes on after /reset as it would have where it was saved. One without falls back to the flag's."""
    loaded, plain = tmp_path / "loaded.json", tmp_path / "plain.json"
    loaded.write_text(json.dumps([turn("system", "Rhyme."), *CHAT]))
    plain.write_text(json.dumps(CHAT))
    conversation = Conversation(chat.build_parser().parse_args(flags))
    began = list(conversation.turns)
    conversation.command(f"/load {plain}")
    conversation.command("/reset")
    assert conversation.turns == began
    conversation.command(f"/load {loaded}")
    conversation.command("/reset")
    assert conversation.turns == [turn("system", "Rhyme.")]


def test_a_turn_stays_if_the_head_cannot_learn_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Adapter:
        def add(self, *_: Any) -> None: ...

        def update(self) -> None:
            raise MemoryError("no room")

    monkeypatch.setattr(chat, "make_adapter", lambda args, model: Adapter())
    monkeypatch.setattr(chat, "save_adapted", lambda args, adapter: None)
    saved = tmp_path / "chat.json"
    assert say(monkeypatch, f"Hi\n/save {saved}\nHi\n", "--adapt") == 0
    answer = text_alone(chat_ids([turn("user", "Hi")]), max_new_tokens=15)
    assert json.loads(saved.read_text()) == {"messages": [turn("user", "Hi"), turn("assistant", answer)]}
    assert capsys.readouterr().out.startswith(f"{answer}\n")


@pytest.mark.usefixtures("interrupts_arrive")
@pytest.mark.parametrize("number", ENDING)
def test_what_a_head_has_learned_is_saved_when_the_chat_is_ended(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, saved = EagleFSD.stream, list[object]()

    def ended(model: EagleFSD, *args: Any, **options: Any) -> Any:
        assert signal.getsignal(number) is not signal.SIG_DFL, "it would end the tests"
        signal.raise_signal(number)
        return stream(model, *args, **options)

    monkeypatch.setattr(EagleFSD, "stream", ended)
    monkeypatch.setattr(chat, "make_adapter", lambda args, model: "learned")
    monkeypatch.setattr(chat, "save_adapted", lambda args, adapter: saved.append(adapter))
    with pytest.raises(SystemExit) as end:
        say(monkeypatch, "Hi\n", "--adapt")
    assert saved == ["learned"] and end.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_file_may_be_named_in_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    conversation = Conversation(chat.build_parser().parse_args([]))
    for written, name in (('"a b.json"', "a b.json"), ("'c'", "c"), ("it's", "it's"), ("''", "''")):
        assert conversation.command(f"/save {written}") == f"0 turns are in {name}"
        assert (tmp_path / name).is_file()


def test_a_saved_chat_can_be_read_in_any_script(tmp_path: Path) -> None:
    conversation = Conversation(chat.build_parser().parse_args([]), [])
    conversation.turns = [turn("user", "\u05e9\u05dc\u05d5\u05dd, caf\u00e9 \U0001f600")]
    conversation.command(f"/save {tmp_path / 'chat.json'}")
    text = (tmp_path / "chat.json").read_text(encoding="utf-8")
    assert conversation.turns[0]["content"] in text
    assert json.loads(text) == {"messages": conversation.turns}


def test_a_rule_that_the_drafts_cannot_serve_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not at every message from then on, and the threshold before it stays."""
    assert say(monkeypatch, "/threshold 0.4\n/threshold auto\nHi\n") == 0
    told = capsys.readouterr().err
    assert "quality_budget (or threshold auto): it is looked up in the calibration" in told
    assert "js <= 0.4 hybrid" in told and "threshold auto:" not in told
    assert say(monkeypatch, "Hi\n", "--quality-budget", "0.02") == 2
    said, told = capsys.readouterr()
    assert not said and told.count("\n") == 1 and "error: quality_budget (or threshold auto): it is" in told


def test_a_base_model_is_refused_before_the_first_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, tokenizer = tiny_engine(), tiny_tokenizer()
    tokenizer.chat_template = None
    base = EagleFSD(whole.target, whole.drafter, tokenizer, base_model="tiny")
    monkeypatch.setattr(chat, "load_model", lambda args: base)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert chat.main(FLAGS) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "has no chat template: choose a target that has one, or" in told
    assert "generate --raw" in told


def test_a_threshold_takes_a_budgets_place() -> None:
    conversation = Conversation(chat.build_parser().parse_args(["--quality-budget", "0.05"]))
    assert conversation.command("/threshold 0.3").startswith("threshold 0.3: ")
    assert conversation.options.rule == Fuzzy(0.3)
    with pytest.raises(ValueError, match=r"^threshold is -1"):
        conversation.command("/threshold -1")
    assert conversation.options.rule == Fuzzy(0.3)
    assert conversation.command("/threshold auto").endswith("the calibrated rule of the budget 0.05")
    assert conversation.options.rule == AutoThreshold(0.05)


def test_a_cost_without_a_price_is_for_a_calibrated_threshold() -> None:
    conversation = Conversation(chat.build_parser().parse_args(["--threshold", "auto", "--cost", "kl"]))
    assert "--cost kl has no effect on it" in conversation.command("/threshold 0.3")
    assert "cost" not in conversation.command("/threshold auto") + conversation.command("/threshold 0")


def test_commands_are_told_from_what_follows_them() -> None:
    conversation = Conversation(chat.build_parser().parse_args([]))
    conversation.command("/threshold\t0.3")
    assert conversation.options.rule == Fuzzy(0.3)
    assert conversation.command("/threshold auto").endswith("the budget 0.02")
    for line in ("/Threshold 0.2", "/reset! now", "/"):
        with pytest.raises(ValueError, match=f"^{line.split()[0]} is no command: /help lists them"):
            conversation.command(line)


def test_a_message_about_images(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They go with one message, stay in the chat, and are saved by their paths."""
    media = pytest.importorskip("support.media_engine", reason="needs pillow")
    engine, saved = media.media_engine(), tmp_path / "chat.json"
    for number in range(2):
        media.picture(number).save(tmp_path / f"{number}.png")
    lines = [
        *(f"/image {tmp_path / '0.png'}", f"/image '{tmp_path / '1.png'}'", "What?", "And now?", "/again"),
        *(f"/save {saved}", "/undo", "/undo", f"/load {saved}", "/again", "/image", "/image lost.png"),
        f"/image {saved}",
    ]
    monkeypatch.setattr(chat, "load_model", lambda args: engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert chat.main(FLAGS) == 0
    images = [{"type": "image", "image": str(tmp_path / f"{number}.png")} for number in range(2)]
    turns: list[dict[str, Any]] = []
    for content in ([*images, {"type": "text", "text": "What?"}], "And now?"):
        turns.append({"role": "user", "content": content})
        made = engine.generate([engine.read_chat(turns)], max_new_tokens=15, tree=TREE).new_tokens[0]
        turns.append(turn("assistant", engine.tokenizer.decode(made, skip_special_tokens=True)))
    said, told = capsys.readouterr()
    assert said == "".join(f"{turns[place]['content']}\n" for place in (1, 3, 3, 3))
    assert json.loads(saved.read_text()) == {"messages": turns}
    assert "the next message is about 2 images" in told and "forgotten: What?" in told
    assert "/image needs the name of a file" in told and "lost.png: cannot be read" in told
    assert f"{saved} is no picture that can be read" in told


def test_a_target_of_text_alone_sees_no_image(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    media = pytest.importorskip("support.media_engine", reason="needs pillow")
    media.picture().save(tmp_path / "0.png")
    assert say(monkeypatch, f"/image {tmp_path / '0.png'}\nWhat?\nHi\n") == 0
    said, told = capsys.readouterr()
    assert said == text_alone(chat_ids([turn("user", "Hi")]), max_new_tokens=15) + "\n"
    assert "the target reads text alone" in told


@pytest.mark.parametrize("content", [[], [{"type": "image"}], [{"type": "video", "video": "a"}], ["a"], 3])
def test_a_turn_that_is_neither_text_nor_images_is_refused(content: object, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": content}]))
    conversation = Conversation(chat.build_parser().parse_args([]))
    with pytest.raises(ValueError, match="turn 1 is no text of one of"):
        conversation.command(f"/load {file}")
