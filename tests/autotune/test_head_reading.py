"""A folder with an EAGLE-3 head loads through --ea-model, and what its files leave open is measured."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle3 import IDS, Eagle3Twin, eagle3_head, save_eagle3
from support.tiny_models import VOCAB, greedy_alone, prompts_of, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.autotune import head_reading
from eagle_fsd.autotune.head_reading import own_text, settle_head
from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.drafting.eagle3.config import Reading
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle3.readings import reading_losses
from eagle_fsd.hub.kept import weights_cache
from eagle_fsd.target.kept.kept_model import KeptModel
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(10, 4, 3)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A target and an EAGLE-3 head on disk; the head's config can be read in two ways."""
    monkeypatch.setattr(head_reading, "MOST", 40)  # a short text tells them apart
    tiny_model().save_pretrained(tmp_path / "target")
    save_eagle3(eagle3_head(2, taps=(1, 1, 1)), tmp_path / "head", "specforge")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eagle_config": {IDS: [1, 1, 1]}}))
    return str(tmp_path / "target"), str(tmp_path / "head")


def test_from_pretrained_reads_measures_and_drafts(
    folders: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="eagle_fsd"):
        model = EagleFSD.from_pretrained(*folders, runtime="torch")
    assert "is the head's reading, by its loss" in caplog.text
    assert model.drafter is not None and model.drafter.name == "eagle3" and model.draft_vocab_size == 40
    prompt = prompts_of([6])
    found = model.generate(prompt, max_new_tokens=12, tree=TREE).new_tokens
    assert found == greedy_alone(tiny_model(), prompt, 12)
    caplog.clear()
    model = EagleFSD.from_pretrained(*folders, runtime="torch", head_taps=[1, 2, 1], norm_output=True)
    head = model.drafter.network
    assert head.config.reading == Reading((1, 2, 1), True) and "by its loss" not in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runtime": "openvino", "head_dtype": "bfloat16"}, "use runtime torch"),
        ({"weight_format": "int8", "head_dtype": "bfloat16"}, "use runtime torch"),
        ({"full_vocabulary": True}, "knows 40 tokens and no others"),
        ({"head_taps": [1, 2]}, "the head reads 3"),
        ({"head_taps": [1, 2, 9]}, "between 1 and the target's number of layers"),
    ],
)
def test_what_such_a_head_cannot_do(folders: tuple[str, str], options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EagleFSD.from_pretrained(*folders, **options)


@pytest.mark.parametrize("weight_format", ["float32", "int8"])
def test_openvino_computes_such_a_head_too(folders: tuple[str, str], weight_format: str) -> None:
    """At a first start and at later ones, with the reading that is measured with torch."""
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    options = {"runtime": "openvino", "weight_format": weight_format}
    wanted = EagleFSD.from_pretrained(*folders, runtime="torch")
    reading = wanted.drafter.network.config.reading
    prompt = prompts_of([6])
    if weight_format == "float32":
        text = wanted.generate(prompt, max_new_tokens=12, tree=TREE).new_tokens
    else:
        plain = EagleFSD.from_pretrained(folders[0], "none", **options)
        text = plain.generate(prompt, max_new_tokens=12, tree=TreeConfig(1)).new_tokens
    for _ in range(2):
        model = EagleFSD.from_pretrained(*folders, **options)
        assert model.runtime == "openvino" and model.drafter.network.config.reading == reading
        assert model.target.graphs.taps == tuple(sorted(set(reading.taps)))
        assert model.generate(prompt, max_new_tokens=12, tree=TREE).new_tokens == text


def test_a_reading_is_measured_once(
    folders: tuple[str, str], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later start takes it from disk. Another head, or another choice of readings, is measured."""
    counted: list[int] = []

    def measure(*arguments: object) -> dict[Reading, float]:
        counted.append(1)
        return reading_losses(*arguments)

    monkeypatch.setattr(head_reading, "reading_losses", measure)
    first = EagleFSD.from_pretrained(*folders, runtime="torch").drafter.network.config
    with caplog.at_level(logging.INFO, logger="eagle_fsd"):
        second = EagleFSD.from_pretrained(*folders, runtime="torch").drafter.network
    assert second.config == first and second.readings == (first.reading,) and len(counted) == 1
    assert f"{first.reading} is the head's reading, as an earlier start measured" in caplog.text
    EagleFSD.from_pretrained(*folders, runtime="torch", head_taps=first.taps)
    weights = Path(folders[1]) / "model.safetensors"
    tensors = load_file(weights)
    save_file(
        {name: -tensor if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, weights
    )
    EagleFSD.from_pretrained(*folders, runtime="torch")
    assert len(counted) == 2


@pytest.mark.parametrize("loss", [math.nan, 2.0])
def test_a_measurement_that_tells_nothing_is_not_remembered(
    loss: float, folders: tuple[str, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not finite never wins, and equal ones may differ another time."""
    counted: list[Reading] = []

    def measure(head: Eagle3Head, *_: object) -> dict[Reading, float]:
        counted.extend(head.readings)
        return dict(zip(head.readings, [loss, 2.0, *[2.0] * len(head.readings)], strict=False))

    monkeypatch.setattr(head_reading, "reading_losses", measure)
    for _ in range(2):
        head = EagleFSD.from_pretrained(*folders, runtime="torch").drafter.network
        assert head.config.reading == counted[1 if math.isnan(loss) else 0]
    assert len(counted) == 4


@pytest.mark.parametrize("weight_format", [pytest.param("float32", marks=pytest.mark.slow), "int8"])
def test_a_second_start_needs_no_whole_model(
    folders: tuple[str, str], cache: Path, weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the graph that shows the head's taps, unless that was tested by another release."""
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    options = {"runtime": "openvino", "weight_format": weight_format}
    monkeypatch.setattr(weights_cache, "SETTLED", -1)  # as if the files had lain there for a while
    tiny_tokenizer().save_pretrained(folders[0])
    prompt, texts = prompts_of([6]), []
    for whole in (True, False, False):
        model = EagleFSD.from_pretrained(*folders, **options)
        kept = isinstance(model.target.held, KeptModel)
        assert kept != whole and (whole or not model.target.held._loaded)
        assert model.target.graphs.taps == tuple(sorted(set(model.drafter.network.config.taps)))
        texts.append(model.generate(prompt, max_new_tokens=12, tree=TREE).new_tokens)
    assert texts[0] == texts[1] == texts[2]
    for note in cache.glob("graphs/*/taps-*.json"):
        note.write_text(json.dumps(json.loads(note.read_text()) | {"eagle_fsd": "0.0.1"}))
    model = EagleFSD.from_pretrained(*folders, **options)
    assert (
        model.target.held._loaded
        and model.generate(prompt, max_new_tokens=12, tree=TREE).new_tokens == texts[0]
    )


def test_the_runtime_that_is_left_open_may_be_openvino(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    monkeypatch.setenv("EAGLE_FSD_RUNTIME", "openvino")
    assert EagleFSD.from_pretrained(*folders).runtime == "openvino"


def test_the_measured_text_is_the_targets_greedy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_reading, "MOST", 40)
    model = tiny_model()
    text = own_text(TargetModel(model), None)
    assert text == [0, *greedy_alone(model, [[0]], head_reading.MOST)[0]] and max(text) < VOCAB


@pytest.mark.parametrize("place", [0, 1])
@torch.no_grad()
def test_the_head_that_knows_the_taps_of_its_target_is_recognised(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lm_head is fitted to the target's text by least squares, from the taps of one of two readings."""
    monkeypatch.setattr(head_reading, "MOST", 38)
    target = TargetModel(tiny_model())
    readings = [Reading((1, 1, 1)), Reading((2, 2, 2))]
    head = eagle3_head(3, taps=readings[place].taps, draft_vocab_size=VOCAB)
    text = own_text(target, None)
    tokens = torch.tensor(text)

    states = states_at_pairs(head, target, tokens)
    wanted = torch.nn.functional.one_hot(tokens[2:], VOCAB).float()
    solution = torch.linalg.lstsq(head.readout(states[:-1]), 8 * wanted).solution
    head.lm_head.weight.copy_(solution.T)
    head.readings = tuple(readings)
    settle_head(head, target, None)
    assert head.config.reading == readings[place]


def states_at_pairs(head: Eagle3Head, target: TargetModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the head's states [n - 1, d] at the pairs of a text."""
    count = len(tokens)
    features = TargetSession(target, 1, count, head.config.taps).prefill(tokens[None], [count])[0]
    twin = Eagle3Twin(head)
    return twin.run(twin.start(features[:-1]), target.embed(tokens[1:]), list(range(count - 1)))


def test_a_text_that_ends_at_once_leaves_the_likeliest_reading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = eagle3_head(1)
    likely = head.config.reading
    head.readings = (likely, Reading((2, 2, 2)))
    monkeypatch.setattr(head_reading, "own_text", lambda *_: [1, 2])
    settle_head(head, TargetModel(tiny_model()), None)
    assert head.config.reading == likely and "ends after 2 tokens" in caplog.text


def test_the_flags() -> None:
    parser = build_parser()
    assert parser.parse_args(["x"]).head_taps is None and parser.parse_args(["x"]).norm_output is None
    args = parser.parse_args(["--head-taps", "2,16,29", "--no-norm-output", "x"])
    assert args.head_taps == (2, 16, 29) and args.norm_output is False
    for text in ("", "2,,3", "0,1,2", "a", "-1,2,3", "2.5"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--head-taps={text}", "x"])
