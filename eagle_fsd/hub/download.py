"""Downloads only the needed files of Hub repositories, through huggingface_hub and its cache.

HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT work as usual. Failures are ValueErrors of one line.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from eagle_fsd.acceptance.calibration import FILE as CALIBRATION
from eagle_fsd.core.checks import format_value, one_line
from eagle_fsd.hub.head_checkpoint import (
    BIN_NAME,
    CONFIG_NAME,
    EAGLE3,
    SAFETENSORS_NAME,
    VOCABULARY_FIELD,
    VOCABULARY_NAME,
    find_head_file,
    kind_by_config,
    read_config,
    refuse_kind,
)
from eagle_fsd.hub.loading.progress import hide_unwanted_bars

logger = logging.getLogger(__name__)

SAFETENSORS_INDEX = SAFETENSORS_NAME + ".index.json"
BIN_INDEX = BIN_NAME + ".index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "*.tiktoken",
)  # fmt: skip
CHAT_FILES = ("generation_config.json", "chat_template.jinja", "chat_template.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# A plain file name, which cannot reach another folder on any system.
PLAIN_NAME = re.compile(r"(?!\.)[^/\\:\x00]+")
OFFLINE = "is not in the cache, or not whole: offline it must be; unset HF_HUB_OFFLINE, or give a folder"
UNREACHABLE = (
    "is not in the cache, or not whole, and the Hub cannot be reached: it must be downloaded first; "
    "connect to the network, or give a folder"
)
# The client's own transport errors (httpx, whichever major version it uses) share this base.
TRANSPORT_ERROR = getattr(errors, "HTTPError", OSError)
DOWNLOAD_ERRORS = (OSError, ValueError, RuntimeError, TRANSPORT_ERROR)


def download_target(repo: str, revision: str | None, trust_remote_code: bool, weights: bool = True) -> Path:
    """Download a target and return its folder: its small files, then only the weights it needs, or none.

    The weights are model.safetensors, else the shards in its index, else the same for pytorch_model.bin.
    """
    code = ["*.py"] if trust_remote_code else []
    whole = [SAFETENSORS_NAME, SAFETENSORS_INDEX] if weights else []
    beside = [*CHAT_FILES, *TOKENIZER_FILES, *PROCESSOR_FILES, *code, *whole]
    folder = download_config(repo, revision, beside, "target", repo)
    if not weights:
        return folder
    # From here on the commit is named, so that later files come from the same one without asking the Hub.
    commit = folder.name
    if not (folder / SAFETENSORS_NAME).is_file() and not (folder / SAFETENSORS_INDEX).is_file():
        snapshot(repo, commit, [CONFIG_NAME, BIN_NAME, BIN_INDEX], "target")
    if not has_whole_weights(folder):
        shards = shard_names(folder)
        snapshot(repo, commit, [CONFIG_NAME, *shards], "target")
        if not shards or not all((folder / name).is_file() for name in shards):
            require_hub("target", repo, folder)
    return folder


def download_head(repo: str, revision: str | None, name: str) -> Path:
    """Download a head, with its calibration if it has one, and return its weights file.

    A head of another kind is refused before its weights are fetched.
    """
    folder = download_config(repo, revision, [], "draft head", name)
    config = read_config(folder, "draft head")
    if (kind := kind_by_config(config)) not in (None, EAGLE3):
        refuse_kind(name, kind)
    if config.get(VOCABULARY_FIELD) is not None and kind != EAGLE3:
        # Some EAGLE-3 heads show their kind only in their weights. A missing vocabulary is reported later.
        snapshot(repo, folder.name, [CONFIG_NAME, VOCABULARY_NAME], "draft head")
    snapshot(repo, folder.name, [CONFIG_NAME, SAFETENSORS_NAME], "draft head")
    if not (folder / SAFETENSORS_NAME).is_file():
        snapshot(repo, folder.name, [CONFIG_NAME, BIN_NAME], "draft head")
        if not (folder / BIN_NAME).is_file():
            require_hub("draft head", repo, folder)
    found = find_head_file(folder, name)
    try:  # a recent client knows the commit's files by now, and asks nobody where there is no calibration
        snapshot(repo, folder.name, [CONFIG_NAME, CALIBRATION], "draft head")
    except ValueError as error:  # the head drafts without it, and may have been cached before it was fetched
        logger.warning("no %s: %s", CALIBRATION, error)
    return found


def download_config(repo: str, revision: str | None, beside: list[str], kind: str, name: str) -> Path:
    """Download a config.json and the files beside it, and return their folder. name: for errors."""
    folder = snapshot(repo, revision, [CONFIG_NAME, *beside], kind)
    if not (folder / CONFIG_NAME).is_file():
        require_hub(kind, repo, folder)
        raise ValueError(f"{kind} {name!r} has no {CONFIG_NAME} on the Hub: it must have one; choose another")
    return folder


def require_hub(kind: str, repo: str, folder: Path) -> None:
    """Raise ValueError if the Hub does not answer: then what a folder lacks may well be there."""
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{kind} {repo!r} {OFFLINE}")
    try:  # what is in the cache was taken if it did not
        huggingface_hub.HfApi().repo_info(repo, revision=folder.name)
    except DOWNLOAD_ERRORS as error:
        raise ValueError(f"{kind} {repo!r} {UNREACHABLE}") from error


def has_whole_weights(folder: Path) -> bool:
    """Return whether a folder holds its weights in a single file."""
    return (folder / SAFETENSORS_NAME).is_file() or (
        not (folder / SAFETENSORS_INDEX).is_file() and (folder / BIN_NAME).is_file()
    )


def shard_names(folder: Path) -> list[str]:
    """Return the weight files that the folder's index names, safetensors before .bin; none without an index.

    Raises ValueError if the index is broken, or names a file outside the folder.
    """
    for path in (folder / SAFETENSORS_INDEX, folder / BIN_INDEX):
        if path.is_file():
            try:
                names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"{str(path)!r} is not a weight index: it must be; download it again"
                ) from error
            for name in names:
                if not isinstance(name, str) or PLAIN_NAME.fullmatch(name) is None:
                    raise ValueError(
                        f"{str(path)!r} names the file {format_value(name)}: the files of an index must be "
                        "beside it; choose another model"
                    )
            return sorted(names)
    return []


def snapshot(repo: str, revision: str | None, patterns: list[str], kind: str) -> Path:
    """Download every matching file in the repository's root and return the cache folder."""
    try:
        with hide_unwanted_bars():
            folder = huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
            )
    except DOWNLOAD_ERRORS as error:
        raise ValueError(f"{kind} {repo!r} {explain_failure(error, revision)}") from error
    return Path(folder)


def explain_failure(error: Exception, revision: str | None) -> str:
    """Return what went wrong on the Hub, with the rule and the remedy."""
    if isinstance(error, errors.GatedRepoError):  # before its base, RepositoryNotFoundError
        return "is gated on the Hub: access must be granted; accept its terms on its page, then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is not on the Hub, or is private: the id must exist; check its spelling, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"has no revision {revision!r} on the Hub: it must be a branch, tag or commit; check its spelling"
        )
    if isinstance(error, errors.HFValidationError):
        return "is not a Hub id: it must be owner/name[@revision]; check its spelling"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return OFFLINE if constants.HF_HUB_OFFLINE else UNREACHABLE
    return (
        f"could not be fetched from the Hub ({one_line(error, 160)}): it must be; try again, or give a folder"
    )
