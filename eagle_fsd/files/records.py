"""Measurements that outlive a process: records by key in small JSON files in the user's cache.

Many processes may read and add at once. Records of other versions stay in their file and are not read. If a
file cannot be read, written or locked, only the measurement is lost.
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
VERSION = 2  # of the records; version 1 wrote no version
MOST = 200  # how many records of this version a file keeps; older ones are dropped

Measured = TypeVar("Measured")


def record_key(*parts: object) -> str:
    """Return a short key for these parts, a digest of their JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def cache_file(name: str = TREES_FILE) -> Path:
    """Return the path of a file of measurements."""
    return cache_folder() / name


def recall(key: str, unpack: Callable[[Any], Measured], name: str = TREES_FILE) -> Measured | None:
    """Return the measurement remembered under a key; None if there is none that this version can read.

    unpack: turns the JSON value into the measurement; it may raise if the value is damaged.
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
    """Add a measurement, a JSON value. All other records stay, except the oldest beyond MOST."""

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
