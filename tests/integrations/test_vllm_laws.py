"""FSD inside vLLM with tiny models: the distribution of sampled texts, and what is refused at start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; see docs/vllm.md")

import transformers
import vllm
from scipy.stats import chisquare
from support.tiny_models import randomize
from support.vllm_engines import counts, engine, installed_plugin
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from eagle_fsd.core.config import SamplingConfig
from eagle_fsd.core.sampling import warp
from eagle_fsd.integrations.vllm.plugin import check_request

pytestmark = pytest.mark.slow

TINY = 64


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed_plugin(tmp_path_factory.mktemp("installed")):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny target and a noisy copy of it as its draft, of TINY tokens; and the target itself."""
    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=TINY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    randomize(model, 3)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
    model.save_pretrained(folder / "target")
    draft = transformers.LlamaForCausalLM(config).eval()
    draft.load_state_dict(model.state_dict())
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.05 * weight.std() * torch.randn(weight.shape, generator=random))
    draft.save_pretrained(folder / "draft")
    return folder, model


def tiny_engine(folder: Path, **options: Any) -> Any:
    speculation = {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": 3}
    settings = {"max_model_len": 128, "skip_tokenizer_init": True, "max_num_seqs": 128}
    settings |= {"speculative_config": speculation}
    return engine(folder / "target", folder / "draft", **(settings | options))


def sampled(llm: Any, count: int, **options: Any) -> torch.Tensor:
    asked = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, max_tokens=3, detokenize=False, **options)
    prompts = [{"prompt_token_ids": [5, 9, 11, 3]}] * count
    made = llm.generate(prompts, asked, use_tqdm=False)
    return torch.tensor([list(one.outputs[0].token_ids) for one in made])  # [count, 3]


def test_sampled_lossless_tokens_have_the_targets_distribution(tiny: tuple[Path, Any]) -> None:
    """The first three tokens by chi-square, the exact law of each summed over all tokens before it."""
    folder, model = tiny
    sampling, count = SamplingConfig(0.8, 20, 0.95), 4000

    @torch.no_grad()
    def law(prefixes: torch.Tensor) -> torch.Tensor:
        found = warp(model(prefixes).logits[:, -1], sampling).double()
        return found / found.sum(-1, keepdim=True)  # chisquare wants sums equal to more than float32 has

    prompt, every = torch.tensor([[5, 9, 11, 3]]), torch.arange(TINY)[:, None]
    first = law(prompt)[0]
    given_first = law(torch.cat((prompt.expand(TINY, -1), every), 1))  # [first, second]
    pairs = torch.cartesian_prod(torch.arange(TINY), torch.arange(TINY))
    given_both = torch.cat(
        [law(torch.cat((prompt.expand(len(part), -1), part), 1)) for part in pairs.split(512)]
    )
    two = first[:, None] * given_first
    laws = [first, two.sum(0), two.flatten() @ given_both]
    with tiny_engine(folder) as llm:
        tokens, found = sampled(llm, count), counts(llm)
        assert found["exact"] > 0.1 * count and found["fuzzy"] == 0
        for place, exact in enumerate(laws):
            seen = torch.bincount(tokens[:, place], minlength=TINY).double()
            assert not seen[exact == 0].any()
            often = exact * count >= 5  # the rest is one outcome
            pvalue = chisquare(
                [*seen[often].tolist(), float(seen[~often].sum()) + 1e-9],
                [*(exact[often] * count).tolist(), float(exact[~often].sum() * count) + 1e-9],
            ).pvalue
            assert pvalue > 1e-4, place
        # A seed gives a text again, alone and among others.
        one = sampled(llm, 1, seed=3, extra_args={"fsd_threshold": 0.2})
        assert torch.equal(sampled(llm, 40, seed=3, extra_args={"fsd_threshold": 0.2}), one.expand(40, -1))


def test_an_engine_that_cannot_run_fsd_is_refused_at_start(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = tiny
    for options, said in (
        ({"speculative_config": None}, "fsd is set without a draft"),
        ({"additional_config": {"fsd": {"threshold": -1}}}, "fsd in additional_config: threshold is -1"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode is 'processed_logprobs'"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "worker_cls is 'vllm.v1.worker.cpu_worker"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
            "speculative method is 'ngram'",
        ),
    ):
        with pytest.raises(ValueError, match=said), tiny_engine(folder, **options):
            pass
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with pytest.raises(ValueError, match=r"vLLM is '0\.34\.0'.*install vLLM 0\.32"), tiny_engine(folder):
        pass


def test_fields_of_fsd_are_refused_where_it_is_off() -> None:
    """As a request with a threshold would be answered without one."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")
    )
    check_request(config, None)
    check_request(config, {"others": 1})
    with pytest.raises(VLLMValidationError, match=r"^fsd_threshold is 0\.3: this engine runs without FSD"):
        check_request(config, {"fsd_threshold": 0.3})


def test_the_tokens_that_end_a_text_are_those_that_vllm_stops_at() -> None:
    asked = SamplingParams(stop_token_ids=[7])
    asked.update_from_generation_config({"eos_token_id": [2, 5]}, 2)
    assert asked.all_stop_token_ids == {2, 5, 7}
