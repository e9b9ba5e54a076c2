"""How two models are loaded, as callers say it: what goes together, and what is refused before a download."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import tiny_head, tiny_model

from eagle_fsd import EagleFSD
from eagle_fsd.hub.head_checkpoint import save_head
from eagle_fsd.hub.loading import target as target_module
from eagle_fsd.hub.loading.options import ASKED, SWITCHES, LoadOptions


def test_only_one_way_to_draft_may_be_asked_for() -> None:
    assert LoadOptions().asked_head(None) is None and LoadOptions().asked_head("h") == "h"
    for options in (LoadOptions(draft_model="m"), LoadOptions(draft_layers=3), LoadOptions()):
        assert options.asked_head("none") == "none"
    assert LoadOptions(draft_model=Path("m"), head_dtype="bfloat16").asked_head(None) == "none"
    with pytest.raises(ValueError, match=r"the head 'h' .* and of the draft model 'm' .*one of them drafts"):
        LoadOptions(draft_model="m").asked_head("h")
    with pytest.raises(ValueError, match=r"the draft model 'm' .* and of the first 3 layers"):
        LoadOptions(draft_model="m", draft_layers=3).asked_head(None)


@pytest.mark.parametrize(
    "option",
    [{"head_taps": (1, 2, 3)}, {"norm_output": True}, {"full_vocabulary": True}, {"head_dtype": "bfloat16"}],
    ids=lambda option: next(iter(option)),
)
def test_what_says_how_a_head_drafts_needs_a_head(option: dict[str, object]) -> None:
    (name,) = option
    for drafter in ({}, {"draft_layers": 2}):
        with pytest.raises(ValueError, match=f"^{name} is .* without a head: it says how one drafts"):
            LoadOptions(**option, **drafter).asked_head("none")
    assert LoadOptions(**option).asked_head("h") == "h"


def test_keywords_override_options_and_are_checked_by_name(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "target")
    save_head(tiny_head(), tmp_path / "head")
    names = (tmp_path / "target", tmp_path / "head")
    options = LoadOptions(dtype="float64", lookup=True, pack=False)
    assert (EagleFSD.from_pretrained(*names, options).dtype, options.lookup) == (
        tiny_model().double().dtype,
        True,
    )
    engine = EagleFSD.from_pretrained(*names, options, dtype="float32", lookup=False)
    assert engine.dtype == tiny_model().dtype and engine.drafter.name == "eagle"
    with pytest.raises(ValueError, match=r"^weights_format is not an option: .*; write weight_format,"):
        EagleFSD.from_pretrained(*names, weights_format="packed")
    with pytest.raises(ValueError, match=r"^ea_modell is not an option: .*; write ea_model,"):
        EagleFSD.from_pretrained(*names[:1], ea_modell="none")
    with pytest.raises(ValueError, match=r"^options is a dict: it must be LoadOptions; give its entries as"):
        EagleFSD.from_pretrained(*names, {"dtype": "float64"})


@pytest.mark.parametrize(
    ("fast", "dtype", "warned"),
    [(False, "bfloat16", True), (True, "bfloat16", False), (False, "float32", False)],
)
def test_a_dtype_that_is_emulated_is_warned_of(
    fast: bool,
    dtype: str,
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(target_module, "multiplies_bfloat16", lambda device: fast)
    tiny_model().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="eagle_fsd"):
        EagleFSD.from_pretrained(tmp_path, "none", dtype=dtype)
    assert ("dtype is bfloat16, which this device emulates" in caplog.text) == warned


@pytest.mark.parametrize("name", [*SWITCHES, *ASKED])
def test_a_switch_is_true_or_false(name: str) -> None:
    """A word would count as True: trust_remote_code="no" would run a Hub model's own code."""
    with pytest.raises(ValueError, match=f"^{name} is 'no': it must be True or False; choose one$"):
        LoadOptions(**{name: "no"})
    assert getattr(LoadOptions(**{name: True}), name) is True


def test_first_layers_are_counted_by_a_plain_integer() -> None:
    assert type(LoadOptions(draft_layers=np.int64(2)).draft_layers) is int
