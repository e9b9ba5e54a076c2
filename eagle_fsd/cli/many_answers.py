"""Answer many prompts on the command line, several at a time, and write their answers in order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from eagle_fsd.cli.answer_report import Answer, summary, to_json
from eagle_fsd.cli.mistakes import explain_steps, raise_user_errors
from eagle_fsd.cli.prompt_arguments import prompt_of
from eagle_fsd.core.checks import one_line
from eagle_fsd.core.process.signals import EXIT_INTERRUPTED, EXIT_USAGE, defer_interrupt
from eagle_fsd.core.process.streams import EnduringStderr, tell

if TYPE_CHECKING:
    from argparse import Namespace

    from torch import Tensor

    from eagle_fsd.decoding.many import FinishedText, TextStream
    from eagle_fsd.decoding.options import GenerationOptions
    from eagle_fsd.engine import EagleFSD


def answer_together(
    model: EagleFSD, prompts: Sequence[Tensor], args: Namespace, options: GenerationOptions, out: TextIO
) -> int:
    """Answer prompts [1, L], --batch-size at a time, and return the exit code.

    options: name each prompt's stream of random numbers. Answers come in the prompts' order. After Ctrl-C or
    an error, those that had ended are written too, and after Ctrl-C those under way, as far as they came.
    """
    from tqdm import tqdm

    from eagle_fsd.decoding import request

    with raise_user_errors():
        rows = [prompt[0].tolist() for prompt in prompts]
        texts = model.generate_many(rows, options, args.batch_size)  # measures the tree if it is auto
    answers = InOrder(model, rows, texts, args, options, out)
    # Where answers go to the terminal, they show how far it is.
    hidden = out.isatty() or not sys.stderr.isatty()
    bar = tqdm(total=len(rows), unit="answer", file=EnduringStderr(sys.stderr), disable=hidden)
    ranks, interrupted = model.target.ranks, False
    try:
        with bar, defer_interrupt(patient=ranks.several) as stop:
            for ended in explain_steps(texts.steps()):
                if interrupted := ranks.lead(stop.is_set()):
                    ended = [*ended, *texts.end()]
                answers.add(ended)
                bar.update(len(ended))
                if interrupted:
                    break
    except KeyboardInterrupt:  # a second Ctrl-C did not wait for the step's end
        interrupted = True
        answers.add(texts.end())
    except Exception:  # what ended in the step that failed is whole
        answers.add([text for text in texts.end() if text.stats.finish_reason != request.INTERRUPTED])
        raise
    finally:
        answers.write_rest()
        tell(answers.summary(interrupted))
    return EXIT_INTERRUPTED if interrupted else EXIT_USAGE if answers.failed else 0


class InOrder:
    """Writes answers in the order of their prompts, each as soon as all before it are written.

    count: how many were given. failed: how many of them have an error.
    """

    def __init__(
        self,
        model: EagleFSD,
        prompts: Sequence[Sequence[int]],
        texts: TextStream,
        args: Namespace,
        options: GenerationOptions,
        out: TextIO,
    ) -> None:
        self.model, self.prompts, self.texts = model, prompts, texts
        self.args, self.options, self.out = args, options, out
        self.count = self.failed = 0
        self._skipped = args.skip * args.num_return_sequences
        self._next, self._waiting = 0, dict[int, Answer]()

    def add(self, ended: Sequence[FinishedText]) -> None:
        """Take the answers that ended in one step."""
        for text in ended:
            self._waiting[text.number] = self._answer(text)
            self.count += 1
            if text.failure is not None:
                self.failed += 1
                name = prompt_of(self.args, text.number, len(self.prompts))
                tell(f"error: {name}: {one_line(text.failure)}")
        while self._next in self._waiting:
            self._write(self._next)
            self._next += 1

    def write_rest(self) -> None:
        """Write the answers that still wait for one before them, which will not come."""
        for number in sorted(self._waiting):
            self._write(number)

    def summary(self, interrupted: bool) -> str:
        """Return one line on all answers."""
        whole = Answer.of(0, self.texts.total, self.texts, self.options)
        whole.interrupted = interrupted
        if self.texts.seed is not None:
            seed, first = self.options.seed[0]
            whole.seed = f"{seed}/{begin}" if (begin := first - self._skipped) else str(seed)
        return f"{self.count} of {len(self.prompts)} answers: {summary(whole)}"

    def _answer(self, text: FinishedText) -> Answer:
        from eagle_fsd.text.streamed import StreamedText

        prompt, stream = self.prompts[text.number], self.options.seed[text.number]
        answer = Answer.of(len(prompt), text.stats, self.texts, self.options)
        answer.token_ids, answer.logprobs = text.new_tokens, text.logprobs
        answer.seed = None if self.texts.seed is None else "/".join(map(str, stream))
        answer.number = self._skipped + text.number + 1
        written = StreamedText(self.model.tokenizer, self.options.stops, prompt if self.args.raw else ())
        pieces = [*written.add(text.new_tokens), *written.finish()]
        answer.text = "".join(piece for piece, _origin in pieces)
        return answer

    def _write(self, number: int) -> None:
        answer = self._waiting.pop(number)
        if self.args.json:
            self.out.write(to_json(self.model, answer, baseline=False) + "\n")
        else:
            blank = "\n" if number + 1 < len(self.prompts) else ""
            self.out.write(f"{answer.text}\n{blank}")
        self.out.flush()
