"""rank_tokens against plain sorting, and its error messages."""

from __future__ import annotations

import pytest
import torch
from support.stubs import generator

from eagle_fsd.training.data.token_counts import rank_tokens


def plain_ranked(counts: list[float], size: int, always: list[int]) -> list[int]:
    """The same with sorted()."""
    order = sorted(range(len(counts)), key=lambda token: (-counts[token], token))
    others = [token for token in order if token not in always][: size - len(set(always))]
    return [token for token in order if token in always or token in others]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_rank_tokens_equal_plain_sorting(seed: int, dtype: torch.dtype) -> None:
    """Many ties and zeros; `always` may name frequent tokens, rare ones, and one twice."""
    draw = generator(seed)
    counts = torch.randint(0, 4, (40,), generator=draw).to(dtype)
    for always in ([], [0], [39, 7, 7], torch.randperm(40, generator=generator(seed))[:6].tolist()):
        for size in (max(1, len(set(always))), 9, 25, 40):
            tokens = rank_tokens(counts, size, always)
            assert tokens.dtype == torch.int64 and tokens.shape == (size,)
            assert tokens.tolist() == plain_ranked(counts.tolist(), size, always)


def test_rank_tokens_by_hand() -> None:
    counts = torch.tensor([0, 5, 2, 5, 0, 9])
    assert rank_tokens(counts, 3).tolist() == [5, 1, 3]
    assert rank_tokens(counts, 5).tolist() == [5, 1, 3, 2, 0]  # a token of count zero fills up
    assert rank_tokens(counts, 3, always=[4]).tolist() == [5, 1, 4]
    assert rank_tokens(counts, 1, always=[4]).tolist() == [4]


BAD_RANKS = {
    "no size": (torch.ones(5), 0, (), r"size is 0: it must be in 1\.\.5, .*; change"),
    "less than always": (torch.ones(5), 1, (1, 2), r"size is 1: it must be in 2\.\.5"),
    "more than there are": (torch.ones(5), 6, (), r"size is 6: it must be in 1\.\.5"),
    "always outside": (torch.ones(5), 3, (5,), r"always holds 5: .* 0..4; drop it"),
    "always negative": (torch.ones(5), 3, (-1,), "always holds -1"),
    "counts of texts": (torch.ones(2, 5), 3, (), r"counts are \[2, 5\].*: they must be \[V\]"),
    "negative counts": (torch.tensor([1, -2]), 1, (), r"counts are \[2\] with a minimum of -2"),
    "NaN": (torch.tensor([1, float("nan")]), 1, (), "minimum of nan"),
    "no counts": (torch.ones(0), 1, (), r"size is 1: it must be in 1\.\.0"),
}


@pytest.mark.parametrize("name", BAD_RANKS)
def test_bad_ranks_are_one_line(name: str) -> None:
    counts, size, always, message = BAD_RANKS[name]
    with pytest.raises(ValueError, match=message) as caught:
        rank_tokens(counts, size, always)
    assert "\n" not in str(caught.value)
