"""The table of the weight formats, from the rows of both passes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle_fsd.evaluation.markdown_table import markdown_table
from eagle_fsd.evaluation.weight_formats.reading import AS_TREES, AT_ONCE, NODES

TITLES = (
    *("runtime", "weights"),
    *("TV, mean (95 %)", f"TV, {NODES} a forward", "same token", f"same, {NODES} a forward"),
    *("weights MB", "resident MB", "peak MB", "tau", "as plain", "as float32"),
)
Rows = Sequence[Mapping[str, Any]]


def format_table(formats: Mapping[str, tuple[Rows, Rows]], reference: Rows) -> str:
    """Write a line for each format from its rows of reading and decoding, all in the order of the questions.

    reference: the rows of decoding of the format that all are compared with. Of the memory the largest of
    all rows is shown. "as plain": texts of lossless decoding that equal those of the same format's plain
    decoding; "as float32": texts of plain decoding that equal the reference's.
    """
    return markdown_table(TITLES, [line(*rows, reference) for rows in formats.values()])


def line(read: Rows, decoded: Rows, reference: Rows) -> list[str]:
    spread, same = [], []
    for way in (AT_ONCE, AS_TREES):
        values = [value for row in read for value in row["tv"][way]]
        spread.append(f"{statistics.fmean(values):.2g} ({np.percentile(values, 95):.2g})")
        same.append(f"{sum(row['same'][way] for row in read) / len(values):.1%}")
    tau = sum(row["new_tokens"] for row in decoded) / sum(row["steps"] for row in decoded)
    as_plain = sum(row["lossless"] == row["plain"] for row in decoded)
    as_reference = sum(a["plain"] == b["plain"] for a, b in zip(decoded, reference, strict=True))
    sizes = [max(row[name] for row in decoded) for name in ("weight_bytes", "resident", "peak")]
    return [
        *(decoded[0]["runtime"], decoded[0]["weight_format"], *spread, *same),
        *(f"{size / 1e6:.0f}" for size in sizes),
        f"{tau:.2f}",
        *(f"{count} of {len(decoded)}" for count in (as_plain, as_reference)),
    ]


def about(formats: Mapping[str, tuple[Rows, Rows]]) -> str:
    """Say in a line how much was measured, where, and at which commits: several where a run was resumed."""
    rows = [row for pair in formats.values() for part in pair for row in part]
    read = next(iter(formats.values()))[0]
    places = sum(len(row["tv"][AT_ONCE]) for row in read)
    libraries = max(row["libraries"] for _, decoded in formats.values() for row in decoded)
    commits = ", ".join(sorted({str(row["commit"]) for row in rows}))
    devices = ", ".join(sorted({f"{row['device']} with {row['threads']} threads" for row in rows}))
    return (
        f"{len(read)} prompts, {places} places, tree {rows[0]['tree']}; {libraries / 1e6:.0f} MB of the "
        f"memory are Python and its libraries; {devices}; commit {commits}"
    )
