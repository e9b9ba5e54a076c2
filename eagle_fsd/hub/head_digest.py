"""Digests of a head's files, by which it is known whatever its folder is called and however it is loaded."""

from __future__ import annotations

from pathlib import Path

from eagle_fsd.files.fingerprints import digest_json, digest_tensors
from eagle_fsd.files.tensor_files import read_tensors
from eagle_fsd.hub.head_checkpoint import VOCABULARY_NAME

WEIGHTS, VOCABULARY = "weights", "draft_vocabulary"


def head_digests(file: Path) -> dict[str, str | None]:
    """Return the digests of a head's weights file and of the draft vocabulary beside it, None if it has none.

    They say nothing of config.json. A list of tokens changes the second one alone.
    """
    vocabulary = file.parent / VOCABULARY_NAME
    return {
        WEIGHTS: digest_file(file),
        VOCABULARY: digest_file(vocabulary) if vocabulary.is_file() else None,
    }


def digest_file(path: Path) -> str:
    """Return a digest of a file's tensors: of their names, dtypes, shapes and values."""
    return digest_json({name: digest_tensors([tensor]) for name, tensor in read_tensors(path).items()})
