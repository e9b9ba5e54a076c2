"""Measure a draft head: accuracy by depth, calibration, tau under a tree, tokens per second.

    eagle-fsd train evaluate --prompts held_out.jsonl --output runs/head/evaluation
    eagle-fsd train evaluate --base-model owner/target --ea-model owner/head --prompts held_out.jsonl \\
        --tree 60/6/10 --output runs/evaluation

Works on any EAGLE-1/2 and EAGLE-3 head. Writes report.json, and prints the report.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.core.config import TreeConfig
from eagle_fsd.core.devices import resolve_device
from eagle_fsd.drafting.eagle3.drafter import Eagle3Spec
from eagle_fsd.drafting.eagle_drafter import EagleSpec
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.cli import check_sizes, encoded_prompts, load_engine, parsed, parser_of, say
from eagle_fsd.evaluation.measure.head_quality import HeadReport, observe
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.places import require_folder
from eagle_fsd.files.provenance import provenance
from eagle_fsd.training.data.examples import Example
from eagle_fsd.training.data.features import OnlineFeatures
from eagle_fsd.training.held_out import HeldOut, evaluate


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tree", default="16/5/8", help=f"{TreeConfig.FORM}; default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s; 1 for tokens/s")
    parser.add_argument("--output", type=Path, required=True, help="folder of report.json")
    with parsed(parser, argv) as arguments:
        check_sizes(arguments, arguments.batch_size)
        tree = TreeConfig.parse(arguments.tree)
        if tree.total_tokens == 1:
            raise ValueError("tree 1 has no drafts to look at: give a larger one, 16/5/8")
        require_folder("--output", arguments.output)
        # Now: the checkout may change while the prompts are answered.
        made_by = provenance(resolve_device(arguments.device))
        engine = load_engine(arguments)
        if not isinstance(engine.drafter, EagleSpec | Eagle3Spec):
            raise ValueError(
                f"ea_model is {engine.ea_model!r}: this command looks at an EAGLE head's drafts; name one"
            )
        prompts = encoded_prompts(arguments, engine)
        report, answers = observe(engine, prompts, tree, arguments.max_new_tokens, arguments.batch_size)
        text = along_text(engine, prompts, answers)
        arguments.output.mkdir(parents=True, exist_ok=True)
        record = asdict(report) | {
            "along_text": text,
            "base_model": engine.base_model,
            "ea_model": engine.ea_model,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "runtime": engine.runtime,
            "weight_format": engine.weight_format,
            "tree": str(tree),
            "prompts": len(prompts),
            "max_new_tokens": arguments.max_new_tokens,
            "batch_size": arguments.batch_size,
            **made_by,
        }
        write_atomically(arguments.output / "report.json", json.dumps(record, indent=1) + "\n")
    say(format_report(report, text))


def along_text(
    engine: EagleFSD, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Measure how often the head predicts the target's token along the target's own answers, by depth.

    Earlier drafts may have been right or wrong; `chain` is the same given that they were right.
    """
    spec = engine.drafter
    assert isinstance(spec, EagleSpec | Eagle3Spec)
    target, pairs = engine.target, zip(prompts, answers, strict=True)
    made = (Example.of_answer(prompt, answer, target.eos_token_ids) for prompt, answer in pairs)
    examples = [one for one in made if sum(one.learn) > 1]  # the others are answers of an end token alone
    taps = spec.head.config.taps if isinstance(spec, Eagle3Spec) else ()
    sequences = OnlineFeatures(target.decoder, examples, taps=taps).read(range(len(examples)))
    on_device = [one.to(engine.device) for one in sequences]

    def best(features: Tensor, k: int) -> Tensor:
        dtype = next(spec.head.parameters()).dtype  # which a list's rows of the lm_head have, too
        logits = spec.vocabulary.logits(features.to(dtype))
        places = logits.topk(min(k, logits.shape[-1]), dim=-1).indices
        return places if spec.head.draft_tokens is None else spec.head.draft_tokens[places]

    with torch.inference_mode():
        greedy = [target.logits(one.features.to(engine.dtype)).argmax(-1) for one in on_device]
        embedding = target.model.get_input_embeddings().weight.to(engine.device)
        head = copy.deepcopy(spec.head).float()
        return evaluate(head, HeldOut(on_device, greedy, best), embedding, k=3)


def format_report(report: HeadReport, text: dict[str, Any]) -> str:
    """Format the report as text, one fact per line."""
    pairs = zip(text["top1"], text["top3"], strict=True)
    along = " / ".join(f"{100 * one:.1f}, {100 * three:.1f}" for one, three in pairs)
    lines = [f"tau {report.tau:.3f}, {report.tokens_per_second:.1f} tokens/s"]
    for count, shares in report.right.items():
        percent = " / ".join(f"{100 * share:.1f}" for share in shares)
        lines.append(
            f"the target's token among the draft's best {count}, by depth, if right before: {percent} %"
        )
    lines.append(f"along the text, right before or not, best 1 and 3, by depth: {along} %")
    lines.append(f"steps that reached that depth: {' / '.join(map(str, report.reached))}")
    lines.append(f"expected calibration error {report.error:.3f}")
    return "\n".join(lines)
