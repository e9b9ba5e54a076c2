"""A second start of a target on OpenVINO needs neither transformers' models nor its layers' weights."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_gguf import tiny_weights, write_gguf
from support.tiny_models import EAGER_ONLY, FAMILIES, greedy_alone, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD, TreeConfig, generate
from eagle_fsd.files.kept_folders import OFF, folder_size
from eagle_fsd.hub import choose_runtime, target_loader
from eagle_fsd.hub.kept import second_start, weights_cache
from eagle_fsd.hub.kept.second_start import same_tokenizer, stands_for
from eagle_fsd.target.kept.kept_model import KeptModel
from eagle_fsd.target.kept.outline import outline_of
from eagle_fsd.target.model import TargetModel

pytest.importorskip("openvino", reason="the extra openvino is not installed")
pytest.importorskip("gguf")

pytestmark = pytest.mark.usefixtures("cache")

# Those that OpenVINO can run; see tests/target/test_openvino_families.py.
NOT_CONVERTED = ("gptj", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4")
CONVERTED = [family for family in FAMILIES if family not in (*NOT_CONVERTED, "gemma3")]
HEAVY = ("transformers.modeling_utils", "torch.distributed.tensor", "torch._dynamo", "sympy")
PROMPT, TREE = [3, 4, 5, 3, 4, 5, 3], TreeConfig(6, 4, 2)


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file that has lain there for a while."""
    monkeypatch.setattr(weights_cache, "SETTLED", -1)
    (tmp_path / "models").mkdir()
    return write(tmp_path / "models" / "tiny.gguf", tiny_weights(tied=False))


def write(path: Path, found: dict[str, torch.Tensor], hours: int = 1) -> Path:
    write_gguf(path, found)
    os.utime(path, (time.time() - 3600 * hours,) * 2)
    return path


def start(gguf: Path, **options: Any) -> EagleFSD:
    options = {"runtime": "openvino", "lookup": True, **options}
    return EagleFSD.from_pretrained(gguf, "none", **options)


def stands_in(model: EagleFSD) -> bool:
    return isinstance(model.target.held, KeptModel)


def answer(model: EagleFSD) -> list[int]:
    return model.generate([PROMPT], max_new_tokens=24, tree=TREE).new_tokens[0]


@pytest.mark.parametrize(("weight_format", "tied"), [("float32", False), ("int8", True)])
def test_it_is_the_first_start_over_again(gguf: Path, weight_format: str, tied: bool) -> None:
    write(gguf, tiny_weights(tied=tied))
    first, second = (start(gguf, weight_format=weight_format) for _ in range(2))
    assert not stands_in(first) and stands_in(second)
    assert answer(second) == answer(first)
    one, other = first.target, second.target
    names = (
        *("hidden_size", "vocab_size", "max_positions", "kinds", "windows", "eos_token_ids", "pad_token_id"),
        *(
            "own_defaults",
            "named_sampling",
            "ignored_defaults",
            "parameter_count",
            "weight_bytes",
            "layer_classes",
            "dtype",
        ),
        *("device", "logits_transform", "weight_format", "flash", "input_device"),
    )
    for name in names:
        assert getattr(other, name) == getattr(one, name), name
    assert second.identity() == first.identity()
    assert other.config.num_hidden_layers == one.config.num_hidden_layers
    assert other.config._attn_implementation == one.config._attn_implementation
    tokens = torch.arange(64)
    assert torch.equal(other.embed(tokens), one.embed(tokens))
    assert torch.equal(other.lm_head.weight, one.lm_head.weight)
    for text in ("cab", " a  b\n\tc ", "aab abba", "<3><4>"):
        assert second.tokenizer.encode(text) == first.tokenizer.encode(text)
    assert stands_in(second)  # nothing above has asked for the layers


def test_every_start_says_where_graphs_are_kept_and_how_large(
    gguf: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = cache / "graphs" / "other-1"  # of another process
    other.mkdir(parents=True)
    (other / "graph.xml").write_bytes(bytes(3_000_000))
    with caplog.at_level(logging.INFO, logger="eagle_fsd"):
        for stands in (False, True):
            assert stands_in(start(gguf)) == stands
            mine = sum(folder_size(one) for one in (cache / "graphs").iterdir() if one != other) / 1e6
            said = f"{mine:.1f} MB of this process, {mine + 3:.1f} MB in all"
            assert f"compiled graphs are in {cache / 'graphs'}: {said}" in caplog.messages
            caplog.clear()
        monkeypatch.setenv(OFF, "1")
        monkeypatch.setenv("EAGLE_FSD_CACHE", str(cache / "unused"))
        start(gguf)
    assert "graphs are in" not in caplog.text


def test_it_is_so_for_a_folder_of_several_files(gguf: Path, tmp_path: Path) -> None:
    """In bfloat16, with a tokenizer; and not where a file has changed, or says something else."""
    folder, whole = tmp_path / "folder", start(gguf)
    whole.target.model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="8KB")
    whole.tokenizer.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    first, second = (start(folder, dtype="float32") for _ in range(2))
    assert not stands_in(first) and stands_in(second)
    assert answer(second) == answer(first) and second.identity() == first.identity()
    path = folder / "generation_config.json"
    before = path.read_text()
    path.unlink()  # then the config says what there is to say
    bare, again = (start(folder, dtype="float32") for _ in range(2))
    assert stands_in(again) and again.target.eos_token_ids == bare.target.eos_token_ids
    path.write_text(before)
    path.write_text(json.dumps({**json.loads(path.read_text()), "repetition_penalty": 1.5}))
    changed = start(folder, dtype="float32")
    assert not stands_in(changed) and changed.target.own_defaults["repetition_penalty"] == 1.5
    again = start(folder, dtype="float32")
    assert stands_in(again) and again.target.own_defaults == changed.target.own_defaults


def test_nothing_is_kept_that_would_not_be_the_same(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where transformers changes a weight while it loads it."""
    read = second_start.read_weight
    monkeypatch.setattr(second_start, "read_weight", lambda *args: read(*args) * 2)
    assert not stands_in(start(gguf))
    monkeypatch.undo()
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(cache))
    monkeypatch.setenv("EAGLE_FSD_NO_OPERATORS", "1")  # as in the fixture, which was undone as well
    monkeypatch.setattr(weights_cache, "SETTLED", -1)
    looked: list[object] = []
    monkeypatch.setattr(second_start, "stands_for", lambda *args: looked.append(args))
    assert not stands_in(start(gguf)) and not looked  # what was found out once is not tried again


def test_what_was_missing_once_may_be_there_the_next_time(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(second_start, "find", lambda *args: None)  # as on a full disk
        assert not stands_in(start(gguf))
    assert not stands_in(start(gguf))
    assert stands_in(start(gguf))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError, Exception])
def test_nothing_is_kept_before_it_is_compared(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """And what fails there fails nobody's start, unless the user ends it."""

    def fail(*_args: object) -> bool:
        raise error("while it is compared")

    with monkeypatch.context() as patch:
        patch.setattr(second_start, "stands_for", fail)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                start(gguf)
        else:
            assert answer(start(gguf))
    assert not stands_in(start(gguf))


def test_a_model_that_has_changed_since_is_not_taken_for_the_graphs_own(gguf: Path) -> None:
    start(gguf)
    model = start(gguf)
    write(gguf, tiny_weights(tied=False, seed=1), hours=2)
    with pytest.raises(ValueError, match="have changed since it was started"):
        model.target.model  # noqa: B018
    assert stands_in(model) and answer(model)


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_auto_leaves_it_to_the_runtime_that_is_faster(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    """Where torch is, nothing is kept, and nothing of what another start kept is in use."""
    monkeypatch.delenv(choose_runtime.USUAL, raising=False)
    monkeypatch.setattr(choose_runtime, "LEAST", 0)
    monkeypatch.setattr(choose_runtime, "recall", lambda *args: runtime)
    expected = answer(start(gguf, runtime="torch"))
    first, second = (start(gguf, runtime="auto") for _ in range(2))
    assert not stands_in(first) and stands_in(second) == (runtime == "openvino")
    assert answer(first) == answer(second) == expected


def test_the_runtime_torch_does_not_even_look(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(gguf)
    monkeypatch.setattr(second_start.SecondStart, "of", lambda *args: pytest.fail("it looks"))
    for other in ({"runtime": "torch"}, {"trust_remote_code": True}):
        assert not stands_in(start(gguf, **other))


def test_what_is_the_same_and_what_is_not(gguf: Path) -> None:
    first, second = start(gguf), start(gguf)
    model, kept = first.target.model, second.target.held
    assert stands_for(kept, model) and same_tokenizer(second.tokenizer, first.tokenizer)
    for name, value in (("chat_template", "{{ x }}"), ("padding_side", "left"), ("model_max_length", 9)):
        before = getattr(second.tokenizer, name)
        assert before != value
        setattr(second.tokenizer, name, value)
        assert not same_tokenizer(second.tokenizer, first.tokenizer), name
        setattr(second.tokenizer, name, before)
    assert same_tokenizer(second.tokenizer, first.tokenizer)
    second.tokenizer.add_tokens(["élan"])
    assert not same_tokenizer(second.tokenizer, first.tokenizer)
    for weight in (kept.embeddings.weight, kept.lm_head.weight):
        before = weight.data.clone()
        weight.data[3, 4] += 1
        assert not stands_for(kept, model)
        weight.data.copy_(before)
        assert stands_for(kept, model)
    kept.generation_config.repetition_penalty = 1.5
    assert not stands_for(kept, model)


def test_the_whole_model_is_there_for_who_asks(gguf: Path) -> None:
    first, second = start(gguf), start(gguf)
    assert stands_in(second)
    whole = second.target.model
    assert isinstance(whole, transformers.PreTrainedModel) and second.target.model is whole
    mine, its = whole.state_dict(), first.target.model.state_dict()
    assert all(torch.equal(mine[name], its[name]) for name in its)


def test_what_is_lost_is_made_again(gguf: Path, cache: Path) -> None:
    expected, graphs = answer(start(gguf)), cache / "graphs"
    assert stands_in(start(gguf))

    def lose_graphs(name: str) -> None:
        for folder in graphs.glob(f"{name}-*"):
            shutil.rmtree(folder)

    losses: list[Callable[[], object]] = [
        lambda: shutil.rmtree(cache / "weights"),
        lambda: lose_graphs("decoder"),
        lambda: lose_graphs("lm_head"),
        lambda: next(graphs.rglob("admitted.json")).write_text(json.dumps({"processor": "another"})),
        lambda: next(graphs.glob("target-*.json")).unlink(),
        lambda: next(graphs.glob("target-*.json")).write_text('{"config": 5}'),
        lambda: [path.write_text("<broken/>") for path in graphs.rglob("graph.xml")],
    ]
    for number, lose in enumerate(losses):
        assert stands_in(start(gguf)), number  # the start before has left all that it needs
        for thread in threading.enumerate():
            if thread.name == "compile ahead":  # it may still write into a folder that is to be lost
                thread.join()
        lose()
        again = start(gguf)
        assert not stands_in(again) and answer(again) == expected, number


@pytest.mark.parametrize(
    "other",
    [
        {"weight_format": "int8"},
        {"attn_implementation": "eager"},
        {"weights_cache": False},
    ],
)
def test_other_settings_find_nothing_of_these(gguf: Path, other: dict[str, Any]) -> None:
    start(gguf)
    assert not stands_in(start(gguf, **other))


def test_another_file_and_other_releases_find_nothing(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(gguf)
    write(gguf, tiny_weights(tied=False, seed=1), hours=2)
    assert not stands_in(start(gguf))
    monkeypatch.setattr(second_start, "__version__", "9.9")
    assert not stands_in(start(gguf))
    monkeypatch.setattr(target_loader, "CONVERTER", "transformers 9.9")
    assert not stands_in(start(gguf))


def test_nothing_is_kept_where_that_is_turned_off(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OFF, "1")
    for _ in range(2):
        assert not stands_in(start(gguf))
    assert not (cache / "graphs").exists()


def test_some_models_have_no_outline(gguf: Path) -> None:
    """Those that torch computes, and those whose embeddings are made in a way that only they know."""
    target = start(gguf).target
    assert TargetModel(target.model).outline("T") is None
    graphs = target.outline("T").graphs
    assert outline_of(target.model, graphs, "", "T") is not None

    class Odd(torch.nn.Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + 1

    target.model.set_input_embeddings(Odd(64, 32))
    assert outline_of(target.model, graphs, "", "T") is None


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(family, marks=pytest.mark.slow) for family in CONVERTED)]
)
def test_it_is_so_for_every_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Among them some that scale their embeddings, as Gemma, or have windows, soft-caps or biases.

    The files of GPT-NeoX name the lm_head otherwise than the model does, so that it is loaded whole.
    """
    monkeypatch.setattr(weights_cache, "SETTLED", -1)
    attention = "eager" if family in EAGER_ONLY else "sdpa"
    model, folder = tiny_model(family, attention), tmp_path / family
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    first, second = (start(folder, attn_implementation=attention) for _ in range(2))
    assert (
        stands_in(second) == (family != "gpt_neox")
        and answer(second) == answer(first) == greedy_alone(model, [PROMPT], 24)[0]
    )
    one, other = first.target, second.target
    assert (one.kinds, one.windows, one.logits_transform) == (
        other.kinds,
        other.windows,
        other.logits_transform,
    )
    if family == "gemma3":
        assert second.target.held.outline.scale == pytest.approx(model.config.hidden_size**0.5)


def test_the_command_imports_no_models(gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The import of transformers' models takes longer than all else of a start."""
    code = (
        "import sys; from eagle_fsd import generate; code = generate.main(sys.argv[1:]); "
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    flags = ["--base-model", str(gguf), "--ea-model", "none", "--lookup", "--runtime", "openvino", "--raw"]
    tree = ["--total-tokens", "4", "--depth", "3", "--tree-top-k", "1", "--max-new-tokens", "8"]
    assert not generate.main([*flags, *tree, "abcabc"])  # the first start, here, where they are imported
    first = capsys.readouterr().out
    assert first and all(name in sys.modules for name in HEAVY)
    command = [sys.executable, "-c", code, *flags, *tree, "abcabc"]
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert second.stdout == first
    assert second.stderr.strip().splitlines()[-1] == "[]"
