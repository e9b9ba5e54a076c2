"""Grouped attention against the plain one that repeats the keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import prompts_of, tiny_model

from eagle_fsd.core.tree import additive
from eagle_fsd.runtime import grouped_attention as module
from eagle_fsd.runtime.grouped_attention import grouped_attention
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession


@pytest.mark.parametrize("additively", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_it_is_attention_over_repeated_keys(
    heads: int, kv_heads: int, count: int, scale: float | None, additively: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, count, 8, generator=g)
    k, v = (torch.randn(2, kv_heads, 23, 8, generator=g) for _ in range(2))
    visible = torch.rand(2, count, 23, generator=g) < 0.5
    visible[:, :, 3] = True
    mask = additive(visible, torch.float32) if additively else visible[:, None]
    many = [x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v)]
    wanted = F.scaled_dot_product_attention(q, *many, attn_mask=mask, scale=scale)
    torch.testing.assert_close(grouped_attention(q, k, v, mask, scale), wanted)


def test_keys_are_not_repeated_for_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the model's own attention changed by what we put in its place."""
    model = tiny_model("llama", "sdpa")
    target = TargetModel(model)
    seen: list[int] = []
    plain = F.scaled_dot_product_attention

    def watched(q: torch.Tensor, k: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        seen.append(k.shape[1])
        return plain(q, k, *rest, **options)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", watched)
    prompt = torch.tensor([prompts_of([9])[0]])
    with torch.inference_mode():
        features = TargetSession(target, 1, 16).prefill(prompt, [9])
        mine, seen[:] = seen.copy(), []
        mask = additive(torch.ones(1, 9, 9, dtype=torch.bool).tril(), torch.float32)
        wanted = model.model(prompt, attention_mask=mask).last_hidden_state
    assert mine == [2, 2] and seen == [4, 4]  # two layers of two key heads; transformers' own repeats them
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(features, wanted, atol=1e-5, rtol=1e-5)
