"""Digests of a head's files, by which it is known whatever its folder is called and however it is loaded."""

from __future__ import annotations

from pathlib import Path

from eagle_fsd.files.fingerprints import digest_json, digest_tensors
from eagle_fsd.files.tensor_files import read_tensors
from eagle_fsd.hub.head_checkpoint import TEXT_FIELD, VOCABULARY_NAME, read_config

WEIGHTS, VOCABULARY = "weights", "draft_vocabulary"


def head_digests(file: Path) -> dict[str, str | int | None]:
    """Return the digests of a head's weights file and of the draft vocabulary beside it, None if it has none.

    Where texts have tokens of their own drafted beside it, their number is there too. Nothing else of
    config.json is. A list of tokens changes the second one alone.
    """
    vocabulary = file.parent / VOCABULARY_NAME
    found: dict[str, str | int | None] = {WEIGHTS: digest_file(file), VOCABULARY: None}
    if vocabulary.is_file():
        found[VOCABULARY] = digest_file(vocabulary)
        if own := read_config(file.parent, "draft head").get(TEXT_FIELD):
            found[TEXT_FIELD] = own
    return found


def digest_file(path: Path) -> str:
    """Return a digest of a file's tensors: of their names, dtypes, shapes and values."""
    return digest_json({name: digest_tensors([tensor]) for name, tensor in read_tensors(path).items()})
