"""What a draft head is worth: right drafts by depth, calibration, tau under a tree, tokens per second.

    python train/evaluate_head.py --prompts held_out.jsonl --output runs/head/evaluation
    python train/evaluate_head.py --base-model owner/target --ea-model owner/head --prompts held_out.jsonl \\
        --tree 60/6/10 --output runs/evaluation

Works on any EAGLE-1/2 head. Writes report.json and calibration.png, and prints the report.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.evaluation.arguments import check_sizes, parser_of
from eagle_fsd.evaluation.head import HeadReport, observe
from eagle_fsd.evaluation.plots import plot_calibration, require_matplotlib
from eagle_fsd.evaluation.prompts import chat_prompts
from eagle_fsd.provenance import provenance


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tree", default="16/5/8", help="total_tokens/depth/top_k; default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s; 1 for tokens/s")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on CUDA")
    parser.add_argument("--device", help="default: CUDA where there is one, else the CPU")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of report.json and calibration.png"
    )
    arguments = parser.parse_args()
    try:
        check_sizes(arguments, arguments.batch_size)
        tree = TreeConfig.parse(arguments.tree)
        if tree.total_tokens == 1:
            raise ValueError("tree 1 has no drafts to look at: give a larger one, 16/5/8")
        require_matplotlib()
        engine = EagleFSD.from_pretrained(
            arguments.base_model, arguments.ea_model, dtype=arguments.dtype, device=arguments.device
        )
        prompts = [
            ids for path in arguments.prompts for ids in chat_prompts(path, engine.tokenizer, arguments.limit)
        ]
        report = observe(engine, prompts, tree, arguments.max_new_tokens, arguments.batch_size)
        arguments.output.mkdir(parents=True, exist_ok=True)
        record = asdict(report) | {
            "base_model": engine.base_model,
            "ea_model": engine.ea_model,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "tree": str(tree),
            "prompts": len(prompts),
            "max_new_tokens": arguments.max_new_tokens,
            "batch_size": arguments.batch_size,
            **provenance(),
        }
        (arguments.output / "report.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        plot_calibration(report, arguments.output / "calibration.png")
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    print(shown(report))


def shown(report: HeadReport) -> str:
    """The report as text, one fact a line."""
    lines = [f"tau {report.tau:.3f}, {report.tokens_per_second:.1f} tokens/s"]
    for count, shares in report.right.items():
        percent = " / ".join(f"{100 * share:.1f}" for share in shares)
        lines.append(f"the target's token among the draft's best {count}, by depth: {percent} %")
    lines.append(f"steps that reached that depth: {' / '.join(map(str, report.reached))}")
    lines.append(f"expected calibration error {report.error:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
