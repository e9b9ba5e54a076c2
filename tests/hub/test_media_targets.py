"""Checkpoints of models that read images or sound as well: they load as targets, and their text is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.media_engine import save_llava, tiny_processor
from support.media_families import tiny_media_config, tiny_media_model
from support.media_prompts import written
from support.tiny_models import greedy_alone
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.generate import main
from eagle_fsd.hub.media.processor import process_chat
from eagle_fsd.hub.target_loader import load_target
from eagle_fsd.target.model import TargetModel
from eagle_fsd.text.chat import AS_PARTS, encode_chat, take_text

PROMPT = [5, 9, 33, 7, 5, 9, 33, 7, 5]
# As in the repositories of SmolVLM and LLaVA: only parts are written.
BY_FIRST_PART = (
    "{% for message in messages %}{{ message['role'] + ':' }}"
    "{% if message['content'][0]['type'] != 'image' %}{{ ' ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
BY_FILTER = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def saved(kind: str, folder: Path) -> Path:
    tiny_media_model(kind).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["aya_vision", "lfm2_vl", "mistral3", "qwen2_5_vl"])
def test_a_folder_loads_and_writes_the_models_own_text(kind: str, tmp_path: Path) -> None:
    engine = EagleFSD.from_pretrained(saved(kind, tmp_path), "none", lookup=True, device="cpu")
    wanted = greedy_alone(tiny_media_model(kind), [PROMPT], 16)
    assert engine.generate([PROMPT], max_new_tokens=16, tree=TreeConfig(8, 4, 2)).new_tokens == wanted
    assert engine.target_alone([PROMPT], max_new_tokens=16).new_tokens == wanted


def test_openvino_computes_the_texts_part(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="needs the extra openvino")
    folder = saved("qwen2_5_vl", tmp_path)
    engine = EagleFSD.from_pretrained(folder, "none", lookup=True, device="cpu", runtime="openvino")
    wanted = greedy_alone(tiny_media_model("qwen2_5_vl"), [PROMPT], 16)
    assert engine.generate([PROMPT], max_new_tokens=16, tree=TreeConfig(8, 4, 2)).new_tokens == wanted


def test_weights_that_text_does_not_read_do_not_count() -> None:
    model = tiny_media_model("mistral3")
    text = sum(weight.numel() for weight in (*model.get_decoder().parameters(), model.lm_head.weight))
    engine = EagleFSD(TargetModel(model), None)
    assert engine.target.parameter_count == text - model.get_input_embeddings().weight.numel()
    assert text < sum(weight.numel() for weight in model.parameters())


def test_an_encoder_decoder_is_refused_by_its_config(tmp_path: Path) -> None:
    tiny_media_config("pix2struct").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is an encoder-decoder .*: it must be a decoder") as caught:
        load_target(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", [BY_FIRST_PART, BY_FILTER])
def test_a_template_that_takes_parts_alone_takes_text_too(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    take_text(tokenizer)
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    wanted = "system: be kind\nuser: hello\nassistant:"
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == wanted
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat]
    assert tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True) == wanted
    assert encode_chat(tokenizer, chat).tolist() == encode_chat(tokenizer, parts).tolist()
    opened = encode_chat(tokenizer, [*chat, {"role": "assistant", "content": "well "}], end="open")
    assert tokenizer.decode(opened[0]).endswith("assistant: well ")


@pytest.mark.parametrize("template", ["{{ messages[0]['role'] }}", "{{ raise_exception('no') }}", None])
def test_other_templates_stay_as_they_are(template: str | None) -> None:
    tokenizer = tiny_tokenizer()
    usual = tokenizer.chat_template
    take_text(tokenizer)
    assert tokenizer.chat_template == usual
    tokenizer.chat_template = template
    take_text(tokenizer)
    assert tokenizer.chat_template == template


@pytest.mark.parametrize(
    "content", [json.dumps({"chat_template": BY_FILTER}), "{", "[]", '{"chat_template": 1}']
)
def test_the_template_of_a_processor_is_read(content: str, tmp_path: Path) -> None:
    """Only where the tokenizer has none; a broken file is none."""
    folder = saved("mistral3", tmp_path)
    (folder / "chat_template.json").write_text(content)
    own = tiny_tokenizer().chat_template
    assert load_target(str(folder))[1].chat_template == own
    (folder / "chat_template.jinja").unlink()
    wanted = AS_PARTS + BY_FILTER if BY_FILTER[-30:] in json.dumps(content) else None
    assert load_target(str(folder))[1].chat_template == wanted


# --- images ---


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    image = pytest.importorskip("PIL.Image", reason="needs pillow")
    path = tmp_path_factory.mktemp("pictures") / "colours.png"
    image.linear_gradient("L").convert("RGB").resize((60, 90)).save(path)
    return path


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory, picture: Path) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


def asking(picture: object) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]


def test_the_models_own_processor_reads_a_chat_with_images(llava: Path, picture: Path) -> None:
    engine = EagleFSD.from_pretrained(llava, "none", lookup=True, device="cpu")
    prompt = engine.read_chat(asking(str(picture)))
    inputs = process_chat(tiny_processor(), asking(str(picture)))
    assert engine.target.media.words_of(prompt) == inputs["input_ids"][0].tolist()
    assert [token >= 96 for token in prompt].count(True) == 4
    wanted = written(tiny_media_model("llava"), dict(inputs), 16)
    assert engine.generate([prompt], max_new_tokens=16, tree=TreeConfig(8, 4, 2)).new_tokens == [wanted]
    text = [{"role": "user", "content": "Hi"}]
    assert engine.read_chat(text) == encode_chat(engine.tokenizer, text)[0].tolist()


def test_what_no_processor_takes_is_refused_in_one_line(llava: Path, picture: Path, tmp_path: Path) -> None:
    engine = EagleFSD.from_pretrained(llava, "none", device="cpu")
    for chat, words in (
        (asking(str(tmp_path / "lost.png")), "processor does not take this chat"),
        ([{"role": "user", "content": [{"type": "image"}]}], "not take this chat|no place for an image"),
        (asking("http://127.0.0.1:9/cat.png"), "processor does not take this chat"),
        ([*asking(str(picture)), "Hi"], "processor does not take this chat"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            engine.read_chat(chat)
        assert "\n" not in str(caught.value)
    folder = saved("mistral3", tmp_path / "bare")
    with pytest.raises(ValueError, match=r"no processor of images that can be loaded|reads text alone"):
        EagleFSD.from_pretrained(folder, "none", device="cpu").read_chat(asking(str(picture)))
    with pytest.raises(ValueError, match="reads text alone, for it has no processor"):
        EagleFSD(TargetModel(tiny_media_model("llava")), None).read_chat(asking(str(picture)))
    with pytest.raises(ValueError, match="not read with OpenVINO"):
        pytest.importorskip("openvino", reason="needs the extra openvino")
        on_graphs = EagleFSD.from_pretrained(llava, "none", device="cpu", runtime="openvino")
        on_graphs.read_chat(asking(str(picture)))


def test_the_command_line_takes_images(
    llava: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--base-model", str(llava), "--ea-model", "none", "--lookup", "--device", "cpu"]
    rest = ["--max-new-tokens", "16", "--total-tokens", "8", "--json", "--system", "Look.", "What is this?"]
    assert main([*model, "--image", str(picture), *rest]) == 0
    answer = json.loads(capsys.readouterr().out)
    inputs = process_chat(tiny_processor(), asking(str(picture)))
    assert answer["token_ids"] == written(tiny_media_model("llava"), dict(inputs), 16)
    assert answer["runtime"] == "torch"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--image", "lost.png"], "--image 'lost.png' is no file: name a picture"),
        (["--image", __file__], "is no picture that can be read"),
        (["--image", __file__, "--raw"], "--image with --raw"),
        (["--image", __file__, "--adapt"], "--image with --adapt"),
    ],
)
def test_images_that_cannot_be_asked_about(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "What is this?"]) == 2
    assert words in capsys.readouterr().err


def test_a_chat_takes_arguments_of_the_template_and_of_the_processor(llava: Path, picture: Path) -> None:
    engine = EagleFSD.from_pretrained(llava, "none", device="cpu")
    chat = asking(str(picture))
    usual, moody = engine.read_chat(chat), engine.read_chat(chat, mood="gay")
    assert engine.tokenizer.decode(engine.target.media.words_of(moody)).count("gay") == 1
    assert {one for one in usual if one >= 96} == {one for one in moody if one >= 96}
    dark = engine.read_chat(chat, mood="gay", rescale_factor=1e-4)
    assert engine.target.media.words_of(dark) == engine.target.media.words_of(moody)
    assert not {one for one in dark if one >= 96} & {one for one in moody if one >= 96}
    for name, near in (("rescale_facter", "'rescale_factor' may be meant"), ("images", ""), ("tokenize", "")):
        with pytest.raises(ValueError, match=f"{name} is no argument of the target's chat") as caught:
            engine.read_chat(chat, **{name: 1})
        assert near in str(caught.value) and "\n" not in str(caught.value)
    assert engine.read_chat([{"role": "user", "content": "Hi"}], unread=1)  # as templates of text take it


def test_the_target_alone_reads_images_too(
    llava: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = process_chat(tiny_processor(), asking(str(picture)))
    wanted = written(tiny_media_model("llava"), dict(inputs), 16)
    engine = EagleFSD.from_pretrained(llava, "none", device="cpu", runtime="torch")
    alone = engine.target_alone(inputs["input_ids"], max_new_tokens=16, inputs=inputs)
    assert alone.new_tokens == [wanted]
    for ids, copies in ((inputs["input_ids"][:, 1:], 1), (inputs["input_ids"], 2)):
        with pytest.raises(ValueError, match="both must be what the processor made of one chat"):
            engine.target_alone(ids, inputs=inputs, num_return_sequences=copies, do_sample=True)
    with pytest.raises(ValueError, match="which the target alone does not read from token ids: give inputs"):
        engine.target_alone([engine.read_chat(asking(str(picture)))], max_new_tokens=1)
    model = ["--base-model", str(llava), "--ea-model", "none", "--lookup", "--device", "cpu", "--baseline"]
    rest = ["--max-new-tokens", "16", "--total-tokens", "8", "--json", "--system", "Look.", "What is this?"]
    assert main([*model, "--image", str(picture), *rest]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == wanted
    assert answer["baseline_same_tokens"] is True
