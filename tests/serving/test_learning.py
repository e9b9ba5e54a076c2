"""A server whose head goes on learning: between texts, from whole ones; no lossless text changes by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

WITHOUT = 'the server needs the extra: pip install "eagle-fsd[serve]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=WITHOUT)

import torch
from starlette.testclient import TestClient
from support.serving import settings, until
from support.tiny_engine import NAME, TREE
from support.tiny_models import prompts_of, simple_model, young_head
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD
from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.hub.resolve import load_head
from eagle_fsd.serve import build_parser, check_arguments, make_settings
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.work.learning import IdleLearning
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.online.adapter import AdaptConfig, HeadAdapter

PROMPTS = prompts_of([6] * 8, seed=5)
NEW = 24


def new_engine() -> EagleFSD:
    return EagleFSD(TargetModel(simple_model()), young_head(), tiny_tokenizer(), base_model=NAME)


def weights(model: EagleFSD) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.head.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def serve(model: EagleFSD, adapter: Any, **fields: Any) -> TestClient:
    return TestClient(create_app(model, settings(learner=adapter, **fields)), raise_server_exceptions=False)


def complete(client: TestClient, prompt: list[int], **body: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": NEW, **body})


@pytest.fixture
def model() -> Iterator[EagleFSD]:
    yield new_engine()


def test_the_head_learns_between_requests_and_no_lossless_text_changes(model: EagleFSD) -> None:
    decode = model.tokenizer.decode
    texts = [
        decode(model.generate([one], max_new_tokens=NEW, tree=TREE).new_tokens[0], skip_special_tokens=True)
        for one in PROMPTS
    ]
    before = weights(model)
    adapter = HeadAdapter(model, AdaptConfig(every=NEW, learning_rate=0.02))
    with serve(model, adapter) as client:
        for turn in range(40):
            for prompt, text in zip(PROMPTS, texts, strict=True):
                assert complete(client, prompt).json()["choices"][0]["text"] == text, turn
            if any(one.used for one in adapter.updates):
                break
        assert any(one.used for one in adapter.updates) and not same(before, weights(model))
        # What is served next is drafted by the head that has learned, and is still the target's own.
        assert [complete(client, one).json()["choices"][0]["text"] for one in PROMPTS] == texts


def test_nothing_is_learned_while_texts_are_served(model: EagleFSD) -> None:
    class Watching:
        """Wants to learn as soon as a text has ended, and notes how many texts there are when it can."""

        def __init__(self) -> None:
            self.ready, self.texts, self.at_update = False, 0, []

        def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
            self.texts, self.ready = self.texts + 1, True

        def update(self) -> None:
            worker = client.app.state.service.worker
            self.at_update.append((self.texts, worker.running + worker.waiting))
            self.ready = False

    learner = Watching()
    with serve(model, learner) as client:
        # One request of two texts, of which the first ends long before the other.
        body = {"prompt": PROMPTS[:2], "max_tokens": 60, "stop_token_ids": [short_end(model)]}
        assert client.post("/v1/completions", json=body).status_code == 200
        until(lambda: learner.at_update)
    assert learner.at_update == [(2, 0)]


def short_end(model: EagleFSD) -> int:
    """Return a token that ends the first prompt's text much sooner than the second's."""
    first, second = model.generate(PROMPTS[:2], max_new_tokens=60, tree=TREE).new_tokens
    return next(token for token in first[:10] if token not in second[:40])


def test_an_update_that_fails_ends_the_learning_and_nothing_else(model: EagleFSD) -> None:
    class Broken:
        ready = True

        def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None: ...

        def update(self) -> None:
            raise RuntimeError("no memory is left")

    with serve(model, Broken()) as client:
        until(lambda: not client.app.state.service.worker._learning.ready)
        assert complete(client, PROMPTS[0]).status_code == 200
        assert client.get("/health").status_code == 200


def test_only_whole_texts_are_learned_from() -> None:
    class Collector:
        ready = False

        def __init__(self) -> None:
            self.seen: list[tuple[list[int], list[int]]] = []

        def add(self, prompt: list[int], answer: list[int]) -> None:
            self.seen.append((prompt, answer))

    learner = Collector()
    learning = IdleLearning(learner)
    for reason in ("stop", "length", "cancelled", None):
        learning.note([1], [2, 3], reason)
    assert learner.seen == [([1], [2, 3])] * 2
    IdleLearning(None).note([1], [2], "stop")
    assert not IdleLearning(None).ready


def test_a_calibrated_threshold_is_refused_beside_it(model: EagleFSD) -> None:
    with serve(model, HeadAdapter(model)) as client:
        for asked in ({"threshold": "auto"}, {"quality_budget": 0.02}):
            answer = complete(client, PROMPTS[0], temperature=0.6, **asked)
            assert answer.status_code == 400
            error, (name,) = answer.json()["error"], asked
            assert error["param"] == name
            assert error["message"].startswith(f"{name} is {asked[name]!r} for a head that adapts: ")


def test_the_flags_make_a_server_that_saves_its_head_at_the_end(
    model: EagleFSD, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapted"
    args = build_parser().parse_args(["--adapt", "--adapt-save", str(folder), "--total-tokens", "8"])
    made = make_settings(args, model, generation_options(args))
    assert isinstance(made.learner, HeadAdapter)
    with TestClient(create_app(model, made), base_url="http://127.0.0.1") as client:
        assert complete(client, PROMPTS[0]).status_code == 200
        assert not folder.exists()
    saved = load_head(str(folder), model.target.hidden_size, model.target.vocab_size)
    assert same(weights(model), saved.state_dict())
    assert f"kept the adapted head in {folder}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--adapt", "--threshold", "auto", "--temperature", "0.6"], "--adapt with a calibrated threshold"),
        (["--adapt-save", "x"], "--adapt-save without --adapt"),
    ],
)
def test_flags_that_do_not_fit_are_named(flags: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_arguments(build_parser().parse_args(flags))
