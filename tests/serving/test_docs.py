"""docs/serve.md: its commands parse, its requests are answered, its Python runs, its lists are complete."""

from __future__ import annotations

import json
import re
import shlex
import threading
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(needed, reason='this needs extras: pip install "eagle-fsd[dev]"')

import openai
from starlette.testclient import TestClient
from support.serving import running, settings, until
from support.tiny_engine import CHAT, chat_ids, text_alone, tiny_engine

from eagle_fsd import Fuzzy, serve
from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.cli.flags import server
from eagle_fsd.cli.flags.server import MOST_BYTES
from eagle_fsd.cli.mistakes import UserError
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.choices import Defaults, Limits
from eagle_fsd.serving.errors import Code
from eagle_fsd.serving.requests.anthropic import MessagesRequest
from eagle_fsd.serving.requests.completions import ChatRequest, CompletionRequest
from eagle_fsd.serving.requests.responses import ResponsesRequest

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
SHELL = "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ").splitlines()


def test_the_servers_commands_parse() -> None:
    lines = [line for line in SHELL if "eagle_fsd.serve" in line]
    assert lines
    for line in lines:
        args = serve.build_parser().parse_args(shlex.split(line)[3:])
        serve.check_arguments(args)
        assert generation_options(args).max_new_tokens == 1024
    assert (args.host, args.max_rows, args.max_queue) == ("127.0.0.1", 8, 64)


def test_the_flags_defaults_are_those_of_the_limits() -> None:
    args = serve.build_parser().parse_args([])
    flags = {one.name: getattr(args, one.name) for one in fields(Limits)}
    assert {**flags, "max_body": MOST_BYTES} == asdict(Limits())
    assert args.max_body is None  # it follows the target


def test_the_requests_are_answered() -> None:
    lines = [line for line in SHELL if line.startswith("curl ")]
    assert lines
    few = settings(defaults=Defaults(max_new_tokens=9))
    with TestClient(create_app(tiny_engine(), few)) as client:
        for line in lines:
            _, url, _, header, _, body = shlex.split(line)
            name, _, value = header.partition(": ")
            path = url.removeprefix("http://127.0.0.1:8000")
            answer = client.post(path, content=body, headers={name: value})
            assert (
                answer.status_code == 200
                and json.loads(body)["threshold"] == answer.json()["timings"]["threshold"]
            )


def test_the_python_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    with running(settings(name="smollm2-135m")) as (url, _):
        there = openai.OpenAI

        def here(base_url: str, **options: Any) -> openai.OpenAI:
            assert base_url == "http://127.0.0.1:8000/v1"
            return there(base_url=f"{url}/v1", **options)

        monkeypatch.setattr(openai, "OpenAI", here)
        exec(compile("".join(blocks), "serve.md", "exec"), {})
    figures, text = re.search(r"^\d\.\d+ \d+\n(.*)", capsys.readouterr().out, re.MULTILINE).group(0, 1)
    assert figures and text


def test_every_field_and_route_and_limit_is_described() -> None:
    kinds = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
    fields = {one.alias or name for kind in kinds for name, one in kind.model_fields.items()}
    limits = r'"(--max-[a-z-]+|--request-timeout|--cors-origin)"'
    flags = set(re.findall(limits, Path(server.__file__).read_text()))
    assert len(flags) == 6
    routes = [route.path for route in create_app(tiny_engine(), settings()).routes if ":" not in route.path]
    assert [name for name in (*fields, *routes, *flags) if f"{name}" not in PAGE] == []


def test_every_code_of_an_error_is_described() -> None:
    assert [code for code in get_args(Code) if f"`{code}`" not in PAGE] == []


def test_the_help_lists_no_flag_that_is_always_refused() -> None:
    shown = serve.build_parser().format_help()
    assert "--temperature" in shown and "--stop" in shown
    assert not any(flag in shown for flag in ("--seed", "--json-schema", "--regex"))


def test_the_servers_own_flags_are_checked_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that compile graphs would be waited for, even at the end of a mistake."""
    monkeypatch.setattr(serve, "begin_early", lambda args: pytest.fail("it began"))
    for flag in ("--port=-1", "--max-rows=0", "--cache-tokens=1", "--max-body=1", "--api-key= ", "--seed=1"):
        assert serve.main([flag]) == 2


def test_mistakes_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--seed", "1"], "--seed is 1: every request names its own seed"),
        (["--regex", "a"], "--regex is given: every request names its own response_format"),
        (["--port", "99999"], "--port is 99999: it must be an integer between 0 and 65535"),
        (["--max-rows", "0"], "--max-rows is 0"),
        (["--cache-tokens", "1024"], "--cache-tokens is 1024: it must be an integer of at least 1025; drop"),
        (["--host", "not.there.invalid"], "not.there.invalid port 8000 cannot be listened at"),
        (["--host", "\u00e9..x"], "\u00e9..x port 8000 cannot be listened at (encoding of hostname failed)"),
        (["--threshold", "-1", "--port", "0"], "threshold is -1"),
        (["--base-model", "/not/there", "--port", "0"], "/not/there"),
    ):
        assert serve.main(flags) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    monkeypatch.setattr(serve, "NEEDED", ("not_installed",))
    with pytest.raises(UserError, match=r'needs not-installed: run pip install "eagle-fsd\[serve\]"'):
        serve.require_packages()


@pytest.mark.parametrize("key", ["", " ", "secret\n", " secret", "sec\x01ret", "\udc80"])
def test_a_key_that_nobody_can_send_does_not_open_the_server(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one is what an unset variable of a shell leaves, or of a unit's file."""
    parse = serve.build_parser().parse_args
    for name, flags, variable in (
        ("--api-key", ["--api-key", key], "secret"),
        (server.KEY_VARIABLE, [], key),
    ):
        monkeypatch.setenv(server.KEY_VARIABLE, variable)
        with pytest.raises(ValueError, match=f"^{name} (is|has) .*(drop it|take them out)") as found:
            serve.check_arguments(parse(flags))
        assert "secret" not in str(found.value)
    assert server.api_key(parse(["--api-key", "other"])) == "other"  # the variable is not read then


@pytest.mark.parametrize(
    "origin", ["*", "null", "http://there", "https://a.example:8443", "chrome-extension://abc"]
)
@pytest.mark.parametrize("wrong", ["", "{}/", "{}/page", "a.example", "http://", "{} http://b"])
def test_origins_that_no_browser_sends_are_refused(origin: str, wrong: str) -> None:
    parse, other = serve.build_parser().parse_args, wrong.format(origin)
    serve.check_arguments(parse(["--cors-origin", origin]))
    with pytest.raises(ValueError, match=r"^--cors-origin is '.*': it must be .* correct it$"):
        serve.check_arguments(parse(["--cors-origin", origin, "--cors-origin", other]))


def test_an_empty_host_does_not_open_the_server() -> None:
    parse = serve.build_parser().parse_args
    for host in ("", " "):
        with pytest.raises(
            ValueError, match=f"^--host is '{host}': it would mean all addresses; say 0.0.0.0"
        ):
            serve.check_arguments(parse(["--host", host]))


def test_a_cost_without_a_price_is_refused() -> None:
    parse = serve.build_parser().parse_args
    serve.check_arguments(parse(["--threshold", "auto", "--cost", "kl"]))
    with pytest.raises(ValueError, match=r"^--cost is kl without a --price above 0: it would"):
        serve.check_arguments(parse(["--threshold", "0.3", "--cost", "kl"]))


@pytest.mark.parametrize(
    ("key", "host"), [(None, "127.0.0.1"), ("secret", "127.0.0.1"), (None, "127.1"), (None, "Localhost")]
)
def test_the_program_serves_until_it_is_told_to_end(
    key: str | None, host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From flags to a server, with a tiny model in the place of the real one."""
    import uvicorn

    run, servers = uvicorn.Server.run, []

    def noted(server: uvicorn.Server, sockets: Any) -> None:
        servers.append(server)
        run(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "run", noted)
    monkeypatch.setattr(serve, "load_model", lambda args: tiny_engine())
    if key is not None:
        monkeypatch.setenv(server.KEY_VARIABLE, key)
    flags = [
        "--host",
        host,
        "--port",
        "0",
        "--total-tokens",
        "8",
        "--depth",
        "3",
        "--tree-top-k",
        "3",
        "--threshold",
        "0.2",
    ]
    codes: list[int] = []
    program = threading.Thread(target=lambda: codes.append(serve.main([*flags, "--max-new-tokens", "9"])))
    program.start()
    told: list[str] = []
    until(lambda: told.append(capsys.readouterr().err) or "Ctrl-C ends it" in "".join(told))
    url = re.search(r"tiny \(tree 8/3/3\) answers at (http://127\.0\.0\.1:\d+/v1),", "".join(told))[1]
    client = openai.OpenAI(base_url=url, api_key="secret")
    answer = client.chat.completions.create(model="tiny", messages=CHAT)
    assert answer.choices[0].message.content == text_alone(chat_ids(), max_new_tokens=9, rule=Fuzzy(0.2))
    servers[-1].should_exit = True
    program.join()
    assert codes == [0] and "warning" not in "".join(told)
    found = servers[-1].config.app.state.service.settings
    assert found.key == key and ("localhost" in found.hosts) == (key is None)
