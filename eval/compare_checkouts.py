"""Compare two checkouts of this project: do they write the same texts, and how fast is one beside the other?

    python eval/compare_checkouts.py --base ../old --new . --output runs/compare.json

For each checkout a worker process loads the default target and its shipped head through the public API. Both
answer the prompts under three rules, in batches of 1 and of 4. Token ids, statistics and seeds must be equal.
So must the fields of `python -m eagle_fsd.generate --json`: names, order and all values but times. Then the
two take turns to answer the prompts greedily, and the ratio of their speeds is reported. Only one of them
works at a time. Exits with 1 if anything but a speed differs, and names the first difference.

--race-only leaves out all but the race, and --trees gives each side a tree of its own:

    python eval/compare_checkouts.py --base ../old --new . --race-only --repeat 1 --max-new-tokens 128 \\
        --prompts data/prompts_*.jsonl --trees 16/8/2/0.07 4/3/2/0.1

Compare a checkout with itself to see how far speeds differ by chance. On a busy machine the two may choose
different matrix libraries, which round differently: --no-pack rules that out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

PROMPTS = [
    "Why do leaves change colour in autumn?",
    "Write a Python function that counts the vowels in a string.",
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. How many is that in all?",
    "List three uses for an empty glass jar.",
    "Write a short poem about a train in the snow.",
    "Translate to French: I would like a cup of tea, please.",
    "Explain to a child what a magnet does.",
    "What is the difference between a list and a tuple in Python?",
]
CASES = list(product(("greedy", "sampled", "fuzzy"), (1, 4)))  # rules and batch sizes
TREE = "16/5/8"
WORKER = "worker"  # the only argument of a worker process


def work() -> None:
    """Load the models, then answer requests on stdin, one JSON object a line, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: the other process ends this one
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr, where it cannot tear a reply
    engine = None
    for line in sys.stdin:
        if engine is None:
            engine, reply = load(**json.loads(line))
        else:
            reply = answer(engine, **json.loads(line))
        try:
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
        except BrokenPipeError:  # Ctrl-C: nobody waits for it
            os._exit(1)


def load(package: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load the default models by the package in that folder, and say what computes."""
    import torch

    import eagle_fsd

    if Path(eagle_fsd.__file__).resolve().parent != Path(package):
        raise ValueError(f"eagle_fsd is imported from {eagle_fsd.__file__}: it must be {package}")
    engine = eagle_fsd.EagleFSD.from_pretrained(**options)
    about = {"version": eagle_fsd.__version__, "torch": torch.__version__}
    return engine, {**about, "threads": torch.get_num_threads(), "device": str(engine.device)}


def answer(engine: Any, prompts: Sequence[str], rule: str, max_new_tokens: int, tree: str) -> dict[str, Any]:
    """Answer prompts in one batch: tokens, seed and statistics of each, and the seconds of all."""
    import torch

    from eagle_fsd import Fuzzy, Lossless, TreeConfig

    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    how = {"add_generation_prompt": True, "return_dict": False}
    ids = [list(engine.tokenizer.apply_chat_template(chat, **how)) for chat in chats]
    gaps = [max(map(len, ids)) - len(row) for row in ids]
    start = time.perf_counter()
    output = engine.generate(
        torch.tensor([[0] * gap + row for gap, row in zip(gaps, ids, strict=True)]),
        torch.tensor([[0] * gap + [1] * len(row) for gap, row in zip(gaps, ids, strict=True)]),
        max_new_tokens=max_new_tokens,
        rule=Fuzzy(threshold=0.3, divergence="js") if rule == "fuzzy" else Lossless(),
        tree=TreeConfig.parse(tree),
        seed=1,
        **({} if rule == "greedy" else {"temperature": 0.6, "top_k": 50, "top_p": 0.9}),
    )
    seconds = time.perf_counter() - start
    seed = getattr(output, "seed", None)  # 0.1 had none
    stats = [{"seed": seed, **without_times(row.to_dict())} for row in output.stats]
    rows = [{"tokens": row, **said} for row, said in zip(output.new_tokens, stats, strict=True)]
    return {"seconds": seconds, "rows": rows}


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """A record with null for its times and speeds, which differ from run to run; the names stay."""
    times = ("seconds", "per_second")
    return {name: None if name.endswith(times) else value for name, value in record.items()}


class Checkout:
    """One side of the comparison: a folder, and a worker that waits while nothing asks it."""

    def __init__(self, path: Path, empty: str, options: dict[str, Any], tree: str = TREE) -> None:
        """Start the worker in an empty folder, from which it can import nothing, and wait for its models.

        tree: of the race.
        """
        self.path, self.options, self.tree = path, options, tree
        environment = {**os.environ, "PYTHONPATH": str(path), "TQDM_DISABLE": "1"}
        self.settings = {"cwd": empty, "env": environment, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, str(Path(__file__).resolve()), WORKER]
        self.worker = subprocess.Popen(command, stdin=subprocess.PIPE, **self.settings)
        git = ["git", "-C", str(path), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        computes = self.ask(package=f"{path}/eagle_fsd", **options)
        self.about = {"path": str(path), "commit": commit, **options, **computes}
        print(", ".join(f"{name} {value}" for name, value in self.about.items()), flush=True)
        self.speeds: list[float] = []

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send the worker a request and return its reply. Raises RuntimeError if the worker ends instead."""
        self.worker.stdin.write(json.dumps(request) + "\n")
        self.worker.stdin.flush()
        if not (line := self.worker.stdout.readline()):
            raise RuntimeError(f"the worker of {self.path} ended ({self.worker.wait()}): see its error above")
        return json.loads(line)

    def answers(self, prompts: Sequence[str], rule: str, size: int, most: int) -> list[dict[str, Any]]:
        """The rows of all prompts, answered `size` at a time."""
        parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        asked = {"rule": rule, "max_new_tokens": most, "tree": TREE}
        return [row for part in parts for row in self.ask(prompts=part, **asked)["rows"]]

    def command_json(self, prompt: str, most: int) -> dict[str, Any]:
        """What `generate --json` prints for a prompt, without times and without the checkout's own path."""
        command = [sys.executable, "-m", "eagle_fsd.generate", "--json", f"--prompt={prompt}"]
        command += [f"--total-tokens={TREE.partition('/')[0]}", f"--max-new-tokens={most}"]
        command += ["--no-pack"] * (not self.options["pack"])
        if "weight_format" in self.options:
            command.append(f"--weight-format={self.options['weight_format']}")
        done = subprocess.run(command, **self.settings)
        if done.returncode or not done.stdout.startswith("{"):
            raise RuntimeError(f"`generate` of {self.path} ended ({done.returncode}) without JSON: see above")
        inside = json.dumps(str(self.path))[1:-1]  # the shipped head is named by its folder
        return without_times(json.loads(done.stdout.replace(inside, "CHECKOUT")))


def differences(base: Any, new: Any, place: str) -> Iterator[str]:
    """Say where two JSON values differ, a line for each place; in a list only the first place counts."""
    if isinstance(base, dict) and isinstance(new, dict):
        if list(base) != list(new):
            changed = ", ".join(name for name in (*base, *new) if (name in base) != (name in new))
            yield f"{place}: the fields differ: {changed or 'their order'}"
        for name in (name for name in base if name in new):
            yield from differences(base[name], new[name], f"{place}, {name}")
    elif isinstance(base, list) and isinstance(new, list):
        for number, pair in enumerate(zip(base, new, strict=False)):
            if found := list(differences(*pair, f"{place} at {number}")):
                yield from found
                return
        if len(base) != len(new):
            yield f"{place}: {len(base)} items in base, {len(new)} in new"
    elif type(base) is not type(new) or base != new:
        yield f"{place}: {base!r} in base, {new!r} in new"


def compare(base: Checkout, new: Checkout, prompts: Sequence[str], most: int) -> dict[str, Any]:
    """Ask both sides everything once, print a table, and return all answers and differences."""
    answers, found = {}, []
    print("| rule | batch | equal | tau base | tau new |\n| --- | --- | --- | --- | --- |")
    for rule, size in CASES:
        case = f"{rule}, batch {size}"
        answers[case] = given = [side.answers(prompts, rule, size, most) for side in (base, new)]
        pairs = enumerate(zip(*given, strict=True), 1)
        rows = [list(differences(*pair, f"{case}, prompt {number}")) for number, pair in pairs]
        found += [line for row in rows for line in row]
        tau, other = (sum(len(r["tokens"]) for r in side) / sum(r["steps"] for r in side) for side in given)
        print(f"| {rule} | {size} | {rows.count([])} of {len(rows)} | {tau:.3f} | {other:.3f} |", flush=True)
    answers["generate --json"] = records = [side.command_json(prompts[0], most) for side in (base, new)]
    apart = list(differences(*records, "generate --json"))
    print(f"generate --json: {len(records[0])} fields, {len(apart)} differences", flush=True)
    return {"differences": found + apart, "answers": answers}


def race(base: Checkout, new: Checkout, prompts: Sequence[str], repeat: int, most: int) -> dict[str, Any]:
    """Let the two answer each prompt in turn, in the order base new new base, and sum up their speeds."""
    equal = 0
    for turn, place in product(range(repeat), range(len(prompts))):
        texts = []
        for side in (base, new) if (turn + place) % 2 == 0 else (new, base):
            asked = {"rule": "greedy", "max_new_tokens": most, "tree": side.tree}
            reply = side.ask(prompts=[prompts[place]], **asked)
            texts.append(reply["rows"][0]["tokens"])
            side.speeds.append(len(texts[-1]) / reply["seconds"])
        equal += texts[0] == texts[1]
    return summed_up(base.speeds, new.speeds) | {"equal": equal, "trees": [base.tree, new.tree]}


def summed_up(base: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    """The median of each side's speeds, and the median and the quartiles of new/base over all pairs."""
    ratios = [mine / other for other, mine in zip(base, new, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    medians = {"base": statistics.median(base), "new": statistics.median(new)}
    return medians | dict(zip(("low", "ratio", "high"), quartiles, strict=True)) | {"pairs": len(ratios)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the two checkouts and let them race. ValueError for arguments that leave nothing to compare."""
    from eagle_fsd.text.prompt_files import (
        read_prompts,  # only here: a worker imports the package of its checkout
    )

    if args.max_new_tokens < 1 or args.repeat < 0:
        raise ValueError("--max-new-tokens must be at least 1 and --repeat at least 0; raise it")
    if args.race_only and not args.repeat:
        raise ValueError("--race-only with --repeat 0 leaves nothing to do; leave one of them out")
    prompts = [prompt for file in args.prompts for prompt in read_prompts(file)] if args.prompts else PROMPTS
    if not prompts:
        raise ValueError("--prompts name files without a prompt: they must hold at least one; name others")
    for path in (args.base, args.new):
        if not (path / "eagle_fsd" / "__init__.py").is_file():
            raise ValueError(f"{path} is no checkout of this project: it must hold eagle_fsd; check the path")
    with tempfile.TemporaryDirectory() as empty:
        pairs = zip((args.base, args.new), args.trees, strict=True)
        options: dict[str, Any] = {"pack": args.pack}
        if args.weight_format is not None:  # commits before the runtimes know no formats
            options["weight_format"] = args.weight_format
        base, new = [Checkout(path.resolve(), empty, options, tree) for path, tree in pairs]
        with base.worker, new.worker:  # whose end closes their pipes, which ends them
            report = {"base": base.about, "new": new.about, "prompts": prompts, "differences": []}
            if not args.race_only:
                report |= compare(base, new, prompts, args.max_new_tokens)
            if args.repeat:
                report["speed"] = race(base, new, prompts, args.repeat, args.max_new_tokens)
    if speed := report.get("speed"):
        print("tokens/s: {base:.1f} in base, {new:.1f} in new".format(**speed))
        print("new/base: {ratio:.3f} (quartiles {low:.3f} to {high:.3f}, {pairs} pairs)".format(**speed))
        print("trees {trees}, {equal} equal texts".format(**speed))
        if apart := speed["pairs"] - speed["equal"]:
            report["differences"].append(f"race: {apart} of {speed['pairs']} texts")
    return report


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--base", type=Path, required=True, help="the checkout to compare with")
    add("--new", type=Path, required=True, help="the checkout to judge")
    add(
        "--prompts",
        type=Path,
        nargs="+",
        help="JSONL files of `prompt`, `turns` ...; default: eight short questions",
    )
    add("--max-new-tokens", type=int, default=48, help="default: %(default)s")
    add("--repeat", type=int, default=3, help="rounds of the race; 0 leaves it out; default: %(default)s")
    add("--race-only", action="store_true", help="compare speeds and greedy texts, and nothing else")
    sides = ("BASE", "NEW")
    add(
        "--trees", nargs=2, default=(TREE, TREE), metavar=sides, help=f"of the race; default: {TREE} for both"
    )
    add("--weight-format", help="of both sides; default: that of their dtype")
    add("--no-pack", dest="pack", action="store_false", help="leave the linear layers as they are")
    add("--output", type=Path, help="write answers, differences and speeds to this JSON file")
    args = parser.parse_args()
    try:
        report = run(args)
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError, RuntimeError) as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        from eagle_fsd.core.process.signals import report_interrupt  # only here, as above

        sys.exit(report_interrupt())
    found = report["differences"]
    print(f"differences: {len(found)}, the first: {found[0]}" if found else "no differences")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    work() if sys.argv[1:] == [WORKER] else main()
