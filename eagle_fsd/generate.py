"""`python -m eagle_fsd.generate`: answer prompts on the command line with draft trees and fuzzy acceptance.

stdout carries only the text as it is made, or with --json one object per prompt (JSON_KEYS). Summaries and
errors go to stderr. Exit codes: 0; 2 for a user's mistake (one line, no traceback); 130 after Ctrl-C,
SIGTERM or the end of the terminal (the text so far is kept); 141 if the reader of stdout went away. An
unexpected exception keeps its traceback.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from eagle_fsd.cli.answer_report import Answer, summary, to_json
from eagle_fsd.cli.arguments import (
    check_answers,
    check_early,
    generation_options,
    require_threshold,
)
from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.cli.flags.processing import with_bad_words
from eagle_fsd.cli.many_answers import answer_together
from eagle_fsd.cli.mistakes import (
    UserError,
    end_line,
    explain_steps,
    raise_user_errors,
    report_mistake,
    run_on_stdout,
)
from eagle_fsd.cli.prompt_arguments import (
    error_in,
    open_images,
    prompt_of,
    read_prompt_arguments,
    require_images,
)
from eagle_fsd.cli.ranks import join, on_every_rank, show_memory
from eagle_fsd.cli.start import begin_early, end_program, interrupt_at_once, load_model, measure_later
from eagle_fsd.core.process.signals import (
    EXIT_INTERRUPTED,
    defer_interrupt,
    on_ending_signals,
    report_interrupt,
)
from eagle_fsd.core.process.streams import tell
from eagle_fsd.runtime.openvino.kept.head_start import HEAD_START
from eagle_fsd.training.online.surfaces import check_adaptation, make_adapter, save_adapted, update_between

# torch and transformers take seconds to import. Only functions that run a model import them, so that --help
# and error messages come at once.
if TYPE_CHECKING:
    from argparse import Namespace

    from torch import Tensor

    from eagle_fsd.decoding.options import GenerationOptions
    from eagle_fsd.decoding.outputs import GenerationOutput
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.training.online.adapter import HeadAdapter


def answer_prompt(
    model: EagleFSD,
    input_ids: Tensor,
    args: Namespace,
    options: GenerationOptions,
    out: TextIO,
    adapter: HeadAdapter | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Answer:
    """Run one prompt [1, L] and write its text to `out` as it is made, unless --json is given.

    adapter: is shown the answer. inputs: of a prompt with images, what the processor made of it.
    """
    from eagle_fsd.text.streamed import StreamedText

    whole = input_ids.new_ones(input_ids.shape)  # all of it is text, a pad token in a chat template too
    with raise_user_errors():
        stream = model.stream(input_ids, whole, options)  # measures the tree if it is auto
    answer = Answer.of(input_ids.shape[1], stream.stats, stream, options)
    if stream.seed is not None:
        answer.seed = "/".join(map(str, options.seed[0]))
    answer.ignored_defaults = ", ".join(model.target.ignored_defaults)
    if args.baseline:
        warm_up(model, input_ids, replace(options, tree=stream.tree), inputs)
    written = StreamedText(model.tokenizer, options.stops, input_ids[0].tolist() if args.raw else ())

    def show(pieces: Sequence[tuple[str, str]]) -> None:
        for piece, _origin in pieces:
            answer.text += piece
            if not args.json:
                out.write(piece)
                out.flush()

    try:
        with (
            defer_interrupt(patient=model.target.ranks.several) as stop,
            end_line(out, lambda: bool(answer.token_ids) and not args.json),
            contextlib.closing(explain_steps(iter(stream))) as steps,
        ):
            for token_ids in steps:
                answer.token_ids += token_ids
                show(written.add(token_ids))
                if model.target.ranks.lead(stop.is_set()):
                    break
        answer.interrupted = model.target.ranks.lead(stop.is_set())  # in the last step, too
    except KeyboardInterrupt:  # a second Ctrl-C did not wait for the step's end
        answer.interrupted = True
    show(written.finish())
    if adapter is not None:
        adapter.add(input_ids[0].tolist(), answer.token_ids)
    answer.logprobs = stream.logprobs if options.logprobs is not None else None
    if not args.json:
        out.write("\n")
        out.flush()
    if args.baseline and not answer.interrupted:
        try:
            output = run_baseline(model, input_ids, options, inputs)
            answer.baseline, answer.baseline_ids = output.stats[0], output.new_tokens[0]
        except KeyboardInterrupt:
            answer.interrupted = True
    return answer


def warm_up(
    model: EagleFSD, input_ids: Tensor, options: GenerationOptions, inputs: Mapping[str, Any] | None
) -> None:
    """Run a few tokens both ways, untimed, so that neither side of a comparison pays for first calls."""
    few = replace(options, max_new_tokens=min(4, options.max_new_tokens), min_new_tokens=0)
    with raise_user_errors():
        model.generate(input_ids, input_ids.new_ones(input_ids.shape), few)
        run_baseline(model, input_ids, few, inputs)


def run_baseline(
    model: EagleFSD, input_ids: Tensor, options: GenerationOptions, inputs: Mapping[str, Any] | None
) -> GenerationOutput:
    """Run the target alone on a prompt [1, L]. inputs: what the processor made of it, if it has images."""
    alone = input_ids if inputs is None else inputs["input_ids"]
    return model.target_alone(alone, alone.new_ones(alone.shape), for_target_alone(options), inputs=inputs)


def for_target_alone(options: GenerationOptions) -> GenerationOptions:
    """Return the options for the target alone: its seed is one number, and it has no log-probabilities."""
    ((seed, _row),) = options.seed
    return replace(options, seed=seed, logprobs=None)


def run(args: Namespace, out: TextIO) -> int:
    """Check the arguments, load the model, answer the prompts in turn, and return the exit code."""
    with raise_user_errors():
        ranks = join(args, "generate")
        require_images(args)
        read = partial(read_prompt_arguments, args)
        prompts = read() if ranks is None else ranks.on_rank_0(read)  # stdin is read once
        check_answers(args)
        check_adaptation(args)
        check_early(args)  # threads that compile would be waited for at the end, even of a mistake
        require_threshold(args)
        begin_early(args)
        options = generation_options(args)
        if args.baseline and options.form is not None:
            raise ValueError(
                f"--baseline with a form ({options.form.kind}): the target alone knows none; leave one out"
            )
        images = open_images(args.image)
        model = load_model(args)
        encoded, inputs = encode_prompts(model, prompts, args, images)
        options = with_bad_words(options, args, model).with_defaults(
            model.target.own_defaults, model.target.named_sampling
        )
        options.require_different_texts("--num-return-sequences")
        copies = options.num_return_sequences
        encoded, inputs = ([one for one in parts for _ in range(copies)] for parts in (encoded, inputs))
        streams = streams_of(model, options, len(encoded), args.skip * copies)
        options = replace(options, num_return_sequences=1, seed=streams)
        adapter = make_adapter(args, model)
    try:
        if min(args.batch_size, len(encoded)) > 1:
            code = answer_together(model, encoded, args, options, out)
        else:
            code = answer_prompts(model, encoded, args, options, out, adapter, inputs)
        HEAD_START.end(complete=True)
        return code
    finally:
        with raise_user_errors():
            save_adapted(args, adapter)
        interrupt_at_once()


def encode_prompts(
    model: EagleFSD, prompts: Sequence[str], args: Namespace, images: Sequence[dict[str, Any]]
) -> tuple[list[Tensor], list[Mapping[str, Any] | None]]:
    """Encode the prompts as [1, L] each. One that is too long is refused before any other is answered.

    images: parts of a message, with which each of them begins. Returns what the processor made of each as
    well, if the target alone is to read the images too; else None.
    """
    import torch

    from eagle_fsd.decoding.request import remaining_positions
    from eagle_fsd.hub.media.processor import prepare_chat
    from eagle_fsd.target.media.reading import read_media
    from eagle_fsd.text.chat import ChatRefused, encode, system_turns

    encoded: list[Tensor] = []
    inputs: list[Mapping[str, Any] | None] = []
    copies = args.num_return_sequences
    for place, prompt in enumerate(prompts):
        name = prompt_of(args, place * copies, len(prompts) * copies)
        try:
            if images:
                turns = [
                    *system_turns(args.system),
                    {"role": "user", "content": [*images, {"type": "text", "text": prompt}]},
                ]
                made = prepare_chat(model.processor, turns, args.chat_template_args)
                ids = torch.tensor([read_media(model.target, made)], device="cpu")
                inputs.append(made if args.baseline else None)
            else:
                ids = encode(model.tokenizer, prompt, args.system, args.raw, args.chat_template_args)
                inputs.append(None)
            encoded.append(ids)
        except ChatRefused as error:
            raise ValueError(f"{error_in(name, error)}, or continue the prompt as it is (--raw)") from error
        except ValueError as error:
            raise ValueError(error_in(name, error)) from error
        remaining_positions(model.target, name, encoded[-1].shape[1])
    return encoded, inputs


def streams_of(
    model: EagleFSD, options: GenerationOptions, count: int, skipped: int
) -> list[tuple[int, int]]:
    """Return the streams of random numbers of `count` texts, which follow `skipped` others."""
    from eagle_fsd.core.randomness.streams import fresh_seed

    ((seed, first),) = options.seed or [(model.target.ranks.lead(fresh_seed()), 0)]
    return [(seed, first + skipped + number) for number in range(count)]


def answer_prompts(
    model: EagleFSD,
    prompts: Sequence[Tensor],
    args: Namespace,
    options: GenerationOptions,
    out: TextIO,
    adapter: HeadAdapter | None,
    inputs: Sequence[Mapping[str, Any] | None],
) -> int:
    """Answer the prompts [1, L] in turn and return the exit code.

    adapter: learns from the answers. inputs: of each prompt, see `answer_prompt`.
    """
    if not args.baseline:
        options = measure_later(options)
    rows = zip(prompts, options.seed, inputs, strict=True)
    for number, (prompt, stream, made) in enumerate(rows, 1):
        of_prompt = replace(options, seed=[stream])
        try:
            answer = answer_prompt(model, prompt, args, of_prompt, out, adapter, made)
        except UserError as error:
            name = prompt_of(args, number - 1, len(prompts))
            raise UserError(error_in(name, error)) from error
        if args.batch_size > 1:  # a lone prompt of a file, whose other answers have their numbers
            answer.number = args.skip * args.num_return_sequences + number
        if args.tp_plan is not None:
            answer.memory = model.memory()
        if args.json:
            out.write(to_json(model, answer, args.baseline) + "\n")
            out.flush()
        elif number < len(prompts):
            out.write("\n")
        tell(summary(answer))
        if args.verbose and answer.memory is not None:
            tell(show_memory(answer.memory))
        if answer.interrupted:
            return EXIT_INTERRUPTED
        more = number < len(prompts)
        try:
            with raise_user_errors():
                model.settler.measure_postponed()
        except KeyboardInterrupt:
            if more:
                raise
            tell("interrupted: the tree's size is measured another time")
        if more:
            with defer_interrupt() as stop:
                adapter, _ = update_between(adapter)
            if stop.is_set():
                return EXIT_INTERRUPTED
    return 0


@on_every_rank
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and return the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)

    def work(out: TextIO) -> int:
        try:
            # Anything that a library prints goes to stderr: stdout is for the text alone.
            with contextlib.redirect_stdout(sys.stderr):
                return run(args, out)
        except FloatingPointError as error:  # logits that are not finite
            return report_mistake(parser.prog, error)
        except KeyboardInterrupt:
            return report_interrupt()

    try:
        with contextlib.ExitStack() as keeping:
            if args.tp_plan is None:  # else torchrun ends all ranks by SIGTERM, and none may wait for another
                keeping.enter_context(on_ending_signals(signal.default_int_handler))
            return run_on_stdout(work, parser.prog, args.verbose)
    finally:
        end_program()


if __name__ == "__main__":
    sys.exit(main())
