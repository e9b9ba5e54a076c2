"""What a head is worth at work: shares by depth against a plain count, calibration, the script, its plot."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stubs import random_tree
from support.tiny_models import VOCAB, KnowingEngine, greedy_alone, prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import Lossless, Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.evaluation import plots
from eagle_fsd.evaluation.measure.head_quality import TOP, DraftObserver, calibration, observe
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.commands.evaluate import along_text

ROOT = Path(__file__).parents[2]
TREE = TreeConfig(16, 5, 3)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"))


@pytest.mark.parametrize("seed", range(8))
def test_the_observer_counts_what_a_plain_walk_counts(seed: int) -> None:
    """Nodes of ragged random trees, with logits that often agree with the tree."""
    draw = torch.Generator().manual_seed(seed)
    tree = random_tree(batch=3, nodes=14, depth=4, width=3, vocab_size=40, seed=seed)
    batch, nodes = tree.tokens.shape
    vocabulary = tree.log_q.shape[-1]
    logits = torch.randn(batch, nodes, vocabulary, generator=draw)
    for row in range(batch):  # at half of the nodes the target takes the first child's token
        for node in range(1, nodes):
            if torch.rand((), generator=draw) < 0.5:
                logits[row, tree.parents[row, node], tree.tokens[row, node]] += 9.0
    seen = DraftObserver(tree.depth)
    verified = Verified(tree, logits, SamplingConfig(), torch.empty(0, dtype=torch.int64))
    emitted = torch.zeros(batch, dtype=torch.int64)
    verdict = accept(Lossless(), verified, RowRandom(0, batch), emitted)
    seen(verified, verdict, dict.fromkeys(range(batch), 1))

    reached, right = [0] * tree.depth, {count: [0] * tree.depth for count in TOP}
    confidence, taken = [], []
    for row in range(batch):
        law = {int(o): tree.log_q[row, i] for i, o in enumerate(tree.owners[row].tolist()) if o >= 0}
        for node in range(1, nodes):
            parent = int(tree.parents[row, node])
            confidence.append(float(law[parent].exp()[tree.tokens[row, node]]))
            taken.append(int(logits[row, parent].argmax()) == int(tree.tokens[row, node]))
        node = 0
        while node in law:
            wanted, depth = int(logits[row, node].argmax()), int(tree.depths[row, node])
            reached[depth] += 1
            for count in TOP:
                right[count][depth] += wanted in law[node].topk(count).indices.tolist()
            children = [n for n in range(nodes) if int(tree.parents[row, n]) == node]
            node = next((n for n in children if int(tree.tokens[row, n]) == wanted), -1)
    assert seen.reached.tolist() == reached
    assert seen.right.tolist() == [right[count] for count in TOP]
    assert torch.cat(seen.taken).tolist() == taken
    torch.testing.assert_close(torch.cat(seen.confidence), torch.tensor(confidence))


def test_an_oracle_is_right_at_every_depth(target: TargetModel) -> None:
    prompts = prompts_of((5, 9, 3))
    texts = greedy_alone(target.model, prompts, 24)
    engine = KnowingEngine(target, texts, reach=None)
    report, answers = observe(engine, prompts, TREE, max_new_tokens=24, batch_size=3)
    assert answers == texts
    assert report.tau == 6.0 and report.reached == [12] * 5
    assert report.right[1] == report.right[3] == [1.0] * 5
    wrong, _ = observe(KnowingEngine(target, texts, wrong=True), prompts, TREE, 24, 3)
    assert wrong.tau == 1.0 and wrong.right[1] == [0.0] * 5
    assert wrong.reached[0] == 3 * 24


@pytest.mark.parametrize("tree", [TREE, TreeConfig(16, 5, 3, 0.012)], ids=str)
def test_a_report_does_not_depend_on_the_batch(target: TargetModel, tree: TreeConfig) -> None:
    engine, prompts = EagleFSD(target, tiny_head()), prompts_of((5, 9, 3, 7))
    reports = [observe(engine, prompts, tree, 12, size)[0] for size in (1, 4)]
    assert reports[0].right == reports[1].right and reports[0].reached == reports[1].reached
    assert reports[0].accept_histogram == reports[1].accept_histogram
    drafted = [sum(nodes for *_, nodes in report.bins) for report in reports]
    assert drafted[0] == drafted[1] <= 15 * reports[0].reached[0]
    assert (drafted[0] == 15 * reports[0].reached[0]) == (tree is TREE)


def test_calibration_of_a_calibrated_and_of_an_overconfident_draft() -> None:
    draw = torch.Generator().manual_seed(0)
    confidence = torch.rand(200_000, generator=draw)
    fair = torch.rand(200_000, generator=draw) < confidence
    bins, error = calibration(confidence, fair)
    assert len(bins) == 10 and sum(nodes for *_, nodes in bins) == 200_000 and error < 0.01
    assert all(abs(mean - share) < 0.02 for mean, share, _ in bins)
    assert calibration(torch.full((100,), 0.95), torch.arange(100) < 45)[1] == pytest.approx(0.5)
    assert calibration(torch.tensor([1.0, 0.0]), torch.tensor([True, False])) == (
        [(0.0, 0.0, 1), (1.0, 1.0, 1)],
        0.0,
    )


class Tokenizer:
    chat_template = "yes"
    pad_token_id = 0

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor([[1, *(ord(letter) % VOCAB for letter in messages[0]["content"])]])}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["evaluate_head.py", *arguments])
    runpy.run_path(str(ROOT / "train" / "evaluate_head.py"), run_name="__main__")


def test_the_script_writes_a_report(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = EagleFSD(target, tiny_head(), tokenizer=Tokenizer(), base_model="tiny", ea_model="head")
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *_, **__: engine)
    prompts, output = tmp_path / "p.jsonl", tmp_path / "new" / "out"
    prompts.write_text('{"prompt": "Why?"}\n{"prompt": "How so?"}\n')
    run(monkeypatch, "--prompts", str(prompts), "--output", str(output), "--max-new-tokens", "8")
    record = json.loads((output / "report.json").read_text())
    assert (record["base_model"], record["ea_model"], record["tree"]) == ("tiny", "head", "16/5/8")
    assert sorted(path.name for path in output.iterdir()) == ["report.json"]
    assert sum(nodes for *_, nodes in record["bins"]) > 0 and 0 <= record["error"] <= 1
    shown = capsys.readouterr().out
    assert f"tau {record['tau']:.3f}" in shown and "among the draft's best 3, by depth, if right" in shown
    assert "along the text, right before or not, best 1 and 3, by depth: " in shown
    assert len(record["along_text"]["top3"]) == 5 and record["along_text"]["positions"] > 0


def test_a_head_of_fewer_tokens_than_are_looked_at_has_a_report(target: TargetModel) -> None:
    head = tiny_head().restrict(torch.tensor([5, 7]), text_tokens=0)
    engine = EagleFSD(target, head, base_model="tiny", ea_model="head")
    prompts = prompts_of([5, 3])
    _, answers = observe(engine, prompts, TreeConfig(4, 3, 2), 8, batch_size=2)
    measured = along_text(engine, prompts, answers)
    assert len(measured["top3"]) == 5 and measured["positions"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tree", "1/1/1"], "has no drafts to look at"),
        (["--tree", "x"], "tree is 'x'"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--prompts", "gone.jsonl"], "gone.jsonl: cannot be read"),
        (["--skip", "1"], "skip is 1: "),
        (["--output", "{}/p.jsonl"], "p.jsonl, where nothing can be written (Not a directory)"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(EagleFSD, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    usual = ["--prompts", "{}/p.jsonl", "--output", "{}/o"]
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *(word.replace("{}", str(tmp_path)) for word in (*usual, *arguments)))
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"plots need matplotlib.*pip install eagle-fsd\[eval\]"):
        plots.require_matplotlib()
