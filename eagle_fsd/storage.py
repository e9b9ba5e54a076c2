"""`python -m eagle_fsd.storage` shows what the package keeps on disk and its size; --clear deletes it.

It keeps the measurements that choose trees, matmul backends and runtimes (two small files), the converted
weights of GGUF files, and the graphs and the operator of the OpenVINO runtime. Everything is made again when
it is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime

from eagle_fsd.cli.flags.parser import new_parser
from eagle_fsd.files.atomic import cache_folder, read_records
from eagle_fsd.files.kept_folders import folder_size
from eagle_fsd.files.records import BACKENDS_FILE, TREES_FILE, cache_file
from eagle_fsd.hub.kept.weights_cache import RECORD, WEIGHTS
from eagle_fsd.runtime.openvino.kept.graph_store import GRAPHS
from eagle_fsd.runtime.openvino.operators.compiler import OPERATORS

ALL, MEASUREMENTS = "all", "measurements"
KEPT = (WEIGHTS, GRAPHS, OPERATORS)


DESCRIPTION = """\
Show what eagle_fsd keeps on disk, by default in ~/.cache/eagle_fsd; EAGLE_FSD_CACHE names another folder."""


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("storage", DESCRIPTION)
    parser.add_argument(
        "--clear",
        nargs="?",
        choices=(ALL, *(kept.name for kept in KEPT), MEASUREMENTS),
        const=ALL,
        help="delete everything, or only converted weights, graphs, operators or measurements",
    )
    return parser


def describe_storage() -> list[str]:
    """Return what is kept, as lines for people."""
    found = [f"{cache_folder()}"]
    for name in (TREES_FILE, BACKENDS_FILE):
        if (file := cache_file(name)).is_file():
            records = read_records(file)
            found.append(f"  {name}: {len(records)} measurements, {file.stat().st_size / 1e6:.1f} MB")
    for kept in KEPT:
        for folder in reversed(kept.whole()):
            record = read_records(folder / RECORD)  # graphs have none
            dtype = str(record.get("dtype")).removeprefix("torch.")
            what = f"{record.get('gguf')} in {dtype}, " if kept == WEIGHTS else ""
            used = datetime.fromtimestamp(folder.stat().st_mtime).isoformat(" ", "minutes")
            size = folder_size(folder) / 1e6
            found.append(f"  {kept.name}/{folder.name}: {what}{size:.0f} MB, used {used}")
    return found if len(found) > 1 else [f"{found[0]}: nothing is kept"]


def clear(what: str) -> None:
    """Delete what is kept, or a part of it."""
    for kept in KEPT:
        if what in (ALL, kept.name):
            kept.clear()
    if what in (ALL, MEASUREMENTS):
        for name in (TREES_FILE, BACKENDS_FILE):
            file = cache_file(name)
            file.unlink(missing_ok=True)  # its lock stays: another process may hold it


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.clear is not None:
            clear(args.clear)
        sys.stdout.write("\n".join(describe_storage()) + "\n")
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"python -m eagle_fsd.storage: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
