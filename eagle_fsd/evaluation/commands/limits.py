"""What this machine allows, and how close the target's forwards and the head's drafts come to it.

    python eval/limits.py --context 256

Bandwidth and matrix rate are measured on large tensors; a forward over n nodes can be no faster than reading
all weights once, nor than multiplying with them n times.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from eagle_fsd.autotune.step_costs import BEAMS
from eagle_fsd.core.checks import require_integer
from eagle_fsd.evaluation.cli import load_engine, mistakes_on_one_line, model_parser, say
from eagle_fsd.evaluation.measure.hardware_limits import forwards, machine, table
from eagle_fsd.files.provenance import provenance
from eagle_fsd.runtime.packed_linear import backend_names


def build_parser() -> argparse.ArgumentParser:
    parser = model_parser(__doc__)
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache; default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    with mistakes_on_one_line(parser):
        require_integer("context", arguments.context, 1, "256 is usual")
        engine = load_engine(arguments)
    here = machine(engine.device, engine.dtype)
    drafted = engine.drafter.tokens
    found, costs = forwards(engine, here, arguments.context, [beam for beam in BEAMS if beam <= drafted])
    made = provenance(engine.device)
    say(
        f"{made['device']}, {made['threads']} threads, {str(engine.dtype).removeprefix('torch.')}: "
        f"{here.bandwidth / 1e9:.1f} GB/s, {here.rate / 1e9:.0f} GFLOP/s; "
        f"linear layers {' and '.join(backend_names(engine.target.model)) or 'as loaded'}; milliseconds\n"
    )
    say(table(found))
    say(f"\ndrafts over {drafted} tokens: first level, each further one")
    for beam, (first, further) in costs.draft.items():
        say(f"  beam {beam}: {1000 * first:.1f}, {1000 * further:.1f}")
    say(f"accept and keep: {1000 * costs.overhead:.1f}; a step without a draft: {1000 * costs.plain:.1f}")
