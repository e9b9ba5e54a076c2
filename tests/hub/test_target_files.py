"""Configs of targets that cannot be: each is one line, at once, and takes no memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eagle_fsd import hub
from eagle_fsd.hub.target_files import LAYERS, MOST, POSITIONS, WIDTHS, check_sizes

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**CONFIG)).save_pretrained(folder)
    return folder


@pytest.fixture
def spoil(saved: Path, tmp_path: Path) -> Callable[..., str]:
    """A copy of the folder whose config says something else."""

    def make(**fields: object) -> str:
        for file in saved.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        (tmp_path / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
        return str(tmp_path)

    return make


def refused(folder: str, *words: str) -> None:
    """Loading the model and loading its text are both the same clear line."""
    for load in (
        hub.load_target,
        lambda name: hub.load_text(hub.resolve_target(name, weights=False)),
    ):
        with pytest.raises(ValueError) as caught:
            load(folder)
        text = str(caught.value)
        assert "\n" not in text and len(text) < 400 and ": " in text and "; " in text
        for word in words:
            assert word in text, text


PRESENT = sorted(CONFIG)
BAD = [10**30, 2**63, 2**62, -1, -(10**30), 0, "16", 16.5, True, [1, "x"], {}]


@pytest.mark.parametrize("value", BAD, ids=repr)
@pytest.mark.parametrize("name", [*PRESENT, "max_position_embeddings", "head_dim"])
def test_sizes_that_no_model_has_are_one_line(name: str, value: object, spoil: Callable[..., str]) -> None:
    refused(spoil(**{name: value}), name, "it must be")


@pytest.mark.parametrize("name", ["max_window_layers", "sliding_window", "eos_token_id", "initial_context"])
@pytest.mark.parametrize("value", [2**63, -(10**30)])
def test_other_numbers_beyond_64_bits_are_one_line(name: str, value: int, spoil: Callable[..., str]) -> None:
    refused(spoil(**{name: value}), name, "it must be at most")


def test_sizes_of_a_part_are_checked_too() -> None:
    for part in ("text_config", "llm_config", "vision_config"):
        with pytest.raises(ValueError, match="num_hidden_layers is 10000000"):
            check_sizes({part: {"num_hidden_layers": 10**30}}, "parts")
    with pytest.raises(ValueError, match="hidden_size is '16'"):
        check_sizes({"text_config": {"hidden_size": "16"}}, "parts")
    check_sizes({"intermediate_size": [32, 64], "num_key_value_heads": None, "head_dim": None}, "lists")


@pytest.mark.parametrize("names", [LAYERS, WIDTHS, POSITIONS])
def test_the_largest_sizes_pass(names: tuple[str, ...]) -> None:
    for name in names:
        check_sizes({name: MOST[name]}, "large")
        with pytest.raises(ValueError, match=f"{name} is {MOST[name] + 1}: it must be at most {MOST[name]}"):
            check_sizes({name: MOST[name] + 1}, "large")


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 2**22, "hidden_size": 2**12},
        {"intermediate_size": 2**24},
        {"num_attention_heads": 2**20, "head_dim": 2**10},
    ],
    ids=str,
)
def test_a_config_of_a_far_larger_model_is_refused_before_it_is_built(
    fields: dict[str, Any], spoil: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are possible; only the files do not have them."""
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was built")
    )
    with pytest.raises(ValueError, match=r"asks for \d+ weights or more, its files have \d+ bytes"):
        hub.load_target(spoil(**fields))


def test_a_whole_target_is_still_loaded(saved: Path) -> None:
    model, _ = hub.load_target(str(saved))
    assert model.config.num_hidden_layers == 2


KINDS = ("LlamaTokenizer", "GPT2Tokenizer", "GemmaTokenizer", "T5Tokenizer")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_without_a_vocabulary_is_refused(kind: str, spoil: Callable[..., str]) -> None:
    folder = spoil(model_type="llama")  # for qwen2, transformers takes one class whatever is named
    record = json.dumps({"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"})
    Path(folder, "tokenizer_config.json").write_text(record, encoding="utf-8")
    refused(folder, "tokenizer without a vocabulary")


def test_a_tokenizer_that_needs_no_file_of_a_vocabulary_is_one(spoil: Callable[..., str]) -> None:
    folder = spoil(model_type="llama")
    transformers.ByT5Tokenizer().save_pretrained(folder)
    tokenizer = hub.load_text(hub.resolve_target(folder)).tokenizer
    assert tokenizer is not None and tokenizer("a").input_ids[0] == ord("a") + 3
