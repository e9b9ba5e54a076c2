"""The anthropic client against a real server: whole and streamed messages, tools, forms, errors, counts."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
    pytest.importorskip(needed, reason='the server and its test need extras: pip install "eagle-fsd[dev]"')
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

from pydantic import BaseModel, ConfigDict, TypeAdapter
from support.media_engine import media_engine, picture
from support.schema_engine import as_call, schema_engine
from support.serving import running, settings, writing
from support.tiny_engine import CHAT, NAME, chat_ids, text_alone

from eagle_fsd import Fuzzy
from eagle_fsd.serving.choices import Limits

ASKED: dict[str, Any] = {"model": NAME, "messages": CHAT, "max_tokens": 20}
CALLS = f"Wait.\n{as_call('pick', {'n': 1})}"


class Person(BaseModel):
    """What answers must be."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["ann", "bob"]
    married: bool


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with running(settings()) as (url, _):
        yield client_of(url)


def client_of(url: str, **fields: Any) -> Any:
    return anthropic.Anthropic(**{"base_url": url, "api_key": "none", "max_retries": 0, **fields})


def test_it_reads_whole_and_streamed_messages(client: Any) -> None:
    expected = text_alone(chat_ids(), max_new_tokens=20)
    found = client.messages.create(**ASKED)
    assert found.content[0].text == expected and found.stop_reason == "max_tokens"
    assert found._request_id.startswith("req_") and found.model_extra["timings"]["tau"] > 1
    TypeAdapter(anthropic.types.Message).validate_python(found.model_dump(warnings="error"))
    usage = found.usage
    count = client.messages.count_tokens(model=NAME, messages=CHAT).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count == len(chat_ids())
    fuzzy = client.messages.create(**ASKED, extra_body={"threshold": 0.3, "divergence": "js"})
    assert fuzzy.content[0].text == text_alone(chat_ids(), max_new_tokens=20, rule=Fuzzy(0.3))
    with client.messages.stream(**ASKED, stop_sequences=[expected[12:15]]) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == last.content[0].text == expected[: expected.index(expected[12:15])]
    assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", expected[12:15])
    kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-1] == "message_stop"
    assert [model.id for model in client.models.list()] == [NAME]
    card = client.models.retrieve(NAME)
    assert (card.display_name, card.created_at.tzinfo is not None) == (NAME, True)


def test_an_answer_goes_back_as_it_came_and_a_beginning_is_continued(client: Any) -> None:
    first = client.messages.create(**ASKED)
    turns = [*CHAT, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And?"}]
    chat = [*CHAT, {"role": "assistant", "content": first.content[0].text}, turns[-1]]
    again = client.messages.create(
        **{**ASKED, "messages": turns}, system="Be short.", thinking={"type": "disabled"}
    )
    ids = chat_ids([{"role": "system", "content": "Be short."}, *chat])
    assert again.content[0].text == text_alone(ids, max_new_tokens=20)
    begun = client.messages.create(**{**ASKED, "messages": turns[:2]})
    body = {"messages": chat[:2], "max_tokens": 20, "continue_final_message": True}
    its = client.post("/v1/chat/completions", body=body, cast_to=object)
    assert begun.content[0].text == its["choices"][0]["message"]["content"]


def test_it_reads_calls_and_forms_and_its_runner_runs_tools() -> None:
    def pick(n: int) -> str:
        """Pick a number."""
        picked.append(n)
        return "done"

    picked: list[int] = []
    with running(writing(CALLS), schema_engine()) as (url, _):
        client = client_of(url)
        tool = anthropic.beta_tool(pick)
        asked = {**ASKED, "max_tokens": 200}
        runner = client.beta.messages.tool_runner(**asked, tools=[tool], max_iterations=2)
        kinds = [[block.type for block in message.content] for message in runner]
        assert kinds == [["text", "tool_use"]] * 2 and picked == [1, 1]
        streaming = client.beta.messages.tool_runner(**asked, tools=[tool], max_iterations=2, stream=True)
        last = [stream.get_final_message() for stream in streaming][-1]
        assert last.stop_reason == "tool_use" and last.content[1].input == {"n": 1} and len(picked) == 4
    with running(settings(), schema_engine()) as (url, _):
        client = client_of(url)
        shown = {"name": "pick", "input_schema": tool.to_dict()["input_schema"], "strict": True}
        choice = {"type": "tool", "name": "pick", "disable_parallel_tool_use": True}
        (used,) = client.messages.create(**asked, tools=[shown], tool_choice=choice).content
        assert used.type == "tool_use" and isinstance(used.input["n"], int)
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "done"}
        turns = [*CHAT, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        told = client.messages.create(
            **{**asked, "messages": turns}, tools=[shown], tool_choice={"type": "none"}
        )
        assert told.stop_reason in ("end_turn", "max_tokens")
        parsed = client.messages.parse(**asked, output_format=Person)
        assert isinstance(parsed.parsed_output, Person)
        back = [*CHAT, {"role": "assistant", "content": parsed.content}, *CHAT]
        assert client.messages.create(**{**asked, "messages": back, "max_tokens": 2}).usage.output_tokens == 2


def test_it_raises_its_own_errors(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="container is not supported") as found:
        client.messages.create(**ASKED, container="x")
    assert found.value.body["error"]["details"]["error_code"] == "unsupported_field"
    assert found.value.request_id.startswith("req_")
    with pytest.raises(anthropic.NotFoundError, match="name that"):
        client.messages.create(**{**ASKED, "model": "other"})
    with pytest.raises(anthropic.NotFoundError, match="leave /v1 out"):
        client_of(f"{client.base_url}/v1").messages.create(**ASKED)
    with running(settings(key="secret", limits=Limits(max_rows=1, max_queue=0))) as (url, _):
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            client_of(url).messages.create(**ASKED)
        right = client_of(url, api_key="secret")
        with right.messages.stream(**{**ASKED, "max_tokens": 200}) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError, match="busy"):
                client_of(url, api_key=None, auth_token="secret").messages.create(**ASKED)


def test_it_sends_images_in_base64() -> None:
    pytest.importorskip("PIL", reason='images need the extra: pip install "eagle-fsd[images]"')
    file = io.BytesIO()
    picture().save(file, "PNG")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file.getvalue()).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Hi"}]
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{source['data']}"}}
    with running(settings(), media_engine()) as (root, service):
        client = client_of(root)
        turns = [{"role": "user", "content": content}]
        found = client.messages.create(**{**ASKED, "messages": turns})
        chat = [{"role": "user", "content": [url, content[1]]}]
        body = {"messages": chat, "max_tokens": 20}
        its = client.post("/v1/chat/completions", body=body, cast_to=object)
        assert found.content[0].text == its["choices"][0]["message"]["content"]
        count = client.messages.count_tokens(model=NAME, messages=turns).input_tokens
        assert count == its["usage"]["prompt_tokens"]
        with pytest.raises(anthropic.BadRequestError, match="beside images: an answer is a new turn"):
            begun = [*turns, {"role": "assistant", "content": "A"}]
            client.messages.create(**{**ASKED, "messages": begun})
    assert json.dumps(service.card)
