"""The openai client against a real server on a free port, several at once, and what the worker survives."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

WITHOUT = 'the server and its test need extras: pip install "eagle-fsd[dev]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(needed, reason=WITHOUT)

import openai
from support.serving import running, settings, until
from support.tiny_engine import CHAT, NAME, chat_ids, text_alone, tiny_engine

from eagle_fsd import Fuzzy
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.decoding.steps.failures import NonFiniteLogits, NothingAllowed
from eagle_fsd.serving.answers.completions import event
from eagle_fsd.serving.choices import Limits
from eagle_fsd.serving.service import Service
from eagle_fsd.serving.work.worker import Worker

LONG = {"model": NAME, "messages": CHAT, "max_tokens": 60}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    with running(settings()) as found:
        yield found


def client_of(url: str, **fields: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, **fields})


def test_the_openai_client_reads_everything(server: tuple[str, Any]) -> None:
    client = client_of(server[0])
    assert [model.id for model in client.models.list()] == [NAME]
    expected = text_alone(chat_ids(), max_new_tokens=20)
    answer = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content == expected and answer.usage.completion_tokens == 20
    assert answer.model_extra["timings"]["tau"] > 1 and answer._request_id.startswith("req_")
    stream = client.chat.completions.create(
        **{**LONG, "max_tokens": 20}, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.total_tokens == len(chat_ids()) + 20
    done = client.completions.create(model=NAME, prompt=[5, 6, 7], max_tokens=6)
    assert done.choices[0].text == text_alone([5, 6, 7], max_new_tokens=6)
    fuzzy = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=20, extra_body={"threshold": 0.3, "divergence": "js"}
    )
    assert fuzzy.choices[0].message.content == text_alone(chat_ids(), max_new_tokens=20, rule=Fuzzy(0.3))
    with client.chat.completions.stream(**LONG, stop=expected[12:15]) as helper:  # the client's own parser
        answer = helper.get_final_completion()
        assert answer.choices[0].message.content == expected[: expected.index(expected[12:15])]


def test_the_openai_client_raises_its_own_errors(server: tuple[str, Any]) -> None:
    client = client_of(server[0])
    with pytest.raises(openai.BadRequestError, match="store is not supported") as found:
        client.chat.completions.create(**LONG, store=True)
    assert (found.value.param, found.value.code) == ("store", "unsupported_field")
    with pytest.raises(openai.NotFoundError, match="name that"):
        client.chat.completions.create(model="other", messages=CHAT)
    with running(settings(key="secret")) as (url, _):
        with pytest.raises(openai.AuthenticationError):
            client_of(url).models.list()
        assert client_of(url, api_key="secret").models.list().data


def test_clients_at_once_get_the_texts_that_they_get_alone(server: tuple[str, Any]) -> None:
    """With rules and samplings of their own, whole and streamed, joining and leaving."""
    client = client_of(server[0])

    def ask(number: int) -> tuple[str, str]:
        messages = [{"role": "user", "content": "x" * number}]
        seed, limit, temperature = number, 8 + 5 * number, (0.0, 1.0)[number % 2]
        threshold = (0.0, 0.2, 0.5)[number % 3]
        asked = {
            "model": NAME, "messages": messages, "max_tokens": limit, "seed": seed,
            "temperature": temperature, "extra_body": {"threshold": threshold},
        }  # fmt: skip
        if number % 2:
            text = client.chat.completions.create(**asked).choices[0].message.content
        else:
            chunks = client.chat.completions.create(**asked, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        options = {
            "max_new_tokens": limit,
            "temperature": temperature,
            "seed": seed,
            "rule": Fuzzy(threshold),
        }
        return text, text_alone(chat_ids(messages), **options)

    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        for text, alone in pool.map(ask, range(7)):
            assert text == alone


def test_a_full_queue_is_said_and_tried_again() -> None:
    """The client's own retries obey retry-after, and succeed as soon as there is room."""
    with running(settings(limits=Limits(max_rows=1, max_queue=0))) as (url, service):
        client = client_of(url)
        stream = client.chat.completions.create(**LONG, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="busy") as found:
            client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=2)
        assert int(found.value.response.headers["retry-after"]) >= 1 and found.value.code == "queue_full"
        service.worker.line.turn = lambda *_: 0.1
        threading.Timer(0.05, stream.close).start()
        again = client_of(url, max_retries=6).chat.completions.create(model=NAME, messages=CHAT, max_tokens=2)
        assert again.choices[0].finish_reason == "length"


def send(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a chat over a bare connection."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_the_text_of_a_client_that_leaves_is_retired(stream: bool, server: tuple[str, Any]) -> None:
    url, service = server
    before = service.metrics.texts.labels("cancelled")._value.get()
    connection = send(url, {**LONG, "max_tokens": 220, "n": 3, "stream": stream, "ignore_eos": True})
    until(lambda: sum(job.clock.first is not None for job in list(service.worker._texts.values())) == 3)
    connection.close()
    until(lambda: service.worker.running == service.worker.waiting == 0)
    assert not service.worker._scheduler.busy
    assert service.metrics.texts.labels("cancelled")._value.get() > before
    assert client_of(url).chat.completions.create(model=NAME, messages=CHAT, max_tokens=2).choices


def test_a_client_that_does_not_read_holds_nobody_up(server: tuple[str, Any]) -> None:
    url, _ = server
    deaf = [send(url, {**LONG, "stream": True, "n": 2, "timings_per_token": True}) for _ in range(3)]
    try:
        answer = client_of(url).chat.completions.create(model=NAME, messages=CHAT, max_tokens=5)
        assert answer.choices[0].message.content == text_alone(chat_ids(), max_new_tokens=5)
    finally:
        for connection in deaf:
            connection.close()


@contextlib.contextmanager
def beside_a_whole_stream(client: openai.OpenAI) -> Iterator[None]:
    """Do something while another client reads a stream, whose text must be the one that it gets alone."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = client.chat.completions.create(**LONG, temperature=1, seed=4, stream=True)
        good = pool.submit(lambda: "".join(chunk.choices[0].delta.content or "" for chunk in stream))
        yield
        assert good.result() == text_alone(chat_ids(), max_new_tokens=60, temperature=1.0, seed=4)


@pytest.mark.parametrize(
    ("at", "told"), [(1, "generation_failed"), (2, "generation_failed"), (1, "nothing_allowed")]
)
def test_logits_that_are_not_finite_end_one_text_and_its_neighbours_go_on(
    at: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is lost. Its other texts are made again, and what they showed already is not shown twice.

    So it is where several ranks decode and the options of one text leave it no token.
    """
    step, failed = Scheduler.step, []
    marked = chat_ids([{"role": "user", "content": "bad"}])

    def broken(scheduler: Scheduler) -> Any:
        bad = next((text for text in scheduler.decoding if list(text.prompt) == marked), None)
        if bad is not None and bad.stats.steps >= at and len(scheduler.decoding) > 1:
            failed.append(bad.number)
            step_number = bad.stats.steps + 1
            raise (
                NothingAllowed(bad) if told == "nothing_allowed" else NonFiniteLogits(step_number, bad.number)
            )
        return step(scheduler)

    monkeypatch.setattr(Scheduler, "step", broken)
    with running(settings()) as (url, _):
        client = client_of(url)
        with beside_a_whole_stream(client):
            words = "the options allow no token|logits are not finite"
            with pytest.raises(openai.APIStatusError, match=words) as found:
                client.chat.completions.create(
                    **{**LONG, "messages": [{"role": "user", "content": "bad"}], "max_tokens": 60}
                )
            assert found.value.code == told and failed
            assert found.value.status_code == (400 if told == "nothing_allowed" else 500)


def test_a_text_whose_options_leave_no_token_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The others are not begun again, as they are where the target's own logits are not finite."""
    everything = list(range(tiny_engine().target.vocab_size))
    with running(settings()) as (url, _):
        client = client_of(url)
        with beside_a_whole_stream(client):
            with pytest.raises(openai.BadRequestError, match="the options allow no token here") as found:
                client.chat.completions.create(**LONG, extra_body={"suppress_tokens": everything})
            assert found.value.code == "nothing_allowed"
    assert "failed" not in caplog.text


def test_an_event_may_hold_half_a_character() -> None:
    """A model may write one, in the arguments of a call."""
    assert json.loads(event({"arguments": "hi \ud83d"})[6:]) == {"arguments": "hi \ud83d"}


def test_an_error_outside_a_step_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may also end where a text is taken out: that must not end the worker."""
    retire, failed = Scheduler.retire, []

    def broken(scheduler: Scheduler, text: Any) -> None:
        if not failed:
            failed.append(text.number)
            raise RuntimeError("out of memory")
        retire(scheduler, text)

    monkeypatch.setattr(Scheduler, "retire", broken)
    with running(settings()) as (url, service):
        client = client_of(url)
        stream = client.chat.completions.create(**LONG, temperature=1, stream=True)
        next(iter(stream))
        stream.close()  # it is retired
        until(lambda: failed)
        answer = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=5)
        assert answer.choices[0].message.content == text_alone(chat_ids(), max_new_tokens=5)
        assert service.worker.alive


def test_a_text_that_cannot_begin_is_told_so_and_not_begun_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before a text is taken up touches no text: it came again and again, and the client waited."""
    chosen, failed = Scheduler._next_reading, []
    marked = chat_ids([{"role": "user", "content": "bad"}])

    def broken(scheduler: Scheduler, most: int, waiting: Any) -> Any:
        if waiting and list(waiting[0].prompt) == marked:
            failed.append(1)
            raise RuntimeError("cannot begin")
        return chosen(scheduler, most, waiting)

    monkeypatch.setattr(Scheduler, "_next_reading", broken)
    with running(settings()) as (url, _):
        client = client_of(url)
        with pytest.raises(openai.InternalServerError, match="its log says how"):
            client.chat.completions.create(**{**LONG, "messages": [{"role": "user", "content": "bad"}]})
        answer = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=5)
        assert answer.choices[0].message.content == text_alone(chat_ids(), max_new_tokens=5)
    assert len(failed) == 1


def test_an_error_while_it_recovers_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that ended in a step may not have come back when the batch is made anew."""
    step, begin, failed = Scheduler.step, Worker._new_scheduler, []

    def broken(scheduler: Scheduler) -> Any:
        if len(scheduler.decoding) == 2 and not failed:
            failed.append("step")
            raise RuntimeError("out of memory")
        return step(scheduler)

    def begin_badly(worker: Worker) -> Scheduler:
        if failed == ["step"]:
            failed.append("begin")
            raise RuntimeError("out of memory, again")
        return begin(worker)

    monkeypatch.setattr(Scheduler, "step", broken)
    monkeypatch.setattr(Worker, "_new_scheduler", begin_badly)

    def ask(client: openai.OpenAI) -> int:
        with pytest.raises(openai.InternalServerError, match="out of memory") as found:
            client.chat.completions.create(**LONG)
        return int(found.value.status_code)

    with running(settings()) as (url, service):
        client = client_of(url)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            assert list(pool.map(ask, [client] * 2)) == [500, 500]
        assert failed == ["step", "begin"]
        answer = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=5)
        assert answer.choices[0].message.content == text_alone(chat_ids(), max_new_tokens=5)
        assert service.worker.alive and service.worker.waiting == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_of_a_route_that_fails_a_client_is_told_only_that(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("zip() argument 2 is shorter")

    monkeypatch.setattr(Service, "answer", broken)
    with running(settings()) as (url, _), pytest.raises(openai.InternalServerError) as found:
        client_of(url).chat.completions.create(**LONG)
    assert found.value.code == "internal_server_error" and "its log says how" in str(found.value)
    assert "zip()" not in str(found.value)
    said = capfd.readouterr().err
    assert "Traceback" in said and "zip() argument 2 is shorter" in said


def test_a_worker_that_ends_ends_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(settings()) as (url, service):
        client = client_of(url)

        def broken(*_: Any) -> None:
            raise RuntimeError("out of memory, again")

        monkeypatch.setattr(service.worker, "_take_in", broken)
        monkeypatch.setattr(service.worker, "_recover", broken)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as found:
                client.chat.completions.create(**LONG)
            assert found.value.status_code == 503
        until(lambda: not service.worker.alive)


@pytest.mark.parametrize(
    ("reason", "told"),
    [("out of memory", "out of memory"), ("zip() argument 2 is shorter", "the server failed, and its log")],
)
def test_a_step_that_fails_ends_its_batch_and_the_worker_lives_on(
    reason: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a stream that has begun, the error is an event, which the client raises too.

    What went wrong is told where it is known, and else only logged. A text that waited is answered.
    """
    step, failed = Scheduler.step, []

    def broken(scheduler: Scheduler) -> Any:
        if scheduler.decoding and scheduler.waiting and not failed:
            failed.append(1)
            raise RuntimeError(reason)
        return step(scheduler)

    monkeypatch.setattr(Scheduler, "step", broken)
    one_place = running(settings(limits=Limits(max_rows=1)))
    with one_place as (url, _), concurrent.futures.ThreadPoolExecutor(1) as pool:
        client = client_of(url)
        stream = client.chat.completions.create(**LONG | {"max_tokens": 220}, stream=True)
        waiting = pool.submit(client.chat.completions.create, model=NAME, messages=CHAT, max_tokens=5)
        with pytest.raises(openai.APIError, match=told) as found:
            list(stream)
        assert (reason in str(found.value)) == (told == reason) and reason in caplog.text
        answer = waiting.result()
        assert answer.choices[0].message.content == text_alone(chat_ids(), max_new_tokens=5)
        assert tiny_engine().target.vocab_size == 96
