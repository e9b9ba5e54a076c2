"""`python -m eagle_fsd.chat`: a chat in the terminal, coloured by how every token came.

stdout carries the answers; everything else goes to stderr. Without a terminal there are no colours and no
prompts, so that messages may be piped in, one a line. Exit codes: 0; 2 for a user's mistake in the flags, or
a stdout that takes no more; 141 if the reader of stdout went away.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from eagle_fsd.cli.answer_report import Answer, summary
from eagle_fsd.cli.arguments import check_early
from eagle_fsd.cli.conversation import (
    HELP,
    Again,
    Content,
    Conversation,
    Dropped,
    Exit,
    Turn,
    as_utf8,
    read_messages,
)
from eagle_fsd.cli.flags.model import add_adapt_flags, add_model_flags
from eagle_fsd.cli.flags.parser import (
    add_generation_flags,
    add_prefix_flag,
    add_verbose_flag,
    check_prefix_flag,
    new_parser,
)
from eagle_fsd.cli.flags.processing import add_template_flag, with_bad_words
from eagle_fsd.cli.mistakes import (
    UserError,
    end_line,
    explain_lack_of_memory,
    raise_user_errors,
    run_on_stdout,
)
from eagle_fsd.cli.ranks import on_every_rank
from eagle_fsd.cli.start import begin_early, end_program, interrupt_at_once, load_model, measure_later
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.config import AutoThreshold, SamplingConfig, TreeConfig
from eagle_fsd.core.process.signals import defer_interrupt, leave, on_ending_signals
from eagle_fsd.core.process.streams import tell
from eagle_fsd.runtime.openvino.kept.head_start import HEAD_START
from eagle_fsd.training.online.surfaces import check_adaptation, make_adapter, save_adapted, update_between

if TYPE_CHECKING:
    from eagle_fsd.decoding.options import GenerationOptions
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.training.online.adapter import HeadAdapter

# Drafted tokens are green if the target drew them too, and bold yellow if the rule let them through. The
# target's own are as the terminal writes.
COLOURS = {"drafted": "\033[32m", "fuzzy": "\033[1;33m", "target": ""}
PLAIN = "\033[0m"
LEGEND = f"{COLOURS['drafted']}drafted{PLAIN}, {COLOURS['fuzzy']}fuzzy{PLAIN}, the target's own"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    description = "Chat with a target model in the terminal. Text is coloured by how every token came."
    parser = new_parser("chat", description, f"commands:\n{HELP}")
    group = parser.add_argument_group("chat")
    group.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    add_template_flag(group)
    add_prefix_flag(group)
    group.add_argument(
        "--no-colour", "--no-color", dest="colour", action="store_false", help="colour nothing (NO_COLOR too)"
    )
    add_model_flags(parser)
    add_generation_flags(parser)
    add_adapt_flags(parser)
    parser.set_defaults(max_new_tokens=1024)
    add_verbose_flag(parser.add_argument_group("output"))
    return parser


class Chat:
    """A conversation with one engine.

    out: takes the answers. coloured: whether it understands colours. adapter: learns from the answers. Raises
    ValueError for a rule that does not go with the engine's drafts.
    """

    def __init__(
        self,
        model: EagleFSD,
        conversation: Conversation,
        out: TextIO,
        coloured: bool,
        adapter: HeadAdapter | None = None,
    ) -> None:
        from eagle_fsd.core.randomness.streams import fresh_seed
        from eagle_fsd.decoding.prompts.prompt_cache import PromptCache

        self.model, self.conversation, self.out, self.coloured = model, conversation, out, coloured
        self.adapter = adapter
        self.kept = PromptCache(conversation.args.prefix_tokens)
        # Settled with the first answers: with a quality budget or without, at each sampling.
        self.trees: dict[tuple[bool, SamplingConfig], TreeConfig] = {}
        ((self.seed, self.number),) = conversation.options.seed or [(fresh_seed(), 0)]
        self.settled(conversation.options)
        conversation.check = self.settled

    def settled(self, options: GenerationOptions) -> GenerationOptions:
        """Return options with what the target has of its own.

        Raises ValueError for a rule that does not go with the drafts, or a budget without a calibration.
        """
        from eagle_fsd.decoding.options import settle_options

        settler, rule = self.model.settler, options.rule
        settled = settle_options(options, {}, self.model.target)
        if not isinstance(rule, AutoThreshold):
            settler.require_rule(rule)
            return settled
        tree = self.trees.get((True, settled.sampling), settled.tree)
        settler.within_budget(rule, settled.sampling, tree if isinstance(tree, TreeConfig) else None)
        return settled

    def answer(self, message: Content, before: list[Turn] | None = None) -> None:
        """Answer a message and add both to the conversation. Ctrl-C ends the answer after the step in hand.

        A second Ctrl-C does not wait for the step. before: the turns that it follows; None: all so far.
        Raises ValueError if the chat cannot be answered, and KeyboardInterrupt if none of the answer is
        there; the chat is then as it was before.
        """
        import torch

        from eagle_fsd.decoding.options import settle_options
        from eagle_fsd.decoding.steps.origins import TokenOrigins
        from eagle_fsd.text.streamed import StreamedText

        before = self.conversation.turns if before is None else before
        turns = [*before, {"role": "user", "content": message}]
        origins = TokenOrigins()
        args = self.conversation.args
        options = with_bad_words(self.conversation.options, args, self.model)
        options = replace(options, seed=[(self.seed, self.number)])
        sampling = settle_options(options, {}, self.model.target).sampling
        setting = isinstance(options.rule, AutoThreshold), sampling
        options = measure_later(options)
        tree = self.trees.get(setting, options.tree)
        options = replace(
            options, observer=origins if self.coloured else None, tree=tree, prompt_cache=self.kept
        )
        ids = self.model.read_chat(turns, **args.chat_template_args)
        input_ids = torch.tensor([ids], device="cpu")
        length, most = input_ids.shape[1], self.model.target.max_positions - 1
        if length > most:
            raise ValueError(
                f"the chat has {length} tokens with this message: at most {most} are read; shorten the "
                "message, or forget the chat with /reset"
            )
        whole = input_ids.new_ones(input_ids.shape)  # all of it is text, a pad token in the template too
        written = StreamedText(self.model.tokenizer, options.stops)
        answer: Answer | None = None
        try:
            with defer_interrupt() as stop, end_line(self.out, lambda: bool(answer and answer.token_ids)):
                stream = self.model.stream(input_ids, whole, options)
                self.trees[setting] = stream.tree
                answer = Answer.of(input_ids.shape[1], stream.stats, stream, options)
                answer.seed = f"{self.seed}/{self.number}" if stream.seed is not None else None
                with contextlib.closing(iter(stream)) as steps:
                    for token_ids in steps:
                        answer.token_ids += token_ids
                        self.show(written.add(token_ids, origins.take()))
                        if stop.is_set():
                            answer.interrupted = True
                            break
        except KeyboardInterrupt:  # a second Ctrl-C did not wait for the step's end
            if answer is None:  # nothing was emitted
                raise
            answer.interrupted = True
        self.show(written.finish())
        self.out.write("\n")
        self.out.flush()
        tell(summary(answer))
        self.number += 1
        self.conversation.turns = [*turns, {"role": "assistant", "content": written.text}]
        if self.adapter is not None:
            self.adapter.add(input_ids[0].tolist(), answer.token_ids)
            with defer_interrupt():
                self.adapter, _ = update_between(self.adapter)
        if not answer.interrupted and self.model.settler.measure_postponed():
            self.trees.clear()  # the next answer has the one that was chosen

    def obey(self, command: str) -> None:
        try:
            tell(self.conversation.command(command))
        except Again as again:
            self.answer(again.message, again.before)

    def show(self, pieces: Sequence[tuple[str, str]]) -> None:
        for text, origin in pieces:
            colour = COLOURS.get(origin, "") if self.coloured else ""
            self.out.write(f"{colour}{text}{PLAIN}" if colour else text)
        self.out.flush()

    def read_line(self, goes_on: bool) -> str | None:
        """Return the user's next line, with a prompt where both ends are a terminal; None at the end.

        Raises Dropped if Ctrl-C takes back the message that the line goes on with.
        """
        if not self.coloured and not (sys.stdin.isatty() and self.out.isatty()):
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        while True:
            try:
                return input("... " if goes_on else ">>> ")
            except KeyboardInterrupt as interrupt:
                if goes_on:
                    tell("\n(the message is dropped)")
                    raise Dropped from interrupt
                tell("\n(/exit or Ctrl-D ends the chat)")
            except EOFError:
                tell("")  # the cursor still stands behind the prompt
                return None

    def run(self) -> None:
        """Answer messages and obey commands until the end of the input."""
        for message, pasted in read_messages(self.read_line):
            try:
                text = as_utf8("the message", message)
                with explain_lack_of_memory():
                    if text.startswith("/") and not pasted:
                        self.obey(text)
                    else:
                        self.answer(self.conversation.take(text))
            except Exit:
                return
            except (ValueError, FloatingPointError, UserError) as error:  # a chat that is too long, ...
                tell(one_line(error))
            except KeyboardInterrupt:  # before an answer began, or in an update of the head
                tell("\ninterrupted: the chat goes on; /exit or Ctrl-D ends it")


def shows_colours(variables: Mapping[str, str]) -> bool:
    """Return whether a terminal shows colours, and its user wants them (https://no-color.org)."""
    return not variables.get("NO_COLOR") and variables.get("TERM") != "dumb"


def refuse_base_model(model: EagleFSD) -> None:
    """Raise ValueError if a model has no chat template, so that it could answer no message."""
    from eagle_fsd.text.chat import ChatRefused, require_chat_template

    try:
        require_chat_template(model.tokenizer)
    except ChatRefused as error:
        raise ValueError(f"{error}, or continue texts with eagle-fsd generate --raw") from error


def run(args: argparse.Namespace, out: TextIO) -> int:
    """Check the arguments, load the model, and chat."""
    if sys.stdin is None:
        raise UserError("stdin is closed: the chat reads messages from it; open it")
    if args.tp_plan is not None:
        raise UserError(
            "--tp-plan in the terminal chat: it has one process; serve the target with torchrun "
            "--nproc-per-node N -m eagle_fsd.serve --tp-plan auto ..., whose page is a chat"
        )
    with raise_user_errors():
        if args.system is not None:
            args.system = as_utf8("--system", args.system)
        check_adaptation(args)
        check_prefix_flag(args)
        check_early(args)
        begin_early(args)
        conversation = Conversation(args)
        conversation.options  # noqa: B018  # raises ValueError for flags that do not fit
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print
            model = load_model(args)
            refuse_base_model(model)
            adapter = make_adapter(args, model)
        at_terminal = sys.stdin.isatty() and out.isatty()
        coloured = at_terminal and args.colour and shows_colours(os.environ)
        talk = Chat(model, conversation, out, coloured, adapter)
    if at_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history and editing
        legend = f"; {LEGEND}" if coloured else ""
        tell(f"{model.base_model}: /help lists the commands{legend}")
    try:
        talk.run()
        HEAD_START.end(complete=True)
    finally:
        with raise_user_errors():
            save_adapted(args, adapter)
        interrupt_at_once()
    return 0


@on_every_rank
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, chat, and return the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # a byte that is no character must not end the chat

    def work(out: TextIO) -> int:
        try:
            return run(args, out)
        except KeyboardInterrupt:
            return 0

    try:
        with on_ending_signals(leave):  # what the head has learned is saved
            return run_on_stdout(work, parser.prog, args.verbose)
    finally:
        end_program()


if __name__ == "__main__":
    sys.exit(main())
