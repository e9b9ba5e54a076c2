"""Targets that another tool quantised: they run on torch as they are, or are refused in one line."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.quantised import (
    METHOD,
    Int8Linear,
    Int8Quantizer,
    TwoTensors,
    name_method,
    save_fp8,
    save_int8,
)
from support.tiny_models import VOCAB, greedy_alone, prompts_of, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from torch import nn

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.drafting.draft_vocabulary import has_plain_rows
from eagle_fsd.files.fingerprints import target_identity
from eagle_fsd.hub import choose_runtime, save_head
from eagle_fsd.hub.choose_runtime import TORCH, USUAL
from eagle_fsd.hub.head_digest import target_digest
from eagle_fsd.hub.loading.options import LoadOptions
from eagle_fsd.hub.loading.pair import load_pair
from eagle_fsd.hub.resolve import resolve_target
from eagle_fsd.hub.split.plan import check_split
from eagle_fsd.runtime.matmul_backends import find_fastest_backend
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.packed_linear import pack_linears
from eagle_fsd.runtime.ranks import held_bytes
from eagle_fsd.target.admission import small_tree
from eagle_fsd.target.admission.small_tree import tree_difference
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.eagle3.new_head import START, new_head
from eagle_fsd.training.readout import Readout

TREE, PROMPTS = TreeConfig(8, 3, 3), prompts_of([5, 9, 12])


def load(folder: Path, ea_model: str | Path = "none", **options: Any) -> EagleFSD:
    return EagleFSD.from_pretrained(folder, ea_model, dtype="float32", device="cpu", **options)


def whole_model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def texts(engine: EagleFSD) -> list[list[int]]:
    return [engine.generate([one], max_new_tokens=16, tree=TREE).new_tokens[0] for one in PROMPTS]


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400 and ": " in text and "; " in text, text
    for word in words:
        assert word in text, text


@pytest.fixture
def int8(tmp_path: Path) -> Path:
    return save_int8(tmp_path / "int8")


@pytest.mark.parametrize("lm_head", [False, True], ids=["plain lm_head", "int8 lm_head"])
def test_text_is_that_of_the_quantised_model_with_every_drafter(tmp_path: Path, lm_head: bool) -> None:
    folder = save_int8(tmp_path / "int8", lm_head=lm_head)
    wanted = greedy_alone(whole_model(folder), PROMPTS, 16)
    assert wanted != greedy_alone(tiny_model(), PROMPTS, 16)  # quantising changed the texts
    save_head(tiny_head(), tmp_path / "head")
    save_head(tiny_head().restrict(torch.arange(3, 60)), tmp_path / "few")
    drafters = [{"lookup": True}, {"draft_layers": 1}, {"draft_model": folder}]
    drafters += [{"ea_model": tmp_path / name} for name in ("head", "few")]
    for drafter in drafters:
        assert texts(load(folder, **drafter)) == wanted, drafter


def test_weights_stay_quantised_and_are_told_of(int8: Path) -> None:
    engine = load(int8, lookup=True)
    layers = [layer for layer in engine.target.model.modules() if isinstance(layer, Int8Linear)]
    assert len(layers) == 14 and {layer.weight.dtype for layer in layers} == {torch.int8}
    assert (engine.weight_format, engine.dtype, engine.runtime) == (METHOD, torch.float32, TORCH)
    assert engine.target.vocab_size == VOCAB
    assert engine.target.weight_bytes < TargetModel(tiny_model()).weight_bytes / 2


def test_a_model_that_the_caller_loaded_is_a_target(int8: Path) -> None:
    model = whole_model(int8)
    engine = EagleFSD(TargetModel(model), tiny_head())
    assert texts(engine) == greedy_alone(model, PROMPTS, 16)


def test_kernels_that_round_otherwise_are_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The model's own forward is the measure: it has the same weights.
    monkeypatch.setattr(small_tree, "own_forward", lambda _: pytest.fail("it is measured by itself"))
    target = load(save_int8(tmp_path, rounds=True)).target
    with torch.inference_mode():
        assert 1e-3 < tree_difference(target) < 0.1  # more than float32 rounds


def test_a_dtype_in_which_the_layers_do_not_run_is_one_line(
    int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("expected m1 and m2 to have the same dtype")

    monkeypatch.setattr(Int8Linear, "forward", fail)
    refused(lambda: load(int8), f"quantised by {METHOD}", "float32 (expected m1", "try dtype bfloat16")


def test_a_method_is_told_where_its_weights_are_to_be(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def note(_: Int8Quantizer, **given: Any) -> None:
        told.append(given["device_map"])

    monkeypatch.setattr(Int8Quantizer, "validate_environment", note)
    load(int8)
    assert told == [{"": torch.device("cpu")}]


# -- runtimes ----------------------------------------


def test_a_quantised_draft_model_runs_on_torch_beside_openvino(int8: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    tiny_model().save_pretrained(tmp_path / "plain")
    tiny_tokenizer().save_pretrained(tmp_path / "plain")
    engine = load(tmp_path / "plain", draft_model=int8, runtime="openvino")
    assert engine.runtime == "openvino" and engine.drafter.draft.runtime is None
    assert texts(engine) == greedy_alone(tiny_model(), PROMPTS, 16)


def test_openvino_is_refused_where_it_is_asked_for(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "require", lambda: None)
    for asked in ({"runtime": "openvino"}, {"weight_format": "int8"}):
        words = (f"is quantised by {METHOD}", "use runtime torch without a weight_format")
        refused(lambda asked=asked: load_pair(int8, "none", LoadOptions(device="cpu", **asked)), *words)


@pytest.mark.parametrize("usual", [None, "openvino"])
def test_torch_is_taken_where_nothing_else_is_asked_for(
    int8: Path, monkeypatch: pytest.MonkeyPatch, usual: str | None
) -> None:
    monkeypatch.delenv(USUAL)
    if usual is not None:
        monkeypatch.setenv(USUAL, usual)
    monkeypatch.setattr(library, "is_installed", lambda: True)
    monkeypatch.setattr(library, "require", lambda: None)
    monkeypatch.setattr(library, "version", lambda: "1")
    monkeypatch.setattr(choose_runtime, "LEAST", 0)  # else small models are not measured
    assert load(int8).runtime == TORCH


# -- what cannot be loaded ----------------------------------------


def test_a_method_that_transformers_does_not_know_is_one_line(int8: Path) -> None:
    name_method(int8, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    refused(lambda: load(int8), "quantised by 'modelopt'", "not quantised")


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "pip install bitsandbytes,"),
        ({"load_in_8bit": True}, "pip install bitsandbytes,"),
        ({"quant_method": "gptq", "bits": 4}, "pip install gptqmodel optimum,"),
        ({"quant_method": "awq", "bits": 4}, "pip install gptqmodel,"),
        ({"quant_method": "compressed-tensors"}, "pip install compressed-tensors,"),
        ({"quant_method": "torchao"}, "pip install torchao,"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_package_that_is_missing_is_named(
    int8: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], package: str
) -> None:
    name_method(int8, method)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    refused(lambda: load(int8), "must be installed", package)


def test_what_another_package_lacks_is_told_as_it_tells_it(
    int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("this needs the package tiny: pip install tiny")

    monkeypatch.setattr(Int8Quantizer, "validate_environment", fail)
    refused(lambda: load(int8), "pip install tiny", "install that")


def test_weights_that_the_method_does_not_find_are_one_line(int8: Path) -> None:
    name_method(int8, {"quant_method": METHOD, "lm_head": True})  # whose scale the files lack
    refused(lambda: load(int8), "lm_head")
    tiny_model().save_pretrained(int8)
    name_method(int8, {"quant_method": METHOD})
    refused(lambda: load(int8), "model.layers.0")


def test_ranks_share_no_quantised_weights(int8: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(int8)
    refused(lambda: check_split(config, 2, "mine"), "'mine'", METHOD, "not quantised")


# -- weights that transformers unpacks ----------------------------------------


def test_unpacked_weights_are_a_plain_target(tmp_path: Path) -> None:
    folder = save_fp8(tmp_path / "fp8")
    engine = load(folder, lookup=True)
    assert texts(engine) == greedy_alone(whole_model(folder), PROMPTS, 16)
    assert engine.weight_format == "float32"
    # A head of the plain target has another digest, and it is no worse for that.
    assert target_digest(resolve_target(str(folder)), engine.target) is None


# -- heads and training ----------------------------------------


def test_no_digest_is_compared_with_a_quantised_targets(int8: Path, tmp_path: Path) -> None:
    assert target_digest(resolve_target(str(int8)), load(int8).target) is None
    tiny_model().save_pretrained(tmp_path / "plain")
    tiny_tokenizer().save_pretrained(tmp_path / "plain")
    plain = load(tmp_path / "plain").target
    assert target_digest(resolve_target(str(tmp_path / "plain")), plain) == plain.identity("")["weights"]


def test_a_quantised_lm_head_is_read_by_its_products(tmp_path: Path) -> None:
    target = load(save_int8(tmp_path, lm_head=True)).target
    readout, features = Readout.from_target(target), torch.randn(4, target.hidden_size)
    torch.testing.assert_close(readout.weight, target.lm_head.rows())
    torch.testing.assert_close(readout.logits(features), target.logits(features))
    drafted = torch.tensor([3, 7, 50])
    head = new_head(target, (1,), drafted, seed=0)
    torch.testing.assert_close(head.lm_head.weight, target.lm_head.rows()[drafted] * START)


def test_identities_of_other_weights_differ(tmp_path: Path) -> None:
    names = [save_int8(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    one, other = (load(name).target.identity("") for name in names)
    assert one != other and one == load(names[0]).target.identity("")


# -- layers and weights of other packages ----------------------------------------


def foreign_layers() -> dict[str, nn.Linear]:
    """Return torch's own linear layers, each with what some package does to it."""
    layers = {name: nn.Linear(64, 32) for name in ("of a class", "own forward", "no weight")}
    numbers, scale = torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 1)
    layers["of a class"].weight = nn.Parameter(TwoTensors(numbers, scale), requires_grad=False)
    layers["own forward"].forward = layers["own forward"].forward
    del layers["no weight"].weight
    return layers


def test_layers_that_are_not_torchs_alone_are_not_packed() -> None:
    model = nn.ModuleDict(foreign_layers())
    find_fastest_backend(model)
    assert {type(layer) for layer in pack_linears(model).values()} == {nn.Linear}
    assert not has_plain_rows(model["of a class"])


def test_a_weight_of_another_class_is_known_and_counted_by_its_parts() -> None:
    layer = foreign_layers()["of a class"]
    assert held_bytes(layer) == 32 * 64 + 4 * (32 + 32)  # numbers, scale and bias
    before = target_identity("", layer)
    layer.weight.numbers[5] += 1
    assert target_identity("", layer) != before


def test_weights_in_buffers_of_integers_count_in_a_quantised_model_alone() -> None:
    layer = nn.Linear(4, 4)
    before = target_identity("", layer), held_bytes(layer)
    layer.register_buffer("qweight", torch.ones(8, dtype=torch.int32))
    assert (target_identity("", layer), held_bytes(layer)) == before
    layer.is_quantized = True
    assert target_identity("", layer) != before[0] and held_bytes(layer) == before[1] + 32


# -- methods of others, where their packages are installed ----------------------------------------


def bitsandbytes_config() -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_4bit=True)


def torchao_config() -> Any:
    reason = "torchao is not installed: pip install torchao"
    torchao = pytest.importorskip("torchao.quantization", reason=reason)
    return transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())


@pytest.mark.parametrize("config", [bitsandbytes_config, torchao_config], ids=["bitsandbytes", "torchao"])
def test_checkpoints_of_real_methods_run(tmp_path: Path, config: Callable[[], Any]) -> None:
    method = config()
    tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, quantization_config=method
    )
    model.save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    named = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    engine = load(tmp_path / "small", lookup=True)
    assert engine.weight_format == named["quant_method"]
    assert texts(engine) == greedy_alone(whole_model(tmp_path / "small"), PROMPTS, 16)
    assert texts(EagleFSD(TargetModel(model.eval()), None, lookup=True)) == greedy_alone(model, PROMPTS, 16)
