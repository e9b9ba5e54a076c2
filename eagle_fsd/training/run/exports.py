"""The heads that a run has exported: it writes over these alone, and a card knows them as its own.

OUTPUT/exports.jsonl has a line for each, with the digests of its files. A run is known by what a resumed one
may not change, so that another run in the same folder does not inherit them.
"""

from __future__ import annotations

import argparse
import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from eagle_fsd import hub
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.files.jsonl import append_row, drop_torn_line, read_jsonl
from eagle_fsd.files.places import require_folder, require_room
from eagle_fsd.files.provenance import provenance
from eagle_fsd.hub.head_checkpoint import (
    BIN_NAME,
    CONFIG_NAME,
    SAFETENSORS_NAME,
    VOCABULARY_NAME,
    find_head_file,
)
from eagle_fsd.hub.head_digest import TRAINED_FOR, head_digests
from eagle_fsd.training.cli import text_tokens
from eagle_fsd.training.run.folder import BEST, fixed_part, read_checkpoint, write_record
from eagle_fsd.training.trainer import Trainer

logger = logging.getLogger(__name__)

EXPORTS = "exports.jsonl"
FOLDED_FROM = "folded_from"  # in a config.json: the digest of the weights that the head had before
HEAD_FILES = (CONFIG_NAME, SAFETENSORS_NAME, BIN_NAME, VOCABULARY_NAME)


def digest_run(identity: Mapping[str, Any]) -> str:
    """Return a digest of what a resumed run may not change. identity: see Trainer.run_identity."""
    return digest_json(fixed_part(dict(identity)))


def finish(
    args: argparse.Namespace, trainer: Trainer, drafted: Tensor | None, record: dict[str, Any], layers: int
) -> None:
    """Write the run's record and, if the run has ended, export the best head, or say how it is exported.

    layers: of the target.
    """
    run = digest_run(trainer.identity)
    about = provenance(trainer.device)
    record |= {**about, "run": run, "steps": trainer.step, "training_seconds": round(trainer.seconds)}
    if trainer.stop:
        record["stopped"] = True
        logger.warning("stopped at step %d: the same command continues from there", trainer.step)
    else:
        best = read_checkpoint(args.output / BEST, "head", "step", "held_out")
        record |= {"finished": time.strftime("%Y-%m-%d %H:%M"), "held_out": best["held_out"]}
        record["best_step"] = best["step"]
    write_record(args.output, record, trained=trainer.step > trainer.resumed_at)
    if args.export and not trainer.stop:
        require_export(args.export, args.output, trainer.identity)  # somebody may have come first
        trainer.head.load_state_dict(best["head"])
        extra = {TRAINED_FOR: record[TRAINED_FOR]} if record[TRAINED_FOR] else {}
        note = functools.partial(note_export, args.output, run, args.export, best["step"], about)
        if isinstance(trainer.head, Eagle3Head):
            names = (layers, args.layout, torch.float16, args.base_model, extra)
            hub.save_eagle3_head(trainer.head, args.export, *names, written=note)
        else:
            restricted = trainer.head.restrict(drafted, text_tokens(args))
            hub.save_head(restricted, args.export, extra, torch.float16, written=note)
        logger.info("exported step %d to %s", best["step"], args.export)
    elif not trainer.stop:
        target = "" if args.base_model == hub.DEFAULT_TARGET else f"--base-model {quote(args.base_model)} "
        logger.info(
            "step %d has the best head: the same command with --export FOLDER writes it, without training, "
            "and `eagle-fsd generate %s--ea-model FOLDER` drafts with it",
            best["step"],
            target,
        )


def exports_of(output: Path, run: str | None) -> list[dict[str, Any]]:
    """Return the records of the heads that a run has exported; run: its digest, None: all in its folder."""
    path = output / EXPORTS
    rows = [row for _, row in read_jsonl(path, torn=True)] if path.is_file() else []
    return [row for row in rows if run is None or row.get("run") == run]


def note_export(
    output: Path, run: str, folder: Path, step: int, about: Mapping[str, Any], written: Path
) -> None:
    """Note that a run exports its head of this step into a folder. written: where its files are now.

    about: the provenance of the call.

    A head is noted before it is in its place: whenever the run is killed, it knows its own files there.
    """
    path, digests = output / EXPORTS, head_digests(find_head_file(written, str(written)))
    drop_torn_line(path)
    append_row(path, {"run": run, "step": step, "folder": str(folder), **digests, **about})


def require_export(folder: Path, output: Path, identity: Mapping[str, Any] | None) -> None:
    """Raise ValueError unless a run can export into a folder, and no head but its own is lost there.

    output: the run's folder. identity: of the run that is in it; None: there is none yet.
    """
    require_folder("--export", folder)
    require_room("--export", folder, folder.parent)  # where a head is written before it is moved
    there = [name for name in HEAD_FILES if (folder / name).exists()]
    if there and (identity is None or not is_export(folder, exports_of(output, digest_run(identity)))):
        raise ValueError(
            f"--export names {folder}, whose {there[0]} this run did not write: it would be lost; name a new "
            "folder (a finished run exports without training)"
        )


def is_export(folder: Path, exports: list[dict[str, Any]]) -> bool:
    """Return whether all files of the head in a folder are of these, unchanged.

    They may be of two of them: whoever stops an export may stop it between two files.
    """
    try:
        digests = head_digests(find_head_file(folder, str(folder)))
    except ValueError:  # half a head, or a damaged one
        return False
    return all(any(row.get(name) == value for row in exports) for name, value in digests.items())
