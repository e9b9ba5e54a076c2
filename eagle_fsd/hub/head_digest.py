"""Digests by which a head and its target are known, whatever they are called and however they are loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from eagle_fsd.files.fingerprints import digest_json, digest_tensors
from eagle_fsd.files.tensor_files import read_tensors
from eagle_fsd.hub.head_checkpoint import TEXT_FIELD, VOCABULARY_NAME, read_config
from eagle_fsd.hub.quantised_files import quantisation_of
from eagle_fsd.hub.resolve import HeadSource, TargetSource
from eagle_fsd.target.model import TargetModel

WEIGHTS, VOCABULARY = "weights", "draft_vocabulary"
TRAINED_FOR = "target_weights"  # in a head's config.json: the digest of the target that it was trained for
logger = logging.getLogger(__name__)


def head_digests(file: Path) -> dict[str, str | int | None]:
    """Return the digests of a head's weights file and of the draft vocabulary beside it, None if it has none.

    Where texts have tokens of their own drafted beside it, their number is there too. Nothing else of
    config.json is. A list of tokens changes the second one alone.
    """
    vocabulary = file.parent / VOCABULARY_NAME
    found: dict[str, str | int | None] = {WEIGHTS: digest_tensor_file(file), VOCABULARY: None}
    if vocabulary.is_file():
        found[VOCABULARY] = digest_tensor_file(vocabulary)
        if own := read_config(file.parent, "draft head").get(TEXT_FIELD):
            found[TEXT_FIELD] = own
    return found


def digest_tensor_file(path: Path) -> str:
    """Return a digest of a file's tensors: of their names, dtypes, shapes and values."""
    return digest_json({name: digest_tensors([tensor]) for name, tensor in read_tensors(path).items()})


def target_digest(source: TargetSource, target: TargetModel) -> str | None:
    """Return the digest of a target's weights; None where these are not those of its own plain files.

    A GGUF file, quantisation and float16 round them, and the same target has another digest.
    """
    if source.gguf_file is not None or target.dtype not in (torch.float32, torch.bfloat16):
        return None
    # The files are asked: what transformers unpacked while it loaded has no mark of it.
    if quantisation_of(read_config(source.folder, "target")) is not None:
        return None
    return target.identity("")["weights"]


def warn_of_other_target(head: HeadSource, source: TargetSource, target: TargetModel) -> None:
    """Log a warning if a head names a target of other weights than these; it drafts for them all the same."""
    named = read_config(head.folder, "draft head").get(TRAINED_FOR)
    if named is not None and target_digest(source, target) not in (None, named):
        logger.warning(
            "draft head %s was trained for a target with other weights than those of %s: it may draft worse",
            head.name,
            source.name,
        )
