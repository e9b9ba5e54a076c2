"""Files that many threads and processes use at once: nothing torn, nothing lost, nothing erased."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError
from support.tiny_models import tiny_head

from eagle_fsd.files import atomic, records
from eagle_fsd.files.atomic import (
    atomic_path,
    name_full_disk,
    read_records,
    sole,
    update_records,
    write_atomically,
)
from eagle_fsd.files.jsonl import append_row, drop_torn_line, read_jsonl
from eagle_fsd.files.records import cache_file, recall, remember
from eagle_fsd.hub import save_head
from eagle_fsd.training.run.folder import save_atomically


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    return tmp_path


def in_threads(count: int, work) -> list[BaseException]:
    """Run work(number) in several threads at once; return what they raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 (shown by the caller)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_that_write_one_file_never_tear_it(tmp_path: Path) -> None:
    path, texts = tmp_path / "file.txt", [f"{number}" * 20_000 for number in range(3)]
    write_atomically(path, texts[0])

    def write_and_read(number: int) -> None:
        for _ in range(100):
            write_atomically(path, texts[number])
            assert path.read_text(encoding="utf-8") in texts

    assert in_threads(3, write_and_read) == []
    assert list(tmp_path.iterdir()) == [path], "a partial file was left behind"


def test_what_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with pytest.raises(RuntimeError, match=r"^out of memory$"), atomic_path(path) as partial:
        partial.write_text("half")
        raise RuntimeError("out of memory")  # which is no word of the disk
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@contextmanager
def small_disk() -> Iterator[None]:
    """As if no file could have more than 100 bytes, the tests' own log among them."""
    resource = pytest.importorskip("resource", reason="the system has no limits of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path: Path) -> None:
    """The system takes a part of a row without an error, and its error at the next one names no file."""
    rows, text, head = tmp_path / "rows.jsonl", tmp_path / "text.json", tmp_path / "head"
    with small_disk():
        append_row(rows, {"text": "a" * 50})
        for _ in range(2):
            with pytest.raises(
                OSError, match=r"rows.jsonl cannot be written \(.*\): free some space and start"
            ):
                append_row(rows, {"text": "b" * 50})
        with pytest.raises(OSError, match=r"text.json cannot be written \(File too large\): free some space"):
            write_atomically(text, "c" * 200)
        with pytest.raises(OSError, match=r"head cannot be written \(.*\): free some space and start again"):
            save_head(tiny_head(), head)
        for size in (1, 10_000):  # torch meets the end of the disk here or there
            with pytest.raises(OSError, match=r"run.pt cannot be written \(.*\): free some space and start"):
                save_atomically({"head": torch.zeros(size)}, tmp_path / "run.pt")
    assert [row["text"][0] for _, row in read_jsonl(rows, torn=True)] == ["a"]
    assert list(tmp_path.iterdir()) == [rows]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_known_by_the_systems_number(number: int, tmp_path: Path) -> None:
    """Of torch's errors it is in what they come from, and safetensors write it."""
    full = rf"^{tmp_path} cannot be written \(.*\): free some space and start again$"
    with pytest.raises(OSError, match=full), name_full_disk(tmp_path):
        raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match=full), name_full_disk(tmp_path):
        try:
            raise OSError(number, os.strerror(number))
        except OSError:
            raise RuntimeError("the writer failed")  # noqa: B904 (as torch does)
    with pytest.raises(OSError, match=full), name_full_disk(tmp_path):
        raise SafetensorError(f"I/O error: (os error {number})")
    other = rf"^{tmp_path} cannot be written \(I/O error: \(os error {errno.EACCES}\)\)$"
    with pytest.raises(OSError, match=other), name_full_disk(tmp_path):
        raise SafetensorError(f"I/O error: (os error {errno.EACCES})")


def test_a_written_file_has_the_users_own_permissions(tmp_path: Path) -> None:
    write_atomically(tmp_path / "mine", "text")
    (tmp_path / "usual").write_text("text")
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "usual").stat().st_mode
    )


def test_threads_that_remember_at_once_lose_nothing() -> None:
    def many(number: int) -> None:
        for count in range(20):
            remember(f"{number}/{count}", [number, count])
            assert recall(f"{number}/{count}", list) == [number, count]

    assert in_threads(3, many) == []
    assert {key: one["measured"] for key, one in read_records(cache_file()).items()} == {
        f"{number}/{count}": [number, count] for number in range(3) for count in range(20)
    }


PROCESS = """
import sys
from eagle_fsd.files.records import remember
for count in range(20):
    remember(f"{sys.argv[1]}/{count}", [int(sys.argv[1]), count])
"""


def test_processes_that_remember_at_once_lose_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(atomic.__file__).parents[2])}
    running = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(number)], env=environment) for number in range(4)
    ]
    seen = 0
    while any(process.poll() is None for process in running):
        if cache_file().exists():
            records = json.loads(cache_file().read_bytes())
            assert len(records) >= seen, "a reader saw what was there before"
            seen = len(records)
        time.sleep(0.001)
    assert [process.returncode for process in running] == [0] * 4
    assert len(read_records(cache_file())) == 80
    assert not list(tmp_path.glob("*.partial"))


STRANGE = {
    "newer": {"version": 99, "measured": 1, "more": [2]},
    "unknown field": {"tree": {"total_tokens": 4, "unheard": 1}},
    "no record": "text",
    "nothing": None,
}


def test_records_that_are_not_understood_are_passed_over_and_kept() -> None:
    cache_file().write_text(json.dumps(STRANGE), encoding="utf-8")
    for count in range(3):
        remember(f"mine/{count}", count)
    assert [recall(key, lambda found: found) for key in STRANGE] == [None] * 4
    assert recall("mine/0", lambda found: found) == 0
    assert read_records(cache_file()).items() > STRANGE.items()


def test_only_our_own_oldest_records_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST", 3)
    cache_file().write_text(json.dumps(STRANGE), encoding="utf-8")
    for count in (0, 1, 2, 0, 3, 4):
        remember(f"mine/{count}", count)
    assert list(read_records(cache_file())) == [*STRANGE, "mine/0", "mine/3", "mine/4"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": 1}', '{"key": {"version": 2}}', "\xff", "[" * 100_000]
)
def test_a_damaged_file_costs_a_measurement(text: str) -> None:
    cache_file().write_text(text, encoding="latin-1")
    assert recall("key", list) is None
    remember("key", [1])
    assert recall("key", list) == [1]


def test_a_file_that_cannot_be_read_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    remember("key", [1])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(PermissionError("no")))
        assert recall("key", list) is None
        remember("other", [2])
    assert recall("key", list) == [1] and recall("other", list) is None


def test_the_folder_may_be_named_by_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLE_FSD_CACHE", "~/kept")
    remember("key", [1])
    assert recall("key", list) == [1] and (tmp_path / "kept").is_dir() and not (tmp_path / "~").exists()
    monkeypatch.delenv("EAGLE_FSD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_file().parent == tmp_path / ".cache" / "eagle_fsd"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_file().parent == tmp_path / "caches" / "eagle_fsd"


def test_a_folder_that_cannot_be_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "file"))
    remember("key", [1])
    assert recall("key", list) is None
    monkeypatch.delenv("EAGLE_FSD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    remember("key", [1])
    assert recall("key", list) is None


def test_a_lock_that_another_holds_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "PATIENCE", 0.2)
    with FileLock(tmp_path / "trees.json.lock"):
        start = time.monotonic()
        remember("key", [1])
        assert time.monotonic() - start < 5
        assert recall("key", list) is None
    remember("key", [1])
    assert recall("key", list) == [1]


@pytest.mark.parametrize(
    "error", [PermissionError("read-only"), NotImplementedError("no locks"), RuntimeError("odd")]
)
def test_a_file_system_without_locks_costs_the_memory_alone(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But two runs in one folder would harm each other, so that a run does not begin."""

    def acquire(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(FileLock, "acquire", acquire)
    remember("key", [1])
    assert recall("key", list) is None
    with pytest.raises(OSError):
        update_records(cache_file(), lambda records: records)
    with pytest.raises(OSError), sole(tmp_path / ".lock", tmp_path, "overwrite each other's checkpoints"):
        raise AssertionError("it began")


def test_rows_are_read_as_editors_write_them(tmp_path: Path) -> None:
    """With a mark of UTF-8 at the beginning, with blank lines, and without the end of the last line."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": 2}')
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (4, {"a": 2})]
    for wrong in (b"\xef\xbb\xbf{}", b'{"a"', b"[1]", b'{"a": "\xff"}', b"[" * 100_000):
        path.write_bytes(b'{"a": 1}\n' + wrong)
        with pytest.raises(ValueError, match=rf"^{path}:2: is "):
            list(read_jsonl(path))
        if wrong[:1] in b"{[":
            assert list(read_jsonl(path, torn=True)) == [(1, {"a": 1})]
    path.write_bytes(b'\xef\xbb\xbf[{"a": 1}]\n')
    with pytest.raises(ValueError, match="if the file is one list, `jq"):
        list(read_jsonl(path))


def test_no_row_is_written_behind_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("one line\nanother")
    with pytest.raises(ValueError, match="ends in b'another', which is not a row; name another output"):
        drop_torn_line(path)
    assert path.read_text() == "one line\nanother"


@pytest.mark.parametrize("torn", [False, True])
def test_a_file_that_grows_while_it_is_read_ends_where_it_ended(torn: bool, tmp_path: Path) -> None:
    """A line may be seen before all of it is there: what comes then is no line of its own."""
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    rows = read_jsonl(path, torn)
    assert next(rows) == (1, {"step": 1}) and next(rows) == (2, {"step": 2})
    with path.open("a") as file:
        file.write('0, "loss": 1}\n')
    assert list(rows) == []
