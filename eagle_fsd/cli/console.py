"""`eagle-fsd`: one command with subcommands. Where the first word names none, it is `eagle-fsd generate`.

A first word that is nearly a command is refused: a model would answer a slip of the fingers.

Nothing large is imported before a command is known, so that every list of commands shows at once, without
torch.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple, NoReturn

from eagle_fsd.core.process.signals import EXIT_USAGE, report_interrupt
from eagle_fsd.core.process.streams import tell

PROGRAM = "eagle-fsd"
HELP = ("-h", "--help")
LEAST_LIKENESS = 0.7  # of a mistyped word to a command: sever has it to serve


class Command(NamedTuple):
    """What a subcommand runs, as module:function, and the line that a list shows of it."""

    target: str
    text: str


class Group(NamedTuple):
    """A subcommand with subcommands of its own."""

    text: str
    commands: Mapping[str, Command]


TRAIN = "eagle_fsd.training.commands"
EVAL = "eagle_fsd.evaluation.commands"
GPU = "eagle_fsd.evaluation.gpu"
FORMATS = "eagle_fsd.evaluation.weight_formats"
LM_EVAL = "eagle_fsd.integrations.lm_eval"

COMMANDS: dict[str, Command | Group] = {
    "generate": Command("eagle_fsd.generate:main", "answer prompts; `eagle-fsd TEXT` does the same"),
    "chat": Command("eagle_fsd.chat:main", "chat in the terminal"),
    "serve": Command("eagle_fsd.serve:main", "answer over HTTP, to clients of OpenAI's and Anthropic's APIs"),
    "train": Group(
        "make text, features and draft heads",
        {
            "synthesize": Command(f"{TRAIN}.synthesize:main", "let the target answer prompts"),
            "text": Command(f"{TRAIN}.text:main", "write fixed public text as training pairs"),
            "features": Command(f"{TRAIN}.features:main", "compute the target's features of text"),
            "head": Command(f"{TRAIN}.head:main", "train a draft head, and export it"),
            "rank": Command(f"{TRAIN}.rank:main", "give a head a vocabulary of the most frequent tokens"),
            "fold-bias": Command(f"{TRAIN}.fold_bias:main", "fold the bias of a head's fc into its weights"),
            "evaluate": Command(f"{TRAIN}.evaluate:main", "measure a head's accuracy, calibration and tau"),
            "publish": Command(f"{TRAIN}.publish:main", "write a head's model card, and push it to the Hub"),
            "export-vllm": Command(f"{TRAIN}.export_vllm:main", "write a head and its target for vLLM"),
        },
    ),
    "eval": Group(
        "measure speed, acceptance and quality",
        {
            "speed": Command(f"{EVAL}.speed:main", "compare tokens per second of methods, side by side"),
            "tau": Command(f"{EVAL}.tau:main", "measure tau, tokens per step, by prompt set and rule"),
            "greedy": Command(f"{EVAL}.greedy:main", "check greedy answers against the target's own"),
            "sweep": Command(f"{EVAL}.sweep:main", "answer tasks under many acceptance rules, into rows"),
            "report": Command(f"{EVAL}.report:main", "make tables and plots of a sweep's rows"),
            "score": Command(f"{EVAL}.score:main", "score a sweep's rows again, without a model"),
            "calibrate": Command(f"{EVAL}.calibrate:main", "find thresholds for budgets of quality"),
            "exchange": Command(f"{EVAL}.exchange:main", "compare what rules gain with what they cost"),
            "limits": Command(f"{EVAL}.limits:main", "measure how fast the hardware could be at best"),
            "soak": Command(
                "eagle_fsd.evaluation.serving.soak_command:main",
                "load the server for long: nothing lost, nothing wrong",
            ),
            "serving-speed": Command(
                "eagle_fsd.evaluation.serving.race_command:main", "race the server against llama.cpp's"
            ),
            "repeating-prompts": Command(
                "eagle_fsd.evaluation.repeating_prompts:main",
                "make prompts whose answers repeat most of the prompt",
            ),
            "weight-formats": Command(f"{FORMATS}.command:main", "compare weight formats with float32"),
            "gpu-check": Command(f"{GPU}.command:main", "check what only a GPU can show"),
            "harness": Command(f"{LM_EVAL}.command:main", "run lm-evaluation-harness with this engine"),
        },
    ),
    "storage": Command("eagle_fsd.storage:main", "show what is kept on disk, and clear it"),
}


def show_commands(name: str, commands: Mapping[str, Command | Group]) -> NoReturn:
    """List the commands, a line each, and end the program as argparse does after --help."""
    width = max(map(len, commands))
    lines = [f"  {command:{width}}  {entry.text}" for command, entry in commands.items()]
    usage = f"usage: {name} COMMAND ...\n\ncommands (each has a --help of its own):\n"
    sys.stdout.write(usage + "\n".join(lines) + "\n")
    sys.exit(0)


def run(name: str, command: Command, arguments: Sequence[str]) -> int:
    """Run a command under its full name: its usage, its errors and its records show that."""
    module, function = command.target.split(":")
    try:
        main = getattr(import_module(module), function)
    except KeyboardInterrupt:  # torch takes seconds to import
        return report_interrupt()
    before = sys.argv
    sys.argv = [name, *arguments]  # argparse takes the program's name from here
    try:
        return main(arguments) or 0
    finally:
        sys.argv = before


def nearly_a_command(word: str) -> str | None:
    """Return the command that a mistyped word stands for, if there is one.

    It begins as the command does, or has the same letters in another order: "what" is like chat, and a word
    that prompts begin with.
    """
    word = word.lower()
    for near in get_close_matches(word, COMMANDS, len(COMMANDS), LEAST_LIKENESS):
        if near[0] == word[0] or sorted(near) == sorted(word):
            return near
    return None


def refuse_word(word: str, near: str) -> int:
    """Say that a word is no command, which one is near, and how to ask it as a prompt."""
    tell(
        f"{PROGRAM}: error: {word!r} is no command: it must be one of {', '.join(COMMANDS)}; write {near}, "
        f"or {PROGRAM} generate {shlex.quote(word)} to ask it as a prompt"
    )
    return EXIT_USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Find the command that the first words name, and run it with the rest."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, commands = PROGRAM, COMMANDS
    if words and words[0] in HELP:
        show_commands(name, commands)
    entry = commands.get(words[0]) if words else None
    if entry is None:
        if words and (near := nearly_a_command(words[0])):
            return refuse_word(words[0], near)
        return run(PROGRAM, COMMANDS["generate"], words)
    name, words = f"{name} {words[0]}", words[1:]
    if isinstance(entry, Command):
        # generate goes by the program's own name: it is what the program does by default.
        return run(PROGRAM if entry is COMMANDS["generate"] else name, entry, words)
    if words and words[0] in entry.commands:
        return run(f"{name} {words[0]}", entry.commands[words[0]], words[1:])
    if words and words[0] in HELP:
        show_commands(name, entry.commands)
    found = f"{words[0]!r} is no command" if words else "no command is given"
    tell(f"{name}: error: {found}: it must be one of {', '.join(entry.commands)}; see --help")
    return EXIT_USAGE
