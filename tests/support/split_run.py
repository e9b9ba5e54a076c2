"""A target on several ranks, for tests: `python -m support.split_run JOBS` runs each job on every rank.

JOBS is a file with a list of [scenario, arguments of from_pretrained]. What a rank found goes to
`JOBS.RANK`. The same scenarios run in the test's own process, on a target that is whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from eagle_fsd import EagleFSD, Fuzzy, PromptCache
from eagle_fsd.core.config import AutoTree, TreeConfig
from eagle_fsd.core.padding import pad_right
from eagle_fsd.runtime.ranks import RanksDiverged, join_ranks, leave_ranks
from support.tiny_models import prompts_of

TESTS = Path(__file__).parents[1]
TREE = TreeConfig(12, 4, 3)
LENGTHS = (9, 4)  # of the two prompts
NEW_TOKENS = 14
MINE = "(rank)"  # in the arguments of a job: the number of the rank, for files that one of them lacks
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "fuzzy": {"rule": Fuzzy(0.4), "temperature": 0.7, "seed": [(5, 1), (6, 2)]},
    "confident": {"tree": TreeConfig(12, 4, 3, min_confidence=0.05), "logprobs": 2},
}


def answers(engine: EagleFSD) -> dict[str, Any]:
    """Return the texts of a ragged batch under each of CALLS, how they were accepted, and the memory."""
    prompts = prompts_of(LENGTHS)
    mask = pad_right([[1] * length for length in LENGTHS], 0)
    found: dict[str, Any] = {}
    for name, keywords in CALLS.items():
        options = {"tree": TREE, "max_new_tokens": NEW_TOKENS, **keywords}
        made = engine.generate(pad_right(prompts, 0), mask, **options)
        counts = [[row.steps, row.new_tokens, row.finish_reason] for row in made.stats]
        found[name] = [made.new_tokens, counts]
    texts = engine.generate_many(prompts_of((5, 9, 2, 7)), tree=TREE, max_new_tokens=8, seed=2, batch_size=2)
    found["many"] = {text.number: text.new_tokens for text in texts}
    found["alone"] = engine.target_alone(pad_right(prompts, 0)[:1], max_new_tokens=NEW_TOKENS).new_tokens
    return found


def memory(engine: EagleFSD) -> list[dict[str, int]]:
    engine.generate([prompts_of([9])[0]], tree=TREE, max_new_tokens=4)
    return engine.memory()


def identity(engine: EagleFSD) -> dict[str, Any]:
    return engine.identity()


def drawn(engine: EagleFSD) -> list[Any]:
    """Return two texts whose seeds are drawn, and the seeds."""
    made = [engine.generate([[5, 6, 7]], tree=TREE, temperature=1, max_new_tokens=12) for _ in range(2)]
    return [[one.new_tokens, one.seed] for one in made]


def auto_tree(engine: EagleFSD) -> list[Any]:
    """Return the tree that was measured, and a text with it."""
    made = engine.generate([[5, 6, 7]], tree=AutoTree(top_k=2), max_new_tokens=12)
    return [str(made.tree), made.new_tokens]


def stray(engine: EagleFSD) -> list[str]:
    """Return what is said where the ranks are given different prompts, and where one stops a stream early.

    Between the two, one of them lacks a text that the other one has kept.
    """
    said = []
    rank = engine.target.ranks.rank
    try:
        engine.generate([[5, 6, 7 + rank]], tree=TREE, max_new_tokens=4)
    except RanksDiverged as error:
        said.append(str(error))
    kept = PromptCache()
    try:
        for _ in range(2):
            if rank:
                kept.clear()
            many = engine.generate_many(prompts_of([40]), tree=TREE, max_new_tokens=4, prompt_cache=kept)
            assert len(list(many)) == 1
    except RanksDiverged as error:
        said.append(str(error))
    try:
        with engine.stream([[5, 6, 7]], tree=TREE, max_new_tokens=30) as stream:
            for number, _ in enumerate(stream):
                if number == rank:  # rank 0 goes on to the next call, and rank 1 to the next step
                    break
        engine.generate([[5, 6, 7]], tree=TREE, max_new_tokens=4)
    except RanksDiverged as error:
        said.append(str(error))
    return said


SCENARIOS: dict[str, Callable[[EagleFSD], Any]] = {
    scenario.__name__: scenario for scenario in (answers, memory, identity, drawn, auto_tree, stray)
}


def refused(load: dict[str, Any]) -> str:
    """Return why a target is not loaded."""
    try:
        EagleFSD.from_pretrained(**load)
    except ValueError as error:
        return str(error)
    return "it was loaded"


def run_job(scenario: str, load: dict[str, Any], **more: Any) -> Any:
    """Load an engine and run a scenario; the result is what JSON holds."""
    load = {"dtype": "float32", "pack": False, "runtime": "torch", **load, **more}
    found = refused(load) if scenario == "refused" else SCENARIOS[scenario](EagleFSD.from_pretrained(**load))
    return json.loads(json.dumps(found))


def environment(**more: str) -> dict[str, str]:
    """Return what a process needs to find this package and the tests' support."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}


@contextmanager
def two_places() -> Iterator[list[dict[str, str]]]:
    """Return the environment in which each of two ranks finds the other.

    The store where they meet is held open here, as torchrun does. A port that is only looked up can be
    another process's by the time that rank 0 listens, and rank 1 then tries for hours.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    yield [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    del store


def on_two_ranks(folder: Path, jobs: Sequence[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
    """Run jobs on two ranks and return what each rank found. torchrun would start them more slowly."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    logs = [path.with_suffix(f".{rank}.log") for rank in range(2)]
    with two_places() as places:
        processes = []
        for place, log in zip(places, logs, strict=True):
            with log.open("wb") as out:
                command = [sys.executable, "-m", "support.split_run", str(path)]
                processes.append(
                    subprocess.Popen(
                        command, env=environment(**place), cwd=folder, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        codes = ended(processes)
    assert codes == [0, 0], "\n".join(log.read_text(encoding="utf-8") for log in logs)
    return [json.loads(path.with_suffix(f".{rank}").read_text(encoding="utf-8")) for rank in range(2)]


def ended(processes: Sequence[subprocess.Popen[bytes]], seconds: float = 400) -> list[int | None]:
    """Wait until all have ended, or one failed and the others had time to. None stands for one that hangs."""
    until = time.monotonic() + seconds
    try:
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < until:
            if any(codes):
                until = min(until, time.monotonic() + 20)
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return codes


def main(path: Path) -> None:
    jobs = json.loads(path.read_text(encoding="utf-8"))
    rank = join_ranks().rank
    found = []
    for scenario, load in jobs:
        mine = {name: str(rank) if value == MINE else value for name, value in load.items()}
        found.append(run_job(scenario, mine, tp_plan="auto"))
    path.with_suffix(f".{rank}").write_text(json.dumps(found), encoding="utf-8")
    leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
