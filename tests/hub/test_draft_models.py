"""Draft models by name: from a folder to an engine that drafts with it, and what is refused before that."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.drafter_laws import require_own_calibrations
from support.tiny_models import VOCAB, greedy_alone, prompts_of, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.hub.choose_runtime import USUAL
from eagle_fsd.hub.loading import target as loading_target
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.same_vocabulary import require_same_vocabulary

TREE = TreeConfig(8, 4, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a target, a draft model, one with a padded vocabulary and one of another family."""
    root = tmp_path_factory.mktemp("models")
    models = {"target": tiny_model(), "draft": tiny_model("qwen2", seed=5)}
    models["padded"] = tiny_model("gpt2", seed=5, vocab_size=VOCAB + 8)
    models["narrow"] = tiny_model(seed=5, vocab_size=VOCAB - 1)
    for name, model in models.items():
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    models["draft"].save_pretrained(root / "other")
    tiny_tokenizer().save_pretrained(root / "other")
    file = root / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {"A": 38, "B": 37}
    file.write_text(json.dumps(content))
    models["narrow"].save_pretrained(root / "silent")
    return root


def load(folders: Path, draft: str | None = None, **options: object) -> EagleFSD:
    name = None if draft is None else folders / draft
    return EagleFSD.from_pretrained(folders / "target", draft_model=name, pack=False, **options)


@pytest.mark.parametrize("draft", ["draft", "padded", "narrow", "target"])
def test_a_draft_model_is_loaded_by_name(folders: Path, draft: str) -> None:
    args = build_parser().parse_args(["--draft-model", str(folders / draft), "x"])
    model = load(folders, args.draft_model, head_dtype="bfloat16" if draft == "padded" else None)
    assert isinstance(model.drafter, DraftModelSpec) and model.head is None
    assert (model.ea_model, model.head_folder) == (str(folders / draft), folders / draft)
    assert model.draft_vocab_size == (VOCAB - 1 if draft == "narrow" else None)
    prompt = prompts_of([6])
    found = model.generate(prompt, max_new_tokens=12, tree=TREE)
    assert found.new_tokens == greedy_alone(tiny_model(), prompt, 12)
    if draft == "target":
        assert model.generate(prompt, max_new_tokens=12, tree=TreeConfig(6, 5, 1)).stats[0].steps == 2


def test_layers_are_asked_for_by_number(folders: Path) -> None:
    args = build_parser().parse_args(["--draft-layers", "1", "x"])
    model = load(folders, draft_layers=args.draft_layers)
    assert model.ea_model == "first 1 layers" and model.head_folder is None
    assert model.drafter.name == "first-layers"
    prompt = prompts_of([6])
    found = model.generate(prompt, max_new_tokens=12, tree=TREE)
    assert found.new_tokens == greedy_alone(tiny_model(), prompt, 12)
    with pytest.raises(ValueError, match="draft_layers is 2: the target has 2 layers"):
        load(folders, draft_layers=2)


@pytest.mark.parametrize("layers", [0, -1, 1.5, True])
def test_a_wrong_number_of_layers_is_refused_before_loading(
    folders: Path, monkeypatch: pytest.MonkeyPatch, layers: object
) -> None:
    monkeypatch.setattr(loading_target, "load_target", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=f"draft_layers is {layers}: it must be an integer of at least 1"):
        load(folders, draft_layers=layers)


def test_an_attention_without_effect_is_warned_of(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    with caplog.at_level(logging.WARNING, logger="eagle_fsd"):
        load(folders, ea_model="none", attn_implementation="eager", runtime="torch")
        load(folders, ea_model="none", attn_implementation="eager", runtime="openvino")
    # transformers says something of its own once in a process.
    (said,) = (record.message for record in caplog.records if record.name.startswith("eagle_fsd"))
    assert said.startswith("attn_implementation is 'eager': it has no effect on a target that OpenVINO")


def test_what_cannot_draft_is_refused_in_one_line(folders: Path) -> None:
    cases = {
        r"draft model '.*other' has another vocabulary .*: token 37 is 'B' there and 'A' here": {
            "draft": "other"
        },
        r"has 95 tokens and the target 96, and it has no tokenizer to compare": {"draft": "silent"},
        r"draft model: target '.*nothing/there/at/all' is not there": {"draft": "nothing/there/at/all"},
        "of one of them|one of them drafts": {"draft": "draft", "ea_model": "owner/head"},
        "head_dtype is bfloat16 without a head": {"draft_layers": 1, "head_dtype": "bfloat16"},
        "full_vocabulary is True without a head": {"draft": "padded", "full_vocabulary": True},
        "draft_device is 'cpu' without a draft model": {"draft_layers": 1, "draft_device": "cpu"},
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message) as raised:
            load(folders, **options)
        assert "\n" not in str(raised.value)


def test_vocabularies_are_compared_by_their_tokens_and_not_by_their_sizes() -> None:
    mine, renamed = tiny_tokenizer(), tiny_tokenizer(special=50)
    require_same_vocabulary(mine, tiny_tokenizer(), (VOCAB, VOCAB + 64), "m")
    require_same_vocabulary(mine, renamed, (VOCAB, VOCAB), "m")  # a special token where the other has none
    require_same_vocabulary(None, None, (VOCAB, VOCAB), "m")
    with pytest.raises(ValueError, match="and the target has no tokenizer"):
        require_same_vocabulary(None, mine, (VOCAB, VOCAB + 1), "m")


def test_a_calibration_is_the_draft_models_own(folders: Path, tmp_path: Path) -> None:
    target = TargetModel(tiny_model())
    drafts = [TargetModel(tiny_model(seed=seed)) for seed in (5, 6)]
    engines = [EagleFSD(target, DraftModelSpec.for_target(one, target)) for one in drafts]
    engines.append(EagleFSD(target, tiny_head()))
    require_own_calibrations(engines, tmp_path)


def test_what_openvino_cannot_compute_drafts_on_torch_unless_openvino_was_asked_for(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    if not hasattr(transformers.Cache, "get_conv_state"):
        pytest.skip("transformers is older than 5.22")
    draft, prompt = str(tmp_path / "recurrent"), prompts_of([20])
    tiny_model("lfm2", seed=5).save_pretrained(draft)
    tiny_tokenizer().save_pretrained(draft)
    with pytest.raises(ValueError, match=r"^draft model: target is a 'lfm2' model .*: use runtime torch"):
        load(folders, draft, runtime="openvino")
    monkeypatch.setenv(USUAL, "openvino")  # what auto prefers
    with caplog.at_level(logging.INFO):
        model = load(folders, draft, runtime="auto")
    assert model.runtime == "openvino" and model.drafter.draft.runtime is None
    assert "the draft model runs on torch: target is a 'lfm2' model with recurrent layers" in caplog.text
    text = model.generate(prompt, max_new_tokens=12, tree=TREE).new_tokens
    assert text == greedy_alone(tiny_model(), prompt, 12)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"draft_layers": 1}, {"draft": "padded"}], ids=str)
def test_it_drafts_on_openvino(folders: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    prompts = prompts_of([6, 9])
    wanted = greedy_alone(tiny_model(), prompts, 12)
    ids, mask = torch.tensor([[0] * 3 + prompts[0], prompts[1]]), torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    model = load(folders, runtime="openvino", **options)
    assert model.drafter.draft.runtime.name == "openvino"
    assert model.generate(ids, mask, max_new_tokens=12, tree=TREE).new_tokens == wanted
