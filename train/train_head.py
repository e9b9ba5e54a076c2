"""Train an EAGLE-1/2 draft head for a target on text, and export it in EAGLE's layout.

python train/train_head.py --data $EAGLE_FSD_DATA/smollm2_corpus.jsonl --output runs/head --epochs 10
--export runs/head/export

Rows: {"conversations": [{"role", "content"}, ...], "complete": true} or {"prompt", "completion"}. The target
computes their features once; they are kept under --features and reused. Stop it with Ctrl-C or SIGTERM and
start it again with the same command: it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from eagle_fsd import hub
from eagle_fsd.config import HeadConfig
from eagle_fsd.head import DraftHead
from eagle_fsd.identity import target_identity
from eagle_fsd.provenance import provenance
from eagle_fsd.target import TargetModel
from eagle_fsd.training.batching import softmax_tokens, split_held_out
from eagle_fsd.training.command import run_command
from eagle_fsd.training.data import load_examples
from eagle_fsd.training.evaluation import hold_out
from eagle_fsd.training.features import FeatureSequence, extract, load_features, write_atomically
from eagle_fsd.training.loss import LossWeights, require_plain_logits
from eagle_fsd.training.schedule import TrainConfig, initialise
from eagle_fsd.training.trainer import BEST, Trainer, read_checkpoint

logger = logging.getLogger("train_head")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = TrainConfig()
    parser.add_argument(
        "--base-model", default=hub.DEFAULT_TARGET, help="the target: a name, a folder or a Hub id"
    )
    parser.add_argument("--data", nargs="*", default=[], help="JSONL files that teach their answers")
    parser.add_argument(
        "--text",
        nargs="*",
        default=[],
        help="JSONL files that teach at every position (text the target did not write)",
    )
    parser.add_argument(
        "--shards",
        nargs="*",
        default=[],
        help="folders of feature shards that an earlier run left under its --features, for the same target",
    )
    parser.add_argument("--features", type=Path, help="where features are kept (default: OUTPUT/features)")
    parser.add_argument(
        "--output", type=Path, required=True, help="the run's folder: checkpoint, best head, log"
    )
    parser.add_argument("--export", type=Path, help="write the best head there in EAGLE's layout at the end")
    parser.add_argument(
        "--max-length",
        type=int,
        default=512,
        help="tokens kept of each row; the head's config.json names it as what it was trained on; "
        "default: %(default)s",
    )
    parser.add_argument("--rows", type=int, help="at most so many rows of each file")
    parser.add_argument(
        "--held-out", type=int, default=48, help="sequences kept for evaluation, drawn from the first source"
    )
    parser.add_argument(
        "--softmax-tokens",
        type=int,
        default=8192,
        help="the loss's softmax is over so many frequent tokens, and the batch's own",
    )
    parser.add_argument(
        "--extract-dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="what the target computes in and features are kept in; default: %(default)s",
    )
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: leave)")
    for name in (
        "epochs",
        "minutes",
        "learning_rate",
        "warmup",
        "weight_decay",
        "clip",
        "noise",
        "unroll_after",
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))
    for name in ("batch_tokens", "unroll", "eval_every", "checkpoint_every", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--optimizer", default=defaults.optimizer, choices=("adamw", "muon"))
    for name in ("regression", "cross_entropy", "decay"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults.loss, name))
    parser.add_argument("--float32", action="store_true", help="train without bfloat16 autocast")
    return parser.parse_args()


def main() -> None:
    run_command("train_head", run, parse())


def run(args: argparse.Namespace) -> None:
    config = TrainConfig(
        **{field.name: getattr(args, field.name) for field in fields(TrainConfig) if field.name in args},
        loss=LossWeights(args.regression, args.cross_entropy, args.decay),
        bfloat16=not args.float32,
    )
    if not (args.data or args.text or args.shards):
        raise ValueError("no data: give --data, --text or --shards")
    if args.threads:
        torch.set_num_threads(args.threads)
    source = hub.resolve_target(args.base_model)
    model, tokenizer = hub.load_target(source, args.extract_dtype, "cpu")
    target = TargetModel(model)
    require_plain_logits(target)
    identity = target_identity(source.name, model)
    folders = prepare_features(args, target, tokenizer, identity)
    sources = [load_features(folder, identity) for folder in folders]
    train, held = split_held_out(list(chain(*sources)), args.held_out, config.seed, len(sources[0]))
    embedding = model.get_input_embeddings().weight.detach().clone()
    lm_head = target.lm_head.weight.detach().clone()
    keep = softmax_tokens(train, len(lm_head), args.softmax_tokens, target.eos_token_ids)
    logger.info("%d sequences, %d tokens, %d learned; softmax over %d", len(train), *counts(train), len(keep))
    head = DraftHead(head_config(target, args.max_length))
    del model, target
    initialise(head, config.seed)
    trainer = Trainer(head, train, hold_out(held, lm_head), embedding, lm_head, keep, config, args.output)
    result = trainer.run()
    end = {"finished": time.strftime("%Y-%m-%d %H:%M"), "held_out": result}
    record = provenance() | {
        "sequences": len(train),
        "tokens": counts(train)[0],
        "learned_tokens": counts(train)[1],
        "softmax_tokens": len(keep),
        "steps": trainer.step,
        "training_seconds": round(trainer.seconds),
        **({"stopped": True} if trainer.stop else end),
    }
    write_atomically(args.output / "provenance.json", json.dumps(record, indent=1) + "\n")
    if args.export and not trainer.stop:
        best = read_checkpoint(args.output / BEST)
        head.load_state_dict(best["head"])
        hub.save_head(head, args.export, dtype=torch.float16)
        logger.info("exported step %d to %s", best["step"], args.export)


def prepare_features(
    args: argparse.Namespace,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase | None,
    identity: Mapping[str, str],
) -> list[Path]:
    """Extract what is missing; the folders of shards, in the order given."""
    if tokenizer is None and (args.data or args.text):
        raise ValueError(
            f"target {identity['name']!r} has no tokenizer: name a folder or Hub id that holds one"
        )
    root = args.features or args.output / "features"
    folders = []
    for path, learn_all in [(path, False) for path in args.data] + [(path, True) for path in args.text]:
        examples, _ = load_examples(path, tokenizer, args.max_length, learn_all, args.rows)
        folder = root / Path(path).stem
        folders.append(extract(target.decoder, examples, folder, identity, dtype=target.dtype))
    return folders + [Path(folder) for folder in args.shards]


def head_config(target: TargetModel, trained_positions: int) -> HeadConfig:
    """A head of the target's own layer shape, with EAGLE's rotary base, 10000: all loaders agree on it."""
    config, heads = target.config, target.config.num_attention_heads
    return HeadConfig(
        hidden_size=target.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * target.hidden_size,  # GPT-2's
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        trained_positions=trained_positions,
    )


def counts(sequences: Sequence[FeatureSequence]) -> tuple[int, int]:
    return sum(len(sequence.tokens) for sequence in sequences), sum(
        int(sequence.learn.sum()) for sequence in sequences
    )


if __name__ == "__main__":
    main()
