"""Measurements that outlive a process: records by key in small JSON files of the user's cache.

Many processes may read and add at once. A record that this version does not know stays in its file and is not
read. A file that cannot be read, written or locked costs the measurement, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from eagle_fsd.files.atomic import cache_folder, read_records, update_records

logger = logging.getLogger(__name__)

TREES_FILE, BACKENDS_FILE = "trees.json", "libraries.json"
VERSION = 2  # of the records; version 1 had none
MOST = 200  # records of this version that a file keeps, the newest

Measured = TypeVar("Measured")


def record_key(*parts: object) -> str:
    """A short key for what these parts say."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def cache_file(name: str = TREES_FILE) -> Path:
    """Where measurements are remembered."""
    return cache_folder() / name


def recall(key: str, unpack: Callable[[Any], Measured], name: str = TREES_FILE) -> Measured | None:
    """What is remembered under a key; None where that is nothing, or nothing that this version reads.

    unpack: makes the measurement of what JSON holds of it; it may raise for what is damaged.
    """
    try:
        record = read_records(cache_file(name)).get(key)
        if not isinstance(record, dict) or record.get("version") != VERSION:
            return None
        return unpack(record["measured"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        logger.info("%s: record %s is not read: %s", name, key, error)
        return None


def remember(key: str, measured: Any, name: str = TREES_FILE) -> None:
    """Add a measurement, as JSON can hold it. All other records stay, but the oldest beyond MOST."""

    def add(records: dict[str, Any]) -> None:
        records.pop(key, None)
        records[key] = {"version": VERSION, "measured": measured}
        ours = [
            old for old, one in records.items() if isinstance(one, dict) and one.get("version") == VERSION
        ]
        for old in ours[:-MOST]:
            del records[old]

    try:
        update_records(cache_file(name), add)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        logger.info("%s: the measurement is not remembered: %s", name, error)
