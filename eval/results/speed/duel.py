"""Two checkouts verify trees in turn, a process each: python duel.py CONTEXT NODES... -- NAME=FOLDER ...

Prints, for each number of nodes, the median milliseconds of a verify forward with its logits, packed on
OpenVINO, and the median over rounds of the first checkout's time divided by each one's. ROUNDS: how many.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = int(os.environ.get("ROUNDS", "40"))


def work(context: int) -> None:
    """Answer numbers of nodes on stdin with milliseconds, after -n has prepared for n nodes."""
    import torch

    from eagle_fsd import EagleFSD
    from eagle_fsd.core.tree import DraftTree
    from eagle_fsd.target.session import TargetSession

    options = {"runtime": "openvino", "weight_format": "packed", "lookup": True}
    target = EagleFSD.from_pretrained("smollm2-135m", "none", **options).target
    torch.set_num_threads(1)

    def tree(nodes: int) -> DraftTree:
        tokens = torch.arange(5, 5 + nodes)[None]
        depths = torch.tensor([[0] + [1] * (nodes - 1)])
        none = torch.empty(1, 0, dtype=torch.int64)
        return DraftTree(tokens, depths - 1, depths, torch.empty(1, 0, target.vocab_size), none, 1)

    with torch.inference_mode():
        session = TargetSession(target, 1, context + 512)
        session.prefill(torch.tensor([[place * 37 % 40000 + 5 for place in range(context)]]), [context])
        print("ready", flush=True)
        for line in sys.stdin:
            nodes = int(line)
            if nodes < 0:
                target.expect(1, -nodes, again=False)
            session.verify(tree(abs(nodes)))  # what the other process left in the caches of memory goes
            began = time.perf_counter()
            session.verify(tree(abs(nodes)))
            session.verify(tree(abs(nodes)))
            print(500 * (time.perf_counter() - began), flush=True)


def main(context: str, sizes: list[str], checkouts: dict[str, str]) -> None:
    workers = {}
    for name, folder in checkouts.items():
        command = [sys.executable, __file__, "work", context]
        given = {**os.environ, "PYTHONPATH": str(Path(folder).resolve())}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers[name] = subprocess.Popen(command, env=given, **pipes)

    def ask(name: str, nodes: str) -> float:
        workers[name].stdin.write(nodes + "\n")
        workers[name].stdin.flush()
        return float(workers[name].stdout.readline())

    for name, worker in workers.items():
        while (said := worker.stdout.readline()).strip() != "ready":
            if not said:
                raise SystemExit(f"the process of {name} has ended")
    for nodes in sizes:
        times: dict[str, list[float]] = {name: [] for name in workers}
        for name in workers:
            ask(name, f"-{nodes}")
        for number in range(ROUNDS):
            for name in sorted(workers, reverse=bool(number % 2)):
                times[name].append(ask(name, nodes))
        first = times[next(iter(workers))]
        for name, mine in times.items():
            ratio = statistics.median(one / its for one, its in zip(first, mine, strict=True))
            print(f"{nodes} nodes, {name}: {statistics.median(mine):.2f} ms, ratio {ratio:.3f}", flush=True)
    for worker in workers.values():
        worker.stdin.close()


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(int(sys.argv[2]))
    else:
        split = sys.argv.index("--")
        main(sys.argv[1], sys.argv[2:split], dict(one.split("=", 1) for one in sys.argv[split + 1 :]))
