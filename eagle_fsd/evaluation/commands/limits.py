"""What this machine allows, and how close the target's forwards and the head's drafts come to it.

    python eval/limits.py --context 128 256 1024 4096 8000 --nodes 1 4 8 16

Bandwidth and matrix rate are measured on large tensors. A forward can be no faster than reading all weights
and the cache once ("reading"), nor than multiplying with them for every node ("multiplying"). All times are
milliseconds but where a column says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.autotune.step_costs import BEAMS, measure_costs
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.evaluation.cli import load_engine, model_parser, parsed, say
from eagle_fsd.evaluation.measure.hardware_limits import behind, context_table, forward_table, machine
from eagle_fsd.files.provenance import provenance
from eagle_fsd.runtime.packed_linear import backend_names

CONTEXTS = (128, 256, 1024, 4096, 8000)
NODES = (1, 4, 8, 16)


def main(argv: Sequence[str] | None = None) -> None:
    parser = model_parser(__doc__)
    add = parser.add_argument
    usual = " ".join(map(str, CONTEXTS))
    lengths = f"tokens in the cache; default: those of {usual} that the target can read"
    add("--context", type=int, nargs="+", help=lengths)
    counts = f"nodes of a forward, beside 1; default: {' '.join(map(str, NODES))}"
    add("--nodes", type=int, nargs="+", default=list(NODES), help=counts)
    with parsed(parser, argv) as arguments:
        for name, sizes in (("context", arguments.context or ()), ("nodes", arguments.nodes)):
            for size in sizes:
                require_integer(name, size, 1, "leave it out for the usual ones")
        engine = load_engine(arguments)
        most = engine.target.max_positions - 1  # the tree's root needs a position, too
        if arguments.context and (longest := max(arguments.context)) > most:
            raise ValueError(
                f"context is {longest}: the target has {most + 1} positions; {most} is the longest for it"
            )
        contexts = arguments.context or [context for context in CONTEXTS if context <= most]
        here, made = machine(engine.device, engine.dtype), provenance(engine.device)
        say(
            f"{made['device']}, {made['threads']} threads, {str(engine.dtype).removeprefix('torch.')}: "
            f"{here.bandwidth / 1e9:.1f} GB/s, {here.rate / 1e9:.0f} GFLOP/s; "
            f"linear layers {' and '.join(backend_names(engine.target.held)) or 'as loaded'}; "
            f"{engine.target.weight_bytes / 1e6:.0f} MB of weights; milliseconds\n"
        )
        nodes = sorted({1, *arguments.nodes})
        found = [behind(engine.target, here, context, nodes) for context in contexts]
        say(f"{forward_table(found)}\n\n{context_table(found)}")
        drafted = engine.drafter.tokens
        beams = [beam for beam in BEAMS if beam <= drafted]
        costs = measure_costs(
            engine.target, engine.drafter, beams, 1, contexts[0], Lossless(), SamplingConfig()
        )
        say(f"\ndrafts over {drafted} tokens behind {contexts[0]}: first level, each further one")
        for beam, (first, further) in costs.draft.items():
            say(f"  beam {beam}: {1000 * first:.1f}, {1000 * further:.1f}")
        rest = ", ".join(
            f"{1000 * seconds:.1f} of {nodes} nodes" for nodes, seconds in costs.overhead.items()
        )
        say(f"accept and keep: {rest}; a step without a draft: {1000 * costs.plain:.1f}")
