"""The records that a model card rests on: of a training run, and of its head's tau."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.training.run.folder import RECORD

SAME = ("base_model", "ea_model", "draft_vocab_size", "dtype", "max_new_tokens")  # equal in a card's rows


def read_training(run: Path) -> dict[str, Any]:
    """Read the record of a run of `eagle-fsd train head` that has ended."""
    record = run / RECORD
    try:
        training = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"training record {str(record)!r} cannot be read ({one_line(error, 80)}): it must be what "
            "`eagle-fsd train head` writes; name its --output"
        ) from error
    needed = ("command", "steps", "training_seconds", "sequences", "tokens", "learned_tokens", "held_out")
    lost = [name for name in needed if training.get(name) in (None, {})]
    if lost:
        raise ValueError(f"{record} has no {', '.join(lost)}: the run must have ended; resume it")
    return training


def refuse_mixed_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Refuse rows of more than one head or setting, and two rows for one place of the table."""
    remedy = "keep the rows of one, or measure again with another --output"
    for name in SAME:
        default = "float32" if name == "dtype" else None  # which rows of older versions lack
        values = dict.fromkeys(row.get(name, default) for row in rows)
        if len(values) > 1:
            raise ValueError(
                f"{name} is {' and '.join(map(repr, values))} in {path}: the rows of a card must be of one "
                f"head and setting; {remedy}"
            )
    places = set()
    for row in rows:
        rule = (row["divergence"], row["mode"], row["child"], row["threshold"])
        tree, temperature = str(TreeConfig(**row["tree"])), row["sampling"]["temperature"]
        place = (row["prompts"], tree, temperature, rule)
        if place in places:
            raise ValueError(
                f"prompts is {row['prompts']!r} twice in {path} with tree {tree}, temperature "
                f"{temperature:g} and the same rule: a place in the table must be one head's at one setting; "
                f"{remedy}"
            )
        places.add(place)
