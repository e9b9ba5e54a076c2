"""How close a verify forward comes to what the machine allows: memory bandwidth and matrix rate.

A forward over n nodes reads every weight and the cache once, and multiplies with them n times. It can be no
faster than the slower of the two, taken at the rates measured here on large tensors. Forwards are timed
through a session, whatever runs behind it.
"""

from __future__ import annotations

import functools
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from eagle_fsd.autotune.step_costs import star_tree
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.runtime.matmul_backends import measure_fastest_backend
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.runtime.timing import RECORDED, Call, median_seconds, time_in_turn
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

LARGE = 512 * 2**20  # bytes, more than any cache
SQUARE = 2048


@dataclass(frozen=True)
class Machine:
    """Bytes read and floating-point operations done per second."""

    bandwidth: float
    rate: float


@torch.inference_mode()
def machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Time sums over a large tensor, and products of large square matrices in this dtype, on this device."""
    block = torch.ones(LARGE // 4, device=device)
    bandwidth = LARGE / median_seconds(block.sum, device)
    left = torch.randn(SQUARE, SQUARE, device=device).to(dtype)
    layer = nn.Sequential(nn.Linear(SQUARE, SQUARE, bias=False, device=device, dtype=dtype))
    pack_linears(layer, measure_fastest_backend(layer, [SQUARE]))
    return Machine(bandwidth, 2 * SQUARE**3 / median_seconds(lambda: layer(left), device))


@dataclass(frozen=True)
class Forward:
    """Seconds of a forward over some nodes: what reading and multiplying take at least, and what it took."""

    nodes: int
    reading: float
    multiplying: float
    verify: float

    @property
    def limit(self) -> float:
        return max(self.reading, self.multiplying)


@dataclass(frozen=True)
class Behind:
    """What is measured behind a prompt of `context` tokens.

    prefill: seconds that reading the prompt takes. cache_bytes: of the session. resident: bytes of the whole
    process afterwards. forwards: by number of nodes, one node first.
    """

    context: int
    prefill: float
    cache_bytes: int
    resident: int
    forwards: list[Forward]


@torch.inference_mode()
def behind(target: TargetModel, here: Machine, context: int, nodes: Sequence[int]) -> Behind:
    """Read a prompt of this length, and time a verify forward of every number of nodes, in turn."""
    for count in nodes:
        target.expect(1, count, again=False)  # as decoding does
    prompt = torch.arange(context, device=target.device)[None] % target.vocab_size
    room = context + max(nodes)
    made: list[TargetSession] = []

    def read() -> None:
        made[:] = [TargetSession(target, 1, room)]
        made[0].prefill(prompt, [context])

    prefill = median_seconds(read, target.device)
    (session,) = made
    # The numbers of nodes take turns, as in decoding: some runtimes are slower after another number.
    trees = {count: star_tree(prompt[:, -1], count, target.vocab_size) for count in nodes}
    calls = {count: Call(functools.partial(session.verify, tree)) for count, tree in trees.items()}
    repeats = time_in_turn(calls, target.device, RECORDED)
    reading = (target.weight_bytes + session.cache_bytes) / here.bandwidth
    node = (2 * target.parameter_count + attention_operations(target, context)) / here.rate
    forwards = [Forward(count, reading, count * node, statistics.median(repeats[count])) for count in nodes]
    return Behind(context, prefill, session.cache_bytes, memory(target.device)["resident"], forwards)


def attention_operations(target: TargetModel, context: int) -> int:
    """Return the operations of one node's attention over the context: two products with every slot."""
    config = target.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or target.hidden_size // heads)
    return 4 * config.num_hidden_layers * width * context


def memory(device: torch.device) -> dict[str, int]:
    """Return the bytes that are taken now, "resident", and the most so far, "peak": of torch on a GPU.

    Else they are the process's own on Linux. What `getrusage` calls its peak begins with that of its parent.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return dict(zip(("resident", "peak"), allocated, strict=True))
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return dict.fromkeys(("resident", "peak"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    told = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
    resident, peak = (1024 * int(told[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return {"resident": resident, "peak": max(resident, peak)}


def forward_table(found: Sequence[Behind]) -> str:
    """Write the forwards as Markdown, in milliseconds."""
    titles = ["context", "nodes", "reading", "multiplying", "verify", "of the limit", "of one node's"]
    rows = []
    for place, one in ((behind, one) for behind in found for one in behind.forwards):
        times = [f"{1000 * value:.1f}" for value in (one.reading, one.multiplying, one.verify)]
        ratios = [f"{one.verify / base:.2f}" for base in (one.limit, place.forwards[0].verify)]
        rows.append([str(place.context), str(one.nodes), *times, *ratios])
    return markdown_table(titles, rows)


def context_table(found: Sequence[Behind]) -> str:
    """Write what depends on the context alone as Markdown."""
    titles = ["context", "reading the prompt, s", "tokens/s", "cache, MB", "resident, MB"]
    rows = []
    for place in found:
        reading = [str(place.context), f"{place.prefill:.2f}", f"{place.context / place.prefill:.0f}"]
        rows.append([*reading, f"{place.cache_bytes / 1e6:.1f}", f"{place.resident / 1e6:.0f}"])
    return markdown_table(titles, rows)
