"""What the programs do while a model is loaded."""

from __future__ import annotations

import gc

import pytest

from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.cli.start import load_model
from eagle_fsd.core.checks import without_collector


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_rests_inside_the_block_and_is_as_before_after_it(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(RuntimeError, match="inside"), without_collector():
            assert not gc.isenabled()
            raise RuntimeError("inside")
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_it_rests_while_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_fsd.engine import EagleFSD

    found: list[bool] = []
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *args, **kwargs: found.append(gc.isenabled()))
    load_model(build_parser().parse_args(["Hello"]))
    assert found == [False] and gc.isenabled()
