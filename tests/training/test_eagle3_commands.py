"""The commands that train, measure and publish an EAGLE-3 head, as a user runs them on a tiny target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle3 import eagle3_head
from support.tiny_models import HIDDEN, VOCAB, greedy_alone, prompts_of, run_loop, tiny_head, tiny_model
from support.training_world import ends_in_one_line, run_command

from eagle_fsd import EagleFSD, TreeConfig, hub
from eagle_fsd.drafting.eagle3.drafter import Eagle3Spec
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.files.fingerprints import target_identity
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.commands import head as head_command
from eagle_fsd.training.commands.evaluate import along_text
from eagle_fsd.training.data.examples import Example
from eagle_fsd.training.data.features import Extraction
from eagle_fsd.training.eagle3.new_head import new_head
from eagle_fsd.training.run.folder import BEST, read_checkpoint, read_log
from eagle_fsd.training.run.model_card import Card, write_repository

TREE = TreeConfig(10, 4, 3)
SETTINGS = "--held-out 2 --batch-tokens 128 --cpu --float32 --extract-dtype float32 --unroll 2"
LONG = "--taps 1,2,2 --epochs 40 --learning-rate 3e-2 --draft-vocab-size 80 --eval-every 1000"


class World:
    """A target on disk, shards of its own texts, and `eagle-fsd train head --eagle3` on both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder / "target")
        tiny_model().save_pretrained(self.name)
        model, _ = hub.load_target(hub.resolve_target(self.name), "float32", "cpu")
        self.target = TargetModel(model)
        self.prompts = [prompts_of([4], seed=seed)[0] for seed in range(12)]
        rows = [prompt + greedy_alone(model, [prompt], 16)[0] for prompt in self.prompts]
        examples = [Example(row, [False] * 3 + [True] * (len(row) - 3)) for row in rows]
        who, exact = target_identity(self.name, model), torch.float32
        Extraction(self.target.decoder, who, dtype=exact, taps=(1, 2, 2)).write({folder / "tapped": examples})
        Extraction(self.target.decoder, who, dtype=exact).write({folder / "plain": examples})

    def train(self, output: str, more: str = "", shards: str = "tapped", eagle3: str = "--eagle3") -> Path:
        """Run the command. Only the first run of the name "run" has its curves drawn, which takes longest."""
        argv = f"{eagle3} --base-model {self.name} --shards {self.folder}/{shards} {SETTINGS}"
        line = f"{argv} --output {self.folder}/{output} {more}".replace("{}", str(self.folder))
        with pytest.MonkeyPatch.context() as patch:
            if output != "run" or (self.folder / output).exists():
                patch.setattr(head_command, "plot_curves", lambda folder: None)
            run_command("head", line)
        return self.folder / output

    def tau(self, head: Eagle3Head) -> float:
        """Tokens per step over the prompts that were trained on, whose text must be the target's own."""
        spec = Eagle3Spec.for_target(head, self.target)
        made = run_loop(self.target, self.prompts, spec.make(12, 8, TREE), 16, tree=TREE)
        assert made.texts == greedy_alone(self.target.model, self.prompts, 16)
        return 12 * 16 / sum(one.steps for one in made.stats)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("eagle3"))


@pytest.fixture(scope="module")
def run(world: World) -> Path:
    return world.train("run", LONG + " --export {}/run/export")


def test_training_lowers_the_loss_and_raises_tau_and_text_stays_the_targets(world: World, run: Path) -> None:
    logged = [record["loss"] for record in read_log(run) if "loss" in record]
    assert sum(logged[-5:]) < sum(logged[:5]) - 5 * 0.3
    assert all(len(record["cross_entropy"]) == 2 for record in read_log(run) if "loss" in record)
    head = hub.load_any_head(str(run / "export"), HIDDEN, VOCAB, 2)
    assert isinstance(head, Eagle3Head) and len(head.draft_tokens) == 80 and len(head.readings) == 1
    assert head.config.taps == (1, 2, 2) and head.config.trained_positions == 20
    best = read_checkpoint(run / BEST)["head"]
    assert torch.equal(head.lm_head.weight, best["lm_head.weight"].half().float())
    fresh = new_head(world.target, (1, 2, 2), head.draft_tokens, 0).eval()
    assert world.tau(head) > 1.3 * world.tau(fresh)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_an_exported_head_is_named_as_ea_model_and_drafts_losslessly(
    world: World, run: Path, layout: str
) -> None:
    """A finished run exports again in another layout, without another step."""
    steps = len(read_log(run))
    world.train("run", f"{LONG} --layout {layout} --export {{}}/{layout}")
    assert len(read_log(run)) == steps
    engine = EagleFSD.from_pretrained(world.name, ea_model=world.folder / layout)
    assert isinstance(engine.drafter, Eagle3Spec) and engine.draft_vocab_size == 80
    made = engine.generate(world.prompts, max_new_tokens=16, tree=TREE)
    assert made.new_tokens == greedy_alone(world.target.model, world.prompts, 16)
    measured = along_text(engine, world.prompts, made.new_tokens)
    assert measured["top1"][0] > 0.25, "it was trained on most of this text"


def test_a_head_is_trained_on_and_its_taps_and_tokens_stay(world: World, run: Path) -> None:
    start = "--init-head {}/run/export --learning-rate 1e-12 --epochs 1"
    world.train("again", f"{start} --export {{}}/again/export")
    first, again = (load(world.folder / name / "export") for name in ("run", "again"))
    assert torch.equal(first.draft_tokens, again.draft_tokens) and first.config == again.config
    for name, value in first.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, atol=1e-3, rtol=1e-3)


def test_a_head_is_widened_as_it_is_trained_on(world: World, run: Path) -> None:
    start = "--init-head {}/run/export --learning-rate 1e-12 --epochs 1 --intermediate-size 90"
    world.train("wider", f"{start} --export {{}}/wider/export")
    first, wider = (load(world.folder / name / "export") for name in ("run", "wider"))
    assert wider.config == replace(first.config, intermediate_size=90)
    for name, value in first.state_dict().items():
        same = wider.state_dict()[name][tuple(slice(size) for size in value.shape)]
        torch.testing.assert_close(same, value, atol=1e-3, rtol=1e-3)
    world.train("new", "--taps 1,2,2 --epochs 1 --intermediate-size 31 --export {}/new/export")
    assert load(world.folder / "new" / "export").config.intermediate_size == 31
    with ends_in_one_line(r"intermediate_size is 1: the head has \d+ inner units, "):
        world.train("less", "--init-head {}/run/export --intermediate-size 1")


def load(folder: Path) -> Eagle3Head:
    return hub.load_any_head(str(folder), HIDDEN, VOCAB, 2)


def test_shards_with_taps_train_an_eagle_2_head_too(world: World) -> None:
    more = "--epochs 1 --learning-rate 1e-3"
    world.train("two", more, eagle3="")
    world.train("one", more, "plain", eagle3="")
    logs = [
        [row["loss"] for row in read_log(world.folder / name) if "loss" in row] for name in ("one", "two")
    ]
    assert logs[0] == logs[1] and logs[0]


def test_the_whole_vocabulary_is_drafted_where_it_is_small(world: World) -> None:
    world.train("whole", "--taps 1,2,2 --epochs 1 --export {}/whole/export --minutes 5")
    assert load(world.folder / "whole" / "export").draft_tokens is None


def test_mistakes_of_a_user_are_one_line(world: World) -> None:
    hub.save_head(tiny_head(), world.folder / "eagle2")
    hub.save_eagle3_head(eagle3_head(0, windows=(8,)), world.folder / "window", 2)
    hub.save_eagle3_head(eagle3_head(0, lm_head=False, draft_vocab_size=VOCAB), world.folder / "bare", 2)
    for message, options in {
        r"taps are 1,2,2 without --eagle3: .*": {"more": "--taps 1,2,2", "eagle3": ""},
        r"the usual taps are 2,1,-1: they must be between 1 and .*\(2\); name others with --taps": {},
        r"features in .*plain have no taps: .*--taps 1,2,2": {"more": "--taps 1,2,2", "shards": "plain"},
        r"features in .*have the taps \[1, 2, 2\]: .*--taps 1,1,2": {"more": "--taps 1,1,2"},
        r"noise is 0\.1 with --eagle3: .*leave --noise out": {"more": "--noise 0.1"},
        r"regression is 1 with --eagle3: .*leave --regression out": {"more": "--regression 1"},
        r"layout is 'speculators' without --eagle3: .*": {"more": "--layout speculators", "eagle3": ""},
        r"--draft-vocab-size with --init-head: .*": {"more": "--draft-vocab-size 9 --init-head x"},
        r"--taps with --init-head: .*": {"more": "--taps 1,2,2 --init-head x"},
        r"--init-head .*eagle2 with --eagle3: it is an EAGLE-1/2 head; .*": {"more": "--init-head {}/eagle2"},
        r"draft head .*window.* is of the EAGLE-3 kind: it must be an EAGLE-1/2 head": {
            "more": "--init-head {}/window",
            "eagle3": "",
        },
        r"the head's sliding window is 8, and texts have up to 20 tokens: .*": {
            "more": "--init-head {}/window"
        },
        r"the head has no lm_head of its own: .*": {"more": "--init-head {}/bare"},
        r"draft_vocab_size is 0: it must be in 1\.\.96": {"more": "--taps 1,2,2 --draft-vocab-size 0"},
    }.items():
        with ends_in_one_line(message):
            world.train("refused", **options)


def test_a_run_of_the_other_kind_of_head_is_refused_by_its_kind(
    world: World, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the target is loaded, and whatever else differs in the settings of the kinds."""
    world.train("plain", "--epochs 1", "plain", eagle3="")
    monkeypatch.setattr(hub, "resolve_target", lambda name: pytest.fail(name))
    rest = "a folder has one run, and its head stays of one kind; name another folder, or"
    with ends_in_one_line(
        rf"--output names .*/plain, .* the run of an EAGLE-1/2 head: {rest} leave --eagle3 out"
    ):
        world.train("plain", "--epochs 1")
    with ends_in_one_line(rf"--output names .*/run, .* the run of an EAGLE-3 head: {rest} add --eagle3"):
        world.train("run", "--epochs 1", eagle3="")


def test_features_names_what_taps_cost(world: World, tmp_path: Path, caplog: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    argv = f"--base-model {world.name} --data {rows} --output {tmp_path}/f --cpu --extract-dtype float32"
    with ends_in_one_line(".*has no tokenizer"):
        run_command("features", f"{argv} --eagle3 --taps 1,2,2")
    with ends_in_one_line(".*without --eagle3: only EAGLE-3 heads read them"):
        run_command("features", f"{argv} --taps 1,2,2")


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_the_card_of_an_eagle_3_head_says_so_and_its_config_stays(tmp_path: Path, layout: str) -> None:
    hub.save_eagle3_head(eagle3_head(1), tmp_path / "head", 2, layout, torch.float16)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    training = {
        **{name: "x" for name in ("device", "eagle_fsd", "commit", "torch", "transformers")},
        **{"command": "train", "steps": 9, "training_seconds": 60, "sequences": 2, "tokens": 3},
        **{"learned_tokens": 2, "held_out": {"top1": [0.5], "positions": 4}},
    }
    row = {"prompts": "own", "prompt_count": 3, "max_new_tokens": 8, "command": "tau"}
    card = Card("owner/target", "mit", "Text.", training, [row], "table", config)
    folder = write_repository(tmp_path / "head", card, "me/head", tmp_path / "repository")
    text = (folder / "README.md").read_text()
    assert (
        "An EAGLE-3 draft head (one decoder layer behind `fc`, float16, " in text
        and "EAGLE-1/2" not in text
        and "- eagle3" in text
    )
    assert ("vLLM" in text) and ("SGLang" in text) == (layout == "eagle3")
    assert json.loads((folder / "config.json").read_text()) == config
    assert load(folder).config == load(tmp_path / "head").config
