"""The tree of a server's texts is measured while nobody asks, and no answer waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

WITHOUT = 'the server needs the extra: pip install "eagle-fsd[serve]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=WITHOUT)

from starlette.testclient import TestClient
from support.serving import settings, until
from support.tiny_engine import NAME, TREE, new_engine, tiny_engine
from support.tiny_models import prompts_of

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.autotune import tree_chooser
from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.serve import build_parser, make_settings
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.work import tree as served
from eagle_fsd.serving.work.tree import LONG_PAUSE, PAUSE, ServedTree

OTHER = TreeConfig(3, 2, 2)
FOUND = SimpleNamespace(tree=OTHER)


def nobody() -> bool:
    return False


def test_a_tree_that_was_measured_is_taken_once() -> None:
    asked: list[str] = []
    tree = ServedTree(TREE, lambda goes_on, more: asked.append(more) or FOUND)
    assert tree.pause == PAUSE and tree.measure(nobody) and tree.size == OTHER
    assert asked == ["a request puts it off"]
    assert tree.pause is None and not tree.measure(nobody) and len(asked) == 1


def test_a_tree_that_is_given_or_the_best_stays() -> None:
    assert ServedTree(TREE).pause is None and not ServedTree(TREE).measure(nobody)
    tree = ServedTree(OTHER, lambda *_: FOUND)
    assert not tree.measure(nobody) and tree.pause is None


def test_a_busy_machine_is_tried_again_later_than_one_that_had_a_request() -> None:
    tree = ServedTree(TREE, lambda goes_on, more: FOUND if goes_on() and len(tried) == 3 else None)
    tried: list[float | None] = []
    for somebody in (True, False, True):
        assert not tree.measure(lambda somebody=somebody: somebody)
        tried.append(tree.pause)
    assert tried == [PAUSE, LONG_PAUSE, PAUSE] and tree.size == TREE
    assert tree.measure(nobody) and tree.size == OTHER


def test_a_tree_does_not_change_under_a_request_that_is_read_or_waits() -> None:
    """Its rule may be that of a budget, which holds for the tree that it was chosen for."""
    measured, waiting = [], [True]
    tree = ServedTree(TREE, lambda goes_on, more: measured.append(goes_on()) or FOUND)
    with tree.stays():
        assert not tree.measure(nobody) and tree.size == TREE
    assert not tree.measure(lambda: waiting[0]) and tree.size == TREE
    assert tree.pause == PAUSE and tree.measure(nobody) and tree.size == OTHER
    assert measured == [False], "once, and it is told that somebody asks"


def test_a_request_that_is_refused_while_it_is_read_makes_no_machine_busy() -> None:
    def measure(goes_on: Callable[[], bool], more: str) -> None:
        with tree.stays():
            assert not goes_on()
        assert not goes_on(), "as it was said"

    tree = ServedTree(TREE, measure)
    assert not tree.measure(nobody) and tree.pause == PAUSE


def test_a_measurement_that_fails_ends_the_measuring_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no graph")

    tree = ServedTree(TREE, fail)
    assert not tree.measure(nobody) and tree.pause is None and tree.size == TREE
    assert f"the tree stays {TREE}, since it cannot be measured: no graph" in caplog.text


def answer(client: TestClient) -> str:
    sent = {"prompt": prompts_of([5])[0], "max_tokens": 8}
    return client.post("/v1/completions", json=sent).json()["choices"][0]["text"]


def tree_of(client: TestClient) -> str:
    return client.get("/v1/models").json()["data"][0]["tree"]


def test_a_request_ends_a_measurement_and_the_next_pause_goes_on_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A measurement that would last for ever holds nobody up, and a server that ends does not wait for it."""
    monkeypatch.setattr(served, "PAUSE", 0.01)
    begun, may_end = [threading.Event() for _ in range(3)], threading.Event()
    rounds: list[int] = []

    def measure(goes_on: Callable[[], bool], more: str) -> Any:
        rounds.append(1)
        begun[len(rounds) - 1].set()
        while goes_on():
            if may_end.wait(0.005):
                return FOUND
        return None

    with TestClient(create_app(tiny_engine(), settings(measure_tree=measure))) as client:
        assert begun[0].wait(30), "a server that nobody asks measures"
        first = answer(client)
        assert tree_of(client) == str(TREE)
        assert begun[1].wait(30), "it goes on behind the answer"
        may_end.set()
        until(lambda: tree_of(client) == str(OTHER))
        assert client.app.state.service.worker._scheduler.trees.tree == OTHER
        assert answer(client) == first, "greedy text is the target's own under any tree"
    assert len(rounds) == 2 and f"the draft tree is {OTHER} from now on" in capsys.readouterr().err
    may_end.clear()
    rounds.clear()
    begun[0].clear()
    with TestClient(create_app(tiny_engine(), settings(measure_tree=measure))):
        assert begun[0].wait(30)


def test_a_request_keeps_the_tree_till_its_texts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    with TestClient(create_app(tiny_engine(), settings())) as client:
        service = client.app.state.service
        for owner, name in ((service, "choose"), (service.reader, "encode"), (service.worker, "submit")):
            real = getattr(owner, name)

            def noting(*given: Any, real: Any = real) -> Any:
                held.append(service.tree._held)
                return real(*given)

            monkeypatch.setattr(owner, name, noting)
        answer(client)
        assert client.post("/v1/completions", json={"prompt": "a", "rule": "no"}).status_code == 400
        assert held == [1, 1, 1, 1] and service.tree._held == 0


def server_settings(model: EagleFSD, *argv: str) -> Any:
    args = build_parser().parse_args(["--base-model", NAME, *argv])
    return make_settings(args, model, generation_options(args))


def test_a_server_starts_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    for name in ("observe", "measure_forwards", "measure_overhead", "disturbance"):
        monkeypatch.setattr(tree_chooser, name, lambda *_, name=name: measured.append(name))
    made = server_settings(new_engine())
    assert made.tree == TreeConfig(8, 6, 4, 0.1) and made.measure_tree is not None and not measured
    assert server_settings(new_engine(), "--total-tokens", "6").measure_tree is None
