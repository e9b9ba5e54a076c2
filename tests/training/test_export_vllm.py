"""`eagle-fsd train export-vllm`: heads as vLLM reads them, and a target as safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import HIDDEN, VOCAB, tiny_head, tiny_model
from support.training_world import ends_in_one_line

from eagle_fsd import hub
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.hub.head_checkpoint import read_config
from eagle_fsd.training.commands.export_vllm import main, read_plain_head, save_plain_head


def with_bias() -> DraftHead:
    """Return the tiny head with a bias of fc."""
    head = tiny_head()
    config = head.config.__class__(**{**vars(head.config), "fc_bias": True})
    made = DraftHead(config)
    made.load_state_dict({**head.state_dict(), "fc.bias": torch.full((HIDDEN,), 0.055)})
    return made


def source_of(head: DraftHead, folder: Path) -> hub.HeadSource:
    return hub.resolve_head(str(hub.save_head(head, folder)), "")


def test_a_head_loses_its_list_and_no_weight(tmp_path: Path) -> None:
    head = tiny_head().restrict(torch.arange(20))
    source = source_of(head, tmp_path / "head")
    made = save_plain_head(read_plain_head(source), source, tmp_path / "made")
    assert sorted(path.name for path in made.iterdir()) == ["config.json", "model.safetensors"]
    config = read_config(made, "draft head")
    assert "draft_vocab_size" not in config
    assert [config[name] for name in ("bias", "attention_bias", "qkv_bias")] == [False, False, False]
    written, own = load_file(made / "model.safetensors"), head.state_dict()
    assert written.keys() == own.keys()
    assert all(torch.equal(written[name], own[name]) for name in own)
    again = hub.load_head(str(made), HIDDEN, VOCAB)
    assert again.draft_tokens is None and again.fc.bias is None


def test_a_bias_is_refused_unless_it_is_given_up(tmp_path: Path) -> None:
    source = source_of(with_bias(), tmp_path / "head")
    with pytest.raises(
        ValueError, match=r"bias of fc, up to 0\.055: vLLM's fc has none.*fold-bias.*--drop-bias"
    ):
        read_plain_head(source)
    made = save_plain_head(read_plain_head(source, give_up_bias=True), source, tmp_path / "made")
    assert "fc.bias" not in load_file(made / "model.safetensors")
    assert read_config(made, "draft head")["bias"] is False


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    head = hub.save_head(tiny_head(), tmp_path / "head")
    arguments = [
        "--base-model",
        str(tmp_path / "model"),
        "--ea-model",
        str(head),
        "--output",
        str(tmp_path / "out"),
    ]
    main(arguments)
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / name) for name in ("head", "target")]
    written, own = load_file(tmp_path / "out" / "target" / "model.safetensors"), model.state_dict()
    assert all(torch.equal(written[name], own[name]) for name in written)
    main([*arguments[:-1], str(tmp_path / "alone"), "--head-only"])
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["head"]
    with ends_in_one_line(r".*--dtype float16 with --head-only: .*; drop one"):
        main([*arguments[:-1], str(tmp_path / "half"), "--head-only", "--dtype", "float16"])
    assert not (tmp_path / "half").exists()
    before = (head / "model.safetensors").read_bytes()
    for output in (tmp_path, tmp_path / "alone"):
        with ends_in_one_line(f".*--output names {output}/head, which exists: name a new folder"):
            main([*arguments[:-1], str(output)])
    assert (head / "model.safetensors").read_bytes() == before


def test_another_kind_of_head_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ends_in_one_line(r".*head 'nowhere/head at all' is not there"):
        main(
            [
                "--base-model",
                str(tmp_path),
                "--ea-model",
                "nowhere/head at all",
                "--output",
                str(tmp_path / "o"),
            ]
        )


def test_a_target_is_written_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    hub.save_head(tiny_head(), tmp_path / "head")
    places = [f"--base-model={tmp_path}/model", f"--ea-model={tmp_path}/head"]
    main([*places, f"--output={tmp_path}/out", "--dtype", "bfloat16"])
    written = load_file(tmp_path / "out" / "target" / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}


def test_nothing_is_written_of_a_head_and_a_target_that_do_not_fit(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=VOCAB + 8).save_pretrained(tmp_path / "model")
    hub.save_head(tiny_head(), tmp_path / "head")
    places = [f"--base-model={tmp_path}/model", f"--ea-model={tmp_path}/head"]
    with ends_in_one_line(f".*has vocab_size {VOCAB}: the target's is {VOCAB + 8}"):
        main([*places, f"--output={tmp_path}/out"])
    (tmp_path / "model" / "config.json").write_text("{")
    with ends_in_one_line(r".*config\.json"):
        main([*places, f"--output={tmp_path}/out"])
    assert not (tmp_path / "out").exists()
