"""What a config does to lm_head's product, and the slope of it; fields that cannot be."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from eagle_fsd.target.admission import small_tree
from eagle_fsd.target.architecture import (
    PLAIN,
    LogitsTransform,
    check_supported,
    end_tokens,
    logits_transform,
)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, PLAIN),
        ({"logits_scaling": None, "logit_scale": 0, "final_logit_softcapping": 0.0}, PLAIN),
        ({"logits_scaling": 1.0, "logit_scale": 1}, PLAIN),
        ({"logits_scaling": 8}, LogitsTransform(scale=0.125)),
        ({"logit_scale": 0.0625}, LogitsTransform(scale=0.0625)),
        ({"final_logit_softcapping": 30.0}, LogitsTransform(cap=30.0)),
        ({"logit_scale": 0.5, "final_logit_softcapping": 4.0}, LogitsTransform(scale=0.5, cap=4.0)),
    ],
)
def test_a_config_says_what_is_done_to_the_logits(fields: dict[str, Any], wanted: LogitsTransform) -> None:
    assert logits_transform(PretrainedConfig(**fields)) == wanted


@pytest.mark.parametrize(("kind", "scale"), [("granite", 0.125), ("hyperclovax", 8)])
def test_a_scaling_divides_or_multiplies(kind: str, scale: float) -> None:
    config = PretrainedConfig(logits_scaling=8)
    config.model_type = kind
    assert logits_transform(config) == LogitsTransform(scale=scale)


def test_a_field_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match=r"final_logit_softcapping is '30': it must be a number; correct"):
        logits_transform(PretrainedConfig(final_logit_softcapping="30"))


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.0, 3.0), (2.0, 5.0), (-1.0, 2.0)])
def test_the_slope_is_the_derivative(scale: float, cap: float | None) -> None:
    """From the transformed values alone, at both ends of the cap too."""
    product = torch.linspace(-40, 40, 81, dtype=torch.float64).requires_grad_()
    transform = LogitsTransform(scale, cap)
    transformed = transform(product)
    (wanted,) = torch.autograd.grad(transformed.sum(), product)
    found = torch.as_tensor(transform.slope(transformed.detach()), dtype=torch.float64)
    torch.testing.assert_close(found.expand_as(wanted), wanted)
    assert PLAIN(product) is product


@pytest.mark.parametrize("ids", [1.5, "</s>", [1, "2"], {"a": 1}, "x" * 10**5])
def test_end_tokens_that_are_no_token_ids_are_named_in_a_line(ids: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^the target's eos_token_id is .*: end tokens must be token ids"
    ) as error:
        end_tokens(SimpleNamespace(eos_token_id=ids), None)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("inner", [3, "llama", {"hidden_size": 8}])
def test_a_text_config_that_is_none_is_named_in_a_line(inner: Any) -> None:
    """As a config.json of a plain decoder may hold by mistake: transformers takes it as it is."""
    with pytest.raises(
        ValueError, match=r"target is a 'llama' model whose text_config is .*: it must be a config"
    ):
        check_supported(LlamaConfig(text_config=inner))


@pytest.mark.parametrize(
    ("differences", "wanted", "tried"),
    [([0.05], 0.05, 1), ([0.4, 0.01], 0.01, 2), ([0.4, 0.2, 0.3], 0.2, 3), ([0.4, math.nan], math.nan, 2)],
)
def test_a_mistake_must_show_in_every_text(
    differences: list[float], wanted: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some texts magnify rounding. A logit that is no number counts at once."""
    target = SimpleNamespace(dtype=torch.bfloat16, weight_format="bfloat16")
    left = list(differences)
    monkeypatch.setattr(small_tree, "difference_on", lambda *_: left.pop(0))
    assert small_tree.tree_difference(target) == pytest.approx(wanted, nan_ok=True)
    assert len(differences) - len(left) == tried == len(differences)
