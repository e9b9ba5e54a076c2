"""On a GPU: no tensors of both devices together, and a step that waits for the device only where it must.

With every drafter, every rule and every option the text is the CPU's.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from support.every_rule import RULES
from support.gpu_twins import DRAFTERS, LOGPROBS, MERGED, OPTIONS, Twins
from support.tiny_models import tiny_model

from eagle_fsd import Fuzzy, GenerationOptions, Lossless
from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.divergence import DIVERGENCES

QUICK = ("eagle", "eagle3", "first layers", "Mamba-1", "lookup", "merged")
OTHER_RULES = [
    *(Lossless(share_noise=False), Fuzzy(0.0), Fuzzy(0.3, mode="paper"), Fuzzy(math.inf, price=math.inf)),
    *(Fuzzy(0.3, divergence) for divergence in DIVERGENCES),
]
# Several at a time: each changes the logits, or what is said of them.
OPTIONS_TOGETHER: dict[str, dict[str, Any]] = {
    "warpers": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "bans": {
        **{"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        **{"no_repeat_ngram_size": 2, "bad_words_ids": [[3], [4, 5], [1, 2, 3]], "suppress_tokens": [1, 2]},
        **{"logit_bias": {(3,): 1.5, (4, 5): 2.0}, "min_new_tokens": 5, "eos_token_id": [*range(9, 40)]},
    },
    "a processor": {"logits_processor": lambda texts, scores: scores * 1.5, "temperature": 0.8},
    "logprobs": {"logprobs": 3},
    "logprobs of the tokens": {"logprobs": 0, "temperature": 0.7},
    "stops and several": {"stop_strings": ["a", "e"], "num_return_sequences": 3, "temperature": 0.9},
    "seeds": {"seed": [(1, 0), (7, 3)], "temperature": 1e-4},
}


@cache
def twins(drafter: str) -> Twins:
    return Twins(tiny_model, DRAFTERS[drafter][0])


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in DRAFTERS]
)
def test_a_step_waits_for_its_verdict_and_for_what_the_host_reads_of_a_draft(name: str) -> None:
    twins(name).steps(DRAFTERS[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_so_does_a_warm_one(name: str) -> None:
    twins(name).steps(DRAFTERS[name][1], temperature=1.0)


@pytest.mark.parametrize("rule", RULES[::2], ids=str)
def test_no_rule_waits(rule: AcceptanceRule) -> None:
    twins("near").steps(set(), rule=rule, temperature=0.8, max_new_tokens=6)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", [*RULES, *OTHER_RULES], ids=str)
def test_none_waits_greedy_or_warm(rule: AcceptanceRule, temperature: float) -> None:
    twins("near").steps(set(), rule=rule, temperature=temperature)


@pytest.mark.parametrize("name", OPTIONS_TOGETHER)
def test_options_wait_once_for_the_draft(name: str) -> None:
    twins("near").steps(OPTIONS | LOGPROBS, **OPTIONS_TOGETHER[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS_TOGETHER)
def test_so_they_do_beside_lookup(name: str) -> None:
    twins("merged").steps(OPTIONS | LOGPROBS | MERGED, **OPTIONS_TOGETHER[name])


@pytest.mark.parametrize("form", [{"regex": "[a-z ]{5,20}"}, {"json_schema": {"type": "integer"}}])
def test_forms_wait_once_for_the_draft(form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="the extra schema is not installed")
    from support.schema_engine import END_ID, schema_engine

    both = Twins(tiny_model, DRAFTERS["near"][0], schema_engine().tokenizer)
    both.steps(OPTIONS, eos_token_id=END_ID, **form)


def test_the_papers_chain_waits_for_its_verdict() -> None:
    options = GenerationOptions.fsd_paper(0.3)
    twins("near").steps(set(), options=options, tree=options.tree)
