"""Serving on a pretended GPU: a CPU's texts and updates, and one wait more for logprobs."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest

WITHOUT = 'the server needs the extra: pip install "eagle-fsd[serve]"'
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=WITHOUT)

import torch
from starlette.testclient import TestClient
from support.pretended_cuda_calls import pretended_cuda
from support.serving import settings
from support.tiny_engine import NAME
from support.tiny_models import prompts_of, simple_model, young_head
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.runtime.cuda_graphs import usual_stepper
from eagle_fsd.serving.app import create_app
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.online.adapter import AdaptConfig, HeadAdapter

PROMPTS = prompts_of([6] * 4, seed=5)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LEARNS = AdaptConfig(every=12, learning_rate=0.02, held_back=2)


def engine_on(device: torch.device) -> EagleFSD:
    target = TargetModel(simple_model().to(device), usual_stepper(device))
    return EagleFSD(target, young_head().to(device), tiny_tokenizer(), base_model=NAME)


def served(device: torch.device, **more: Any) -> list[Any]:
    """Return the choices of requests one after the other, and of one with several texts."""
    body = {"max_tokens": 8, "temperature": 0, **more}
    with TestClient(create_app(engine_on(device), settings())) as client:
        made = [
            client.post("/v1/completions", json={"prompt": one, **body}) for one in (*PROMPTS[:2], PROMPTS)
        ]
        return [one.json()["choices"] for one in made]


@pytest.mark.parametrize("logprobs", [None, 3])
def test_served_texts_are_those_of_a_cpu(logprobs: int | None) -> None:
    """Log-probabilities make the host wait once more in a step, however many texts there are."""
    on_cpu = served(CPU, logprobs=logprobs)
    with pretended_cuda() as gpu:
        on_gpu = served(GPU, logprobs=logprobs)
    assert [[one["text"] for one in each] for each in on_gpu] == [
        [x["text"] for x in each] for each in on_cpu
    ]
    waits = Counter(one.split(" ")[0] for one in gpu.waits)
    verdicts, noted = (waits[f"decoding/steps/emission.py:{name}"] for name in ("to_host", "note_logprobs"))
    assert verdicts > 10 and noted == (verdicts if logprobs else 0)
    if logprobs:
        for one, other in zip(chain(*on_gpu), chain(*on_cpu), strict=True):
            mine, its = (part["logprobs"]["token_logprobs"] for part in (one, other))
            assert mine == pytest.approx(its) and one["logprobs"]["tokens"] == other["logprobs"]["tokens"]


def learned(device: torch.device) -> tuple[list[Any], dict[str, torch.Tensor]]:
    model = engine_on(device)
    adapter = HeadAdapter(model, LEARNS)
    for _ in range(2):
        for prompt in PROMPTS:
            adapter.add(
                prompt, model.generate([prompt], max_new_tokens=8, tree=TreeConfig(2, 1, 1)).new_tokens[0]
            )
            adapter.update()
    found = {name: value.detach().cpu() for name, value in model.head.state_dict().items()}
    return [(one.tokens, one.before, one.after, one.used) for one in adapter.updates], found


def test_a_head_that_drafts_on_a_gpu_learns_what_it_learns_on_a_cpu() -> None:
    updates, head = learned(CPU)
    with pretended_cuda():
        same_updates, same_head = learned(GPU)
    assert same_updates == updates and any(used for *_, used in updates)
    assert all(torch.equal(value, same_head[name]) for name, value in head.items())
