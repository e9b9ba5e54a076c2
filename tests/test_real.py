"""The lossless law on SmolLM2-135M-Instruct with its shipped head: greedy text equals Hugging Face's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import PROMPT_SETS

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.evaluation.commands.greedy import compare, reference
from eagle_fsd.text.chat import encode

PROMPTS = (
    "Name the largest planet.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the ride? Explain how you found it.",
    "Write a Python function that reverses the words of a sentence, with a docstring and an example.",
    "What is 2 + 2?",
)
NEAR_TIES = 2  # the most texts of all prompts that may part where the target's best two logits tie
LEAST_TAU = {  # over all prompts of the sets
    TreeConfig(16, 5, 8): 1.9,
    TreeConfig(60, 6, 10): 2.2,
    TreeConfig(16, 8, 4, 0.05): 1.9,
}


def check(engine: EagleFSD, texts: list[str], tree: TreeConfig, batch_size: int, new_tokens: int) -> float:
    """Compare with the target alone, prompt by prompt; returns tau."""
    prompts = [encode(engine.tokenizer, text)[0].tolist() for text in texts]
    expected = reference(engine, prompts, new_tokens)
    differences, stats = compare(engine, prompts, expected, tree, batch_size, new_tokens)
    assert all(difference.excused() for difference in differences), differences
    assert len(differences) <= NEAR_TIES
    return stats.tau


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("tree", LEAST_TAU, ids=str)
def test_greedy_text(smollm2: EagleFSD, tree: TreeConfig, batch_size: int) -> None:
    """In a batch the four have different lengths and end at different times."""
    assert check(smollm2, list(PROMPTS), tree, batch_size, new_tokens=24) > 1.8


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("tree", LEAST_TAU, ids=str)
def test_greedy_text_of_all_prompts(
    smollm2: EagleFSD, prompts: Callable[[str], list[str]], tree: TreeConfig, batch_size: int
) -> None:
    """As `eval/check_greedy.py` does, which keeps the target's texts between its runs."""
    texts = [text for name in PROMPT_SETS for text in prompts(name)]
    assert check(smollm2, texts, tree, batch_size, new_tokens=64) >= LEAST_TAU[tree]
