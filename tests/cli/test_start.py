"""What the programs do while a model is loaded, and at their end."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys

import pytest

from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.cli.start import load_model
from eagle_fsd.core.process.collector import without_collector


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


@pytest.mark.parametrize("program", ["chat", "generate", "serve"])
def test_ctrl_c_in_the_interpreters_own_end_shows_no_traceback(program: str) -> None:
    """As a second one comes that is pressed behind an answer."""
    script = (
        "import atexit, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(signal.raise_signal, signal.SIGINT)\n"  # later than what is registered after it
        f"from eagle_fsd.{program} import main\n"
        "sys.exit(main(['--total-tokens', '0']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("\n") == 1 and ": error: " in done.stderr
