"""What the runtime refuses, before OpenVINO sees it."""

from __future__ import annotations

import pytest

from eagle_fsd.runtime.openvino import backend
from eagle_fsd.runtime.openvino.backend import OpenVINO
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
