"""Let the target answer prompts, and keep the answers with their features: shards for train_head.py
--answers, and the text beside them.

python train/make_answers.py --prompts prompts.jsonl --output runs/answers --temperature 0

A row needs `prompt`, `question` or `turns`. A run that was stopped goes on at the first missing shard.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle_fsd import hub
from eagle_fsd.provenance import provenance
from eagle_fsd.training.answers import AnswerSettings, write_answers
from eagle_fsd.training.data import read_jsonl
from eagle_fsd.training.features import load_shard, shard_path, write_shard


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--base-model", default=hub.DEFAULT_TARGET)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, default=256, help="longer prompts are left out")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        run(args)
    except ValueError as error:
        sys.exit(f"make_answers: {error}")


def run(args: argparse.Namespace) -> None:
    settings = AnswerSettings(args.max_new_tokens, args.temperature, args.top_k)
    questions = [
        question(row, f"{path}, line {number}") for path in args.prompts for number, row in read_jsonl(path)
    ]
    model, tokenizer = hub.load_target(args.base_model, torch.bfloat16, "cpu")
    ends = model.generation_config.eos_token_id
    encoded = sorted((encode(text, tokenizer) for text in questions), key=len)
    encoded = [prompt for prompt in encoded if len(prompt) <= args.max_prompt_tokens]
    args.output.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(encoded), args.batch_size)
    for shard, start in enumerate(tqdm(starts, desc="answers", unit="batch")):
        path = shard_path(args.output, shard)
        if path.is_file():
            continue
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + shard)
        prompts = encoded[start : start + args.batch_size]
        made = write_answers(model, prompts, settings, ends if isinstance(ends, list) else [ends], generator)
        write_shard(path, made, torch.bfloat16)
    with (args.output / "answers.jsonl").open("w", encoding="utf-8") as lines:
        for shard in range(len(starts)):
            for sequence in load_shard(shard_path(args.output, shard)):
                text = (
                    tokenizer.decode(sequence.tokens[~sequence.learn]),
                    tokenizer.decode(sequence.tokens[sequence.learn]),
                )
                lines.write(json.dumps({"rendered_prompt": text[0], "answer": text[1]}) + "\n")
    (args.output / "provenance.json").write_text(json.dumps(provenance(), indent=1) + "\n", encoding="utf-8")


def question(row: dict[str, Any], where: str) -> str:
    """The prompt of a row of any of the data files."""
    text = row.get("prompt") or row.get("question") or next(iter(row.get("turns") or []), None)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: no 'prompt', 'question' or 'turns'; add one or remove the row")
    return text


def encode(text: str, tokenizer: Any) -> list[int]:
    turns = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, add_special_tokens=False).input_ids


if __name__ == "__main__":
    main()
