"""What a drafter is shown of a prompt's end."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from eagle_fsd.decoding.prompts.prefill import LISTED, list_next_tokens


def test_lists_are_those_after_the_last_tokens_of_every_row() -> None:
    """Here a token's features are its logits. A row of fewer tokens than LISTED begins with its first one."""
    target = SimpleNamespace(logits=lambda features: features)
    features = torch.randn(2, LISTED + 9, 5, generator=torch.Generator().manual_seed(0))
    found = list_next_tokens(target, features, [LISTED + 7, 3], 2)
    assert found is not None and found.ids.shape == (2, LISTED, 2)
    for row, last in ((0, LISTED + 7), (1, 3)):
        wanted = features[row, max(0, last - LISTED) : last].log_softmax(-1).topk(2)
        count = len(wanted.values)
        assert found.ids[row, -count:].equal(wanted.indices)
        torch.testing.assert_close(found.log_p[row, -count:], wanted.values)
    assert list_next_tokens(target, features, [3, 3], 0) is None
    assert list_next_tokens(target, features[:, :0], [0, 0], 2) is None, "a prompt of one token has no list"
