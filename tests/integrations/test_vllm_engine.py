"""FSD inside vLLM with SmolLM2: texts, thresholds, tau and errors of a running engine and its server.

Needs vLLM in this environment, and the extra's versions of torch and transformers beside it; docs/vllm.md has
the commands.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; see docs/vllm.md")

from support.vllm_engines import DRAFTED, counts, engine, installed_plugin

from eagle_fsd import EagleFSD, Fuzzy, TreeConfig, hub
from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.core.padding import pad_left
from eagle_fsd.training.commands.export_vllm import read_plain_head, save_plain_head, save_target

pytestmark = pytest.mark.slow

EAGLE3_HEAD = "EAGLE_FSD_EAGLE3_HEAD"  # names a folder

PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a short story about a dog that finds its way home.",
    "List three countries and their areas.",
    "Explain to a child why the sky is blue.",
    "How do I make a simple tomato soup?",
    "Give me advice for a job interview.",
    "What is the difference between a virus and a bacterium?",
    "Write a poem about the sea in autumn.",
    "How does a bicycle stay upright?",
    "Describe the water cycle step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What were the main causes of the First World War?",
    "Summarise the plot of Romeo and Juliet.",
    "How can I learn to play the guitar on my own?",
    "Write an email that asks for a day off.",
    "Why do leaves change their colour?",
]


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed_plugin(tmp_path_factory.mktemp("installed")):
        yield


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, smollm2: EagleFSD) -> Path:
    """SmolLM2 and its shipped head, exported for vLLM."""
    folder = tmp_path_factory.mktemp("smollm2")
    head = hub.resolve_head(None, hub.DEFAULT_TARGET)
    save_plain_head(read_plain_head(head), head, folder / "head")
    model, tokenizer = hub.load_target(hub.DEFAULT_TARGET, "float32", "cpu")
    save_target(model, tokenizer, folder / "target")
    return folder


def chat(llm: Any, prompts: Sequence[str], **sampling: Any) -> list[list[int]]:
    """Return the token ids of the answers; a tuple in `sampling` has a value for each prompt."""
    from vllm import SamplingParams

    each = [
        SamplingParams(
            **{name: value[row] if isinstance(value, tuple) else value for name, value in sampling.items()}
        )
        for row in range(len(prompts))
    ]
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [list(made.outputs[0].token_ids) for made in llm.chat(asked, each, use_tqdm=False)]


# Settings of vLLM that change logits, and so must change them along a chain.
PROCESSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"min_tokens": 60},
    {"bad_words": ["dog", "the", " the"]},
    {"allowed_token_ids": list(range(500, 9000))},
]


def processed_ids(llm: Any) -> list[list[list[int]]]:
    return [chat(llm, PROMPTS[1:4], temperature=0.0, max_tokens=64, **options) for options in PROCESSED]


@pytest.fixture(scope="module")
def plain(real: Path) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Plain vLLM's greedy answers, and those with each of PROCESSED."""
    with engine(real / "target") as llm:
        return chat(llm, PROMPTS, temperature=0.0, max_tokens=96), processed_ids(llm)


@pytest.fixture(scope="module")
def plain_ids(plain: tuple[list[list[int]], Any]) -> list[list[int]]:
    return plain[0]


@pytest.fixture(scope="module")
def fsd(real: Path, plain: Any) -> Iterator[Any]:
    with engine(real / "target", real / "head") as llm:
        yield llm


def test_greedy_lossless_ids_are_plain_vllms(fsd: Any, plain_ids: list[list[int]]) -> None:
    """And drafts are accepted, so that the equality is of chains and not of plain steps."""
    before = counts(fsd)
    assert chat(fsd, PROMPTS, temperature=0.0, max_tokens=96) == plain_ids
    after = counts(fsd)
    assert after["exact"] - before["exact"] > 0.3 * (after["steps"] - before["steps"])
    assert after["fuzzy"] == before["fuzzy"]


def test_what_changes_logits_changes_them_along_a_chain(fsd: Any, plain: tuple[Any, list[Any]]) -> None:
    assert processed_ids(fsd) == plain[1]


def test_a_grammar_holds_under_fuzzy_acceptance(fsd: Any) -> None:
    """Fuzzily followed tokens obey the mask of structured output too."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    wanted = StructuredOutputsParams(regex=r"(red|green|blue)(, (red|green|blue)){5}")
    for threshold in (0.0, 0.3, "inf"):
        asked = SamplingParams(
            temperature=0.0, max_tokens=40, structured_outputs=wanted, extra_args={"fsd_threshold": threshold}
        )
        made = fsd.chat([[{"role": "user", "content": "Name six colours."}]], asked, use_tqdm=False)
        assert re.fullmatch(r"(red|green|blue)(, (red|green|blue)){5}", made[0].outputs[0].text), threshold


def test_requests_of_one_batch_are_what_each_is_alone(fsd: Any) -> None:
    """Four thresholds and a divergence, greedy and sampled with seeds, together and one after the other."""
    prompts = PROMPTS[:8]
    asked: list[dict[str, Any]] = [
        {},
        {"fsd_threshold": 0.3},
        {"fsd_threshold": 0.6},
        {"fsd_threshold": 0.3, "fsd_divergence": "tv"},
        {"fsd_threshold": 0.6, "fsd_max_consecutive": 1},
        {"fsd_threshold": 0.3},
        {"fsd_threshold": 0.6},
        {},
    ]
    terms: dict[str, tuple[Any, ...]] = {
        "extra_args": tuple(asked),
        "temperature": (*[0.0] * 5, *[0.7] * 3),
        "top_k": (*[0] * 5, *[50] * 3),
        "seed": (*[None] * 5, 5, 6, 7),
    }
    together = chat(fsd, prompts, max_tokens=48, **terms)
    for row, prompt in enumerate(prompts):
        alone = {name: values[row] for name, values in terms.items()}
        assert chat(fsd, [prompt], max_tokens=48, **alone) == [together[row]], asked[row]
    exact = chat(fsd, prompts[:5], max_tokens=48, temperature=0.0)
    assert together[0] == exact[0]
    assert together[1:3] != exact[1:3]


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_tau_is_that_of_our_own_chain(
    fsd: Any, real: Path, threshold: float, record_property: Callable[[str, object], None]
) -> None:
    """The same head, chain, rule and prompts: tokens a step within 3 %, and the texts."""
    compare_tau(fsd, real / "target", real / "head", threshold, record_property)


@pytest.mark.skipif(
    EAGLE3_HEAD not in os.environ,
    reason=f"{EAGLE3_HEAD} names no EAGLE-3 head for the default target (train/train_head.py --eagle3)",
)
def test_tau_of_an_eagle3_head_is_that_of_our_own_chain(
    real: Path, plain_ids: list[list[int]], record_property: Callable[[str, object], None]
) -> None:
    head = Path(os.environ[EAGLE3_HEAD])
    with engine(real / "target", head, method="eagle3") as llm:
        assert chat(llm, PROMPTS, temperature=0.0, max_tokens=96) == plain_ids
        compare_tau(llm, real / "target", head, 0.0, record_property)


def compare_tau(
    llm: Any, target: Path, head: Path, threshold: float, record_property: Callable[[str, object], None]
) -> None:
    rule = Fuzzy(threshold) if threshold else Lossless()
    own = EagleFSD.from_pretrained(str(target), str(head), dtype=torch.float32, device="cpu", lookup=False)
    asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    rows = [own.tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in asked]
    tree = TreeConfig(DRAFTED + 1, DRAFTED, 1)
    before = counts(llm)
    ids = chat(llm, PROMPTS, temperature=0.0, max_tokens=96, extra_args={"fsd_threshold": threshold})
    after = counts(llm)
    tau = (sum(map(len, ids)) - len(ids)) / (after["steps"] - before["steps"])
    # vLLM's first token comes of the prompt, without a chain. So chains begin behind it here, too: a fuzzy
    # text depends on where they do.
    first = own.generate(*pad_left(rows, 0), tree=TreeConfig(1), temperature=0.0, max_new_tokens=1).new_tokens
    rows = [[*row, *one] for row, one in zip(rows, first, strict=True)]
    made = own.generate(*pad_left(rows, 0), rule=rule, tree=tree, temperature=0.0, max_new_tokens=95)
    steps, tokens = sum(one.steps for one in made.stats), sum(one.new_tokens for one in made.stats)
    texts = [[*one, *rest] for one, rest in zip(first, made.new_tokens, strict=True)]
    same = sum(mine == its for mine, its in zip(ids, texts, strict=True))
    record_property("tau", f"{threshold}: {tau:.4f} in vLLM, {tokens / steps:.4f} here, {same} texts equal")
    assert tau == pytest.approx(tokens / steps, rel=0.03)
    assert same >= len(ids) - 2


def test_guards_hold_across_the_steps_of_a_text(fsd: Any, plain_ids: list[list[int]]) -> None:
    """With an exact beginning of 40 tokens the texts begin as the target's own, and then go on fuzzily."""
    asked = {"fsd_threshold": "inf", "fsd_exact_prefix": 40}
    ids = chat(fsd, PROMPTS[:6], temperature=0.0, max_tokens=96, extra_args=asked)
    assert all(mine[:40] == its[:40] for mine, its in zip(ids, plain_ids, strict=False))
    assert any(mine != its for mine, its in zip(ids, plain_ids, strict=False))
    before = counts(fsd)
    chat(
        fsd,
        PROMPTS[:6],
        temperature=0.0,
        max_tokens=96,
        extra_args={"fsd_threshold": "inf", "fsd_max_consecutive": 0},
    )
    assert counts(fsd)["fuzzy"] == before["fuzzy"]


def test_wrong_values_are_errors_of_their_request_alone(fsd: Any, plain_ids: list[list[int]]) -> None:
    from vllm.exceptions import VLLMValidationError

    for asked, said in (
        ({"fsd_threshold": -1}, "fsd_threshold is -1: it must be a number at least 0"),
        ({"fsd_child": "draft"}, "fsd_child is 'draft': vLLM drafts chains"),
    ):
        with pytest.raises(VLLMValidationError, match=said):
            chat(fsd, PROMPTS[:1], extra_args=asked)
    assert chat(fsd, PROMPTS[:1], temperature=0.0, max_tokens=96) == plain_ids[:1]


def test_log_probabilities_go_with_chains(fsd: Any, plain_ids: list[list[int]]) -> None:
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
    made = fsd.chat([[{"role": "user", "content": PROMPTS[0]}]], asked, use_tqdm=False)[0].outputs[0]
    assert list(made.token_ids) == plain_ids[0][: len(made.token_ids)]
    for token, found in zip(made.token_ids, made.logprobs, strict=True):
        assert found[token].rank == 1 and found[token].logprob <= 0


# --- over HTTP


def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_thresholds_over_http(real: Path, plain_ids: list[list[int]], tmp_path: Path) -> None:
    """A server with a default, requests with their own, and wrong values: 400, and the server goes on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculation = {"method": "eagle", "model": str(real / "head"), "num_speculative_tokens": DRAFTED}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(real / "target")),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"),
        *("--enforce-eager", "--kv-cache-memory-bytes", "200000000", "--gpu-memory-utilization", "0.1"),
        *("--served-model-name", "smollm2", "--speculative-config", json.dumps(speculation)),
        *("--additional-config", json.dumps({"fsd": {"threshold": 0.6}})),
    ]
    base = f"http://127.0.0.1:{port}"
    body = {"model": "smollm2", "messages": [{"role": "user", "content": PROMPTS[1]}], "max_tokens": 48}
    body |= {"temperature": 0, "return_token_ids": True}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"{base}/health", timeout=5)
                    break
                except OSError:
                    assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
                    time.sleep(1)
            answers = {
                threshold: post(f"{base}/v1/chat/completions", {**body, "vllm_xargs": xargs})
                for threshold, xargs in (
                    *((0.0, {"fsd_threshold": 0}), (0.3, {"fsd_threshold": 0.3, "fsd_divergence": "js"})),
                    *((0.6, {"fsd_threshold": 0.6, "fsd_exact_eos": True}), (None, {})),
                )
            }
            assert [status for status, _ in answers.values()] == [200] * 4
            ids = {key: answer["choices"][0]["token_ids"] for key, (_, answer) in answers.items()}
            assert ids[0.0] == plain_ids[1][: len(ids[0.0])]
            assert ids[None] == ids[0.6] != ids[0.0]
            for xargs, said in (
                ({"fsd_threshold": -1}, "fsd_threshold is -1: it must be a number at least 0"),
                ({"fsd_threshold": "a lot"}, "fsd_threshold is 'a lot'"),
                ({"fsd_divergence": "euclid"}, "fsd_divergence is 'euclid': it must be one of"),
                ({"fsd_tau": 3}, "fsd_tau is 3: there is no such field"),
            ):
                status, answer = post(f"{base}/v1/chat/completions", {**body, "vllm_xargs": xargs})
                assert status == 400 and said in answer["error"]["message"], answer
                status, answer = post(
                    f"{base}/v1/completions", {"model": "smollm2", "prompt": "a", "vllm_xargs": xargs}
                )
                assert status == 400 and said in answer["error"]["message"], answer
            status, answer = post(f"{base}/v1/chat/completions", {**body, "vllm_xargs": {"fsd_threshold": 0}})
            assert status == 200 and answer["choices"][0]["token_ids"] == ids[0.0]
        finally:
            server.terminate()
            server.wait(60)
