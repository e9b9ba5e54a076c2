"""Soak the server: clients that come, go, break off and send nonsense, for as long as you like.

    python eval/soak.py --seconds 1800 --output runs/soak -- --dtype float64 --total-tokens 8
    python eval/soak.py --seconds 300 --output runs/soak -- --base-model FOLDER --dtype float64

What stands behind -- are flags of `python -m eagle_fsd.serve`, which is started as a process of its own. At
first every request is answered alone. Then clients send the same requests at random, whole and as streams,
leave in the middle, and send what must be refused. The promises: no answer is lost; each is the one that the
request got alone; every error has OpenAI's body; memory grows by at most 5 % after the warm-up; the
server is idle in the end, and ends at a signal. Exit code 1 if one is broken.

With rounding (float32, say) a batch may decide a near-tie the other way. A different answer to a
greedy, exact request is judged by the target's log-probabilities: within --near-tie it is no wrong one. Other
kinds cannot be judged, so leave them out there (--kinds plain), or serve with --dtype float64, which rounds
too little to matter. The formats packed and int8 round activations as well, by tenths of a nat: there texts
depend on the batch, and only the other promises can be held to.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd.core.checks import require_integer, require_number
from eagle_fsd.evaluation.cli import parsed, plain_parser, say
from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.serving.client import Client
from eagle_fsd.evaluation.serving.processes import Scale, Server, end, free_port, started
from eagle_fsd.evaluation.serving.soak import LOST, UNCLEAR, Findings, answers_alone, judge, soak
from eagle_fsd.evaluation.serving.soak_requests import KINDS, draw_requests
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.provenance import provenance

GROWTH = 0.05  # of the memory, at most
WEIGHED = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # shares of the time
WINDOW = 0.1  # of the time: memory is the median over it
IDLE_SECONDS = 30.0
SOON = 10.0  # seconds for a server without texts to end in
BUSY = re.compile(r"^eagle_fsd_num_requests_(?:running|waiting) ([\d.]+)$", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of report.json and server.log")
    add("--seconds", type=float, default=300.0, help="default: %(default)s")
    add("--clients", type=int, default=8, help="default: %(default)s")
    add("--requests", type=int, default=100, help="different requests; default: %(default)s")
    add("--words", type=int, default=120, help="of the longest prompt; default: %(default)s")
    add("--max-new-tokens", type=int, default=64, help="of the longest answer; default: %(default)s")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of requests; default: all")
    add("--warm-up", type=float, default=0.2, help="share of the time before memory is held to; default: 0.2")
    add(
        "--near-tie", type=float, default=1e-3, help="nats between tokens that may be swapped; default: 0.001"
    )
    add("--seed", type=int, default=0, help="of the requests; default: %(default)s")
    add("server", nargs="*", metavar="-- FLAGS", help="flags of python -m eagle_fsd.serve")
    with parsed(parser, argv) as arguments:
        check(arguments)
        port = free_port()
        command = [sys.executable, "-m", "eagle_fsd.serve", "--port", str(port), *arguments.server]
        with started(command, port, "/health", arguments.output / "server.log") as server:
            report = run(arguments, server)
            ended = f"it ends within {SOON:g} s of a signal"
            report["promises"][ended] = end(server.process) <= SOON
        report |= provenance()
        write_atomically(arguments.output / "report.json", json.dumps(report, indent=1) + "\n")
    say(table(report))
    return 0 if all(report["promises"].values()) else 1


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for numbers that leave nothing to do."""
    for name in ("clients", "requests", "words", "max_new_tokens"):
        require_integer(name, getattr(arguments, name), 1, "leave it out for the default")
    require_number("seconds", arguments.seconds, 1, 1e6, "300 is usual")
    require_number("warm_up", arguments.warm_up, 0, 0.8, "0.2 is usual")
    require_number("near_tie", arguments.near_tie, 0, 10, "0.001 is usual in float32")


def run(arguments: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Soak a server that is quiet, and return the report."""
    sizes = (arguments.requests, arguments.kinds, arguments.words, arguments.max_new_tokens)
    requests = draw_requests(arguments.seed, *sizes)
    client = server.client
    served = client.get("/v1/models").data()["data"][0]
    expected = answers_alone(client, requests)
    with Scale(server) as scale:
        found = soak(client, requests, expected, arguments.clients, arguments.seconds)
    idle = becomes_idle(client)
    again = answers_alone(client, requests) if idle else []
    judged = functools.cache(lambda one: judge(client, requests[one.number], one) if idle else None)
    differences = [
        {"kind": requests[one.number].kind, **vars(one), "gap": judged(one)} for one in found.differences
    ]
    wrong = [one for one in differences if one["gap"] is None or one["gap"] > arguments.near_tie]
    warm, last = arguments.warm_up, 1 - WINDOW
    growth = scale.between(last, 1.0) / scale.between(warm, warm + WINDOW) - 1
    changed = sum(one != other for one, other in zip(expected, again, strict=False))
    return {
        "served": served,
        "clients": arguments.clients,
        "seconds": arguments.seconds,
        "requests": len(requests),
        "outcomes": dict(Counter(found.outcomes).most_common()),
        "compared": dict(Counter(found.asked)),
        "differences": differences[:50],
        "near_ties": len(differences) - len(wrong),
        "largest_near_tie": max((one["gap"] for one in differences if one not in wrong), default=None),
        "wrong": len(wrong),
        "changed_after": changed,
        "faults": found.faults,
        "memory": {f"{share:.0%}": round(scale.between(share, share) / 1e6, 1) for share in WEIGHED},
        "memory_growth": growth,
        "latency": latencies(found),
        "promises": {
            "nothing is lost": LOST not in found.outcomes and bool(found.asked),
            "no answer is wrong": not wrong,
            "every error is clear": UNCLEAR not in found.outcomes,
            f"memory grows by at most {GROWTH:.0%}": growth <= GROWTH,
            "the server is idle in the end": idle,
            "the same requests get the same answers afterwards": idle and not changed,
        },
    }


def becomes_idle(client: Client) -> bool:
    """Return whether the server has no text left soon after its clients went."""
    limit = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < limit:
        try:
            counts = BUSY.findall(client.get("/metrics").body.decode())
        except OSError:  # it has died
            return False
        if len(counts) == 2 and not any(map(float, counts)):
            return True
        time.sleep(0.2)
    return False


def latencies(found: Findings) -> dict[str, list[float]]:
    """Return the median, the 95th and the 99th percentile in milliseconds."""
    kinds = {"first chunk of a stream": found.first, "whole answer": found.whole}
    shares = (50, 95, 99)
    return {name: (1000 * np.percentile(times or [np.nan], shares)).tolist() for name, times in kinds.items()}


def table(report: Mapping[str, Any]) -> str:
    """Write what a report says."""
    served = report["served"]
    about = (
        f"{served['id']}, tree {served['tree']}, {served['weight_format']} on {served['runtime']}; "
        f"{report['clients']} clients for {report['seconds']:g} s, {report['requests']} different requests"
    )
    compared = ", ".join(f"{count} {kind}" for kind, count in report["compared"].items())
    largest = report["largest_near_tie"]
    ties = f"{report['near_ties']}" + ("" if largest is None else f" (at most {largest:.2g} nats)")
    memory = " / ".join(f"{size:.0f}" for size in report["memory"].values())
    lines = [
        *([outcome, str(count)] for outcome, count in report["outcomes"].items()),
        ["answers compared", compared],
        ["near-ties decided the other way", ties],
        ["wrong answers", str(report["wrong"])],
        [f"memory at {' / '.join(report['memory'])}, MB", memory],
        ["its growth after the warm-up", f"{report['memory_growth']:+.1%}"],
        *(
            [f"{name}, ms: 50 / 95 / 99 %", " / ".join(f"{one:.0f}" for one in times)]
            for name, times in report["latency"].items()
        ),
        *([promise, "yes" if kept else "NO"] for promise, kept in report["promises"].items()),
    ]
    return f"{about}\n\n{markdown_table(['what', 'found'], lines)}"
