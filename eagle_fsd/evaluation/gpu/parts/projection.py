"""What speed-up the measured times allow at acceptance lengths that others have published. A projection.

A step that emits tau tokens takes the place of tau plain steps, so that speed-up = tau * plain / step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eagle_fsd.evaluation.gpu.bench import Bench
from eagle_fsd.evaluation.gpu.parts.costs import TREES
from eagle_fsd.evaluation.gpu.runner import Findings, LeftOut

PLAIN, PAPERS = str(TREES[0]), str(TREES[-1])  # plain decoding; the EAGLE-2 paper's tree for 7B and 8B
EIGHT_B = "costs, Llama-8B's shape"  # the name of that part
EAGLE_2, EAGLE_3 = "EAGLE-2 (arXiv 2406.16858)", "EAGLE-3 (arXiv 2503.01840)"
LABEL = "projection: measured times of a step and published or measured tau; not a measured speed-up"


@dataclass(frozen=True)
class Published:
    """A mean acceptance length of EAGLE-2 with the tree PAPERS, and the speed-up that came with it there."""

    target: str
    prompts: str
    temperature: float
    tau: float
    speedup: float
    source: str


PUBLISHED = (
    Published("LLaMA3-Instruct 8B", "MT-bench", 0.0, 4.53, 3.46, f"{EAGLE_2}, table 2"),
    Published("Llama-3.1-Instruct 8B", "mean of 5 sets", 0.0, 4.11, 3.23, f"{EAGLE_3}, table 1"),
    Published("Vicuna 7B", "mean of 6 sets", 0.0, 4.68, 3.39, f"{EAGLE_2}, table 1"),
    Published("LLaMA2-Chat 7B", "mean of 6 sets", 0.0, 4.64, 3.43, f"{EAGLE_2}, table 1"),
    Published("Vicuna 7B", "mean of 6 sets", 1.0, 4.20, 2.94, f"{EAGLE_2}, table 1"),
    Published("LLaMA2-Chat 7B", "mean of 6 sets", 1.0, 4.41, 3.15, f"{EAGLE_2}, table 1"),
)


def speedup(tau: float, plain: float, step: float) -> float:
    """Return how many times faster than plain decoding it is; plain, step: times of a step, in one unit."""
    return tau * plain / step


def break_even(plain: float, step: float) -> float:
    """Return the tau at which a step with a tree is as fast as plain decoding."""
    return step / plain


def projection(bench: Bench, found: Mapping[str, Findings]) -> Findings:
    """Project speed-ups from the times of the parts before, by target, stepper, context and published tau."""
    costs = {name: part for name, part in found.items() if "modes" in part}
    if not costs:
        raise LeftOut("no times were measured")
    own = found.get("equality of the target", {}).get("tau", {})
    rows: list[dict[str, Any]] = []
    for name, part in costs.items():
        published = PUBLISHED if name == EIGHT_B else ()
        measured = {} if name == EIGHT_B else own
        for mode, contexts in part["modes"].items():
            for context, cell in contexts.items():
                if context.isdecimal():
                    rows += [
                        {"subject": name, "mode": mode, "context": int(context), **row}
                        for row in projected(cell["step"], published, measured)
                    ]
    shown = []
    for row in rows:
        tau, gain = (f"{row[key]:.2f}" if row[key] is not None else "" for key in ("tau", "speedup"))
        where = [row["subject"], row["mode"], str(row["context"]), row["tree"], f"{row['break_even']:.2f}"]
        shown.append([*where, tau, gain, row["of"]])
    titles = ["target", "", "context", "tree", "tau to break even", "tau", "speed-up", "whose tau"]
    best = max((row["speedup"] for row in rows if row["speedup"] is not None), default=None)
    said = "no tau is known for these targets" if best is None else f"at most {best:.2f} times a plain step"
    return {
        "ok": True,
        "summary": f"{said} (a projection)",
        "label": LABEL,
        "rows": rows,
        "table": {"titles": titles, "rows": shown},
    }


def projected(
    steps: Mapping[str, float], published: tuple[Published, ...], measured: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return a row for every tree and tau.

    steps: milliseconds by tree, PLAIN among them; measured: tau by tree.
    """
    plain = steps[PLAIN]
    rows = []
    for tree, step in steps.items():
        if tree == PLAIN:
            continue
        even = {"tree": tree, "break_even": round(break_even(plain, step), 4)}
        known = [(one.tau, asdict(one)) for one in published if tree == PAPERS]
        known += [(measured[tree], {"source": "tau measured by this check"})] if tree in measured else []
        if not known:
            rows.append({**even, "tau": None, "speedup": None, "of": ""})
        for tau, said in known:
            of = ", ".join(str(said[key]) for key in ("target", "prompts", "source") if key in said)
            if "temperature" in said:
                of = f"{of}, temperature {said['temperature']:g}, {said['speedup']:.2f} there"
            rows.append({**even, "tau": tau, "speedup": round(speedup(tau, plain, step), 4), "of": of})
    return rows
