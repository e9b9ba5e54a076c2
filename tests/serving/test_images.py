"""Images in requests: the answer is the engine's own for the same chat, and only data: URLs are read."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason='the server needs the extra: pip install "eagle-fsd[serve]"')
pytest.importorskip("PIL", reason='images need the extra: pip install "eagle-fsd[images]"')

from PIL import Image
from starlette.testclient import TestClient
from support.media_engine import data_url, media_engine, new_media_engine, picture, tiny_processor
from support.media_prompts import PLACE
from support.serving import running, settings
from support.tiny_engine import CHAT, TREE, tiny_engine

from eagle_fsd import EagleFSD
from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.hub.media.processor import ProcessorSource, process_chat
from eagle_fsd.serve import build_parser, make_settings
from eagle_fsd.serving import prompts
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.choices import Defaults, Limits
from eagle_fsd.serving.errors import ApiError
from eagle_fsd.serving.requests import images
from eagle_fsd.serving.requests.completions import ChatRequest

CHATS, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
TOKENS = 20


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(media_engine(), settings()), raise_server_exceptions=False) as made:
        yield made


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def asking(image: Image.Image, text: str = "Hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [image_part(data_url(image)), text_part(text)]}]


def of_engine(image: Image.Image, text: str = "Hi") -> list[dict[str, Any]]:
    """Return the same chat as the engine takes it."""
    return [{"role": "user", "content": [{"type": "image", "image": image}, text_part(text)]}]


def alone(messages: list[dict[str, Any]], template: dict[str, Any] | None = None, **options: Any) -> str:
    """Return the text that the engine gives for this chat on its own."""
    model = media_engine()
    ids = model.read_chat(messages, **(template or {}))
    made = model.generate([ids], tree=TREE, max_new_tokens=TOKENS, **options).new_tokens[0]
    return model.tokenizer.decode(made, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def answer(client: TestClient, path: str = CHATS, **asked: Any) -> Any:
    found = client.post(path, json={"max_tokens": TOKENS, **asked})
    assert found.status_code == 200, found.text
    return found.json()


def said(found: Any) -> str:
    return found["choices"][0]["message"]["content"]


def refusal(client: TestClient, path: str = CHATS, **asked: Any) -> dict[str, Any]:
    found = client.post(path, json=asked)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    return error


# -- answers ----------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [(28, 28), (40, 90)])
@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "JPEG"])
def test_the_answer_is_the_engines_own(client: TestClient, kind: str, size: tuple[int, int]) -> None:
    url = data_url(picture(3, size), kind)
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    for written in (image_part(url), {"type": "image_url", "image_url": url}):
        asked = [{"role": "user", "content": [written, text_part("Hi")]}]
        assert said(answer(client, messages=asked)) == alone(of_engine(image))


def test_several_drawn_texts_and_a_stream_are_the_engines_too(client: TestClient) -> None:
    drawn = {"temperature": 1.0, "seed": 5}
    wanted = alone(of_engine(picture()), **drawn)
    found = answer(client, messages=asking(picture()), **drawn, n=2, logprobs=True)["choices"]
    assert found[0]["message"]["content"] == wanted != found[1]["message"]["content"]
    assert len(found[0]["logprobs"]["content"]) == TOKENS
    body = {"messages": asking(picture()), "max_tokens": TOKENS, **drawn, "stream": True, "stop": ["never"]}
    lines = client.post(CHATS, json=body).text.split("\n\n")[:-2]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content", "") for delta in deltas) == wanted


def test_a_response_reads_images_as_a_chat_does(client: TestClient) -> None:
    url = data_url(picture())
    content = [
        {"type": "input_image", "image_url": url, "detail": "low", "file_id": None},
        {"type": "input_text", "text": "Hi"},
    ]
    asked = {"input": [{"role": "user", "content": content}], "instructions": "Be short."}
    found = client.post(RESPONSES, json={**asked, "max_output_tokens": TOKENS}).json()
    turns = [{"role": "system", "content": "Be short."}, *of_engine(picture())]
    assert found["output"][0]["content"][0]["text"] == alone(turns)
    assert found["usage"]["input_tokens"] == len(media_engine().read_chat(turns))


def test_requests_at_once_see_their_own_images(client: TestClient) -> None:
    wanted = [alone(of_engine(picture(seed))) for seed in range(4)]
    assert len(set(wanted)) == 4
    with ThreadPoolExecutor(5) as pool:
        text = pool.submit(lambda: said(answer(client, messages=CHAT)))
        found = pool.map(lambda seed: said(answer(client, messages=asking(picture(seed)))), range(4))
        assert list(found) == wanted
    assert text.result() == alone(CHAT)


def test_the_order_of_images_counts(client: TestClient) -> None:
    one, two = picture(1), picture(2)
    texts = []
    for first, second in ((one, two), (two, one)):
        asked = [*asking(first, "a"), {"role": "assistant", "content": "b"}, *asking(second, "c")]
        turns = [*of_engine(first, "a"), {"role": "assistant", "content": "b"}, *of_engine(second, "c")]
        texts.append(said(answer(client, messages=asked)))
        assert texts[-1] == alone(turns)
    assert texts[0] != texts[1]


def test_the_next_turn_reads_what_is_new_alone(client: TestClient) -> None:
    first = answer(client, messages=asking(picture(7)), suppress_tokens=[PLACE])
    before = first["usage"]["prompt_tokens"]
    later = [{"role": "assistant", "content": said(first)}, {"role": "user", "content": "And? " * 20}]
    again = answer(client, messages=[*asking(picture(7)), *later])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= before
    assert said(again) == alone([*of_engine(picture(7)), *later])
    other = answer(client, messages=[*asking(picture(8)), *later])
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < before
    assert said(other) == alone([*of_engine(picture(8)), *later])


def test_templates_arguments_and_tools_go_on_working(client: TestClient) -> None:
    found = answer(client, messages=asking(picture()), chat_template_kwargs={"mood": "glad"})
    assert said(found) == alone(of_engine(picture()), {"mood": "glad"}) != alone(of_engine(picture()))
    tools = [{"type": "function", "function": {"name": "f"}}]
    told = client.post("/tokenize", json={"messages": asking(picture())}).json()
    more = answer(client, messages=asking(picture()), tools=tools)
    assert more["usage"]["prompt_tokens"] > told["count"] + 100  # they are described


def test_texts_of_clients_reach_the_processor_as_text_alone(client: TestClient, tmp_path: Path) -> None:
    """It would take arguments that its template does not read for its own, such as images by their paths."""
    picture(9).save(tmp_path / "secret.png")
    path = str(tmp_path / "secret.png")
    for asked in ({"images": [path]}, {"processor_kwargs": {"images": [path]}}, {"do_resize": False}):
        found = answer(client, messages=asking(picture()), chat_template_kwargs=asked)
        assert said(found) == alone(of_engine(picture()))


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools %}{{ tools[0]['name'] }}{% endif %}",
        "{% for one in tools %}{% generation %}{{ one['name'] }}{% endgeneration %}{% break %}{% endfor %}",
    ],
)
def test_a_processors_template_gets_what_it_reads(template: str) -> None:
    processor = tiny_processor()
    processor.chat_template = template + "<image>{{ images }}{{ mood }}"
    given = {"tools": [{"name": "called"}], "images": "1", "mood": 2, "text": "three", "padding_side": "left"}
    ids = process_chat(processor, of_engine(picture()), given)["input_ids"][0]
    assert processor.tokenizer.decode(ids) == "<s>called" + "<image>" * 4 + "12"


def test_chats_of_text_alone_take_no_processor(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "process_chat", lambda *_: pytest.fail("it was asked"))
    parts = [{"role": "user", "content": [text_part("H"), text_part("i")]}]
    assert said(answer(client, messages=CHAT)) == said(answer(client, messages=parts)) == alone(CHAT)


def test_images_of_texts_that_wait_are_not_forgotten() -> None:
    model = new_media_engine()
    model.target.media.limit = 1  # byte: only the last request's are kept beside those in use
    with (
        TestClient(create_app(model, settings(limits=Limits(max_rows=1)))) as client,
        ThreadPoolExecutor(5) as pool,
    ):
        found = list(pool.map(lambda seed: said(answer(client, messages=asking(picture(seed)))), range(5)))
    assert found == [alone(of_engine(picture(seed))) for seed in range(5)]


def test_chats_with_images_are_read_one_at_a_time_and_the_line_has_an_end() -> None:
    limits, go_on = Limits(max_rows=1, max_queue=1), threading.Event()
    reader = create_app(media_engine(), settings(limits=limits)).state.service.reader
    inside: list[int] = []

    def work(_body: Any, number: int) -> int:
        inside.append(number)
        assert go_on.wait(30)
        inside.remove(number)
        return len(inside)

    async def ask() -> list[Any]:
        seen = ChatRequest.model_validate({"messages": asking(picture())})
        text = ChatRequest.model_validate({"messages": CHAT})
        waiting = [asyncio.ensure_future(reader.aside(seen, work, number)) for number in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="the server is busy, and 2 texts wait already") as caught:
            await reader.aside(seen, work, 2)
        assert caught.value.status == 429
        assert await reader.aside(text, lambda _body: "read") == "read"
        go_on.set()
        return [*await asyncio.gather(*waiting), await reader.aside(seen, work, 3)]

    assert asyncio.run(ask()) == [0, 0, 0]


# -- token ids ----------------------------------------


def test_tokens_are_shown_without_the_places_of_images(client: TestClient) -> None:
    found = client.post("/tokenize", json={"messages": asking(picture())}).json()
    ids = media_engine().read_chat(of_engine(picture()))
    assert max(ids) >= media_engine().target.vocab_size > max(found["tokens"])
    assert found["tokens"] == list(media_engine().target.media.words_of(ids))
    assert found["tokens"].count(PLACE) == 4
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).status_code == 200


def test_nobody_names_the_places_of_anothers_image(client: TestClient) -> None:
    ids = media_engine().read_chat(of_engine(picture()))
    assert refusal(client, COMPLETIONS, prompt=ids)["message"].startswith("prompt has the token ")
    assert refusal(client, COMPLETIONS, prompt=[[5], ids])["param"] == "prompt"
    assert refusal(client, "/detokenize", tokens=ids)["param"] == "tokens"


def test_a_head_learns_nothing_from_prompts_with_images() -> None:
    noted: list[Any] = []

    class Learner:
        ready = False

        def add(self, prompt: Any, _answer: Any) -> None:
            noted.append(list(prompt))

        def update(self) -> None:
            raise AssertionError

    with TestClient(create_app(media_engine(), settings(learner=Learner()))) as client:
        answer(client, messages=asking(picture()))
        answer(client, messages=CHAT)
    assert noted == [media_engine().read_chat(CHAT)]


# -- refusals ----------------------------------------


def header(width: int, height: int) -> bytes:
    """Return the beginning of a PNG of this size."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b"")]
    written = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


WHOLE = data_url(picture())
BYTES = base64.b64decode(WHOLE.partition(",")[2])
BMP = io.BytesIO()
picture().save(BMP, "BMP")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/a.png", "is 'https://example.org/a.png': this server fetches nothing"),
        ("/etc/passwd", "is '/etc/passwd': this server fetches nothing"),
        ("file:///etc/passwd", "is 'file:///etc/passwd': this server"),
        ("", "is '': this server fetches nothing"),
        ("data:text/plain;base64,AAAA", "is 'data:text/plain;base64,AAAA': this server"),
        ("data:image/png,AAAA", "is 'data:image/png,AAAA': this server"),
        ("data:image/png;base64,A", "is not base64 ("),
        ("data:image/png;base64,AA AA", "is not base64 ("),
        ("data:image/png;base64,\ud800", "is not base64 ("),
        ("data:image/png;base64,", "is not an image of a known format: send a whole file in PNG, JPEG"),
        ("data:image/png;base64,AAAA", "is not an image of a known format: send a whole file"),
        (url_of(BMP.getvalue()), "is not an image of a known format: send a whole file"),
        (url_of(BYTES[: len(BYTES) // 2]), "is broken ("),
        (url_of(header(8, 8)), "is broken ("),
        (url_of(header(9000, 9000)), "has 81000784 pixels with those before it: a request's images may have"),
        (url_of(header(60_000, 60_000)), "has more pixels: a request's images may have"),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(client: TestClient, url: str, message: str) -> None:
    content = [image_part(WHOLE), image_part(url)]
    body = json.dumps({"messages": [{"role": "user", "content": content}]})
    found = client.post(CHATS, content=body, headers={"content-type": "application/json"})
    error = found.json()["error"]
    assert found.status_code == 400 and "\n" not in error["message"] and len(error["message"]) < 300
    assert error["message"].startswith(f"messages: image 2 {message}")
    assert (error["param"], error["code"]) == ("messages", "invalid_value")


IMAGE = image_part(WHOLE)
INPUT = {"type": "input_image", "image_url": WHOLE}
LAST = {"role": "assistant", "content": "I see"}


@pytest.mark.parametrize(
    ("path", "asked", "param", "message"),
    [
        (CHATS, {"messages": [{"role": "user", "content": [IMAGE] * 33}]}, "messages",
         "messages: there are 33 images: at most 32 are taken; leave some out"),
        (CHATS, {"messages": [*asking(picture()), LAST], "continue_final_message": True},
         "continue_final_message", "continue_final_message beside images: an answer is a new turn there;"),
        (CHATS, {"messages": asking(picture()), "add_generation_prompt": False}, "add_generation_prompt",
         "add_generation_prompt beside images"),
        (CHATS, {"messages": [{"role": "system", "content": [IMAGE]}, *CHAT]}, "messages.0.content",
         "messages.0: content has an image in a message of the role system: only the user's may"),
        (CHATS, {"messages": [*CHAT, {"role": "assistant", "content": [IMAGE]}]}, "messages.1.content",
         "messages.1: content has an image in a message of the role assistant"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages.0.content.0.image_url", "messages.0.content.0.image_url is missing"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}]},
         "messages.0.content.0.image_url.url", "messages.0.content.0.image_url.url is 5"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
         "messages.0.content", "content has a part of type 'input_audio': only text and images are read"),
        (CHATS, {"messages": asking(picture()), "documents": [{"text": "x"}]}, "documents",
         "documents: the model's chat template reads none"),
        (RESPONSES, {"input": [{"role": "developer", "content": [INPUT]}]}, "input.0.content",
         "input.0: content has an image in a message of the role developer"),
        (RESPONSES, {"input": [{"role": "user", "content": [{**INPUT, "image_url": "http://a.b/c"}]}]},
         "input", "input: image 1 is 'http://a.b/c': this server fetches nothing"),
        (RESPONSES, {"input": [{"role": "user", "content": [{**INPUT, "file_id": "file-1"}]}]},
         "input.0.content.0.file_id", "input.0.content.0.file_id is not a field"),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "a", "output": [INPUT]}]},
         "input.0.output", "output has a part of type 'input_image': only text is read here"),
        (CHATS, {"messages": asking(picture(), "x" * 2000)}, "messages", "messages has 2021 tokens: at most"),
        ("/tokenize", {"messages": [{"role": "user", "content": [image_part("x.png")]}]}, "messages",
         "messages: image 1 is 'x.png': this server fetches nothing"),
    ],
)  # fmt: skip
def test_what_is_not_taken_is_refused_by_its_name(
    client: TestClient, path: str, asked: Any, param: str, message: str
) -> None:
    error = refusal(client, path, **asked)
    assert error["param"] == param and error["message"].startswith(message)


def test_a_placeholder_in_a_text_is_no_image(client: TestClient) -> None:
    error = refusal(client, messages=asking(picture(), "<image>"))
    assert error["param"] == "messages" and "; change it, or leave images out" in error["message"]


def test_a_prompt_that_is_too_long_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "read_media", lambda *_: pytest.fail("the towers read it"))
    with TestClient(create_app(media_engine(), settings(limits=Limits(max_prompt_tokens=20)))) as client:
        assert refusal(client, messages=asking(picture()))["code"] == "context_length_exceeded"


def test_models_of_text_alone_refuse_images_and_load_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prompts, "read_images", lambda *_: pytest.fail("an image was read"))
    loaded: list[Any] = []
    load = ProcessorSource.processor.func

    def noted(source: ProcessorSource) -> Any:
        loaded.append(source)
        return load(source)

    monkeypatch.setattr(ProcessorSource, "processor", property(noted))
    whole = tiny_engine()
    tiny_processor().tokenizer.save_pretrained(tmp_path / "text")
    (tmp_path / "text" / "config.json").write_text('{"model_type": "llama"}')
    source = ProcessorSource(str(tmp_path / "text"), tmp_path / "text")
    for processor, message in (
        (None, "messages: the target reads text alone, for it has no processor"),
        (source, "messages: target 'text' "),
    ):
        model = EagleFSD(whole.target, whole.drafter, whole.tokenizer, "tiny", processor=processor)
        with TestClient(create_app(model, settings())) as client:
            for _ in range(2):
                error = refusal(client, messages=asking(picture()))
                assert error["message"].startswith(message) and error["param"] == "messages"
                assert str(tmp_path) not in error["message"]
            assert client.post(CHATS, json={"messages": CHAT, "max_tokens": 1}).status_code == 200
    assert loaded == [source]


def test_where_openvino_computes_images_are_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_engine().target, "graphs", object())
    monkeypatch.setattr(prompts, "read_images", lambda *_: pytest.fail("an image was read"))
    error = refusal(client, messages=asking(picture()))
    assert error["message"].startswith("messages: images and sound are not read with OpenVINO")


def test_without_pillow_it_says_what_to_install(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asking(picture())
    monkeypatch.setitem(sys.modules, "PIL", None)
    error = refusal(client, messages=asked)
    assert 'run pip install "eagle-fsd[images]"' in error["message"] and error["param"] == "messages"


def test_all_images_of_a_request_share_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_PIXELS", 3 * 28 * 28)
    assert len(images.read_images([WHOLE] * 3)) == 3
    with pytest.raises(ValueError, match="image 4 has 3136 pixels with those before it"):
        images.read_images([WHOLE] * 4)


def test_images_are_upright_and_have_three_colours() -> None:
    turned = picture(1, (20, 30))
    exif = Image.Exif()
    exif[0x0112] = 6  # it was taken with the camera on its side
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    (found,) = images.read_images([url_of(file.getvalue())])
    assert (found.size, found.mode) == ((30, 20), "RGB")
    (grey,) = images.read_images([data_url(picture().convert("LA"))])
    assert grey.mode == "RGB"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_command_of_the_page_is_answered(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"### Images\n\n```sh\n(.*?)```", page, re.DOTALL)
    picture(4).save(tmp_path / "cat.png")
    few = settings(defaults=Defaults(max_new_tokens=TOKENS))
    with running(few, media_engine()) as (url, _):
        command = command.replace("http://127.0.0.1:8000", url)
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=True)
    assert said(json.loads(done.stdout)) == alone(of_engine(picture(4), "What is this?"))


def test_programs_are_told_of_the_parts(client: TestClient) -> None:
    parts = client.get("/openapi.json").json()["components"]["schemas"]
    for part, of, name in (
        ("Message", ["TextPart", "ImagePart"], "content"),
        ("MessageItem", ["ItemPart", "ImageItemPart"], "content"),
    ):
        found = parts[part]["properties"][name]["anyOf"][1]["items"]["oneOf"]
        assert [one["$ref"].rpartition("/")[2] for one in found] == of
    kinds = parts["ImagePart"]["properties"]["image_url"]["anyOf"]
    assert kinds[0] == {"type": "string"} and kinds[1]["$ref"].endswith("/ImageUrl")


@pytest.mark.parametrize(
    ("engine", "argv", "most"),
    [(media_engine, [], 20 * 2**20), (tiny_engine, [], 2**20), (media_engine, ["--max-body=4096"], 4096)],
)
def test_a_body_may_be_larger_where_the_target_reads_images(
    engine: Callable[[], EagleFSD], argv: list[str], most: int
) -> None:
    args = build_parser().parse_args(["--total-tokens", "8", "--depth", "3", "--tree-top-k", "3", *argv])
    assert make_settings(args, engine(), generation_options(args)).limits.max_body == most
