"""Train an EAGLE-1/2 or EAGLE-3 draft head for a target on text, and export it for other engines.

    eagle-fsd train head --data runs/answers.jsonl --output runs/head --export runs/head/export
    eagle-fsd train head --eagle3 --data runs/answers.jsonl --output runs/head3 --export runs/head3/export
    accelerate launch -m eagle_fsd.training.commands.head --shards runs/features/answers --output runs/head

Rows: {"conversations": [{"role", "content"}, ...]}, the same as "messages" or in ShareGPT's {"from",
"value"}, {"prompt", "completion"} as texts or as lists of messages, or Alpaca's {"instruction", "input",
"output"}. The target computes their features once, and they are kept under
--features for later runs; with --online they are computed batch by batch and not kept. Ctrl-C, SIGTERM
or the end of the terminal stops a run, and the same command continues it. OUTPUT/curves.png shows its curves.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from transformers import PreTrainedTokenizerBase

from eagle_fsd import hub
from eagle_fsd.autotune.head_reading import settle_head
from eagle_fsd.core.checks import require_integer
from eagle_fsd.drafting.eagle3.export import LAYOUTS
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.evaluation.cli import plain_parser
from eagle_fsd.files.places import require_folder
from eagle_fsd.hub.head_checkpoint import FC_BIAS_KEY
from eagle_fsd.hub.head_digest import TRAINED_FOR, target_digest
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.batching import require_held_out, softmax_tokens, split_held_out, without_copies
from eagle_fsd.training.cli import (
    TRACKERS,
    add_compute_arguments,
    add_shards,
    add_text_arguments,
    add_text_tokens,
    check_text,
    read_examples,
    require_tracker,
    run_command,
    text_tokens,
    uses_no_gpu,
)
from eagle_fsd.training.data.shards import Features
from eagle_fsd.training.data.sources import Sources
from eagle_fsd.training.data.token_counts import always_drafted, learned_tokens, require_size
from eagle_fsd.training.eagle3.new_head import (
    LARGEST_VOCABULARY,
    choose_taps,
    make_trainable,
    new_head,
    require_window,
)
from eagle_fsd.training.eagle3.options import add_eagle3, check_training, refuse_other_kind
from eagle_fsd.training.loss import Head, LossWeights
from eagle_fsd.training.readout import Readout
from eagle_fsd.training.run.curves import plot_curves
from eagle_fsd.training.run.exports import finish, require_export
from eagle_fsd.training.run.folder import (
    CHECKPOINT,
    flatten,
    read_checkpoint,
    refuse_other_run,
    sole_run,
    stored_run,
)
from eagle_fsd.training.run.process import end_together
from eagle_fsd.training.run.settings import add_settings, settle_defaults
from eagle_fsd.training.schedule import TrainConfig, initialise, widen
from eagle_fsd.training.trainer import Trainer

logger = logging.getLogger(__name__)

PATIENCE = timedelta(hours=6)  # processes wait for each other's shards and for the first one's evaluations


def build_parser() -> argparse.ArgumentParser:
    parser = plain_parser(__doc__)
    add_text_arguments(parser)
    add = parser.add_argument
    add_compute_arguments(parser)
    add_shards(parser)
    add_eagle3(parser, "train an EAGLE-3 head, which reads the target's taps and has its own lm_head")
    add("--online", action="store_true", help="compute features batch by batch and store none")
    add("--features", type=Path, help="folder of stored features (default: OUTPUT/features)")
    add("--output", type=Path, required=True, help="the run's folder: checkpoint, best head, log, curves")
    text = "write the best head there in EAGLE's layout at the end, over no head but the run's own"
    add("--export", type=Path, help=text)
    add(
        "--layout",
        default=LAYOUTS[0],
        choices=LAYOUTS,
        help="names in an exported EAGLE-3 head: those of EAGLE, which vLLM and SGLang read, or those of "
        "the speculators library, which vLLM reads too; default: %(default)s",
    )
    text = f"start from this head, not a new one: a folder, a Hub id or {hub.DEFAULT_TARGET}, the shipped one"
    add("--init-head", help=text)
    add(
        "--intermediate-size",
        type=int,
        metavar="N",
        help="inner units of the head's MLP: more draft better and take longer; a narrower --init-head is "
        "widened and begins with what it drafts now (default: the target's, or --init-head's)",
    )
    add("--held-out", type=int, default=48, help="sequences kept for evaluation, drawn from the first source")
    add(
        "--softmax-tokens",
        type=int,
        default=8192,
        help="frequent tokens in the loss's softmax, beside the batch's own; with --eagle3 it runs over the "
        "drafted tokens; default: %(default)s",
    )
    add(
        "--draft-vocab-size",
        type=int,
        help="tokens that the exported head drafts, the most frequent ones (FR-Spec); a finished run exports "
        f"again without training (default: all). --eagle3: all that it knows (default: {LARGEST_VOCABULARY})",
    )
    add_text_tokens(parser)
    add("--threads", type=int, default=0, help="torch's threads; 0: torch's own number")
    add("--report-to", default="none", choices=("none", *TRACKERS), help="a tracker; default: %(default)s")
    add_settings(parser)
    add("--float32", action=argparse.BooleanOptionalAction, help="not in bfloat16 (default: if that is slow)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), run, argv)


def run(args: argparse.Namespace) -> None:
    settle_defaults(args)
    config = TrainConfig(
        **{field.name: getattr(args, field.name) for field in fields(TrainConfig) if field.name in args},
        loss=LossWeights(args.regression, args.cross_entropy, args.decay),
        bfloat16=not args.float32,
    )
    check(args, config)
    if args.threads:
        torch.set_num_threads(args.threads)
    trackers = require_tracker(args.report_to)
    # The trainer has its own autocast: accelerate's would change a run without a trace in its record.
    accelerator = Accelerator(
        mixed_precision="no",
        cpu=uses_no_gpu(args),
        log_with=trackers,
        project_dir=args.output,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    with sole_run(args.output) if accelerator.is_main_process else nullcontext():
        stopped_by = train(args, config, accelerator)
    if stopped_by:
        sys.exit(128 + stopped_by)  # the shell's code for a signal


def train(args: argparse.Namespace, config: TrainConfig, accelerator: Accelerator) -> int:
    """Compute features, train, record and export. Returns the signal that ended the run early, or 0."""
    source = hub.resolve_target(args.base_model)
    start = None if args.init_head is None else hub.resolve_head(args.init_head, source.name)
    model, tokenizer = hub.load_target(source, args.extract_dtype, accelerator.device)
    pack_linears(model)
    target = TargetModel(model)
    size, drafted = args.draft_vocab_size, None
    if start is None and args.eagle3 and size is None:
        size = min(LARGEST_VOCABULARY, target.vocab_size)
    if size is not None:
        require_size(size, always_drafted(target, tokenizer), target.vocab_size)
    head = starting_head(args, target, tokenizer, start)
    if start is not None and args.intermediate_size is not None:
        widen(head, args.intermediate_size, config.seed)
    taps = head.config.taps if isinstance(head, Eagle3Head) else ()
    if head is None:
        taps = choose_taps(target, args.taps)
    sources = Sources(read_examples(args, tokenizer, source.name, target.max_positions), args.shards)
    sources.require(args.held_out, head)
    if args.online:
        data = sources.online(target, taps)
    else:
        root = args.features or args.output / "features"
        data = sources.stored(target, source.name, root, accelerator, taps)
    longest = max(len(tokens) for tokens in data.tokens)
    rest, held = split_held_out(len(data.tokens), args.held_out, config.seed, sources.counts[0])
    numbers = without_copies(rest, held, data.tokens)
    embedding = model.get_input_embeddings().weight.detach().clone()
    readout = Readout.from_target(target)
    if size is not None:
        often = learned_tokens(((data.tokens[one], data.learn[one]) for one in numbers), target, tokenizer)
        drafted = often.best(size)
        share = 100 * often.coverage(drafted)
        logger.info("%d tokens to draft, %.2f %% of what is learned", len(drafted), share)
    if head is None:
        head = new_head(target, taps, drafted, config.seed, args.intermediate_size)
        make_trainable(head)
    if isinstance(head, Eagle3Head):
        require_window(head, longest)
        keep = torch.arange(target.vocab_size) if head.draft_tokens is None else head.draft_tokens
    else:
        texts = [data.tokens[number] for number in numbers]
        keep = softmax_tokens(texts, target.vocab_size, args.softmax_tokens, always_drafted(target))
    before = head.config.trained_positions
    if start is None or before:  # else it stays unknown
        head.config = replace(head.config, trained_positions=max(before or 0, longest))
    tokens, learned = count_tokens(data, numbers)
    logger.info(
        "%d sequences, %d tokens, %d learned; softmax over %d", len(numbers), tokens, learned, len(keep)
    )
    held_out, layers, digest = data.read(held), target.config.num_hidden_layers, target_digest(source, target)
    del model, target
    trainer = Trainer(
        head, data, numbers, held_out, embedding, readout, keep, config, args.output, accelerator
    )
    accelerator.init_trackers("eagle_fsd", flatten(trainer.identity["config"]))
    trainer.run()
    end_together(accelerator)
    if accelerator.is_main_process:
        plot_curves(args.output)
        record = {
            "base_model": source.name,
            TRAINED_FOR: digest,
            "sequences": len(numbers),
            "tokens": tokens,
            "learned_tokens": learned,
            "softmax_tokens": len(keep),
            "processes": accelerator.num_processes,
        }
        finish(args, trainer, drafted, record, layers)
    return trainer.stop


def check(args: argparse.Namespace, config: TrainConfig) -> None:
    """Raise ValueError for mistakes that can be found before any model is loaded."""
    if args.features is not None and (args.online or not (args.data or args.text)):
        other = "--online" if args.online else "--shards alone"
        raise ValueError(f"--features with {other}: no features are stored then; drop one")
    counts = check_text(args)
    if args.online and args.shards:
        raise ValueError("--online with --shards: stored features need no target in the loop; drop one")
    check_training(args)
    text_tokens(args)
    if args.draft_vocab_size is not None and args.export is None and not args.eagle3:
        raise ValueError(
            "--draft-vocab-size without --export: it says what an exported head drafts; add --export"
        )
    if args.intermediate_size is not None:
        require_integer("intermediate_size", args.intermediate_size, 1, "change --intermediate-size")
    require_integer("held_out", args.held_out, 1, "change --held-out")
    if counts is not None:
        require_held_out(sum(counts), args.held_out, counts[0])
    require_integer("softmax_tokens", args.softmax_tokens, 1, "change --softmax-tokens")
    require_integer("threads", args.threads, 0, "0 leaves torch's own number")
    require_folder("--output", args.output)
    if args.features is not None:
        require_folder("--features", args.features)
    if (run := stored_run(args.output)) is not None:
        refuse_other_kind(args, run)
        path = args.output / CHECKPOINT
        refuse_other_run(path, {"config": run["config"]}, {"config": asdict(config)})
    if args.export is not None:
        require_export(args.export, args.output, run)


def starting_head(
    args: argparse.Namespace,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase | None,
    found: hub.HeadSource | None,
) -> Head | None:
    """Make a new head for the target, or load the one that was found for --init-head.

    None: a new EAGLE-3 head, made after counting.
    """
    if found is None and args.eagle3:
        return None
    if found is None:
        shape = HeadConfig.for_target(target.config, target.hidden_size, target.vocab_size)
        size = args.intermediate_size or shape.intermediate_size
        head = DraftHead(replace(shape, intermediate_size=size, fc_bias=begun_with_bias(args.output)))
        initialise(head, args.seed, target.model.get_input_embeddings().weight)
        return head
    logger.info("starting from head %s", found.name)
    if args.eagle3:
        layers = target.config.num_hidden_layers
        head = hub.load_any_head(found, target.hidden_size, target.vocab_size, layers, device=target.device)
        if not isinstance(head, Eagle3Head):
            raise ValueError(
                f"--init-head {found.name} with --eagle3: it is an EAGLE-1/2 head; leave one out"
            )
        settle_head(head, target, tokenizer)
        make_trainable(head)
        return head
    return hub.load_head(found, target.hidden_size, target.vocab_size).train().restrict(None)


def begun_with_bias(output: Path) -> bool:
    """Return whether the run in the folder trains a bias of `fc`, as runs of earlier versions do."""
    path = output / CHECKPOINT
    return path.is_file() and FC_BIAS_KEY in read_checkpoint(path, "head")["head"]


def count_tokens(data: Features, numbers: Sequence[int]) -> tuple[int, int]:
    """Count the tokens of these examples, and those that are learned."""
    learned = sum(int(data.learn[number].sum()) for number in numbers)
    return sum(len(data.tokens[number]) for number in numbers), learned


if __name__ == "__main__":
    main()
