"""The flags that name target and head, and say how they are loaded."""

from __future__ import annotations

import argparse

from eagle_fsd.cli.flags.types import parse_taps
from eagle_fsd.cli.ranks import add_split_flag


def add_adapt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a head that goes on learning."""
    group = parser.add_argument_group("adaptation")
    group.add_argument(
        "--adapt",
        action="store_true",
        help="let the EAGLE-1/2 head learn from the answers, between them; what it has learned is used once "
        "it does better on answers that are held back",
    )
    group.add_argument(
        "--adapt-save",
        metavar="FOLDER",
        help="at the end, write the adapted head into a new folder; it holds what was learned from the texts",
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name target and head, and say how they are loaded."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--base-model",
        "--base-model-path",
        metavar="M",
        help="target: Hub id[@revision], folder or .gguf file (default: smollm2-135m, with a shipped head)",
    )
    group.add_argument(
        "--ea-model",
        "--ea-model-path",
        metavar="H",
        help="EAGLE-1/2/3 head: Hub id[@revision] or folder; none: no head (default: the shipped head of a "
        "known target)",
    )
    group.add_argument(
        "--head-taps",
        type=parse_taps,
        metavar="I,J,K",
        help="the layers that an EAGLE-3 head reads, each by the number of the layer that its state enters "
        "(default: as its config.json says, measured where that can be read in two ways)",
    )
    group.add_argument(
        "--norm-output",
        action=argparse.BooleanOptionalAction,
        help="whether an EAGLE-3 head hands its normed state on to the next draft step (default: as its "
        "config.json says, measured where that can be read in two ways)",
    )
    group.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        help="also draft what the text repeats, in one tree with the head's drafts; with --ea-model none: "
        "look all drafts up, in the text and in the target's own earlier distributions, for any target "
        "(default: on a CPU, beside the shipped head)",
    )
    group.add_argument(
        "--draft-model",
        metavar="M",
        help="instead of a head: a smaller language model of the target's family, named as --base-model is",
    )
    group.add_argument(
        "--draft-layers",
        type=int,
        metavar="N",
        help="instead of a head: the target's own first N layers, with its lm_head",
    )
    group.add_argument("--draft-device", help="device of the draft model (default: the target's)")
    group.add_argument(
        "--dtype", help="float32, float16, bfloat16, or float64 for checks (default: chosen by the device)"
    )
    group.add_argument(
        "--head-dtype",
        metavar="DTYPE",
        help="dtype of the draft head or draft model (default: the target's dtype)",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is a GPU, else cpu)")
    group.add_argument(
        "--device-map", metavar="MAP", help="spread the target over devices, e.g. auto; not with --device"
    )
    add_split_flag(group)
    group.add_argument(
        "--attn-implementation", metavar="NAME", help="sdpa or eager (default: the model's own choice)"
    )
    group.add_argument("--trust-remote-code", action="store_true", help="let a Hub model run its own code")
    group.add_argument(
        "--runtime",
        choices=("auto", "torch", "openvino"),
        default="auto",
        help='what computes on a CPU: torch, openvino (pip install "eagle-fsd[openvino]"), or the faster of '
        "them for this format, measured once (default: auto)",
    )
    group.add_argument(
        "--weight-format",
        choices=("float32", "bfloat16", "int8", "packed"),
        help="how the target's weights are kept. int8: rounded to 8 bits. packed: a .gguf file's own blocks. "
        "Both round activations too, and need openvino (default: --dtype)",
    )
    group.add_argument(
        "--no-pack",
        dest="pack",
        action="store_false",
        help="on a CPU, keep no second copy of the weights packed for oneDNN or MKL: half the memory, but "
        "slower (--device-map never keeps one)",
    )
    group.add_argument(
        "--no-graphs",
        dest="graphs",
        action="store_false",
        help="on CUDA, launch every operation instead of replaying CUDA graphs: slower, for debugging",
    )
    group.add_argument(
        "--no-weights-cache",
        dest="weights_cache",
        action="store_false",
        help="convert a .gguf file's weights again, and keep no copy in ~/.cache/eagle_fsd",
    )
