"""The second turn of a chat, timed on a tiny model."""

from __future__ import annotations

import re

import pytest
from support.tiny_models import tiny_head, tiny_model

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.evaluation import second_turn as script
from eagle_fsd.target.model import TargetModel


def engine() -> EagleFSD:
    return EagleFSD(TargetModel(tiny_model()), tiny_head())


def test_the_turn_is_the_same_and_only_the_question_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prefill = script.Scheduler._read_prompts

    def counted(scheduler: script.Scheduler) -> None:
        if scheduler.waiting:
            found = scheduler._find_prefix(scheduler.waiting[0])
            read.append(len(scheduler.waiting[0].prompt) - (0 if found is None else found[1]))
        prefill(scheduler)

    monkeypatch.setattr(script.Scheduler, "_read_prompts", counted)
    turns = [
        script.second_turn(engine(), TreeConfig(8, 3, 3), keeps, 60, 7, 9, seed=4) for keeps in (False, True)
    ]
    assert turns[0][0] == turns[1][0] and len(turns[0][0]) == 9
    assert all(seconds > 0 for _, seconds in turns)
    assert read[:3] == [51, 67, 51] and 7 <= read[3] <= 7 + 4


def test_the_script_end_to_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = engine()
    monkeypatch.setattr(script, "load_engine", lambda _: made)
    script.main(["--history", "40", "--question", "5", "--max-new-tokens", "6", "--repeats", "2"])
    printed = capsys.readouterr().out
    assert "median of 2 chats, 2 of them with equal answers" in printed
    assert re.search(r"\| all is read \| \d+ \| 1\.0 \|\n\| the first turn was kept \| \d+ \| \d", printed)
    for wrong, complaint in (
        ("--repeats 0", "repeats is 0"),
        ("--history 64", "history is 64"),
        ("--history 300", "are 394 tokens: the target has 256 positions"),
    ):
        with pytest.raises(SystemExit):
            script.main(wrong.split())
        assert complaint in capsys.readouterr().err
