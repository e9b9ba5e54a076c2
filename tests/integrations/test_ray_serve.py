"""Two replicas under Ray Serve, one of them killed while clients read: only what it was writing is lost."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("ray", reason='this needs an extra: pip install "eagle-fsd[ray]"')

import ray
from ray import serve
from support.tiny_engine import save_near_models

from eagle_fsd.evaluation.serving.client import Client, Streamed
from eagle_fsd.evaluation.serving.processes import free_port
from eagle_fsd.evaluation.serving.soak import answers_alone
from eagle_fsd.evaluation.serving.soak_requests import Asked, draw_requests, texts_of_chunks
from eagle_fsd.integrations.ray_serve import app

CLIENTS, BEFORE, AFTER = 8, 5.0, 15.0  # seconds before and after the kill
SOON = 120.0  # seconds for a new replica to load


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"replica": "2"}, "replica is no argument"),
        ({"replicas": "0"}, "replicas is 0"),
        ({"replicas": 0}, "replicas is 0"),  # of a config file
        ({"replicas": 1, "flags": "--port 9"}, "--port is 9"),
        ({"flags": "--max-rows 0"}, "--max-rows is 0"),
        ({"flags": "--tp-plan auto"}, "--tp-plan is auto in a replica: each is one process"),
        ({"flags": "--stop \udcff"}, "--stop is not UTF-8"),
        ({"flags": "--port 9"}, "--port is 9: the address is Ray's own"),
    ],
)
def test_wrong_arguments_are_a_line(arguments: dict[str, str | int], complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        app(arguments)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two replicas of a tiny model, in float64, which rounds too little to change a text."""
    models = " ".join(save_near_models(tmp_path))
    flags = f"{models} --dtype float64 --runtime torch --total-tokens 8 --depth 3 --tree-top-k 3"
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    settings["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # 5 s are too few on a busy machine
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"replicas": "2", "flags": flags}), route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@dataclass
class Asking:
    """One request: when it was sent, and what came. replica: "" if no head of an answer came."""

    number: int
    sent: float
    streamed: Streamed

    @property
    def replica(self) -> str:
        return self.streamed.headers.get("x-replica", "")


def ask(client: Client, requests: list[Asked], number: int) -> Asking:
    found = Asking(number, time.monotonic(), Streamed())
    # Where the connection breaks, what came before is there.
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        client.stream(requests[number].path, requests[number].body, into=found.streamed)
    return found


def kill(replica: str) -> None:
    """Kill the process of a replica."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if replica in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
            return
    raise AssertionError(f"no actor of replica {replica}")


@pytest.mark.slow
def test_an_answer_says_its_requests_id_once(url: str) -> None:
    """Ray's proxy adds the header, also where the answer has it already."""
    for given in ({}, {"X-Request-Id": "mine"}):
        client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        client.request("GET", "/health", headers=given)
        ids = [value for name, value in client.getresponse().getheaders() if name.lower() == "x-request-id"]
        assert len(ids) == 1 and ids[0] == given.get("X-Request-Id", ids[0])


@pytest.mark.slow
def test_a_killed_replica_loses_what_was_on_it_and_nothing_else(url: str) -> None:
    client = Client(url, timeout=60)
    requests = draw_requests(1, 20, ("plain", "sampled"), 8, 60)
    expected = answers_alone(client, requests)
    found: list[Asking] = []
    lock, end = threading.Lock(), time.monotonic() + BEFORE + AFTER

    def run(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            asked = ask(client, requests, draw.randrange(len(requests)))
            with lock:
                found.append(asked)

    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(run, seed) for seed in range(CLIENTS)]
        time.sleep(BEFORE)
        names = sorted({one.replica for one in found} - {""})
        killed, when = names[0], time.monotonic()
        kill(killed)
        gone = time.monotonic()
        for one in running:
            one.result()
    assert len(names) == 2, "both replicas answered before one was killed"
    lost = [one for one in found if not one.streamed.whole]
    for one in lost:  # with no head it was on the killed one if it was sent before that was gone
        assert one.replica == killed or (not one.replica and one.sent < gone), one
    assert len(lost) <= CLIENTS
    for one in found:
        if one.streamed.whole:
            chunks = [chunk for _, chunk in one.streamed.chunks]
            right = expected[one.number]
            assert texts_of_chunks(chunks, len(right)) == right
    after = [one for one in found if one.sent > gone]
    assert after and all(one.streamed.whole for one in after) and when <= gone

    limit = time.monotonic() + SOON
    while not (new := {ask(client, requests, 0).replica for _ in range(8)} - {*names, ""}):
        assert time.monotonic() < limit, "no new replica took the place of the killed one"
        time.sleep(1)
    assert killed not in new
