"""Chats with the same system prompt read it once, also where the target has recurrent layers."""

from __future__ import annotations

from functools import partial

import pytest
import transformers

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason='the server needs the extra: pip install "eagle-fsd[serve]"')

from starlette.testclient import TestClient
from support.serving import settings
from support.tiny_models import greedy_alone, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from eagle_fsd import EagleFSD
from eagle_fsd.decoding.prompts.prefix_cache import LEAST
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.choices import Limits
from eagle_fsd.target.model import TargetModel

SYSTEM = {"role": "system", "content": "You answer questions about fish and rivers. Say what you know. " * 2}
QUESTIONS = ("Hi", "How deep is it?", "Why?", "Hi again")


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_the_third_chat_does_not_read_the_system_prompt(family: str) -> None:
    if not hasattr(transformers.Cache, "get_conv_state"):
        pytest.skip("transformers is older than 5.22")
    model = EagleFSD(TargetModel(tiny_model(family)), tiny_head(4), tiny_tokenizer(), base_model="tiny")
    chats = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    encode = partial(model.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True)
    prompts = [list(encode(chat)["input_ids"]) for chat in chats]
    wanted = [
        model.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for ids in greedy_alone(model.target.model, prompts, 12)
    ]
    application = create_app(model, settings(limits=Limits(prefix_tokens=4096)))
    said, cached = [], []
    with TestClient(application) as client:
        for chat in chats:
            body = {"messages": chat, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            said.append(answer["choices"][0]["message"]["content"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        page = client.get("/metrics").text
    shared = next(n for n, pair in enumerate(zip(*prompts[:2], strict=False)) if len(set(pair)) > 1)
    assert said == wanted
    assert shared > len(SYSTEM["content"]) and cached == [0, 0, shared - LEAST, shared - LEAST]
    assert f"eagle_fsd_prefix_cache_hits_total {2.0 * cached[2]}" in page
