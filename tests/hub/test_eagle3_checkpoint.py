"""EAGLE-3 heads are recognised by their files and read from every layout; what is none is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle3 import IDS, VARIANTS, eagle3_head, save_eagle3
from support.tiny_models import HIDDEN, VOCAB, tiny_head
from torch import Tensor

from eagle_fsd import hub
from eagle_fsd.drafting.eagle3.config import Reading
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_head import DraftHead

FAMILIES = ("safeailab", "specforge", "angelslim", "nemo", "speculators")
Edit = Callable[[dict[str, Tensor]], object]


def load(folder: Path, **options: Any) -> Eagle3Head | DraftHead:
    return hub.load_any_head(str(folder), HIDDEN, VOCAB, 2, **options)


def refused(folder: Path, *words: str, **options: Any) -> None:
    with pytest.raises(ValueError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and "draft head" in message, message
    for word in words:
        assert word in message, message


def set_fields(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit(folder: Path, change: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_eagle3(eagle3_head(1), tmp_path / "head")


@pytest.mark.parametrize(
    ("family", "name"),
    [*product(("safeailab", "speculators"), VARIANTS), *product(FAMILIES[1:4], ("plain", "eagle3.1"))],
)
def test_every_layout_gives_the_same_head(tmp_path: Path, family: str, name: str) -> None:
    head = eagle3_head(1, **VARIANTS[name])
    again = load(save_eagle3(head, tmp_path / "head", family))
    assert isinstance(again, Eagle3Head) and not again.training
    assert again.config == head.config and head.config.reading == again.readings[0]
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    assert (again.draft_tokens is None) == (head.draft_tokens is None)
    if head.draft_tokens is not None:
        assert torch.equal(again.draft_tokens, head.draft_tokens)
    assert torch.equal(again.inverse_frequencies, head.inverse_frequencies)


def test_bin_files_dtypes_and_lone_files(tmp_path: Path) -> None:
    folder = save_eagle3(eagle3_head(1), tmp_path / "head", suffix="bin")
    assert load(folder).dtype == torch.float32
    assert load(folder / "pytorch_model.bin", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_readings_that_the_files_leave_open(folder: Path) -> None:
    set_fields(folder, eagle_config={IDS: [1, 1, 1]}, norm_output=True)
    head = load(folder)
    assert head.readings == tuple(Reading(t, n) for t in ((2, 2, 2), (1, 1, 1)) for n in (True, False))
    assert head.config.reading == head.readings[0]
    head = load(folder, taps=[1, 2, 1], norm_output=False)
    assert head.readings == (Reading((1, 2, 1)),) and head.config.taps == (1, 2, 1)


def test_a_head_of_eagle_2_is_still_one(tmp_path: Path, folder: Path) -> None:
    plain = hub.save_head(tiny_head(), tmp_path / "plain")
    assert isinstance(load(plain), DraftHead)
    refused(plain, "head_taps is [1, 2, 2]", "must be of EAGLE-3", taps=[1, 2, 2])
    refused(plain, "norm_output is False", norm_output=False)
    with pytest.raises(ValueError, match="is of the EAGLE-3 kind: it must be an EAGLE-1/2 head"):
        hub.load_head(str(folder), HIDDEN, VOCAB)


# --- the draft vocabulary ---


def test_maps_of_tokens_that_are_right(folder: Path) -> None:
    tokens = eagle3_head(1).draft_tokens
    for change in (
        lambda t: t.pop("t2d"),
        lambda t: t.pop("d2t"),
        lambda t: t.update(d2t=t["d2t"].int()),
        lambda t: t.update(t2d=t["t2d"].to(torch.uint8)),
    ):
        save_eagle3(eagle3_head(1), folder)
        edit(folder, change)
        assert torch.equal(load(folder).draft_tokens, tokens)
    head = eagle3_head(2, draft_vocab_size=VOCAB)
    save_eagle3(head, folder)
    edit(folder, lambda t: t.update(d2t=torch.zeros(VOCAB, dtype=torch.int64)))
    assert load(folder).draft_tokens is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: [t.pop("d2t"), t.pop("t2d")], "drafts 40 of 96 tokens and has no d2t"),
        (lambda t: t.update(d2t=t["d2t"] + torch.arange(40)), "d2t"),
        (lambda t: t.update(d2t=t["d2t"] + 96), "d2t is broken"),
        (lambda t: t.update(d2t=t["d2t"] - 9), "d2t is broken"),
        (lambda t: t["d2t"].__setitem__(7, t["d2t"][6] - 1), "d2t is broken"),
        (lambda t: t["d2t"].zero_(), "d2t and t2d name different tokens"),
        (lambda t: t["t2d"].zero_(), "d2t and t2d name different tokens"),
        (lambda t: t.update(d2t=t["d2t"][:39]), "d2t is [39]"),
        (lambda t: t.update(d2t=t["d2t"].float()), "torch.float32"),
        (lambda t: t.update(t2d=t["t2d"][:95]), "t2d is [95]"),
        (lambda t: t.update(t2d=t["t2d"].float()), "t2d is [96] torch.float32"),
    ],
)
def test_maps_of_tokens_that_are_broken(folder: Path, change: Edit, words: str) -> None:
    edit(folder, change)
    refused(folder, words)


# --- what cannot be ---


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), "it has no fc.weight"),
        (lambda t: t.pop("norm.weight"), "lacks norm.weight"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "lacks layers.0.hidden_norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "draft_vocab_size is 40 and it has no lm_head.weight"),
        (lambda t: t.update({"lm_head.weight": torch.ones(41, 32)}), "has 41 rows"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), "has norm.weight twice"),
        (lambda t: t.update({"midlayer.mlp.extra.weight": torch.ones(2)}), "has layers.0.mlp.extra.weight"),
        (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(2)}), "lacks layers.1"),
        (lambda t: t.update({"layers.99999999.x": torch.ones(2)}), "lacks layers.1"),
        (lambda t: t.update({"fc.weight": torch.ones(96)}), "fc.weight is [96]"),
        (lambda t: t.update({"fc.weight": torch.tensor(1.0)}), "fc"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 100)}), "must be a multiple"),
        (lambda t: t["norm.weight"].fill_(torch.nan), "NaN"),
        (lambda t: t.update({"norm.weight": torch.ones(32, dtype=torch.int8)}), "torch.int8"),
        (lambda t: t.update({"embed_tokens.weight": torch.full((96, 32), torch.inf)}), "infinity"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(95, 32)}), "embed_tokens.weight is [95, 32]"),
        (lambda t: t.update({"midlayer.self_attn.kv_b_proj.weight": torch.ones(2)}), "EAGLE-3 with MLA"),
        (lambda t: t.update({"mask_hidden": torch.ones(2)}), "P-EAGLE"),
        (lambda t: t.update({"markov_head.weight": torch.ones(2)}), "DSpark"),
    ],
)
def test_tensors_that_cannot_be(folder: Path, change: Edit, words: str) -> None:
    edit(folder, change)
    refused(folder, words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 95}, "vocab_size is 95: the target's is 96"),
        ({"hidden_size": 64}, "target hidden_size is 64: the target's is 32"),
        ({"target_hidden_size": 64}, "target hidden_size is 64"),
        ({"intermediate_size": 49}, "_proj.weight is ["),
        ({"intermediate_size": 2**31 - 1}, "_proj.weight is ["),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"hidden_size": None}, "target hidden_size is None"),
        ({"draft_vocab_size": 41}, "they must agree"),
        ({"eagle_config": {IDS: [3, 4, 5]}}, "between 1 and the target's number of layers (2)"),
        ({"fc_norm": True}, "lacks fc_norm.0.weight"),
        ({"norm_before_fc": True}, "lacks input_norm.weight"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "'yarn'"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "EAGLE-3 with MLA"),
        ({"kv_lora_rank": 512}, "EAGLE-3 with MLA"),
        ({"architectures": ["LlamaForCausalLMEagle3Gated"]}, "gated EAGLE-3"),
        ({"architectures": ["PEagleSpeculator"]}, "P-EAGLE"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"dflash_config": {}}, "DFlash"),
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"speculators_model_type": "mtp"}, "'mtp'"),
        ({"medusa_num_heads": 4}, "Medusa"),
    ],
)
def test_configs_that_cannot_be(folder: Path, fields: dict[str, object], words: str) -> None:
    set_fields(folder, **fields)
    refused(folder, words)
