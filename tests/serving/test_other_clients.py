"""Other clients of OpenAI's API against a real server: langchain-openai, openai-agents, the program llm."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WITHOUT = 'the server and its test need extras: pip install "eagle-fsd[dev]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(needed, reason=WITHOUT)

from support.schema_engine import as_call, schema_engine
from support.serving import running, settings, writing
from support.tiny_engine import CHAT, NAME, chat_ids, text_alone

from eagle_fsd import Fuzzy


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(settings()) as (url, _):
        yield f"{url}/v1"


def chat_of(url: str, **fields: Any) -> Any:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    return langchain.ChatOpenAI(
        **{"base_url": url, "api_key": "none", "model": NAME, "max_retries": 0, "temperature": 0, **fields}
    )


def test_langchain_asks_streams_stops_and_passes_a_threshold(url: str) -> None:
    expected = text_alone(chat_ids(), max_new_tokens=20)
    messages = [(one["role"], one["content"]) for one in CHAT]
    chat = chat_of(url, max_tokens=20)
    answer = chat.invoke(messages)
    assert answer.content == expected and answer.usage_metadata["output_tokens"] == 20
    assert answer.response_metadata["finish_reason"] == "length"
    chunks = list(chat.stream(messages))
    assert "".join(chunk.content for chunk in chunks) == expected and len(chunks) > 2
    stop = expected[12:15]
    assert chat.invoke(messages, stop=[stop]).content == expected[: expected.index(stop)]
    fuzzy = chat_of(url, max_tokens=20, extra_body={"threshold": 0.3, "divergence": "js"})
    assert fuzzy.invoke(messages).content == text_alone(chat_ids(), max_new_tokens=20, rule=Fuzzy(0.3))
    penalised = chat_of(url, max_tokens=20, presence_penalty=0.8, frequency_penalty=0.4, logprobs=True)
    wanted = text_alone(chat_ids(), max_new_tokens=20, presence_penalty=0.8, frequency_penalty=0.4)
    answer = penalised.invoke(messages)
    assert answer.content == wanted
    assert len(answer.response_metadata["logprobs"]["content"]) == 20
    assert [one.content for one in chat.batch([messages] * 3)] == [expected] * 3


def test_langchain_gets_responses_as_it_gets_chats(url: str) -> None:
    expected = text_alone(chat_ids(), max_new_tokens=20)
    messages = [(one["role"], one["content"]) for one in CHAT]
    chat, newer = (chat_of(url, max_tokens=20, use_responses_api=newer) for newer in (False, True))
    answer = newer.invoke(messages)
    assert answer.text == expected and answer.usage_metadata["output_tokens"] == 20
    assert "".join(chunk.text for chunk in newer.stream(messages)) == expected
    turns = [*messages, answer, ("user", "And?")]
    assert newer.invoke(turns).text == chat.invoke([*messages, ("assistant", expected), turns[-1]]).content


def test_openais_agents_call_functions_and_go_on() -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    openai = pytest.importorskip("openai")
    written, called = f"Wait.\n{as_call('pick', {'n': 1})}", []

    def pick(n: int) -> str:
        """Pick a number."""
        called.append(n)
        return "done"

    async def events(url: str) -> list[str]:
        client = openai.AsyncOpenAI(base_url=url, api_key="none")
        model = agents.OpenAIResponsesModel(NAME, client)
        agent = agents.Agent(
            name="A", instructions="Be short.", tools=[agents.function_tool(pick)], model=model
        )
        run = agents.Runner.run_streamed(agent, "Pick.", max_turns=2)
        with pytest.raises(agents.exceptions.MaxTurnsExceeded):  # it writes the same in every turn
            async for _ in run.stream_events():
                pass
        return [item.type for item in run.new_items]

    agents.set_tracing_disabled(True)
    configured = writing(written)
    with running(configured, schema_engine()) as (url, _):
        found = asyncio.run(events(f"{url}/v1"))
    assert found == ["message_output_item", "tool_call_item", "tool_call_output_item"] * 2
    assert called == [1, 1]


def test_langchain_raises_the_servers_errors(url: str) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
        chat_of(url, extra_body={"best_of": 2}).invoke("Hi")


def test_the_program_llm_asks_and_streams(url: str, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="llm is not installed")
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "tiny", "model_name": NAME, "api_base": url, "api_key_name": "none"}])
    )
    environment = {
        **os.environ,
        "LLM_USER_PATH": str(tmp_path),
        "LLM_LOAD_PLUGINS": "",
        "OPENAI_API_KEY": "x",
    }
    options = ["-o", "max_tokens", "20", "-o", "temperature", "0", "--key", "none"]
    expected = text_alone(chat_ids(), max_new_tokens=20)
    for more in ([], ["--no-stream"]):
        command = [sys.executable, "-m", "llm", "-m", "tiny", CHAT[0]["content"], *options, *more]
        made = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert made.returncode == 0, made.stderr
        assert made.stdout.rstrip("\n") == expected.rstrip("\n")
