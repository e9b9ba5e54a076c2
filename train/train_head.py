"""Train an EAGLE-1/2 draft head for a target on text, from features that the target computes once, and
export it in EAGLE's layout.

python train/train_head.py --data $EAGLE_FSD_DATA/smollm2_corpus.jsonl --output runs/head --epochs 10
--export runs/head/export

Rows: {"conversations": [{"role", "content"}, ...], "complete": true} or {"prompt", "completion"}. Features
are kept under --features and reused. Stop it with Ctrl-C or SIGTERM and start it again with the same
command: it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

import torch

from eagle_fsd import hub
from eagle_fsd.config import HeadConfig
from eagle_fsd.head import DraftHead
from eagle_fsd.provenance import provenance
from eagle_fsd.training.batching import softmax_tokens, split_held_out
from eagle_fsd.training.data import load_examples
from eagle_fsd.training.evaluation import hold_out
from eagle_fsd.training.features import FeatureSequence, extract, load_features
from eagle_fsd.training.loss import LossWeights
from eagle_fsd.training.schedule import TrainConfig, initialise
from eagle_fsd.training.trainer import BEST, Trainer

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
    parser.add_argument("--answers", nargs="*", default=[], help="folders of ready feature shards")
    parser.add_argument("--features", type=Path, help="where features are kept (default: OUTPUT/features)")
    parser.add_argument(
        "--output", type=Path, required=True, help="the run's folder: checkpoint, best head, log"
    )
    parser.add_argument("--export", type=Path, help="write the best head there in EAGLE's layout at the end")
    parser.add_argument("--max-length", type=int, default=512)
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
    parser.add_argument("--extract-dtype", default="bfloat16", choices=("bfloat16", "float32"))
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
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        run(args)
    except ValueError as error:
        sys.exit(f"train_head: {error}")


def run(args: argparse.Namespace) -> None:
    config = TrainConfig(
        **{
            name: getattr(args, name)
            for name in ("epochs", "minutes", "batch_tokens", "learning_rate", "warmup", "optimizer")
        },
        **{
            name: getattr(args, name)
            for name in (
                "weight_decay",
                "clip",
                "noise",
                "unroll",
                "unroll_after",
                "eval_every",
                "checkpoint_every",
                "seed",
            )
        },
        loss=LossWeights(args.regression, args.cross_entropy, args.decay),
        bfloat16=not args.float32,
    )
    if not (args.data or args.text or args.answers):
        raise ValueError("no data: give --data, --text or --answers")
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = hub.load_target(args.base_model, getattr(torch, args.extract_dtype), "cpu")
    folders = prepare_features(args, model, tokenizer)
    sequences = load_features(folders)
    train, held = split_held_out(sequences, args.held_out, config.seed)
    embedding = model.get_input_embeddings().weight.detach().clone()
    lm_head = model.get_output_embeddings().weight.detach().clone()
    ends = model.generation_config.eos_token_id
    keep = softmax_tokens(
        train, len(lm_head), args.softmax_tokens, ends if isinstance(ends, list) else [ends]
    )
    logger.info("%d sequences, %d tokens, %d learned; softmax over %d", len(train), *counts(train), len(keep))
    head = DraftHead(head_config(model))
    del model
    initialise(head, config.seed)
    trainer = Trainer(head, train, hold_out(held, lm_head), embedding, lm_head, keep, config, args.output)
    result = trainer.run()
    record = provenance() | {
        "finished": time.strftime("%Y-%m-%d %H:%M"),
        "sequences": len(train),
        "tokens": counts(train)[0],
        "learned_tokens": counts(train)[1],
        "softmax_tokens": len(keep),
        "steps": trainer.step,
        "training_seconds": round(trainer.seconds),
        "held_out": result,
    }
    (args.output / "provenance.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.export and not trainer.stop:
        best = torch.load(args.output / BEST, weights_only=True)
        head.load_state_dict(best["head"])
        hub.save_head(head.to(torch.float16), args.export)
        logger.info("exported step %d to %s", best["step"], args.export)


def prepare_features(args: argparse.Namespace, model: torch.nn.Module, tokenizer: object) -> list[Path]:
    """Extract what is missing; the folders of shards, in the order given."""
    root = args.features or args.output / "features"
    folders = []
    for path, learn_all in [(path, False) for path in args.data] + [(path, True) for path in args.text]:
        examples, _ = load_examples(path, tokenizer, args.max_length, learn_all, args.rows)
        folders.append(extract(model.base_model, examples, root / Path(path).stem, dtype=torch.bfloat16))
    return folders + [Path(folder) for folder in args.answers]


def head_config(model: torch.nn.Module) -> HeadConfig:
    """A head of the target's own layer shape; rotary base 10000, EAGLE's default, so that every loader
    agrees.
    """
    target = model.config.get_text_config()
    return HeadConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or target.num_attention_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        vocab_size=target.vocab_size,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
    )


def counts(sequences: list[FeatureSequence]) -> tuple[int, int]:
    return sum(len(sequence.tokens) for sequence in sequences), sum(
        int(sequence.learn.sum()) for sequence in sequences
    )


if __name__ == "__main__":
    main()
