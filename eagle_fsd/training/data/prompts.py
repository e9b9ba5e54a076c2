"""Gather the prompts that the target is to answer, from files and from data sets. Knows no model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import find_half_character, one_line, require_integer
from eagle_fsd.text.prompt_files import find_prompt, read_prompts
from eagle_fsd.training.data.examples import banned_runs, overlap

logger = logging.getLogger(__name__)


def gather_prompts(
    files: Sequence[Path],
    dataset: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    config: str | None = None,
) -> list[str]:
    """Read the prompts of files and of a data set of the Hub, at most `limit` of each.

    split: of the data set; None is train. config: which of the data set's configurations.
    """
    if limit is not None:
        require_integer("limit", limit, 1, "change --limit")
    for name, value in (("dataset_config", config), ("split", split)):
        if value is not None and dataset is None:
            raise ValueError(f"{name} is {value!r}: it must be of a data set; name one with --dataset")
    prompts: list[str] = []
    for path in files:
        prompts += read_prompts(path)[:limit]
    if dataset is not None:
        prompts += dataset_prompts(dataset, split or "train", limit, config)
    return prompts


def usable_prompts(prompts: Sequence[str]) -> list[str]:
    """Return those that are whole and not blank, each once. What is left out is counted."""
    whole = [prompt for prompt in prompts if find_half_character(prompt) is None]
    if len(whole) < len(prompts):
        logger.warning("%d prompts left out: they hold half a character", len(prompts) - len(whole))
    said = [prompt for prompt in whole if prompt.strip()]
    once = list(dict.fromkeys(said))
    for left_out, why in ((len(whole) - len(said), "they are blank"), (len(said) - len(once), "repeated")):
        if left_out:
            logger.info("%d prompts left out: %s", left_out, why)
    return once


def dataset_prompts(name: str, split: str, limit: int | None, config: str | None = None) -> list[str]:
    """Read the prompts of a data set of the Hub, or of a folder. Rows without a prompt are left out."""
    if Path(name).is_file():
        raise ValueError(
            f"data set {name!r} is a file: it must be a Hub id or a folder of files; name its folder, or "
            "give --prompts for rows of JSONL"
        )
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "a data set of the Hub needs the package datasets: pip install eagle-fsd[train]"
        ) from error
    try:
        if any((Path(name) / kept).is_file() for kept in ("state.json", "dataset_dict.json")):
            rows = choose_split(datasets.load_from_disk(name), split, config)
        else:
            rows = datasets.load_dataset(name, config, split=split, streaming=True)
    except (ValueError, OSError, RuntimeError) as error:  # the last for a data set that has a script
        raise ValueError(
            f"data set {name!r}, configuration {config!r}, split {split!r} cannot be read "
            f"({one_line(error, 200)}): it must have both; change --dataset, --dataset-config or --split"
        ) from error
    found: list[str] = []
    stream = iter(rows)
    while limit is None or len(found) < limit:
        try:
            row = next(stream, None)
        except Exception as error:  # of the network, a parser or Arrow: they have no base class in common
            raise ValueError(
                f"data set {name!r}, split {split!r} broke off after {len(found)} prompts "
                f"({one_line(error, 200)}): it must be read to its end or to --limit; run the command again, "
                "or take a lower --limit"
            ) from error
        if row is None:
            break
        if (prompt := find_prompt(row)) is not None:
            found.append(prompt)
    if not found:
        raise ValueError(
            f"data set {name!r}, split {split!r}: no row has a prompt, question, turns, instruction, "
            "messages or conversations; choose another"
        )
    return found


def choose_split(saved: Any, split: str, config: str | None) -> Iterable[Mapping[str, Any]]:
    """Return the rows of a split of what save_to_disk wrote; without splits, it counts as the split train."""
    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved, "train": saved}
    if config is not None or split not in splits:
        raise ValueError(f"save_to_disk wrote the splits {', '.join(sorted(splits))} and no configuration")
    return splits[split]


def without_overlap(prompts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Return the prompts that share no run of eight words (see word_runs) with what the files ask."""
    banned = banned_runs(files)
    kept = [prompt for prompt in prompts if not overlap(prompt, banned)]
    if len(kept) < len(prompts):
        names = ", ".join(map(str, files))
        left_out = len(prompts) - len(kept)
        logger.info("%d of %d prompts left out: they overlap with %s", left_out, len(prompts), names)
    return kept
