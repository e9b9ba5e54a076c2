"""The table and the plot of a race of servers, from its rows. Knows no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.plots import FAINT, INK, save

STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))  # lines are told apart without colour
TITLES = ("clients", "server", "tokens/s", "times ours", "first token ms", "a token ms", "between chunks ms")


def summaries(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    """Return what was measured, by clients and server, over all turns.

    rate: tokens per second in all. first: until an answer's first text. token: from an answer's first text to
    its last, by token after the first chunk's. chunk: between two chunks of text, of which each may hold
    several tokens. All three as (median, 95th percentile) in milliseconds.
    """
    groups: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["clients"], row["server"]), []).append(row)
    found = {}
    for key, members in sorted(groups.items(), key=lambda item: item[0][0]):
        answers = [answer for row in members for answer in row["answers"]]
        tokens, seconds = sum(row["tokens"] for row in members), sum(row["seconds"] for row in members)
        by_token = [
            (one["last"] - one["first"]) / (one["tokens"] - 1) for one in answers if one["tokens"] > 1
        ]
        found[key] = {
            "rate": tokens / seconds,
            "first": spread([answer["first"] for answer in answers]),
            "token": spread(by_token),
            "chunk": spread([gap for answer in answers for gap in answer["gaps"]]),
        }
    return found


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    middle, high = np.percentile(seconds or [np.nan], (50, 95))
    return 1000 * float(middle), 1000 * float(high)


def same_texts(rows: Sequence[Mapping[str, Any]], ours: str) -> dict[str, float]:
    """Return, by server, the share of prompts that it answers alone with the same text as ours does."""
    texts: dict[str, dict[int, str]] = {}
    for row in rows:
        for answer in row["answers"]:
            texts.setdefault(row["server"], {}).setdefault(answer["prompt"], answer["text"].strip())
    mine = texts.get(ours, {})
    found = {}
    for server, told in texts.items():
        shared = mine.keys() & told.keys()
        if server != ours and shared:
            found[server] = sum(mine[one] == told[one] for one in shared) / len(shared)
    return found


def table(rows: Sequence[Mapping[str, Any]], ours: str) -> str:
    """Write what was measured: medians, and 95th percentiles behind a slash."""
    found = summaries(rows)
    lines = []
    for (clients, server), one in found.items():
        mine = found.get((clients, ours))
        ratio = "" if mine is None or server == ours else f"{one['rate'] / mine['rate']:.2f}"
        times = [f"{one[name][0]:.0f} / {one[name][1]:.0f}" for name in ("first", "token", "chunk")]
        lines.append([str(clients), server, f"{one['rate']:.1f}", ratio, *times])
    return markdown_table(TITLES, lines)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw tokens per second, and the time to the first token, against the number of clients, to a PNG."""
    from matplotlib.figure import Figure

    found = summaries(rows)
    servers = list(dict.fromkeys(row["server"] for row in rows))
    figure = Figure(figsize=(9, 4), layout="constrained")
    rate, first = figure.subplots(1, 2)
    for place, server in enumerate(servers):
        line, marker = STYLES[place % len(STYLES)]
        points = [(clients, one) for (clients, name), one in found.items() if name == server]
        counts = [clients for clients, _ in points]
        look = {"linestyle": line, "marker": marker, "color": FAINT if place else INK, "label": server}
        rate.plot(counts, [one["rate"] for _, one in points], **look)
        medians = [one["first"][0] for _, one in points]
        above = [one["first"][1] - one["first"][0] for _, one in points]
        first.errorbar(counts, medians, yerr=([0] * len(above), above), capsize=3, **look)
    counts = sorted({row["clients"] for row in rows})
    for panel, title in (
        (rate, "tokens per second in all"),
        (first, "ms to the first token, up to the 95th %"),
    ):
        panel.set_xscale("log", base=2)
        panel.set(xticks=counts, xticklabels=list(map(str, counts)), xlabel="clients at once")
        panel.set_title(title, loc="left", fontsize=10)
        panel.grid(color=FAINT, alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    rate.set_ylim(bottom=0)
    first.set_yscale("log")
    figure.legend(*rate.get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=9)
    save(figure, path)
