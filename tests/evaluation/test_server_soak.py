"""The soak of a server: it finds nothing at a good one, and every fault of a bad one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import NoReturn

import pytest

pytest.importorskip("fastapi", reason='this needs an extra: pip install "eagle-fsd[serve]"')
pytest.importorskip("uvicorn", reason='this needs an extra: pip install "eagle-fsd[serve]"')
pytest.importorskip("prometheus_client", reason='this needs an extra: pip install "eagle-fsd[serve]"')

from support.serving import running, settings
from support.tiny_engine import save_near_models

from eagle_fsd.evaluation.serving import soak_command
from eagle_fsd.evaluation.serving.client import Client, Reply
from eagle_fsd.evaluation.serving.processes import Scale, Server, end, free_port, started
from eagle_fsd.evaluation.serving.soak import (
    LOST,
    UNCLEAR,
    WRONG,
    Difference,
    SoakClient,
    answers_alone,
    gap,
    judge,
    soak,
)
from eagle_fsd.evaluation.serving.soak_requests import CHAT, HOSTILE, KINDS, Asked, draw_requests, is_clear
from eagle_fsd.serving.choices import Limits

SECONDS = float(os.environ.get("EAGLE_FSD_SOAK_SECONDS", "300"))
HELLO = Asked(CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}, "plain")


def test_a_good_server_is_found_to_be_one() -> None:
    requests = draw_requests(3, 15, KINDS, 8, 20)
    with running(settings(limits=Limits(max_rows=3, max_queue=2))) as (url, _):
        client = Client(url)
        expected = answers_alone(client, requests)
        found = soak(client, requests, expected, 6, 1.5)
    assert found.faults == {} and not found.differences
    assert found.outcomes.count("refused") >= len(HOSTILE) and "answered" in found.outcomes
    assert found.asked and set(found.asked) <= set(KINDS)


def test_requests_are_the_same_for_a_seed_and_of_all_kinds() -> None:
    assert draw_requests(1, 20, KINDS, 9, 9) == draw_requests(1, 20, KINDS, 9, 9)
    assert {asked.kind for asked in draw_requests(1, 20, KINDS, 9, 9)} == set(KINDS)
    assert draw_requests(1, 20, KINDS, 9, 9) != draw_requests(2, 20, KINDS, 9, 9)


class Bad(BaseHTTPRequestHandler):
    """A server that answers everything, wrongly; a stream breaks off."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        streamed = b'"stream": true' in body
        said = {"choices": [{"index": 0, "message": {"content": "no"}, "delta": {"content": "no"}}]}
        sent = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streamed else "application/json")
        self.end_headers()
        self.wfile.write(b"data: " + sent + b"\n\n" if streamed else sent)

    do_GET = do_BREW = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def bad() -> Iterator[Client]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bad)
    Thread(target=server.serve_forever, daemon=True).start()
    yield Client(f"http://127.0.0.1:{server.server_port}", timeout=10)
    server.shutdown()
    server.server_close()


def test_every_fault_of_a_bad_server_is_found(bad: Client) -> None:
    client = SoakClient(bad, [HELLO], [["yes"]], random.Random(0))
    outcomes = {name: getattr(client, name)(0) for name in ("whole", "stream", "leave", "hostile")}
    assert outcomes == {"whole": WRONG, "stream": LOST, "leave": WRONG, "hostile": UNCLEAR}
    assert [one.found for one in client.found.differences] == ["no", "no"]
    gone = SoakClient(Client(f"http://127.0.0.1:{free_port()}", 2), [HELLO], [["yes"]], random.Random(0))
    for _ in range(5):
        gone.act()
    assert gone.found.outcomes == [LOST] * 5 and len(gone.found.faults[LOST]) == 5


@pytest.mark.parametrize(
    ("body", "clear"),
    [
        ('{"error": {"message": "m", "type": "t", "param": null, "code": null}}', True),
        ('{"error": {"message": "", "type": "t", "param": null, "code": null}}', False),
        ('{"error": {"message": "m", "type": "t"}}', False),
        ('{"error": "m"}', False),
        ("[]", False),
        ("Internal Server Error", False),
    ],
)
def test_a_clear_error_has_a_message_and_its_fields(body: str, clear: bool) -> None:
    assert is_clear(Reply(400, {}, body.encode())) is clear


def test_a_gap_is_that_of_the_token_where_texts_part() -> None:
    tokens = [
        ("the", -0.1, {"the": -0.1, "a": -2.0}),
        (" cat", -0.70, {" cat": -0.70, " dog": -0.71}),
        (" sat", -0.2, {" sat": -0.2, " ran": -3.0}),
    ]

    def of(found: str) -> float | None:
        return gap(tokens, Difference(0, 0, found, "the cat sat"))

    assert of("the dog sat") == pytest.approx(0.01)
    assert of("the cat ran") == pytest.approx(2.8)
    assert of("a cat") == pytest.approx(1.9)
    assert of("the bird") is None


def test_a_real_difference_is_judged_by_the_server_itself() -> None:
    """The judge finds the second token of a place, and how much less likely that is."""
    with running(settings()) as (url, _):
        client = Client(url)
        [[right]] = answers_alone(client, [HELLO])
        scored = client.post(CHAT, {**HELLO.body, "logprobs": True, "top_logprobs": 2}).data()
        places = scored["choices"][0]["logprobs"]["content"]
        first, second = (places[4]["top_logprobs"][rank] for rank in (0, 1))
        before = "".join(place["token"] for place in places[:4])
        other = Difference(0, 0, before + second["token"] + "~", right)
        assert judge(client, HELLO, other) == pytest.approx(first["logprob"] - second["logprob"], abs=1e-4)
        assert judge(client, Asked(CHAT, HELLO.body, "sampled"), other) is None


def test_a_process_is_started_weighed_and_ended(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with started(command, port, "/", log) as server, Scale(server, every=0.02) as scale:
        while len(scale.samples) < 5:
            pass
        assert 2e6 < scale.between(0, 1) < 2e8 and scale.between(0.9999, 0.9999) > 2e6
        assert end(server.process) < 10
    assert server.process.poll() is not None and server.resident() == 0
    complaint = pytest.raises(ValueError, match=r"did not start \(.*no-such-module")
    with complaint, started([sys.executable, "-m", "no-such-module"], port, "/", log):
        pass


def test_what_a_request_takes_for_a_while_is_no_growth() -> None:
    scale = Scale(None, samples=[(0.0, 100), (1.0, 900), (2.0, 101), (3.0, 800), (4.0, 800), (5.0, 110)])
    assert scale.between(0.0, 0.4) == 100 and scale.between(0.5, 1.0) == 110
    assert scale.between(0.7, 0.7) == 800, "the last one before"


def test_what_a_server_started_is_weighed_with_it() -> None:
    child = "held = bytearray(b'x') * 10**8; print(flush=True); input()"
    parent = f'import subprocess, sys; subprocess.run([sys.executable, "-c", "{child}"])'
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", parent], **pipes) as process:
        process.stdout.readline()
        assert Server([], Client(""), process).resident() > 10**8
        process.stdin.close()  # which ends both


def test_a_report_that_cannot_be_written_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError("no room is left")

    monkeypatch.setattr(soak_command, "started", lambda *_: nullcontext(SimpleNamespace(process=None)))
    monkeypatch.setattr(soak_command, "run", lambda *_: {"promises": {}})
    monkeypatch.setattr(soak_command, "end", lambda _: 0.0)
    monkeypatch.setattr(soak_command, "write_atomically", full)
    with pytest.raises(SystemExit) as ended:
        soak_command.main(["--output", str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: no room is left\n")


@pytest.mark.slow
def test_minutes_of_soak_break_no_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server as a process of its own, in float64: nothing lost, nothing wrong, nothing kept."""
    models = save_near_models(tmp_path, max_position_embeddings=1024)
    limits = ["--max-rows", "4", "--max-queue", "3", "--runtime", "torch", "--dtype", "float64"]
    sizes = ["--words", "20", "--max-new-tokens", "40", "--requests", "60", "--seconds", str(SECONDS)]
    sent = ["--output", str(tmp_path / "soak"), *sizes, "--", *models, *limits, "--total-tokens", "8"]
    code = soak_command.main(sent)
    printed = capsys.readouterr().out
    assert code == 0, printed
    report = json.loads((tmp_path / "soak" / "report.json").read_text())
    assert report["wrong"] == 0 and {"answered", "streamed", "refused"} <= set(report["outcomes"])
