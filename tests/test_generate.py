"""The command line: what it prints, what it refuses, how it ends. Most of it runs on a scripted model."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.full_disk import FullDisk
from support.tiny_engine import chat_ids, new_engine, text_alone
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_fsd import (
    AcceptanceRule,
    AutoTree,
    Fuzzy,
    GenerationStats,
    Lossless,
    NonFiniteLogits,
    TreeConfig,
    Typical,
    chat,
    generate,
)
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble, FLy, RelaxedTopK, SGLang
from eagle_fsd.cli.answer_report import JSON_KEYS, Answer, summary
from eagle_fsd.cli.arguments import check_answers, check_early, make_rule, make_tree
from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.core.config import AutoThreshold
from eagle_fsd.core.process.signals import ENDING
from eagle_fsd.decoding.options import GenerationOptions
from eagle_fsd.runtime.ranks import ALONE
from eagle_fsd.text.detokenizer import Detokenizer
from eagle_fsd.text.prompt_files import find_prompt

REPLY = "Grüße, 世界 🌍!"
END = 256


class Bytes:
    """A tokenizer of bytes: the hardest case for streaming, since most characters take several tokens."""

    chat_template: str | None = "<user>{}<answer>"

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(text.encode())], dtype=torch.int64)}

    def apply_chat_template(
        self, messages: list[dict[str, str]], **_options: object
    ) -> dict[str, torch.Tensor]:
        return self("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<answer>", "pt")

    def encode(self, text: str, **_options: object) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], **_options: object) -> str:
        return bytes(i for i in ids if i != END).decode("utf-8", errors="replace")


class ScriptedModel:
    """An engine that answers REPLY, `per_step` tokens a step; `during` runs inside each step."""

    base_model, ea_model, dtype, device = "scripted", "head", torch.float32, torch.device("cpu")
    draft_vocab_size: int | None = None
    runtime, weight_format = "torch", "float32"
    target = SimpleNamespace(
        ignored_defaults={}, own_defaults={}, named_sampling={}, ranks=ALONE, max_positions=512
    )

    def __init__(self, reply: str = REPLY, per_step: int = 3) -> None:
        self.tokenizer = Bytes()
        self.ids = [*reply.encode(), END]
        self.per_step = per_step
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.during = lambda step: None
        self.settler = SimpleNamespace(measure_postponed=lambda: False)

    def stream(
        self, input_ids: torch.Tensor, mask: torch.Tensor, options: GenerationOptions
    ) -> SimpleNamespace:
        assert mask.all()
        self.calls.append(("stream", self.tokenizer.decode(input_ids[0].tolist()), vars(options)))
        stats = GenerationStats()
        seed = None if options.sampling.greedy else options.seed
        return ScriptedStream(self._steps(options.max_new_tokens, stats), stats, options.rule, seed)

    def _steps(self, most: int, stats: GenerationStats) -> Iterator[list[int]]:
        ids = self.ids[:most]
        for start in range(0, len(ids), self.per_step):
            chunk = ids[start : start + self.per_step]
            self.during(start // self.per_step)
            stats.record(len(chunk), exact=len(chunk) - 1, fuzzy=0)
            stats.seconds += 0.5
            yield chunk
        stats.finish_reason = "stop" if ids[-1] == END else "length"

    def generate(self, input_ids: torch.Tensor, mask: torch.Tensor, options: GenerationOptions) -> None:
        assert mask.all()
        self.calls.append(("generate", "", vars(options)))

    def target_alone(
        self, input_ids: torch.Tensor, mask: torch.Tensor, options: Any, inputs: Any
    ) -> SimpleNamespace:
        assert mask.all() and inputs is None
        self.calls.append(("target_alone", "", vars(options)))
        ids = self.ids[: options.max_new_tokens]
        stats = GenerationStats(steps=len(ids), new_tokens=len(ids), seconds=2.0 * len(ids))
        return SimpleNamespace(stats=[stats], new_tokens=[ids])


class ScriptedStream(SimpleNamespace):
    def __init__(
        self, steps: Iterator[list[int]], stats: GenerationStats, rule: AcceptanceRule, seed: Any
    ) -> None:
        super().__init__(steps=steps, stats=stats, tree=TreeConfig(), rule=rule, seed=seed)

    def __iter__(self) -> Iterator[list[int]]:
        return self.steps


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    scripted = ScriptedModel()
    monkeypatch.setattr(generate, "load_model", lambda args: scripted)
    return scripted


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command; argparse's own exits included."""
    try:
        code = generate.main(argv)
    except SystemExit as ending:
        code = ending.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# -- text and streaming ----------------------------------------


@pytest.mark.parametrize("program", [generate, chat], ids=["generate", "chat"])
def test_a_pad_token_in_a_chat_template_is_text(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise an answer would be to a part of the prompt, and another one in a batch or from the server."""
    engine, prompt = new_engine(), chat_ids()
    engine.target.held.generation_config.pad_token_id = prompt[1]
    monkeypatch.setattr(program, "load_model", lambda args: engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    argv = ["--total-tokens", "8", "--depth", "3", "--tree-top-k", "3", "--max-new-tokens", "15"]
    assert program.main([*argv, *(["--baseline", "Hi"] if program is generate else [])]) == 0
    said, told = capsys.readouterr()
    assert said == text_alone(prompt, max_new_tokens=15) + "\n"
    assert program is chat or "the same text" in told


def test_text_goes_to_stdout_and_one_line_to_stderr(
    model: ScriptedModel, capsys: pytest.CaptureFixture
) -> None:
    code, out, err = run(capsys, "Hello?")
    assert (code, out) == (0, REPLY + "\n")
    assert err == "22 tokens in 4.0 s (5.5 tok/s), tau 2.75, 0 fuzzy accepts, lossless, tree 16/5/8\n"
    assert model.calls[0][1] == "<user>Hello?<answer>"


def test_text_is_shown_as_it_is_made(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    seen: list[str] = []
    monkeypatch.setattr(sys, "stdout", Recorder())
    at_step: list[str] = []
    model.during = lambda step: at_step.append(seen[-1] if seen else "")
    assert generate.main(["Hello?"]) == 0
    assert at_step == ["", "Gr", "Grüß", "Grüße, ", "Grüße, 世", "Grüße, 世界", "Grüße, 世界 ", REPLY]
    assert seen[-1] == REPLY + "\n"


@pytest.mark.parametrize("seed", range(20))
def test_streamed_pieces_make_the_whole_text(seed: int) -> None:
    chance = random.Random(seed)
    data = "".join(chance.choice(["a", " ", "ß", "世", "🌍", "é", "\n"]) for _ in range(30)).encode()
    ids = list(data)
    if seed % 2:
        ids.insert(chance.randrange(len(ids)), 0xFF)  # never valid UTF-8
        ids = ids[: chance.randrange(20, len(ids))]  # and perhaps half a character at the end
    ids.insert(chance.randrange(len(ids)), END)
    whole = Bytes().decode(ids)
    detokenizer, text, rest = Detokenizer(Bytes()), "", ids
    while rest:
        cut = chance.randint(1, 6)
        text += detokenizer.add(rest[:cut])
        rest = rest[cut:]
        assert whole.startswith(text)
    assert text + detokenizer.finish() == whole
    assert detokenizer.finish() == ""


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Like SentencePiece: a token's leading space is dropped at the start of a text."""
    vocab = {word: i for i, word in enumerate(["<unk>", "</s>", "▁Hello", "▁world", "s", "▁again", "."])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


def test_spaces_survive_streaming() -> None:
    tokenizer = words_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([token]) for token in (2, 3, 4, 5, 6, 1)]
    assert pieces == ["Hello", " world", "s", " again", ".", ""]
    assert "".join(pieces) == tokenizer.decode([2, 3, 4, 5, 6, 1], skip_special_tokens=True)


def test_a_continuation_keeps_its_first_space() -> None:
    assert Detokenizer(words_tokenizer(), context=[2]).add([3]) == " world"
    assert Detokenizer(words_tokenizer()).add([3]) == "world"


def test_cut_in_half_a_character(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "--max-new-tokens", "3", "Hello?")
    assert (code, out) == (0, "Gr\ufffd\n")


def test_what_libraries_print_does_not_reach_stdout(
    model: ScriptedModel, capsys: pytest.CaptureFixture
) -> None:
    model.during = lambda step: print(f"noise {step}")  # noqa: T201
    _, out, err = run(capsys, "--json", "Hello?")
    assert json.loads(out)["text"] == REPLY
    assert "noise 0" in err


# -- prompts ----------------------------------------


def prompts_seen(model: ScriptedModel) -> list[str]:
    return [text for call, text, _ in model.calls if call == "stream"]


def test_system_and_raw(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    run(capsys, "--system", "Be brief.", "Hello?")
    run(capsys, "--system", "", "Hello?")
    run(capsys, "--raw", "Once upon")
    assert prompts_seen(model) == [
        "<system>Be brief.<user>Hello?<answer>",
        "<system><user>Hello?<answer>",
        "Once upon",
    ]


def test_stdin(model: ScriptedModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffWhy?\r\nWhy not?\r\n".encode())))
    assert run(capsys, "--raw", "-")[0] == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"And now?")))
    assert run(capsys, "--raw", "--prompt", "-")[0] == 0
    assert prompts_seen(model) == ["Why?\nWhy not?", "And now?"]


def test_what_is_piped_in_is_the_prompt_where_none_is_given(
    model: ScriptedModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"Name three rivers.\n"))
    monkeypatch.setattr(sys, "stdin", piped)
    assert run(capsys, "--raw", "Why?")[0] == 0  # it is left alone
    assert run(capsys, "--raw")[0] == 0
    assert prompts_seen(model) == ["Why?", "Name three rivers."]


def test_a_stdin_without_text_is_no_prompt(
    model: ScriptedModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(b"typed\n"))
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    for stdin in (None, io.TextIOWrapper(io.BytesIO(b"")), io.TextIOWrapper(io.BytesIO(b" \n")), terminal):
        monkeypatch.setattr(sys, "stdin", stdin)
        code, _, err = run(capsys)
        assert code == 2 and err == (
            "python -m eagle_fsd.generate: error: no prompt: give a TEXT, --prompt TEXT, --prompt-file FILE, "
            "or - for stdin\n"
        )


def test_prompt_files(model: ScriptedModel, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    text, lines = tmp_path / "one.txt", tmp_path / "many.jsonl"
    text.write_text("Two\nlines\n", encoding="utf-8")
    lines.write_text('{"prompt": "first"}\n\n{"turns": ["second", "later"], "id": 7}\n', encoding="utf-8")
    assert run(capsys, "--raw", "--prompt-file", str(text))[0] == 0
    code, out, err = run(capsys, "--raw", "--prompt-file", str(lines))
    assert (code, out) == (0, f"{REPLY}\n\n{REPLY}\n")
    assert err.count("\n") == 2
    assert prompts_seen(model) == ["Two\nlines", "first", "second"]
    _, out, _ = run(capsys, "--json", "--prompt-file", str(lines))
    assert [json.loads(line)["text"] for line in out.splitlines()] == [REPLY, REPLY]


def test_what_is_left_out_of_a_chat_is_said(
    model: ScriptedModel,
    capsys: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    file = tmp_path / "chats.jsonl"
    asks, answers = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    system, shared = {"role": "system", "content": "Be brief."}, {"from": "human", "value": "Hi"}
    rows = [
        {"messages": [asks, answers]},
        {"messages": [system, asks]},
        {"messages": [asks, answers, asks]},
        {"conversations": [shared]},
        {"turns": ["Hi", "later"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(capsys, "--prompt-file", str(file))
    run(capsys, "--prompt-file", str(file))
    assert caplog.text.count("only the user's first turn of a chat is a prompt; 2 of 5 rows say more (") == 1
    caplog.clear()
    assert len(prompts_seen(model)) == 10
    file.write_text("".join(json.dumps(rows[i]) + "\n" for i in (0, 3, 4)))
    run(capsys, "--prompt-file", str(file))
    assert "say more" not in caplog.text


# -- JSON and the baseline ----------------------------------------


def test_json_is_one_object_with_the_contract_keys(
    model: ScriptedModel, capsys: pytest.CaptureFixture
) -> None:
    code, out, _ = run(capsys, "--json", "--threshold", "0.25", "--max-new-tokens", "4", "Hello?")
    assert code == 0 and out.count("\n") == 1
    assert json.loads(out) == {
        "text": "Grü",
        "prompt_tokens": len("<user>Hello?<answer>"),
        "token_ids": [71, 114, 195, 188],
        "new_tokens": 4,
        "steps": 2,
        "tau": 2.0,
        "exact_accepts": 2,
        "fuzzy_accepts": 0,
        "accept_histogram": [0, 1, 0, 1],
        "sources": {"target": 2, "head": 2, "suffix": 0, "recycled": 0},
        "reused_tokens": 0,
        "seconds": 1.0,
        "prefill_seconds": 0.0,
        "draft_seconds": 0.0,
        "verify_seconds": 0.0,
        "tokens_per_second": 4.0,
        "finish_reason": "length",
        "rule": "fuzzy",
        "threshold": 0.25,
        "divergence": "js",
        "mode": "hybrid",
        "base_model": "scripted",
        "ea_model": "head",
        "dtype": "float32",
        "runtime": "torch",
        "weight_format": "float32",
        "device": "cpu",
        "tree": "16/5/8",
        "seed": None,
    }
    assert tuple(json.loads(out)) == JSON_KEYS
    model.draft_vocab_size = 9
    _, out, _ = run(capsys, "--json", "Hello?")
    assert json.loads(out)["draft_vocab_size"] == 9


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ("lossless", 0.0, None, None)),
        (["--rule", "lossless"], ("lossless", 0.0, None, None)),
        (["--threshold", "0.3", "--price", "inf"], ("lossless", 0.0, None, None)),
        (["--threshold", "inf", "--divergence", "tv", "--mode", "paper"], ("fuzzy", "inf", "tv", "paper")),
        (["--rule", "typical"], ("typical", None, None, "hybrid")),
        (["--rule", "cactus"], ("cactus", None, None, None)),
        (["--rule", "sglang", "--single", "1"], ("lossless", 0.0, None, None)),
    ],
)
def test_json_names_the_rule(
    model: ScriptedModel, capsys: pytest.CaptureFixture, flags: list[str], expected: tuple[object, ...]
) -> None:
    _, out, _ = run(capsys, "--json", *flags, "Hello?")
    record = json.loads(out)
    assert tuple(record[name] for name in ("rule", "threshold", "divergence", "mode")) == expected
    assert "price" not in record


def test_a_plan_says_its_price(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    flags = ("--threshold", "inf", "--mode", "swap", "--price", "2.5")
    record = json.loads(run(capsys, "--json", *flags, "Hello?")[1])
    assert (record["price"], record["cost"], record["mode"]) == (2.5, "tokens", "swap")
    assert ", 0 fuzzy accepts, plan, price 2.5 of tokens, tree" in run(capsys, *flags, "Hello?")[2]
    flags = ("--threshold", "0.3", "--price", "9", "--cost", "divergence")
    assert "plan, price 9 of js, js <= 0.3 hybrid, tree" in run(capsys, *flags, "Hello?")[2]
    assert "price" not in json.loads(run(capsys, "--json", "--threshold", "0.3", "Hello?")[1])


@pytest.mark.parametrize(
    ("rule", "asked", "words"),
    [
        (Fuzzy(math.inf, price=3.5), AutoThreshold(0.02), "plan, price 3.5 of tokens (budget 0.02)"),
        (Fuzzy(math.inf, price=3.5), None, "plan, price 3.5 of tokens"),
        (Fuzzy(0.3), AutoThreshold(0.05), "js <= 0.3 hybrid (budget 0.05)"),
        (Lossless(), AutoThreshold(0.05), "lossless (budget 0.05)"),
        (Lossless(), None, "lossless"),
        (Cactus(), None, "cactus"),
    ],
)
def test_a_summary_names_the_rule_and_its_budget(
    rule: AcceptanceRule, asked: AutoThreshold | None, words: str
) -> None:
    stats = GenerationStats()
    stats.record(2, exact=0, fuzzy=1)
    made = SimpleNamespace(tree=TreeConfig(), rule=rule)
    line = summary(Answer.of(3, stats, made, GenerationOptions(rule=asked)))
    kind = "relaxed" if rule == Cactus() else "fuzzy"
    assert line.endswith(f", 1 {kind} accept, {words}, tree 16/5/8")


def test_baseline(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    flags = [
        "--baseline",
        "--temperature",
        "0.6",
        "--top-p",
        "0.9",
        "--seed",
        "5",
        "--max-new-tokens",
        "6",
        "Hello?",
    ]
    code, out, err = run(capsys, *flags)
    assert (code, out) == (0, "Grüß\n")
    assert err.endswith("target alone: 6 tokens in 12.0 s (0.5 tok/s), the same text; speed ratio 12.00\n")
    assert [call for call, _, _ in model.calls] == ["stream", "generate", "target_alone", "target_alone"]
    expected = {"max_new_tokens": 6, "temperature": 0.6, "top_k": None, "top_p": 0.9, "seed": 5}
    assert expected.items() <= model.calls[-1][2].items()
    _, out, _ = run(capsys, "--json", *flags)
    record = json.loads(out)
    assert tuple(record)[: len(JSON_KEYS)] == JSON_KEYS
    assert record["baseline_same_tokens"] is True and record["speedup"] == 12.0
    assert (record["baseline_new_tokens"], record["baseline_seconds"]) == (6, 12.0)


def test_a_baseline_says_what_it_leaves_out(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    """Hugging Face's `generate` with the model's own defaults would be another text."""
    ignored = {"typical_p": 0.9, "min_length": 3}
    model.target = SimpleNamespace(**vars(model.target) | {"ignored_defaults": ignored})
    _, _, err = run(capsys, "--baseline", "Hello?")
    assert "; target alone without typical_p, min_length: " in err


# -- seeds ----------------------------------------


def seeds_of(model: ScriptedModel) -> list[object]:
    return [options["seed"] for call, _, options in model.calls if call == "stream"]


def test_each_prompt_has_a_stream_of_its_own(
    model: ScriptedModel, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Hello {n}?"}) + "\n" for n in range(3)))
    flags = ["--temperature", "1", "--json", "--prompt-file", str(rows)]
    _, out, err = run(capsys, *flags, "--seed", "7")
    assert seeds_of(model) == [[(7, 0)], [(7, 1)], [(7, 2)]]
    assert [json.loads(line)["seed"] for line in out.splitlines()] == ["7/0", "7/1", "7/2"]
    assert err.splitlines()[1].endswith(", seed 7/1")
    model.calls.clear()
    run(capsys, "--temperature", "1", "--seed", "7/2", "Hello 2?")
    assert seeds_of(model) == [[(7, 2)]]


def test_without_a_seed_each_call_draws_another_and_says_which(
    model: ScriptedModel, capsys: pytest.CaptureFixture
) -> None:
    named = [json.loads(run(capsys, "--temperature", "1", "--json", "Hello?")[1])["seed"] for _ in range(2)]
    assert [f"{seed}/{row}" for ((seed, row),) in seeds_of(model)] == named
    assert named[0] != named[1]
    assert json.loads(run(capsys, "--json", "Hello?")[1])["seed"] is None  # nothing is drawn


# -- flags ----------------------------------------


def test_flags_reach_the_engine(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    sampling = "--temperature 0.7 --top-k 9 --top-p 0.8 --seed 3 --max-new-tokens 5"
    tree = "--total-tokens 20 --depth 4 --tree-top-k 6 --min-confidence 0.1"
    rule = "--threshold 0.4 --divergence tv --mode paper --child target"
    guards = "--fuzzy-min-p 0.1 --max-overshoot 4 --min-gain 0.5 --max-consecutive 2 --exact-prefix 7"
    changes = (
        "--min-p 0.05 --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 "
        "--no-repeat-ngram-size 3 --suppress-tokens 4,6 --logit-bias 7=-2 --logit-bias 8=1.5 "
        "--min-new-tokens 2 --stop END --stop STOP --bad-word ab"
    )
    run(capsys, *f"{sampling} {tree} {rule} {guards} {changes} Hello?".split(" "))
    assert model.calls[0][2] == {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.8,
        "seed": [(3, 0)],
        "tree": TreeConfig(20, 4, 6, 0.1),
        "rule": Fuzzy(
            *(0.4, "tv", "paper", "target"),
            **{"min_p": 0.1, "max_overshoot": 4, "min_gain": 0.5, "max_consecutive": 2, "exact_prefix": 7},
        ),
        "eos_token_id": None,
        "observer": None,
        "prompt_cache": None,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[97, 98], [32, 97, 98]],
        "suppress_tokens": [4, 6],
        "logit_bias": {7: -2.0, 8: 1.5},
        "min_new_tokens": 2,
        "logits_processor": None,
        "logprobs": None,
        "stop_strings": ["END", "STOP"],
        "num_return_sequences": 1,
        "do_sample": None,
        "json_schema": None,
        "regex": None,
        "grammar": None,
    }


def test_a_form_reaches_the_engine(
    model: ScriptedModel,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llguidance", reason='forms need an extra: pip install "eagle-fsd[schema]"')
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    for schema in (str(file), ' {"type": "object"}'):
        run(capsys, "--json-schema", schema, "Hello?")
        assert model.calls[-1][2]["json_schema"] == {"type": "object"}
    run(capsys, "--regex", "a+", "Hello?")
    assert model.calls[-1][2]["regex"] == "a+"
    for flags, message in (
        (["--json-schema", "{", "x"], "'{' is no JSON"),
        (["--json-schema", str(tmp_path / "none.json"), "x"], "none.json' is no schema, and no file of one"),
        (["--json-schema", "{}", "--regex", "a", "x"], "regex beside json_schema: a text has one form"),
        (["--regex", "a", "--baseline", "x"], "--baseline with a form (regex)"),
    ):
        code, _, err = run(capsys, *flags)
        assert code == 2 and message in err and err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "llguidance", None)
    code, _, err = run(capsys, "--regex", "a", "x")
    assert code == 2 and '--regex needs llguidance: run pip install "eagle-fsd[schema]"' in err


def test_the_text_ends_before_a_stop_string(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    assert run(capsys, "--stop", "nowhere", "--stop", ", ", "Hello?")[1] == "Grüße\n"


def test_several_answers_have_streams_of_their_own(
    model: ScriptedModel, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--temperature", "1", "--seed", "7", "--num-return-sequences", "3"]
    _, out, _ = run(capsys, *flags, "Hello?")
    assert seeds_of(model) == [[(7, 0)], [(7, 1)], [(7, 2)]] and out == "\n".join([f"{REPLY}\n"] * 3)
    code, _, err = run(capsys, "--num-return-sequences", "3", "Hello?")
    assert code == 2 and "--num-return-sequences is 3 at temperature 0" in err


def test_template_arguments_reach_the_template(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    seen: list[dict[str, object]] = []
    usual = model.tokenizer.apply_chat_template
    model.tokenizer.apply_chat_template = lambda messages, **given: seen.append(given) or usual(messages)
    run(capsys, "--chat-template-args", '{"enable_thinking": false}', "Hello?")
    assert seen[0]["enable_thinking"] is False
    for flags, message in (
        (["--chat-template-args", "{", "x"], "'{' is no JSON"),
        (["--chat-template-args", "[]", "x"], "'[]' is no JSON object"),
        (["--chat-template-args", "[" * 100_000, "x"], "is no JSON: maximum recursion depth"),
        (["--chat-template-args", '{"tokenize": false}', "x"], "tokenize is no argument of a chat template"),
        (
            ["--chat-template-args", '{"messages": []}', "x"],
            "--chat-template-args: messages is no",
        ),
        (["--chat-template-args", '{"a": 1}', "--raw", "x"], "--chat-template-args with --raw"),
        (["--logprobs", "2", "x"], "--logprobs without --json"),
        (["--logit-bias", "x", "x"], "'x' is not ID=X"),
        (["--suppress-tokens", "1,b", "x"], "'1,b' is no list of token ids"),
        (["--bad-word", "", "x"], "a bad word is empty"),
        (["--baseline", "--stop", "a", "x"], "--baseline with --stop"),
    ):
        code, _, err = run(capsys, *flags)
        assert code == 2 and message in err and err.count("\n") == 1


def test_a_tree_is_measured_unless_its_size_is_given() -> None:
    def tree(*argv: str) -> object:
        return make_tree(build_parser().parse_args([*argv, "x"]))

    assert tree() == tree("--total-tokens", "auto") == AutoTree()
    assert tree("--depth", "3", "--tree-top-k", "2") == AutoTree(3, 2)
    assert tree("--min-confidence", "0.1") == AutoTree(min_confidence=0.1)
    assert tree("--total-tokens", "9") == TreeConfig(9)
    assert tree("--total-token", "9", "--depth", "3") == TreeConfig(9, 3)


def test_rules_and_their_defaults() -> None:
    def rule(*argv: str) -> object:
        return make_rule(build_parser().parse_args([*argv, "x"]))

    assert rule() == Fuzzy(threshold=0.0)
    assert rule("--rule", "lossless") == Lossless()
    assert rule("--rule", "typical") == Typical()
    assert rule("--rule", "typical", "--epsilon", "0.2", "--delta", "0.5") == Typical(epsilon=0.2, delta=0.5)
    assert rule("--rule", "cactus", "--delta", "0.5") == Cactus(0.5)
    assert rule("--rule", "relaxed_topk", "--candidates", "4", "--margin", "0.3") == RelaxedTopK(4, 0.3)
    assert rule("--rule", "sglang", "--single", "0.3", "--acc", "0.8") == SGLang(0.3, 0.8)
    assert rule("--rule", "ensemble", "--weight", "0.6") == Ensemble(0.6)
    assert rule("--rule", "fly", "--entropy", "0.2", "--window", "2") == FLy(0.2, 2)
    assert rule("--threshold", "auto") == AutoThreshold()
    assert rule("--quality-budget", "0.05") == AutoThreshold(0.05)
    assert rule("--threshold", "inf", "--price", "1.5", "--cost", "kl") == Fuzzy(
        float("inf"), price=1.5, cost="kl"
    )
    auto = "--threshold auto --quality-budget 0.05 --divergence tv --mode paper --child target"
    assert rule(*auto.split()) == AutoThreshold(0.05, "tv", "paper", "target")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--threshold 0.3 --quality-budget 0.1",
            "it finds the threshold of the rule fuzzy; leave out --thre",
        ),
        (
            "--rule cactus --quality-budget 0.1",
            "it finds the threshold of the rule fuzzy; leave out --rule ca",
        ),
        (
            "--threshold auto --fuzzy-min-p 0.1",
            "--fuzzy-min-p is 0.1 with --threshold auto: that rule has none",
        ),
        ("--threshold auto --rule cactus", "--threshold is auto with --rule cactus: that rule has none"),
        ("--threshold auto --quality-budget 1.5", "error: --quality-budget is 1.5"),
        ("--rule cactus --epsilon 0.1", "--epsilon is 0.1 with --rule cactus"),
    ],
)
def test_flags_that_do_not_go_together(flags: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *flags.split(), "Hello?")
    assert code == 2 and line in err and err.count("\n") == 1 and not out


def test_help_states_the_true_defaults() -> None:
    text = " ".join(build_parser().format_help().partition("examples:")[0].split())
    tree, fuzzy, typical, fly = TreeConfig(), Fuzzy(), Typical(), FLy()
    for flag, default in {
        "--total-tokens": "auto", "--depth": tree.depth, "--tree-top-k": tree.top_k,
        "--min-confidence": f"{tree.min_confidence:g}",
        "--divergence": fuzzy.divergence, "--mode": fuzzy.mode, "--child": fuzzy.child,
        "--fuzzy-min-p": f"{fuzzy.min_p:g}",
        "--max-overshoot": fuzzy.max_overshoot, "--exact-prefix": fuzzy.exact_prefix,
        "--min-gain": f"{fuzzy.min_gain:g}",
        "--epsilon": typical.epsilon, "--delta": typical.delta,
        "--entropy": fly.entropy, "--window": fly.window,
    }.items():  # fmt: skip
        *_, found = re.finditer(f"{flag}[ ,]", text)  # Python 3.13 writes values behind all spellings
        entry = text[found.start() :]
        assert entry[entry.index("(default: ") :].startswith(f"(default: {default}"), flag


def test_eagle_spellings() -> None:
    argv = "--base-model-path m --ea-model-path h --total-token 30 --max-new-token 9 x"
    args = build_parser().parse_args(argv.split(" "))
    assert (args.base_model, args.ea_model, args.total_tokens, args.max_new_tokens) == ("m", "h", 30, 9)


def test_help_and_the_first_checks_need_no_torch() -> None:
    flags = ["--logit-bias", "3=1", "--bad-word", "a", "--stop", "b", "--divergence", "tv", "x"]
    code = f"import sys, eagle_fsd.generate as g; g.check_early(g.build_parser().parse_args({flags})); "
    subprocess.run([sys.executable, "-c", f"{code} assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--total-tokens 0", "--total-tokens is 0"),
        ("--quality-budget 1.5", "--quality-budget is 1.5"),
        ("--threshold -1", "--threshold is -1"),
        ("--seed x", "--seed is x"),
        ("--temperature 0 --num-return-sequences 2", "--num-return-sequences is 2"),
        ("--num-return-sequences 2", None),  # the model's own temperature may be above 0
        ("--ea-model none --lookup", None),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(flags: str, words: str | None) -> None:
    args = build_parser().parse_args([*flags.split(), "x"])
    with pytest.raises(ValueError, match=f"^{words}") if words else contextlib.nullcontext():
        check_early(args)


def test_logprobs_are_shown_in_json_alone() -> None:
    with pytest.raises(ValueError, match="--logprobs without --json"):
        check_answers(build_parser().parse_args(["--logprobs", "0", "x"]))


def test_version(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("eagle_fsd ")


# -- mistakes ----------------------------------------

MISTAKES = {
    "no prompt": ([], "no prompt"),
    "empty prompt": (["--prompt", ""], "empty"),
    "blank prompt": (["  \n"], "empty"),
    "two prompts": (["a", "--prompt", "b"], "not allowed with"),
    "no such file": (["--prompt-file", "/does/not/exist"], "/does/not/exist"),
    "unknown flag": (["x", "--fast"], "--fast"),
    "half a flag": (
        ["--temp", "0.5", "x"],
        "error: unrecognized arguments: --temp; did you mean --temperature? (--help lists the flags)",
    ),
    "half of two flags": (["--top=3", "x"], "arguments: --top; did you mean --top-k or --top-p? ("),
    "mistyped flag": (["--max-tokens", "5", "x"], "--max-tokens; did you mean --max-new-tokens? ("),
    "flag like no other": (["--zzz", "x"], "error: unrecognized arguments: --zzz (--help lists the flags)"),
    "alike in dashes": (["--foo", "x"], "error: unrecognized arguments: --foo (--help lists the flags)"),
    "prompt without quotes": (
        ["Name", "three", "rivers"],
        "error: unrecognized arguments: three rivers; put the prompt in quotes (--help lists the flags)",
    ),
    "no batch": (["--batch-size", "0", "x"], "error: --batch-size is 0: it must be an integer of at least 1"),
    "baseline of many": (["--batch-size", "2", "--baseline", "x"], "--baseline with --batch-size 2: it"),
    "adaptation of none": (["--adapt", "--ea-model", "none", "--lookup", "x"], "with --ea-model none: only"),
    "adaptation of layers": (["--adapt", "--draft-layers", "3", "x"], "--adapt with --draft-layers: only"),
    "adaptation of many": (["--batch-size", "2", "--adapt", "x"], "--adapt with --batch-size 2: it works"),
    "all skipped": (["--skip", "1", "x"], "--skip is 1: it must be an integer between 0 and 0; the command"),
    "raw system": (["--raw", "--system", "s", "x"], "--system"),
    "negative threshold": (["--threshold", "-0.1", "x"], "error: --threshold is -0.1"),
    "NaN threshold": (["--threshold", "nan", "x"], "error: --threshold is nan"),
    "threshold no number": (["--threshold", "much", "x"], "'much'"),
    "price alone": (["--price", "1.5", "x"], "--price without --threshold: nothing is followed then"),
    "divergence alone": (["--divergence", "tv", "x"], "--divergence without --threshold"),
    "cost alone": (["--threshold", "0.3", "--cost", "kl", "x"], "--cost is kl without a --price above 0: it"),
    "two biases": (["--logit-bias", "3=1", "--logit-bias", "3=2", "x"], "the token 3 twice"),
    "price at 0": (["--threshold", "0", "--price", "2", "x"], "--price with --threshold 0: nothing is"),
    "unknown divergence": (["--divergence", "kl", "x"], "'kl'"),
    "unknown mode": (["--mode", "loose", "x"], "'loose'"),
    "threshold of another rule": (["--rule", "lossless", "--threshold", "0.3", "x"], "--threshold is 0.3"),
    "epsilon of another rule": (["--epsilon", "0.3", "x"], "--epsilon is 0.3"),
    "negative temperature": (["--temperature", "-1", "x"], "temperature is -1"),
    "NaN temperature": (["--temperature", "nan", "x"], "temperature is nan"),
    "top-p 0": (["--top-p", "0", "x"], "error: --top-p is 0"),
    "negative top-k": (["--top-k", "-1", "x"], "error: --top-k is -1"),
    "no new tokens": (["--max-new-tokens", "0", "x"], "error: --max-new-tokens is 0"),
    "negative new tokens": (["--max-new-tokens", "-3", "x"], "error: --max-new-tokens is -3"),
    "negative seed": (["--seed", "-1", "x"], "seed is -1"),
    "seed too large": (["--seed", str(2**63), "x"], "seed is"),
    "seed of words": (["--seed", "3/x", "x"], "seed is 3/x"),
    "tree of no size": (["--total-tokens", "many", "x"], "'many' is neither a number of nodes nor auto"),
    "empty tree": (["--total-tokens", "0", "x"], "error: --total-tokens is 0"),
    "tree without depth": (["--depth", "0", "x"], "depth is 0"),
    "tree that cannot be": (["--total-tokens", "99", "--depth", "1", "x"], "error: --total-tokens is 99"),
    "tree too narrow": (["--total-tokens", "2", "--tree-top-k", "0", "x"], "error: --tree-top-k is 0"),
    "tree too deep to measure": (
        ["--depth", "64", "x"],
        "error: --depth is 64: a measured tree has at most 64 nodes, the root among them; lower depth",
    ),
    "broken system message": (["--system", "a\udcff", "x"], "--system is not UTF-8 at character 1"),
    "broken stop": (["--stop", "a", "--stop", "\udcff", "x"], "--stop is not UTF-8 at character 0"),
    "broken bad word": (["--bad-word", "\udcff", "x"], "--bad-word is not UTF-8 at character 0"),
    "broken form": (["--regex", "\udcff", "x"], "--regex is not UTF-8 at character 0"),
    "min-p above 1": (["--min-p", "2", "x"], "error: --min-p is 2"),
    "min-p of the rule above 1": (
        ["--threshold", "0.3", "--fuzzy-min-p", "2", "x"],
        "error: --fuzzy-min-p is 2.0: it must be a number between 0 and 1; 0 turns the guard off",
    ),
    "negative in a row": (
        ["--threshold", "0.3", "--max-consecutive", "-1", "x"],
        "error: --max-consecutive is -1: it must be an integer between 0 and 2147483647; leave it out",
    ),
    "negative logprobs": (
        ["--logprobs", "-1", "--json", "x"],
        "error: --logprobs is -1: it must be an integer between 0 and 100; leave it out",
    ),
    "the same text thrice": (
        ["--temperature", "0", "--num-return-sequences", "3", "x"],
        "error: --num-return-sequences is 3 at temperature 0: all would be the same text; give a temperature",
    ),
    "empty stop": (["--stop", "", "x"], "error: --stop has ''"),
    "empty bad word": (["--bad-word", "", "x"], "a bad word is empty"),
    "more than all new tokens": (
        ["--min-new-tokens", "9", "--max-new-tokens", "8", "x"],
        "error: --min-new-tokens is 9: it must be an integer between 0 and 8; lower it",
    ),
    "penalty 0": (["--repetition-penalty", "0", "x"], "error: --repetition-penalty is 0.0"),
    "no number as a bias": (["--logit-bias", "3=nan", "x"], "error: --logit-bias is nan"),
    "no token": (["--suppress-tokens", "-3", "x"], "--suppress-tokens"),
    "nothing drafts": (
        ["--ea-model", "none", "x"],
        "error: --ea-model is none with --total-tokens auto: nothing drafts a tree; add --lookup",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        generate, "load_model", lambda args: pytest.fail("a mistake must be found before loading")
    )
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and words in err


def test_a_mistake_has_its_exit_code_where_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert generate.main(["--total-tokens", "0", "x"]) == 2


OF_RULES = {  # whose fields and their ranges are known with torch alone
    "threshold of another rule", "epsilon of another rule", "min-p of the rule above 1", "negative in a row",
}  # fmt: skip


@pytest.mark.parametrize("argv", [argv for name, (argv, _) in MISTAKES.items() if name not in OF_RULES])
def test_a_mistake_is_found_before_threads_compile(
    argv: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be waited for."""
    monkeypatch.setattr(generate, "begin_early", lambda args: pytest.fail("they began"))
    assert run(capsys, *argv)[0] == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: "),
        (b'{"text": "a"}\n', "p.jsonl:1: "),
        (b'{"turns": []}\n', "p.jsonl:1: "),
        (b'["a"]\n', "p.jsonl:1: "),
        (b'{"prompt": 5}\n', "p.jsonl:1: "),
        (b'{"prompt": "a"}\n{"prompt": ""}\n', "prompt 2"),
        (b"\n", "no prompt"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_bad_jsonl(
    content: bytes, words: str, model: ScriptedModel, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    code, out, err = run(capsys, "--prompt-file", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err and str(path) in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--dtype", "int3"], "int3"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--base-model", "/does/not/exist"], "/does/not/exist"),
        (["--base-model", "/does/not/exist.gguf"], "/does/not/exist.gguf"),
    ],
)
def test_models_and_devices_that_are_not_there(
    argv: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    code, out, err = run(capsys, *argv, "x")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_what_the_engine_refuses_is_a_mistake(
    model: ScriptedModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(input_ids: torch.Tensor, *options: Any) -> None:
        if input_ids.shape[1] > 4:
            raise ValueError("the prompt has 6 tokens:\n  at most 4 fit")
        return scripted(input_ids, *options)

    scripted = model.stream
    monkeypatch.setattr(model, "stream", refuse)
    assert run(capsys, "--raw", "Hello?")[::2] == (
        2,
        "python -m eagle_fsd.generate: error: the prompt has 6 tokens: at most 4 fit\n",
    )
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "abc"}\n{"prompt": "abcdef"}\n')
    code, out, err = run(capsys, "--raw", "--prompt-file", str(path))
    assert (code, out) == (2, f"{REPLY}\n\n")
    assert "prompt 2 of 2: the prompt has 6" in err


def test_a_prompt_that_cannot_be_encoded_is_named(
    model: ScriptedModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(messages: Sequence[dict[str, str]], **_options: object) -> None:
        if "bad" in messages[-1]["content"]:
            raise ValueError("the template refuses it")
        return template(messages, **_options)

    template = model.tokenizer.apply_chat_template
    monkeypatch.setattr(model.tokenizer, "apply_chat_template", refuse)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "abc"}\n{"prompt": "a bad one"}\n')
    code, out, err = run(capsys, "--prompt-file", str(path))
    assert (code, out) == (2, "") and "error: prompt 2 of 2: " in err and "refuses" in err


def test_a_prompt_that_is_too_long_is_refused_before_any_is_answered(
    model: ScriptedModel, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * length}) + "\n" for length in (3, 511, 512)))
    assert run(capsys, "--raw", "--prompt-file", str(path))[:2] == (2, "") and not model.calls
    assert run(capsys, "--raw", "y" * 512)[2] == (
        "python -m eagle_fsd.generate: error: the prompt has 512 tokens: the target has 512 positions, and "
        "one must be left for the answer; shorten the prompt\n"
    )
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert run(capsys, "--raw", "--prompt-file", str(path))[0] == 0 and len(model.calls) == 2


@pytest.mark.parametrize(
    ("flag", "form", "words"),
    [
        ("--json-schema", '{"type": "nosuch"}', "--json-schema cannot be followed: Invalid type: nosuch"),
        ("--regex", "(a", "--regex cannot be followed: "),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_before_loading(
    flag: str, form: str, words: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason='forms need the extra: pip install "eagle-fsd[schema]"')
    monkeypatch.setattr(generate, "load_model", lambda args: pytest.fail("it must be found before loading"))
    code, out, err = run(capsys, flag, form, "x")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err and err.endswith("; change it\n")


def test_one_node_or_lookup_needs_no_head(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    for more in (["--total-tokens", "1"], ["--lookup"]):
        assert run(capsys, "--ea-model", "none", *more, "Hello?")[0] == 0


def test_verbose_shows_where_a_mistake_was_found(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    code, _, err = run(capsys, "--verbose", "--threshold", "-1", "x")
    assert code == 2 and "Traceback" in err


def test_no_chat_template(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    model.tokenizer.chat_template = None
    code, _, err = run(capsys, "Hello?")
    assert code == 2 and "--raw" in err
    assert run(capsys, "--raw", "Hello?")[0] == 0


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no system role') }}",
            "refuses this chat (no system role): leave the system message out, or continue the prompt as it",
        ),
        ("{{ messages[0]['content'] + 1 }}", "refuses this chat (can only concatenate str"),
        ("{% if %}", "chat template is broken (Expected an expression"),
    ],
)
def test_chat_templates_that_fail(
    model: ScriptedModel,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    message: str,
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    def apply(messages: list[dict[str, str]], **_: object) -> None:
        render_jinja_template([messages], chat_template=template)

    monkeypatch.setattr(model.tokenizer, "apply_chat_template", apply, raising=False)
    code, _, err = run(capsys, "--system", "Be brief.", "Hello?")
    assert code == 2 and message in err and "--raw" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["a\udcff"], ["--system", "\udcff", "Hello?"], ["--raw", "a\udcff"]])
def test_arguments_that_are_not_utf8(
    model: ScriptedModel, capsys: pytest.CaptureFixture, arguments: list[str]
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "is not UTF-8 at character" in err and err.count("\n") == 1


def test_a_closed_stdin(
    model: ScriptedModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run(capsys, "-")
    assert code == 2 and "stdin is closed: pipe a prompt into it" in err


@pytest.mark.parametrize("name", ["gone.txt", "."])
def test_prompt_files_that_cannot_be_read(
    model: ScriptedModel, capsys: pytest.CaptureFixture, tmp_path: Path, name: str
) -> None:
    code, _, err = run(capsys, "--prompt-file", str(tmp_path / name))
    assert code == 2 and "cannot be read (" in err and "name a text or .jsonl file" in err


def test_a_json_file_is_no_prompt(
    model: ScriptedModel, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    file.write_text('["Hi", "Why?"]')
    code, _, err = run(capsys, "--prompt-file", str(file))
    assert code == 2 and "rows.json is a .json file: prompts must be rows of a .jsonl file" in err


def test_a_closed_stdout_is_one_line() -> None:
    command = f"{sys.executable} -m eagle_fsd.generate Hello? >&-"
    result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2 and "stdout is closed" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    code = (
        "import sys; from eagle_fsd import generate;"
        "generate.run = lambda args, out: (out.write('x' * 99999), out.flush());"
        "sys.exit(generate.main(['Hello?']))"
    )
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2 and "stdout takes no more (No space left on device)" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("step", [0, 2])
def test_an_unexpected_exception_keeps_its_traceback(model: ScriptedModel, step: int) -> None:
    def fail(now: int) -> None:
        if now == step:
            raise RuntimeError("a fault")

    model.during = fail
    with pytest.raises(RuntimeError, match="a fault"):
        generate.main(["Hello?"])


@pytest.mark.parametrize("step", [0, 2])
def test_logits_that_are_not_finite_are_one_line(
    model: ScriptedModel, capsys: pytest.CaptureFixture, step: int
) -> None:
    def fail(now: int) -> None:
        if now == step:
            raise NonFiniteLogits(step + 1, 0)

    model.during = fail
    code, out, err = run(capsys, "Hello?")
    assert code == 2 and err.count("\n") == 1
    assert f"error: step {step + 1} of row 0: the target's logits are not finite" in err and "dtype" in err
    assert bool(out) == (step > 0) and out.count("\n") == out.endswith("\n") == (step > 0)


def test_the_tree_is_measured_behind_the_answer(
    model: ScriptedModel, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """Nobody waits for it; it is measured first for a comparison. Ctrl-C puts it off, or ends a file."""
    assert run(capsys, "Hello?")[0] == 0
    run(capsys, "--baseline", "Hello?")
    later = [options["tree"].later for name, _, options in model.calls if name == "stream"]
    assert later == [True, False]

    def interrupted() -> None:
        assert capsys.readouterr().out.endswith("\n"), "the whole answer is there"
        raise KeyboardInterrupt

    model.settler.measure_postponed = interrupted
    assert run(capsys, "Hello?") == (0, "", "interrupted: the tree's size is measured another time\n")
    two = tmp_path / "two.jsonl"
    two.write_text('{"prompt": "Hello?"}\n' * 2)
    assert run(capsys, "--prompt-file", str(two)) == (130, "", "interrupted\n")


@pytest.mark.parametrize("step", [0, 2])
def test_memory_that_ends_is_one_line(model: ScriptedModel, capsys: pytest.CaptureFixture, step: int) -> None:
    def fail(now: int) -> None:
        if now == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1 GiB.")

    model.during = fail
    code, _, err = run(capsys, "Hello?")
    assert code == 2 and err.count("\n") == 1
    assert "error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB" in err


def test_a_value_error_in_mid_run_is_a_fault(model: ScriptedModel) -> None:
    def fail(now: int) -> None:
        if now == 2:
            raise ValueError("a fault")

    model.during = fail
    with pytest.raises(ValueError, match="a fault"):
        generate.main(["Hello?"])


# -- endings ----------------------------------------


pytestmark = pytest.mark.usefixtures("interrupts_arrive")


def press_ctrl_c(times: dict[int, int], number: int = signal.SIGINT) -> Any:
    def during(step: int) -> None:
        for _ in range(times.get(step, 0)):
            assert signal.getsignal(number) is not signal.SIG_DFL, "it would end the tests"
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    return during


def test_ctrl_c_ends_after_the_step(model: ScriptedModel, capsys: pytest.CaptureFixture) -> None:
    model.during = press_ctrl_c({1: 1})
    code, out, err = run(capsys, "Hello?")
    assert (code, out) == (130, "Grüß\n")
    assert (
        err
        == "6 tokens in 1.0 s (6.0 tok/s), tau 3.00, 0 fuzzy accepts, lossless, tree 16/5/8, interrupted\n"
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_behind_the_last_step_is_not_lost(
    model: ScriptedModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The answer is whole, and no other prompt is answered."""
    path, steps = tmp_path / "p.jsonl", generate.explain_steps
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def late(stream: Any) -> Iterator[list[int]]:
        yield from steps(stream)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    monkeypatch.setattr(generate, "explain_steps", late)
    code, out, _ = run(capsys, "--json", "--prompt-file", str(path))
    (record,) = map(json.loads, out.splitlines())
    assert code == 130 and record["text"] == REPLY


def test_a_full_stderr_loses_no_answer(
    model: ScriptedModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert generate.main(["--json", "--prompt-file", str(path)]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == [REPLY] * 2


def test_half_a_character_is_found_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b\\ud83d"}\n')
    monkeypatch.setattr(generate, "load_model", lambda args: pytest.fail("it was loaded"))
    code, out, err = run(capsys, "--prompt-file", str(path))
    assert (code, out) == (2, "") and "prompt 2 of " in err and "is not UTF-8 at character 1" in err


def test_prompt_files_take_text_in_parts_and_name_rows_that_are_too_deep(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    parts = [{"type": "text", "text": "Why is "}, {"type": "text", "text": "that?"}]
    assert find_prompt({"messages": [{"role": "user", "content": parts}]}) == "Why is that?"
    for some in ([], [{"type": "image_url"}], [*parts, {"type": "image_url"}]):
        assert find_prompt({"messages": [{"role": "user", "content": some}]}) is None
    path = tmp_path / "p.jsonl"
    for line, words in (("[" * 100_000, "recursion"), ('{"prompt": "a", "x": ' + "9" * 5000, "4300")):
        path.write_text('{"prompt": "a"}\n' + line + "\n")
        code, out, err = run(capsys, "--prompt-file", str(path))
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert f"{path}:2: is not JSON (" in err and words in err


def test_a_job_in_the_background_keeps_ctrl_c_ignored(
    model: ScriptedModel, capsys: pytest.CaptureFixture
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model.during = press_ctrl_c({1: 2})
    code, out, err = run(capsys, "Hello?")
    assert (code, out) == (0, f"{REPLY}\n") and "interrupted" not in err
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_with_json(model: ScriptedModel, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    model.during = press_ctrl_c({1: 1})
    code, out, _ = run(capsys, "--json", "--baseline", "--prompt-file", str(path))
    (record,) = map(json.loads, out.splitlines())
    assert code == 130 and record["finish_reason"] == "interrupted"
    assert (record["text"], record["new_tokens"], record["steps"]) == ("Grüß", 6, 2)
    assert record["baseline_seconds"] is None and record["speedup"] is None


@pytest.mark.usefixtures("interrupts_arrive")
@pytest.mark.parametrize("number", [signal.SIGINT, *ENDING])
def test_a_second_ctrl_c_does_not_wait(
    model: ScriptedModel, capsys: pytest.CaptureFixture, number: int
) -> None:
    model.during = press_ctrl_c({1: 2}, number)
    code, out, err = run(capsys, "Hello?")
    assert (code, out) == (130, "Gr\ufffd\n")
    assert "interrupted" in err and all(signal.getsignal(one) is signal.SIG_DFL for one in ENDING)


def test_a_program_that_has_a_handler_for_sigterm_keeps_it(
    model: ScriptedModel, capsys: pytest.CaptureFixture
) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        model.during = press_ctrl_c({1: 1}, signal.SIGTERM)
        code, out, _ = run(capsys, "Hello?")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, out, seen) == (0, f"{REPLY}\n", [signal.SIGTERM])


def test_ctrl_c_while_loading(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load_model", load)
    assert run(capsys, "Hello?") == (130, "", "interrupted\n")


def test_a_reader_that_goes_away(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert generate.main(["Hello?"]) == 141


def test_a_terminal_without_the_characters(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert generate.main(["Hello?"]) == 0
    assert raw.getvalue() == b"Gr??e, ?? ?!\n"


# -- the real model ----------------------------------------


def test_real_answer_equals_the_engine(
    smollm2: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "load_model", lambda args: smollm2)
    flags = [
        "--total-tokens",
        "16",
        "--max-new-tokens",
        "24",
        "--min-new-tokens",
        "10",
        "Write one sentence with an emoji and the word café.",
    ]
    code, out, _ = run(capsys, "--json", "--baseline", *flags)
    record = json.loads(out)
    assert code == 0 and record["baseline_same_tokens"] is True and record["tau"] > 1.0
    assert record["text"] == smollm2.tokenizer.decode(record["token_ids"], skip_special_tokens=True)
    assert len(record["token_ids"]) == record["new_tokens"] <= 24
    code, out, _ = run(capsys, *flags)
    assert (code, out) == (0, record["text"] + "\n")


@pytest.mark.real
@pytest.mark.slow  # a server's process, and this one's code with a scripted model, end on it in quick tests
def test_real_process_ends_on_ctrl_c(smollm2: Any) -> None:
    command = [
        sys.executable,
        "-m",
        "eagle_fsd.generate",
        "--total-tokens",
        "16",
        "--max-new-tokens",
        "2000",
        "Write a long story about the sea.",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and (first + out).strip()
    assert err.count(b"\n") == 1 and err.endswith(b"interrupted\n"), err.decode()
