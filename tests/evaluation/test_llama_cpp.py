"""llama.cpp as a method of a race: what it is given, what is refused, and its real answers if it is there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_models import prompts_of, tiny_head, tiny_model

from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.engine import EagleFSD
from eagle_fsd.evaluation.commands import speed as script
from eagle_fsd.evaluation.measure.llama_cpp import (
    LLAMA_CPP,
    LLAMA_CPP_LOOKUP,
    LOOKUP_TOKENS,
    LlamaCpp,
    gguf_file,
)
from eagle_fsd.evaluation.measure.observers import likelihoods
from eagle_fsd.evaluation.measure.speed import Setting, method
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.chat import encode

SAMPLED = SamplingConfig(0.6, 50, 0.9)


class FakeLibrary:
    """Notes every call in order; the tokens that it draws are given."""

    __version__ = "1.2.3"

    def __init__(self, drawn: Sequence[int]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.drawn: Iterator[int] = iter(drawn)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> str:
            self.calls.append((name.removeprefix("llama_sampler_"), *arguments))
            return name.removeprefix("llama_sampler_")

        return call

    def Llama(self, path: str, **options: Any) -> FakeLibrary:
        self.calls.append(("Llama", path, options))
        return self

    def llama_sampler_sample(self, chain: str, context: object, place: int) -> int:
        assert (chain, place) == ("chain_init", -1)
        self.calls.append(("draw",))
        return next(self.drawn)

    def llama_print_system_info(self) -> bytes:
        return b"CPU : AVX512 = 1 | "

    @property
    def ctx(self) -> str:
        return "context"


def install(monkeypatch: pytest.MonkeyPatch, drawn: Sequence[int]) -> FakeLibrary:
    library = FakeLibrary(drawn)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    return library


def test_a_greedy_answer_reads_the_prompt_anew_and_feeds_every_token_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = install(monkeypatch, [7, 8, 9, 10])
    peer = LlamaCpp(Path("a.gguf"), 40, 2)
    threads = {"n_threads": 2, "n_threads_batch": 2}
    assert library.calls == [("Llama", "a.gguf", {"n_ctx": 40, "verbose": False, **threads})]
    tokens, (stats,) = peer.answer([[1, 2, 3]], 3, SamplingConfig(), 0, ())
    assert tokens == [[7, 8, 9]]
    assert library.calls[1:] == [
        ("reset",),
        ("eval", [1, 2, 3]),
        ("init_greedy",),
        ("chain_default_params",),
        ("chain_init", "chain_default_params"),
        ("chain_add", "chain_init", "init_greedy"),
        *(("draw",), ("eval", [7]), ("draw",), ("eval", [8]), ("draw",)),
        ("free", "chain_init"),
    ]
    assert (stats.steps, stats.new_tokens, stats.finish_reason) == (3, 3, "length")
    assert 0 < stats.prefill_seconds < stats.seconds


def test_an_end_token_ends_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [7, 2, 9])
    tokens, (stats,) = LlamaCpp(Path("a.gguf"), 40, 1).answer([[1]], 3, SamplingConfig(), 0, (2,))
    assert tokens == [[7, 2]] and stats.finish_reason == "stop" and stats.new_tokens == 2


def test_sampling_applies_the_temperature_first_as_hugging_face_does(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, [7])
    LlamaCpp(Path("a.gguf"), 40, 1).answer([[1]], 1, SAMPLED, 2**32 + 4, ())
    parts = [("init_temp", 0.6), ("init_top_k", 50), ("init_top_p", 0.9, 1), ("init_dist", 5)]
    assert [call for call in library.calls if call[0].startswith("init_")] == parts
    added = [call[2] for call in library.calls if call[0] == "chain_add"]
    assert added == ["init_temp", "init_top_k", "init_top_p", "init_dist"]


def engine(base_model: str) -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model()), tiny_head(), base_model=base_model)


def gguf(folder: Path) -> Path:
    """Write a file that looks like a GGUF file to us; nothing reads on."""
    file = folder / "a.gguf"
    file.write_bytes(b"GGUF")
    return file


def setting(**others: Any) -> Setting:
    return Setting(4, SamplingConfig(), TreeConfig(1), **others)


def no_stock() -> TargetModel:
    raise AssertionError("llama.cpp reads its own file")


def test_the_method_has_the_targets_file_threads_and_end_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine(str(gguf(tmp_path)))
    model.target.model.generation_config.eos_token_id = [8]
    for endless, text in ((False, [7, 8]), (True, [7, 8, 9, 10])):
        library = install(monkeypatch, [7, 8, 9, 10])
        one = method(LLAMA_CPP, model, no_stock, setting(endless=endless, longest=33))
        answers = one(prompts_of([5]))
        assert answers.tokens == [text] and answers.tree is None
        _, path, options = library.calls[0]
        assert path == str(tmp_path / "a.gguf") and options["n_ctx"] == 33
        assert options["n_threads"] == torch.get_num_threads()
    library = install(monkeypatch, [7])
    method(LLAMA_CPP, model, no_stock, setting())
    assert library.calls[0][2]["n_ctx"] == model.target.max_positions


def test_what_llama_cpp_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"is not a \.gguf file: llama\.cpp reads nothing else; name one, or"
    ):
        gguf_file(str(tmp_path))
    file = gguf(tmp_path)
    assert gguf_file(str(file)) == file
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # an import of it fails
    with pytest.raises(
        ValueError, match=r"needs llama-cpp-python, .* pip install llama-cpp-python, which co"
    ):
        method(LLAMA_CPP, engine(str(file)), no_stock, setting())
    elsewhere = engine(str(file))
    elsewhere.target.device = torch.device("meta")
    with pytest.raises(
        ValueError, match=r"llama\.cpp runs on the CPU, and the target on meta: name --device"
    ):
        method(LLAMA_CPP, elsewhere, no_stock, setting())


def test_the_script_races_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    model, library = engine(str(gguf(tmp_path))), install(monkeypatch, [1, 2, 3, 4] * 5)
    monkeypatch.setattr(script, "load_engine", lambda _: model)
    monkeypatch.setattr(script, "encoded_prompts", lambda *_: prompts_of([4, 9]))
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hello?"}\n')
    argv = f"--prompts {tmp_path}/a.jsonl --methods plain llama.cpp --max-new-tokens 4"
    argv += f" --output {tmp_path}/out"
    script.main(argv.split())
    printed = capsys.readouterr().out
    assert "| 1 | llama.cpp | " in printed and "vs llama.cpp" in printed
    assert library.calls[0][2]["n_ctx"] == 9 + 4
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert all(row["llama_cpp"] == {"version": "1.2.3", "system_info": "CPU : AVX512 = 1 |"} for row in rows)
    with pytest.raises(SystemExit):
        script.main([*argv.split(), "--batch-size", "2"])
    assert "batch_size is 2 with llama.cpp: a context of llama.cpp takes one" in capsys.readouterr().err


def test_prompt_lookup_is_llama_cpp_pythons_own_and_greedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, model = install(monkeypatch, []), engine(str(gguf(tmp_path)))
    speculative = SimpleNamespace(LlamaPromptLookupDecoding=lambda **options: options)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    asked = []

    def generate(_: FakeLibrary, prompt: list[int], **options: float) -> Iterator[int]:
        asked.append((prompt, options))
        return iter(range(100))

    monkeypatch.setattr(FakeLibrary, "generate", generate, raising=False)
    (prompt,) = prompts_of([5])
    answers = method(LLAMA_CPP_LOOKUP, model, no_stock, setting())([prompt])
    assert answers.tokens == [[0, 1, 2, 3]] and asked == [(prompt, {"temp": 0.0})]
    assert library.calls[0][2]["draft_model"] == {"num_pred_tokens": LOOKUP_TOKENS}
    assert library.calls[1:] == [("reset",)]
    with pytest.raises(ValueError, match=r"llama\.cpp\+lookup has the temperature 0\.6: its own sampling"):
        method(LLAMA_CPP_LOOKUP, model, no_stock, Setting(4, SAMPLED, TreeConfig(1)))


def test_the_real_one_answers_as_the_target_does(smollm2: EagleFSD) -> None:
    """It computes in fewer bits, so later tokens may be others; the target finds its text as likely."""
    pytest.importorskip("llama_cpp", reason="it is not installed: pip install llama-cpp-python")
    ids = encode(smollm2.tokenizer, "Count from 1 to 10.")[0].tolist()
    wanted = smollm2.generate([ids], max_new_tokens=32, tree=TreeConfig(1)).new_tokens[0]
    peer = LlamaCpp(gguf_file(smollm2.base_model), len(ids) + 32, torch.get_num_threads())
    ends = smollm2.target.eos_token_ids
    (tokens,), (stats,) = peer.answer([ids], 32, SamplingConfig(), 0, ends)
    assert tokens[:8] == wanted[:8] and len(tokens) == stats.new_tokens == stats.steps == 32
    drafting = LlamaCpp(gguf_file(smollm2.base_model), len(ids) + 32, torch.get_num_threads(), lookup=True)
    (looked_up,), _ = drafting.answer([ids], 32, SamplingConfig(), 0, ends)
    assert len(looked_up) == 32
    likely = likelihoods(smollm2.target, [ids] * 3, [wanted, tokens, looked_up])
    assert min(likely[1:]) > likely[0] - 0.2
    assert peer.answer([ids], 32, SamplingConfig(), 0, ends)[0] == [tokens]
    (first, again, other) = (peer.answer([ids], 32, SAMPLED, seed, ends)[0][0] for seed in (1, 1, 2))
    assert first == again != other
    assert likelihoods(smollm2.target, [ids], [first])[0] > -2.0
    (short,), (stopped,) = peer.answer([ids], 32, SamplingConfig(), 0, tokens[3:4])
    assert short == tokens[: tokens.index(tokens[3]) + 1] and stopped.finish_reason == "stop"
