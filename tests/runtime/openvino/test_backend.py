"""What the runtime refuses, before OpenVINO sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_fsd.runtime.openvino import backend, library
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.variants import AGAIN
from eagle_fsd.runtime.openvino.weight_formats import FORMATS

pytest.importorskip("openvino", reason="the extra openvino is not installed")


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cores", [1, 2])
def test_bfloat16_is_refused_where_openvino_would_end_the_process(
    cores: int, threads: int, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "cores", lambda: cores)
    monkeypatch.setattr(backend, "has_amx", lambda: amx)
    for weight_format in FORMATS:
        if weight_format == "bfloat16" and amx and 1 in (cores, threads):
            with pytest.raises(ValueError, match=r"with one thread .* use runtime torch"):
                OpenVINO(weight_format, threads=threads)
        else:
            assert OpenVINO(weight_format, threads=threads).threads == threads


@pytest.mark.parametrize(
    ("size", "memory", "copies"),
    [
        (100, 10**9, 8),  # a small one: the sizes that come often
        (2**28, 2**33, 4),
        (2**29, 2**31, 2),
        (2**30, 2**34, 2),  # a large one, on a machine that has room for two more
        (2**30, 2**34 - 1, 0),
        (2**33, 2**36, 0),
        (2**33, None, 2),
    ],
)
def test_copies_of_a_graph_take_a_part_of_the_memory(size: int, memory: int | None, copies: int) -> None:
    assert backend.copies_of(size, memory) == copies


def test_compiled_forms_are_kept_of_what_the_next_process_begins_with(cache: Path) -> None:
    """Of open sizes and of those expected first: not of a dozen sizes that are measured."""
    product = OpenVINO("float32", threads=1).product("tiny", torch.randn(8, 4))
    folder = product.variants.folder
    assert folder is not None and folder.parent == cache / "graphs"
    product.variants.expect((3,))
    for count in (3, 5, 7):
        for _ in range(AGAIN):
            product(torch.randn(count, 4))
    assert product.variants.compiled.keys() == {(3,), (5,), (7,)}
    assert len(list(folder.glob("*.blob"))) == 2


def test_compiled_forms_of_large_graphs_are_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MOST_COMPILED", 100)
    product = OpenVINO("float32", threads=1).product("tiny", torch.randn(8, 4))
    assert product.variants.folder is not None and not list(product.variants.folder.glob("*.blob"))
