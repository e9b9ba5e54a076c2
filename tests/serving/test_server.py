"""How a server ends: answers under way get some time, or none, and whoever waits for one is told."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed, reason='this needs an extra: pip install "eagle-fsd[serve]"')

from support.serving import running, settings, until
from support.tiny_engine import CHAT, save_near_models, tiny_engine

from eagle_fsd.serving import server as serving
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.server import Server

LONG = {"messages": CHAT, "max_tokens": 200, "ignore_eos": True}
ENDED = {"message": "the server is shutting down: try again later", "type": "server_error", "param": None,
         "code": "closing"}  # fmt: skip


def ask(port: int, **fields: Any) -> http.client.HTTPResponse:
    """Send a chat, and return the answer's beginning."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({**LONG, **fields})
    client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    return client.getresponse()


class Ending:
    """A server of the tiny engine in a thread, whose steps wait for a signal that it shall end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.place, self.capsys = socket.create_server(("127.0.0.1", 0)), capsys
        self.port = self.place.getsockname()[1]
        self.ended_well: list[bool] = []
        configured = settings(at_end=lambda: self.ended_well.append(True))
        self.server = Server(create_app(tiny_engine(), configured), f"http://127.0.0.1:{self.port}")
        work = self.server.service.worker._work

        def slowly() -> None:
            time.sleep(0.02)  # a text of 200 tokens takes some seconds
            work()

        monkeypatch.setattr(self.server.service.worker, "_work", slowly)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.place]}, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def signal(self, *numbers: int) -> None:
        for number in numbers:
            self.server.handle_exit(number, None)

    def join(self) -> tuple[float, str]:
        """Return how many seconds the end took, and what was said."""
        begun = time.monotonic()
        self.thread.join(60)
        assert not self.thread.is_alive() and self.ended_well
        return time.monotonic() - begun, self.capsys.readouterr().err


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], Ending]:
    return lambda: Ending(monkeypatch, capsys)


def last_event(answer: http.client.HTTPResponse) -> Any:
    """Return the last chunk of a stream, which must end as OpenAI's do."""
    *_, before, last, end = answer.read().decode().split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return json.loads(before.removeprefix("data: "))


@pytest.mark.parametrize("hurry", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT), None])
def test_answers_whose_time_is_over_end_with_an_error(
    hurry: tuple[int, ...] | None, ending: Callable[[], Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second signal, which must be Ctrl-C, or by the clock; whole ones as well as streams."""
    monkeypatch.setattr(serving, "SHUTDOWN_SECONDS", 0.3 if hurry is None else 60)
    run = ending()
    whole: list[http.client.HTTPResponse] = []
    waiting = threading.Thread(target=lambda: whole.append(ask(run.port)))
    stream = ask(run.port, stream=True)
    waiting.start()
    until(lambda: run.server.service.worker.running == 2)
    run.signal(*(hurry or (signal.SIGINT, signal.SIGTERM)))
    assert last_event(stream) == {"error": ENDED}
    waiting.join()
    assert whole[0].status == 503 and json.load(whole[0]) == {"error": ENDED}
    seconds, said = run.join()
    assert seconds < 5 and "Traceback" not in said and said.count("\n") == 2
    assert run.server.hurried == (hurry is not None)


def test_answers_end_as_usual_in_their_time_and_the_server_with_them(
    ending: Callable[[], Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SHUTDOWN_SECONDS", 60)
    run = ending()
    stream = ask(run.port, stream=True, max_tokens=20)
    run.signal(signal.SIGINT)
    assert last_event(stream)["choices"][0]["finish_reason"] == "length"
    seconds, said = run.join()
    assert seconds < 3 and not run.server.hurried, "an idle connection must not hold it up"
    assert "another Ctrl-C ends them now" in said


def test_from_the_signal_on_nobody_new_is_answered(
    ending: Callable[[], Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections are refused, idle ones closed; a request that was being sent is answered."""
    monkeypatch.setattr(serving, "SHUTDOWN_SECONDS", 60)
    run = ending()
    stream = ask(run.port, stream=True)
    idle, sending = (socket.create_connection(("127.0.0.1", run.port), timeout=30) for _ in range(2))
    idle.sendall(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    health = idle.recv(4096)
    assert health.startswith(b"HTTP/1.1 200 OK\r\n") and health.endswith(b"\r\n\r\n"), "HEAD has no body"
    body = json.dumps({**LONG, "max_tokens": 2}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sending.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
    until(lambda: len(run.server.server_state.tasks) == 2)
    run.signal(signal.SIGTERM)
    assert idle.recv(4096) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", run.port), timeout=30)
    sending.sendall(body)
    assert sending.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    run.signal(signal.SIGINT)
    assert last_event(stream) == {"error": ENDED}
    run.join()


def test_a_signal_that_comes_while_the_end_is_announced_is_the_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads the line may answer it before the handler of the first signal is done."""
    server = Server(create_app(tiny_engine(), settings()), "http://127.0.0.1:1")
    said: list[str] = []

    def answer(line: str) -> None:
        said.append(line)
        server.handle_exit(signal.SIGINT, None)

    monkeypatch.setattr(sys.stderr, "write", answer)
    server.handle_exit(signal.SIGINT, None)
    assert server.hurried and len(said) == 1


def test_a_closed_stderr_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a service that is started without one."""
    monkeypatch.setattr(sys, "stderr", None)
    with running(settings()) as (url, service):
        Server(create_app(tiny_engine(), settings()), url).handle_exit(signal.SIGINT, None)
        assert service.worker.alive


def test_who_reads_nothing_does_not_hold_up_the_end(
    ending: Callable[[], Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GRACE", 0.5)
    run = ending()
    deaf = socket.create_connection(("127.0.0.1", run.port))
    deaf.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
    )  # and no more
    until(lambda: run.server.server_state.tasks)
    run.signal(signal.SIGINT, signal.SIGINT)
    seconds, said = run.join()
    assert seconds < 3 and "Traceback" not in said
    deaf.close()


def test_a_second_ctrl_c_ends_the_program_without_a_traceback(tmp_path: Path) -> None:
    flags = [*save_near_models(tmp_path, max_position_embeddings=8192), "--port", "0"]
    flags += ["--total-tokens", "8", "--depth", "3", "--tree-top-k", "3"]
    with subprocess.Popen(
        [sys.executable, "-m", "eagle_fsd.serve", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EAGLE_FSD_CACHE": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            assert process.stderr is not None
            said = next((line for line in process.stderr if "answers at" in line), "it did not start")
            port = int(said.partition("http://127.0.0.1:")[2].partition("/")[0])
            stream = ask(port, stream=True, max_tokens=8000)
            process.send_signal(signal.SIGINT)
            assert "another Ctrl-C ends them now" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert last_event(stream) == {"error": ENDED}
            assert (process.stderr.read(), process.wait(60)) == ("", 130)
        finally:
            process.kill()
