"""The lossless law on SmolLM2-135M-Instruct with its shipped head: greedy text equals Hugging Face's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import PROMPT_SETS

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.evaluation.greedy import compare, reference
from eagle_fsd.text import encode

NEAR_TIES = 2  # the most texts of all prompts that may part where the target's best two logits tie
LEAST_TAU = {TreeConfig(16, 5, 8): 1.9, TreeConfig(60, 6, 10): 2.0}  # over all prompts


def check(engine: EagleFSD, texts: list[str], tree: TreeConfig, batch_size: int, new_tokens: int) -> float:
    """Compare with the target alone, prompt by prompt; returns tau."""
    prompts = [encode(engine.tokenizer, text)[0].tolist() for text in texts]
    expected = reference(engine, prompts, new_tokens)
    differences, stats = compare(engine, prompts, expected, tree, batch_size, new_tokens)
    assert all(difference.excused for difference in differences), differences
    assert len(differences) <= NEAR_TIES
    return stats.tau


@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_text_of_a_prompt_from_every_set(
    smollm2: EagleFSD, prompts: Callable[[str], list[str]], batch_size: int
) -> None:
    """In a batch the four have different lengths and end at different times."""
    texts = [prompts(name)[3] for name in PROMPT_SETS]
    assert check(smollm2, texts, TreeConfig(16, 5, 8), batch_size, new_tokens=24) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("tree", LEAST_TAU, ids=str)
def test_greedy_text_of_all_prompts(
    smollm2: EagleFSD, prompts: Callable[[str], list[str]], tree: TreeConfig, batch_size: int
) -> None:
    """As `eval/check_greedy.py` does, which keeps the target's texts between its runs."""
    texts = [text for name in PROMPT_SETS for text in prompts(name)]
    assert check(smollm2, texts, tree, batch_size, new_tokens=64) >= LEAST_TAU[tree]
