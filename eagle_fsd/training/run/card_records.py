"""The records that a model card rests on: of a training run, and of its head's tau."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.config import TreeConfig
from eagle_fsd.drafting.eagle3.config import layer_fields
from eagle_fsd.evaluation.rows import read_raw_rows, read_rows
from eagle_fsd.files.fingerprints import differences
from eagle_fsd.files.provenance import HUB_ID
from eagle_fsd.hub.head_checkpoint import VOCABULARY_FIELD, find_head_file, read_config
from eagle_fsd.hub.head_digest import WEIGHTS, head_digests
from eagle_fsd.hub.resolve import DEFAULT_TARGET, DEFAULT_TARGET_HUB_ID
from eagle_fsd.training.run.exports import FOLDED_FROM, exports_of
from eagle_fsd.training.run.folder import RECORD

# What is equal in a card's rows.
SAME = ("base_model", "ea_model", "draft_vocab_size", "dtype", "weight_format", "max_new_tokens")

NEEDED = (
    *("command", "steps", "training_seconds", "sequences", "tokens", "learned_tokens", "held_out"),
    *("device", "eagle_fsd", "torch", "transformers"),
)


def read_tau(path: Path) -> list[dict[str, Any]]:
    """Read rows of `eagle-fsd eval tau`, each checked. Raises ValueError for any other file."""
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"no rows in {path}: a card says what a head is worth; run `eagle-fsd eval tau`")
    read_raw_rows([path])
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("command"), str):
            raise ValueError(
                f"{path}: row {number} has no command: a card shows how it was measured; measure again with "
                "`eagle-fsd eval tau`"
            )
    return rows


def read_training(run: Path) -> dict[str, Any]:
    """Read the record of a run of `eagle-fsd train head` that has ended."""
    record = run / RECORD
    try:
        training = dict(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"training record {str(record)!r} cannot be read ({one_line(error, 80)}): it must be what "
            "`eagle-fsd train head` writes; name its --output"
        ) from error
    lost = [name for name in NEEDED if training.get(name) in (None, {})]
    if not lost and not {"top1", "positions"} <= set(training["held_out"]):
        lost = ["top1 and positions in held_out"]
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


def compare_tau(head: Path, tau: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hold the head to be published against its rows of tau, and return in words what cannot be compared.

    Raises ValueError for rows of another head or of another list of tokens: the card would not be true.
    """
    digests = head_digests(find_head_file(head, str(head)))
    drafted = drafted_tokens(read_config(head, "draft head"))
    for row in rows:
        measured = row.get("head", digests)  # rows of older versions do not say
        if measured is None or (changed := differences(measured, digests)):
            found = "no head drafted" if measured is None else changed
            raise ValueError(
                f"{tau} is of {row['ea_model']!r}, not of {head} ({found}): tau must be of the head that is "
                "published; measure that one, or name the other with --head"
            )
        if row["draft_vocab_size"] != drafted:
            raise ValueError(
                f"draft_vocab_size is {row['draft_vocab_size']} in {tau} and {drafted} in {head}: tau must "
                "be of the tokens that the head drafts; measure that head, without --full-vocabulary"
            )
    silent = not all("head" in row for row in rows)
    return [f"{tau} does not say which head it is of: measure again to be sure"] if silent else []


def compare_run(head: Path, run: Path, training: Mapping[str, Any]) -> list[str]:
    """Hold the head to be published against what its run exported; see compare_tau.

    training: the record of the run. A list of tokens and a folded bias leave a head what the run made of it.
    """
    weights = head_digests(find_head_file(head, str(head)))[WEIGHTS]
    own = {weights, read_config(head, "draft head").get(FOLDED_FROM)}
    exports = exports_of(run, training.get("run"))
    steps = [export["step"] for export in exports if export[WEIGHTS] in own]
    if not exports and training.get("run") is not None:
        raise ValueError(
            f"{run} has exported no head, so {head} is not of it: the run must be the one that trained the "
            "head; name that one with --run, or export its head with --export"
        )
    if not exports:
        return [f"{run} does not say which heads it exported: export the head again to be sure"]
    if not steps:
        raise ValueError(
            f"{head} has the weights {weights}, and {run} exported {', '.join(e[WEIGHTS] for e in exports)}: "
            "the run must be the one that trained the head; name that one with --run"
        )
    if training.get("best_step", steps[-1]) not in steps:
        raise ValueError(
            f"{head} is of step {steps[-1]} of {run}, whose record is of step {training['best_step']}: the "
            "run has trained on since; export again, and measure that head"
        )
    return []


def compare_target(base_model: str, names: Iterable[tuple[Path, str | None]]) -> list[str]:
    """Hold the card's target against those that records name, each with its origin; see compare_tau."""
    unknown = []
    for origin, name in dict.fromkeys(names):
        if name is None:  # records of older versions
            unknown.append(f"{origin} does not say which target it is of")
        elif (known := hub_id(name)) is None:
            unknown.append(f"{origin} is of {name!r}: nothing says whether that is {base_model!r}")
        elif known.lower() != base_model.lower():
            raise ValueError(
                f"base_model is {base_model!r}, and {origin} is of {name!r}: a card must be of one target; "
                "name the one that the head was made for with --base-model"
            )
    return unknown


def card_target(name: str) -> str:
    """Return the Hub id by which a card names its target, without a revision.

    Raises ValueError for a folder or a file: nobody else has it, and its path may be private.
    """
    if (found := hub_id(name)) is None and not HUB_ID.fullmatch(name):
        raise ValueError(
            f"base_model is {name!r}: a card names the target by its Hub id OWNER/NAME, not by a place on "
            "this machine; give the id that the target has there"
        )
    return found or name.partition("@")[0]


def drafted_tokens(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a head drafts, by its config.json; None if these are all."""
    size = config.get(VOCABULARY_FIELD)
    return None if size == layer_fields(config).get("vocab_size") else size


def hub_id(name: str) -> str | None:
    """Return a target's Hub id, without its revision; None for a file or a folder, which has none."""
    if name == DEFAULT_TARGET:
        return DEFAULT_TARGET_HUB_ID
    return name.partition("@")[0] if HUB_ID.fullmatch(name) and not Path(name).exists() else None
