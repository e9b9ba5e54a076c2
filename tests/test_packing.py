"""Packed linear layers against the plain ones that they stand in for."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import prompts_of, tiny_model
from torch import nn

from eagle_fsd.packing import PackedLinear, linear_of_rows, pack_linears, packable, plain_linears
from eagle_fsd.target import TargetModel
from eagle_fsd.vocabulary import DraftVocabulary

pytestmark = pytest.mark.skipif(not packable(torch.zeros(2, 2)), reason="torch is built without oneDNN")


def layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80, bias=bias, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (17, 48), (3, 5, 48), (2, 600, 48), (0, 48), (2, 0, 48)])
def test_a_packed_layer_gives_what_the_plain_one_does(shape: tuple[int, ...], bias: bool) -> None:
    plain = layer(bias=bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        made = PackedLinear(plain)(x)
        torch.testing.assert_close(made, plain(x), rtol=1e-5, atol=1e-6)
        strided = torch.randn(4, 48, 7).transpose(1, 2)
        torch.testing.assert_close(PackedLinear(plain)(strided), plain(strided), rtol=1e-5, atol=1e-6)


def test_bfloat16_layers_are_packed_where_the_machine_has_it() -> None:
    plain = layer(torch.bfloat16)
    if not packable(plain.weight):
        pytest.skip("oneDNN has no bfloat16 on this machine")
    x = torch.randn(5, 48, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(x), plain(x), rtol=2e-2, atol=2e-2)


def test_the_packed_weight_is_what_is_multiplied() -> None:
    """Or all of this would hold for a stand-in that does nothing."""
    made = PackedLinear(layer(bias=False))
    x = torch.randn(3, 48)
    with torch.inference_mode():
        before = made(x)
        made.weight.data.mul_(2.0)
        assert torch.equal(made(x), before)
        with plain_linears(made):
            torch.testing.assert_close(made(x), 2 * before, rtol=1e-5, atol=1e-6)
        assert torch.equal(made(x), before)


def test_a_packed_layer_moves_and_copies_with_its_weight() -> None:
    made = PackedLinear(layer())
    x = torch.randn(3, 48)
    with torch.inference_mode():
        made.weight.data.mul_(2.0)
        torch.testing.assert_close(made.float()(x), nn.functional.linear(x, made.weight, made.bias))
        twin = copy.deepcopy(made)
        assert twin.packed is not None and torch.equal(twin(x), made(x))
    assert made.double().packed is None and made(x.double()).dtype == torch.float64


def test_a_packed_layer_sees_weights_that_are_loaded() -> None:
    made, other = PackedLinear(layer()), nn.Linear(48, 80)
    made.load_state_dict(other.state_dict())
    x = torch.randn(3, 48)
    with torch.inference_mode():
        torch.testing.assert_close(made(x), other(x), rtol=1e-5, atol=1e-6)


def test_gradients_flow_as_through_the_plain_layer() -> None:
    plain, x = layer(), torch.randn(3, 48)
    PackedLinear(plain)(x).square().sum().backward()
    found, plain.weight.grad = plain.weight.grad, None
    plain(x).square().sum().backward()
    assert torch.equal(found, plain.weight.grad)


def test_packing_leaves_parameters_and_other_layers_alone() -> None:
    class Adapted(nn.Linear):
        pass

    shared = layer()
    model = nn.ModuleDict({"one": shared, "two": shared, "inner": nn.Sequential(layer(), Adapted(48, 2))})
    before = dict(model.named_parameters())
    pack_linears(model)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(value is before[name] for name, value in model.named_parameters())
    assert model["one"] is model["two"] and type(model["one"]) is PackedLinear
    assert type(model["inner"][0]) is PackedLinear and type(model["inner"][1]) is Adapted
    assert pack_linears(model)["one"] is model["one"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_a_layer_are_its_outputs(packed: bool, bias: bool) -> None:
    whole = PackedLinear(layer(bias=bias)) if packed else layer(bias=bias)
    rows = torch.tensor([7, 0, 79])
    made = linear_of_rows(whole, rows, torch.device("cpu"))
    assert isinstance(made, PackedLinear) == packed
    x = torch.randn(4, 48)
    with torch.inference_mode():
        torch.testing.assert_close(made(x), whole(x)[:, rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "phi"])
def test_packed_targets_write_the_same_texts(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gemma2" else "sdpa")
    ids = torch.tensor([prompts_of([12])[0]])
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    pack_linears(model)
    target = TargetModel(model)
    assert isinstance(target.lm_head, PackedLinear)
    assert torch.equal(model.generate(ids, **options), wanted)
    drafted = torch.tensor([3, 11, 5])
    vocabulary = DraftVocabulary(target, drafted)
    features = torch.randn(2, target.hidden_size)
    with torch.inference_mode():
        torch.testing.assert_close(vocabulary.logits(features), target.logits(features)[:, drafted])
