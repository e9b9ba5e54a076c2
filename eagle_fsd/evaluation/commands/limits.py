"""What this machine allows, and how close the target's forwards and the head's drafts come to it.

    python eval/limits.py --context 128 256 1024 4096 8000 --nodes 1 4 8 16

Bandwidth and matrix rate are measured on large tensors. A forward can be no faster than reading all weights
and the cache once ("reading"), nor than multiplying with them for every node ("multiplying"). All times are
milliseconds but where a column says otherwise.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.autotune.step_costs import BEAMS, measure_costs, timed_tree
from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.cli import load_engine, model_parser, parsed, say
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.measure.memory import memory
from eagle_fsd.files.provenance import provenance
from eagle_fsd.runtime.matmul_backends import measure_fastest_backend
from eagle_fsd.runtime.packed_linear import backend_names, pack_linears
from eagle_fsd.runtime.timing import RECORDED, Call, median_seconds, time_in_turn
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

CONTEXTS = (128, 256, 1024, 4096, 8000)
NODES = (1, 4, 8, 16)
LARGE = 512 * 2**20  # bytes, more than any cache
SQUARE = 2048  # rows of a matrix
ON_A_GPU = 8192  # there, since fewer would take it no longer than to start the product


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
        contexts = arguments.context or [context for context in CONTEXTS if context <= most] or [most]
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
        if engine.drafter is not None:
            say(f"\n{step_lines(engine, contexts[0])}")


class Machine(NamedTuple):
    """Bytes read and floating-point operations done per second."""

    bandwidth: float
    rate: float


@torch.inference_mode()
def machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Time sums over a large tensor, and products of large square matrices in this dtype, on this device."""
    block = torch.ones(LARGE // 4, device=device)
    bandwidth = LARGE / median_seconds(block.sum, device)
    square = SQUARE if device.type == "cpu" else ON_A_GPU
    left = torch.randn(square, square, device=device).to(dtype)
    layer = nn.Sequential(nn.Linear(square, square, bias=False, device=device, dtype=dtype))
    pack_linears(layer, measure_fastest_backend(layer, [square])[0])
    return Machine(bandwidth, 2 * square**3 / median_seconds(lambda: layer(left), device))


class Behind(NamedTuple):
    """What is measured behind a prompt of `context` tokens.

    prefill: seconds that reading the prompt takes. cache_bytes: of the session. resident: bytes of the whole
    process afterwards. reading, node: seconds that a forward takes at least, to read all weights and the
    cache once, and to multiply with them for each node. verify: what it took, by number of nodes, 1 first.
    """

    context: int
    prefill: float
    cache_bytes: int
    resident: int
    reading: float
    node: float
    verify: dict[int, float]


@torch.inference_mode()
def behind(target: TargetModel, here: Machine, context: int, nodes: Sequence[int]) -> Behind:
    """Read a prompt of this length, and time a verify forward of every number of nodes, in turn."""
    for count in nodes:
        target.expect(1, count, again=False)  # as decoding does
    prompt = torch.arange(context, device=target.device)[None] % target.vocab_size
    room = context + max(nodes)

    def read() -> TargetSession:
        made = TargetSession(target, 1, room)
        made.prefill(prompt, [context])
        return made

    session = read()
    # The numbers of nodes take turns, as in decoding: some runtimes are slower after another number.
    kind = (target.vocab_size, target.recurrent)
    trees = {count: timed_tree(prompt[:, -1], count, *kind) for count in nodes}
    calls = {count: Call(functools.partial(session.verify, tree)) for count, tree in trees.items()}
    repeats = time_in_turn(calls, target.device, RECORDED)
    prefill = median_seconds(read, target.device)  # now that all graphs are compiled, which takes all cores
    reading = (target.weight_bytes + session.cache_bytes) / here.bandwidth
    node = (2 * target.parameter_count + attention_operations(target, context)) / here.rate
    verify = {count: statistics.median(seconds) for count, seconds in repeats.items()}
    resident = memory(target.device)["resident"]
    return Behind(context, prefill, session.cache_bytes, resident, reading, node, verify)


def attention_operations(target: TargetModel, context: int) -> int:
    """Return the operations of one node's attention over the context: two products with every slot."""
    config = target.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or target.hidden_size // heads)
    return 4 * config.num_hidden_layers * width * context


def forward_table(found: Sequence[Behind]) -> str:
    """Write the forwards as Markdown, in milliseconds."""
    titles = ["context", "nodes", "reading", "multiplying", "verify", "of the limit", "of one node's"]
    rows = []
    for place, nodes in ((behind, nodes) for behind in found for nodes in behind.verify):
        multiplying, verify = nodes * place.node, place.verify[nodes]
        times = [f"{1000 * value:.1f}" for value in (place.reading, multiplying, verify)]
        limit = max(place.reading, multiplying)
        ratios = [f"{verify / base:.2f}" for base in (limit, place.verify[1])]
        rows.append([str(place.context), str(nodes), *times, *ratios])
    return markdown_table(titles, rows)


def context_table(found: Sequence[Behind]) -> str:
    """Write what depends on the context alone as Markdown."""
    titles = ["context", "reading the prompt, s", "tokens/s", "cache, MB", "resident, MB"]
    rows = []
    for place in found:
        reading = [str(place.context), f"{place.prefill:.2f}", f"{place.context / place.prefill:.0f}"]
        rows.append([*reading, f"{place.cache_bytes / 1e6:.1f}", f"{place.resident / 1e6:.0f}"])
    return markdown_table(titles, rows)


def step_lines(engine: EagleFSD, context: int) -> str:
    """Write what drafting costs, and the rest of a step."""
    drafted = engine.drafter.tokens
    beams = [beam for beam in BEAMS if beam <= drafted]
    costs = measure_costs(engine.target, engine.drafter, beams, 1, context, Lossless(), SamplingConfig())
    lines = [f"drafts over {drafted} tokens behind {context}: first level, each further one"]
    for beam, (first, further) in costs.draft.items():
        lines.append(f"  beam {beam}: {1000 * first:.1f}, {1000 * further:.1f}")
    rest = ", ".join(f"{1000 * seconds:.1f} of {nodes} nodes" for nodes, seconds in costs.overhead.items())
    return "\n".join([*lines, f"accept and keep: {rest}; a step without a draft: {1000 * costs.plain:.1f}"])
