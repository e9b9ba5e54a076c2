"""--batch-size: the same answers as one at a time, in the same order, and none that was made is lost."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.full_disk import FullDisk
from support.tiny_models import tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD, generate
from eagle_fsd.cli import many_answers
from eagle_fsd.decoding import loop
from eagle_fsd.decoding.many import TextStream
from eagle_fsd.target.model import TargetModel

TEXTS = ["Hello there", "a", "Once upon a time in the west", "Sum", "What is it?"]
FLAGS = ["--raw", "--max-new-tokens", "12", "--total-tokens", "8", "--depth", "3", "--tree-top-k", "3"]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags that answer TEXTS with a tiny model."""
    model = EagleFSD(TargetModel(tiny_model()), tiny_head(), tiny_tokenizer())
    monkeypatch.setattr(generate, "load_model", lambda args: model)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return ["--prompt-file", str(path), *FLAGS]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = generate.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


TIMES = ("seconds", "prefill_seconds", "draft_seconds", "verify_seconds", "tokens_per_second")


def answers(out: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in out.splitlines()]
    for record in found:
        assert all(record.pop(name) >= 0 for name in TIMES)
        for one in record.get("logprobs", ()):  # which are rounded otherwise beside others
            one["logprob"] = round(one["logprob"], 3)
            one["top"] = [token for token, _ in one["top"]]
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ["--stop", "s!"],
        ["--temperature", "0.9", "--seed", "4/2", "--logprobs", "1"],
        ["--threshold", "0.4", "--stop", "l"],
    ],
    ids=["greedy", "sampled", "fuzzy"],
)
def test_the_answers_are_those_of_one_at_a_time(
    prompts: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*prompts, *flags, "--num-return-sequences", "2"] if "--seed" in flags else [*prompts, *flags]
    code, out, _ = run(capsys, *flags, "--json")
    assert code == 0
    for size in ("2", "9"):
        code, many, err = run(capsys, *flags, "--json", "--batch-size", size)
        assert code == 0
        records = answers(many)
        assert [record.pop("number") for record in records] == list(range(1, len(records) + 1))
        assert records == answers(out)
        tokens = sum(record["new_tokens"] for record in records)
        assert err.startswith(f"{len(records)} of {len(records)} answers: {tokens} tokens in ")
        assert err.count("\n") == 1 and err.endswith(
            "tree 8/3/3, seed 4/2\n" if "--seed" in flags else "8/3/3\n"
        )


def test_texts_stand_apart_as_before(prompts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, one, _ = run(capsys, *prompts)
    _, many, _ = run(capsys, *prompts, "--batch-size", "3")
    assert many == one and one.count("\n\n") >= len(TEXTS) - 1


def test_a_run_goes_on_behind_what_is_skipped(prompts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*prompts, "--json", "--temperature", "1", "--seed", "3", "--num-return-sequences", "2"]
    _, whole, _ = run(capsys, *flags, "--batch-size", "4")
    for size in ("1", "4"):
        code, rest, err = run(capsys, *flags, "--batch-size", size, "--skip", "3")
        assert err.endswith(f", seed 3{'/9' if size == '1' else ''}\n")
        found = answers(rest)
        if size == "1":
            assert all("number" not in record for record in found)
            found = [{**record, "number": number} for number, record in enumerate(found, 7)]
        assert code == 0 and found == answers(whole)[6:]
    _, rest, _ = run(capsys, *prompts, "--json", "--batch-size", "4", "--skip", "4")
    assert [record["number"] for record in answers(rest)] == [5]  # alone, and yet one of many


@pytest.mark.parametrize("size", ["1", "4"])
def test_errors_name_a_prompt_by_its_place_in_the_file(
    prompts: list[str], size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is skipped, and however many texts each is to get."""
    flags = [
        *prompts,
        "--temperature",
        "1",
        "--num-return-sequences",
        "2",
        "--skip",
        "1",
        "--batch-size",
        size,
    ]
    usual, once = EagleFSD._request, tiny_tokenizer()(TEXTS[2])["input_ids"][1]

    def forbid(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        third = ids[:, 1] == once
        if size == "1" and bool(third.any()):
            raise ValueError("it is forbidden")
        return logits.masked_fill(third[:, None], -torch.inf)

    def with_forbidden(self: EagleFSD, options: Any, *rest: Any) -> Any:
        return usual(self, dataclasses.replace(options, logits_processor=forbid), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(EagleFSD, "_request", with_forbidden)
        code, _, err = run(capsys, *flags)
    named = re.findall(r"prompt \d+ of \d+", err)
    assert code == 2 and named and set(named) == {"prompt 3 of 5"}
    lines = [json.dumps({"prompt": text}) for text in ("a", "b", "c" * 300)]
    Path(prompts[1]).write_text("\n".join(lines))
    code, out, err = run(capsys, *flags)
    assert (code, out) == (2, "") and "error: prompt 3 of 3 has " in err


def after(monkeypatch: pytest.MonkeyPatch, count: int, act: Any) -> None:
    """Let something happen at the end of a step."""
    usual, steps = TextStream.step, []

    def step(self: TextStream) -> Any:
        ended = usual(self)
        steps.append(1)
        if len(steps) == count:
            act()
        return ended

    monkeypatch.setattr(TextStream, "step", step)


def send(number: int) -> None:
    assert signal.getsignal(number) is not signal.SIG_DFL, "it would end the tests"
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.usefixtures("interrupts_arrive")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_loses_no_token(
    prompts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    if number == signal.SIGTERM:  # of a job in the background, which ignores Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    flags = [*prompts, "--json", "--batch-size", "2"]
    _, out, _ = run(capsys, *flags)
    whole = answers(out)
    after(monkeypatch, 14, lambda: send(number))
    code, out, err = run(capsys, *flags)
    found = answers(out)
    assert code == 130 and ", interrupted" in err and f"{len(found)} of 5 answers: " in err
    numbers = [record["number"] for record in found]
    assert numbers == sorted(numbers) and 2 < len(found) < 5
    for record in found:
        wanted = whole[record["number"] - 1]
        if record["finish_reason"] == "interrupted":
            made = len(record["token_ids"])
            assert made < 12 and record["token_ids"] == wanted["token_ids"][:made]
        else:
            assert record == wanted
    assert {record["finish_reason"] for record in found} == {"interrupted", "length"}


@pytest.mark.parametrize("error", [RuntimeError("a fault"), KeyboardInterrupt()], ids=["fault", "two Ctrl-C"])
def test_answers_that_ended_are_written_whatever_comes(
    prompts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    """Also one that waits for an answer before it, which was not finished. Two Ctrl-C lose no other token."""

    def fail() -> None:
        raise error

    flags = [*prompts, "--json", "--batch-size", "2"]
    flags += ["--stop", answers(run(capsys, *flags)[1])[1]["text"][1]]  # so that the second text ends first
    _, out, _ = run(capsys, *flags)
    whole = answers(out)
    after(monkeypatch, 5, fail)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="a fault"):
            generate.main(flags)
        out = capsys.readouterr().out
    else:
        code, out, _ = run(capsys, *flags)
        assert code == 130
    found, parts = answers(out), 0
    for record in found:
        wanted = whole[record["number"] - 1]
        if record["finish_reason"] == "interrupted":
            parts += 1
            assert record["token_ids"] == wanted["token_ids"][: record["new_tokens"]]
        else:
            assert record == wanted
    assert len(found) > parts and bool(parts) == isinstance(error, KeyboardInterrupt)
    numbers = [record["number"] for record in found]
    assert numbers == ([2] if isinstance(error, RuntimeError) else [1, 2, 3])


def test_an_answer_that_ends_in_the_step_that_fails_is_written(
    prompts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of a step are told before their keys and values are kept, for which memory may end."""
    flags, usual = [*prompts, "--json", "--batch-size", "2"], loop.keep
    stop = answers(run(capsys, *flags)[1])[1]["text"][5]  # so that the second text ends before the first one
    flags += ["--stop", stop]
    whole = answers(run(capsys, *flags)[1])

    def keep(*parts: Any) -> Any:
        if not all(parts[4]):  # there is nothing to keep of a text that has ended
            raise RuntimeError("a fault")
        return usual(*parts)

    monkeypatch.setattr(loop, "keep", keep)
    with pytest.raises(RuntimeError, match="a fault"):
        generate.main(flags)
    found = answers(capsys.readouterr().out)
    assert found and found == [whole[record["number"] - 1] for record in found]


def test_a_text_without_a_token_is_an_error_of_its_own(
    prompts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = many_answers.answer_together

    def with_forbidden(model: Any, rows: Any, args: Any, options: Any, out: Any) -> int:
        first = rows[3][0, 1]

        def of_one(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return logits.masked_fill((ids[:, 1] == first)[:, None], -torch.inf)

        return usual(model, rows, args, dataclasses.replace(options, logits_processor=of_one), out)

    monkeypatch.setattr(generate, "answer_together", with_forbidden)
    code, out, err = run(capsys, *prompts, "--json", "--batch-size", "2")
    found = answers(out)
    assert code == 2 and len(found) == 5
    assert [record["finish_reason"] for record in found] == ["length"] * 3 + ["failed", "length"]
    assert err.startswith("error: prompt 4 of 5: ") and err.count("\n") == 2


def test_a_full_stderr_loses_no_answer(
    prompts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", FullDisk())
    assert generate.main([*prompts, "--json", "--batch-size", "3"]) == 0
    assert len(answers(capsys.readouterr().out)) == 5


def test_a_blank_prompt_that_is_skipped_is_no_mistake(
    prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(prompts[1])
    path.write_text('{"prompt": " "}\n' + path.read_text())
    assert run(capsys, *prompts)[0] == 2
    code, out, _ = run(capsys, *prompts, "--json", "--skip", "1", "--batch-size", "2")
    assert code == 0 and [json.loads(line)["number"] for line in out.splitlines()] == [2, 3, 4, 5, 6]
