"""Graphs on disk: made once, read afterwards, bounded, and never an error."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import tiny_model
from torch import Tensor

from eagle_fsd.files.kept_folders import OFF, folder_size
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.backend import OpenVINO, product_model
from eagle_fsd.runtime.openvino.kept import graph_store
from eagle_fsd.runtime.openvino.kept.graph_store import GRAPHS, digest, find_or_make
from eagle_fsd.target.model import TargetModel

pytest.importorskip("openvino", reason="the extra openvino is not installed")

pytestmark = pytest.mark.usefixtures("cache")


class Maker:
    """Makes the graph of a product with a weight, and counts how often it is asked to."""

    def __init__(self, seed: int = 0, size: int = 8) -> None:
        self.weight = torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return product_model(self.weight, None)

    def find(self, name: str = "tiny", parts: object = None) -> tuple[Any, Path | None]:
        return find_or_make(name, [self.weight], parts, self)

    def check(self, graph: Any, folder: Path | None) -> None:
        """Check that a graph computes this product."""
        rows = torch.randn(3, self.weight.shape[1])
        compiled = library.compile_graph(graph, "f32", False, 1, folder)
        made = torch.from_numpy(compiled([rows.numpy()])[0].copy())
        torch.testing.assert_close(made, rows @ self.weight.T)


def test_a_graph_is_made_once_and_then_read(cache: Path) -> None:
    first = Maker()
    graph, folder = first.find()
    assert folder is not None and folder.parent == cache / "graphs" and folder.name.startswith("tiny-")
    first.check(graph, folder)
    again = Maker()  # the same weights in other memory
    graph, found = again.find()
    assert (first.calls, again.calls, found) == (1, 0, folder)
    again.check(graph, folder)
    assert GRAPHS.whole() == [folder]
    assert not [path for path in (cache / "graphs").iterdir() if path.name.startswith(".")]


def test_another_graph_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By weights, name, parts, the weights' shape, and what made it."""
    asked: list[tuple[Maker, str, object]] = [
        (Maker(), "tiny", None),
        (Maker(seed=1), "tiny", None),
        (Maker(), "other", None),
        (Maker(), "tiny", ["int8"]),
        (Maker(size=16), "tiny", None),
    ]
    found = {maker.find(name, parts)[1] for maker, name, parts in asked}
    assert len(found) == len(asked)
    assert [maker.calls for maker, *_ in asked] == [1] * len(asked)
    releases = (
        (graph_store, "VERSION", 99),
        (library, "version", lambda: "99"),
        (torch, "__version__", "99"),
    )
    for release in releases:
        with monkeypatch.context() as patch:
            patch.setattr(*release)
            found.add(Maker().find()[1])
    assert len(found) == len(asked) + len(releases)


def test_one_number_changes_the_digest() -> None:
    weight = torch.zeros(64, 64)
    changed = weight.clone()
    changed[63, 63] = 1e-30
    tensors: list[list[Tensor]] = [
        *([weight], [changed], [weight.view(32, 128)], [weight.view(torch.int32)], [weight, weight], []),
        [weight.bfloat16()],
    ]
    assert len({digest(each, None) for each in tensors}) == len(tensors)
    assert digest([weight.T.contiguous().T], None) == digest([weight], None)  # by values, not by strides
    assert digest([weight], ["a"]) != digest([weight], ["b"])


@pytest.mark.parametrize("value", ["1", "yes"])
def test_the_environment_turns_it_off(cache: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    kept = Maker()
    kept.find()
    monkeypatch.setenv(OFF, value)
    maker = Maker()
    graph, folder = maker.find()
    assert (maker.calls, folder) == (1, None)  # nothing is read
    maker.check(graph, folder)
    Maker(seed=1).find()
    assert len(GRAPHS.whole()) == 1  # and nothing is kept
    monkeypatch.delenv(OFF)
    assert find_or_make("tiny", [maker.weight], None, maker, kept=False)[1] is None and maker.calls == 2


@pytest.mark.parametrize("value", ["", "0"])
def test_the_environment_leaves_it_on(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(OFF, value)
    assert Maker().find()[1] is not None


def test_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = [Maker(seed=seed) for seed in range(4)]
    kept = [maker.find()[1] for maker in makers[:3]]
    for age, folder in enumerate(kept):
        assert folder is not None
        os.utime(folder, (1000 + age, 1000 + age))
    makers[0].find()  # used again, so the second is the oldest now
    assert kept[0] is not None
    monkeypatch.setattr(graph_store, "_in_use", {kept[1]})  # another process, which reads the oldest
    monkeypatch.setattr(graph_store, "MOST", int(3.5 * folder_size(kept[0])))
    newest = makers[3].find()[1]
    assert GRAPHS.whole() == [kept[1], kept[0], newest]


def test_the_graphs_of_a_process_do_not_push_each_other_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What has no room beside them is not kept: else every start would write both again."""
    monkeypatch.setattr(graph_store, "_in_use", set())
    first = Maker().find()[1]
    assert first is not None
    monkeypatch.setattr(graph_store, "MOST", folder_size(first))
    second = Maker(seed=1)
    with caplog.at_level("INFO", "eagle_fsd"):
        graph, folder = second.find()
    assert folder is None and GRAPHS.whole() == [first]
    assert "is not kept: 0.0 GB are more than the limit of 0.0 GB" in caplog.text
    second.check(graph, None)
    monkeypatch.setattr(graph_store, "_in_use", set())  # in another process it takes the first one's place
    monkeypatch.setattr(graph_store, "MOST", 1)  # though it is too large alone
    kept = second.find()[1]
    assert kept is not None and GRAPHS.whole() == [kept]
    monkeypatch.setattr(graph_store, "_in_use", set())  # where it is read, it stays
    assert second.find()[1] == kept and Maker().find()[1] is None


def test_what_killed_processes_left_is_deleted(cache: Path) -> None:
    root = cache / "graphs"
    old, young = root / ".tiny-1-a", root / ".tiny-1-b"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "graph.xml").write_text("half")
    os.utime(old, (1000, 1000))
    kept = Maker().find()[1]
    assert young.is_dir() and not old.exists() and GRAPHS.whole() == [kept]


def test_an_unusable_folder_is_no_error(cache: Path) -> None:
    (cache / "graphs").write_text("a file, where a folder is wanted")
    for _ in range(2):
        maker = Maker()
        graph, folder = maker.find()
        assert (maker.calls, folder) == (1, None)
        maker.check(graph, folder)
    assert GRAPHS.whole() == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user may write everywhere")
def test_a_folder_without_the_right_to_write_is_no_error(cache: Path) -> None:
    cache.chmod(0o500)
    try:
        maker = Maker()
        graph, folder = maker.find()
    finally:
        cache.chmod(0o700)
    assert (maker.calls, folder) == (1, None)
    maker.check(graph, folder)


def test_a_full_disk_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(partial: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fill)
    maker = Maker()
    graph, folder = maker.find()
    assert folder is None and list((cache / "graphs").iterdir()) == []
    maker.check(graph, folder)


def test_a_full_disk_of_temporary_files_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is written and read again in any case. OpenVINO's own error says nothing of a disk."""

    def fill(*_: object, **__: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr("openvino.save_model", fill)
    message = r"cannot take the 0\.0 GB of a graph \(basic_ios::clear: iostream error\): free some space"
    with pytest.raises(OSError, match=message):
        Maker().find()
    assert list((cache / "graphs").iterdir()) == []
    with pytest.raises(ValueError, match=rf"the target's graphs cannot be made: .*{message}"):
        TargetModel(tiny_model(), runtime=OpenVINO("float32"))


@pytest.mark.parametrize("broken", ["graph.xml", "graph.bin"])
def test_a_broken_graph_is_made_again(broken: str) -> None:
    """Another program, or a disk's fault, may have cut a file off."""
    folder = Maker().find()[1]
    assert folder is not None
    path = folder / broken
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    maker = Maker()
    graph, found = maker.find()
    assert maker.calls == 1
    maker.check(graph, found)


def test_a_broken_graph_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no room beside itself."""
    monkeypatch.setattr(graph_store, "_in_use", set())
    folder = Maker().find()[1]
    assert folder is not None
    monkeypatch.setattr(graph_store, "MOST", 1)
    (folder / "graph.xml").write_text("<net")
    Maker().find()
    maker = Maker()
    maker.find()
    assert maker.calls == 0


def test_who_comes_second_leaves_the_folder_of_the_first() -> None:
    """The first may be compiling into it: two programs that start together on a new machine."""
    first, second = Maker(), Maker()
    folders_seen: list[Path | None] = []

    def make() -> Any:
        folders_seen.append(first.find()[1])  # the other program, while this one converts
        kept = folders_seen[0]
        assert kept is not None
        (kept / "1.blob").write_bytes(b"compiled")
        return second()

    graph, folder = find_or_make("tiny", [second.weight], None, make)
    assert folder is not None and folders_seen == [folder]
    assert (folder / "1.blob").read_bytes() == b"compiled"
    second.check(graph, folder)


def test_a_folder_that_appears_while_it_is_saved_stays() -> None:
    maker = Maker()
    folder = maker.find()[1]
    assert folder is not None
    (folder / "1.blob").write_bytes(b"compiled")
    graph_store.keep(maker(), folder)
    assert (folder / "1.blob").read_bytes() == b"compiled"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_folder_that_goes_while_a_graph_is_compiled_is_no_error() -> None:
    maker = Maker()
    graph, folder = maker.find()
    assert folder is not None
    shutil.rmtree(folder)
    maker.check(graph, folder)
    assert not folder.exists()


def test_clear_deletes_everything(cache: Path) -> None:
    Maker().find()
    Maker(seed=1).find()
    assert len(GRAPHS.whole()) == 2
    GRAPHS.clear()
    assert GRAPHS.whole() == [] and not (cache / "graphs").exists()
    GRAPHS.clear()  # nothing is there, which is no error
    maker = Maker()
    assert maker.find()[1] is not None and maker.calls == 1


def test_a_graph_lives_on_when_its_folder_is_deleted(cache: Path) -> None:
    """A file that is mapped into memory stays as long as it is."""
    maker = Maker()
    graph, folder = maker.find()
    assert folder is not None
    shutil.rmtree(folder)
    compiled = library.compile_graph(graph, "f32", False, 1)
    rows = np.ones((2, 8), dtype=np.float32)
    np.testing.assert_allclose(compiled([rows])[0], rows @ maker.weight.numpy().T, rtol=1e-5, atol=1e-6)
