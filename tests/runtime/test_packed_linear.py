"""Packed linear layers against the plain ones that they stand in for."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_models import greedy_alone, prompts_of, tiny_head, tiny_model
from torch import nn

from eagle_fsd import EagleFSD
from eagle_fsd.drafting.draft_vocabulary import DraftVocabulary
from eagle_fsd.runtime import matmul_backends, timing
from eagle_fsd.runtime.matmul_backends import (
    BACKENDS,
    MKL,
    ONEDNN,
    MatmulBackend,
    backend_for,
    find_fastest_backend,
    measure_fastest_backend,
)
from eagle_fsd.runtime.packed_linear import (
    PackedLinear,
    backend_names,
    pack_linears,
    plain_linears,
    take_rows,
)
from eagle_fsd.target.model import TargetModel

pytestmark = pytest.mark.skipif(
    not ONEDNN.supports(torch.zeros(2, 2)), reason="torch is built without oneDNN"
)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> MatmulBackend:
    if not request.param.supports(torch.zeros(2, 2)):
        pytest.skip(f"torch is built without {request.param.name}")
    return request.param


def layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80, bias=bias, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (17, 48), (3, 5, 48), (2, 600, 48), (0, 48), (2, 0, 48)])
def test_a_packed_layer_gives_what_the_plain_one_does(
    shape: tuple[int, ...], bias: bool, backend: MatmulBackend
) -> None:
    plain = layer(bias=bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        made = PackedLinear(plain, backend)(x)
        torch.testing.assert_close(made, plain(x), rtol=1e-5, atol=1e-6)
        strided = torch.randn(4, 48, 7).transpose(1, 2)
        torch.testing.assert_close(
            PackedLinear(plain, backend)(strided), plain(strided), rtol=1e-5, atol=1e-6
        )


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(576, 1536), (1536, 576), (7, 3), (1, 5), (576, 5000)])
def test_a_weight_packed_once_serves_any_rows_and_threads(
    shape: tuple[int, int], backend: MatmulBackend
) -> None:
    """A backend may ask for both when it packs; it must not depend on them afterwards."""
    torch.manual_seed(0)
    x, weight, threads = torch.randn(300, shape[0]), torch.randn(shape[1], shape[0]), torch.get_num_threads()
    try:
        for packing in (1, 2):
            torch.set_num_threads(packing)
            packed = backend.pack(weight)
            for multiplying in (1, 2, 3):
                torch.set_num_threads(multiplying)
                for rows in (1, 2, 3, 5, 16, 17, 64, 300):
                    made = backend.multiply(x[:rows], packed, weight, None)
                    torch.testing.assert_close(made, x[:rows] @ weight.T, rtol=1e-4, atol=1e-3)
    finally:
        torch.set_num_threads(threads)


def scale(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2.0)


def exchange(weight: torch.Tensor) -> None:
    weight.data = weight.data * 2.0


@pytest.mark.parametrize("change", [scale, exchange])
def test_a_weight_that_changes_is_packed_again(
    change: Callable[[nn.Parameter], None], backend: MatmulBackend
) -> None:
    """Or a merged adapter would be in the training text and not in the generated one."""
    made, x = PackedLinear(layer(bias=False), backend), torch.randn(3, 48)
    with torch.inference_mode():
        before = made(x)
        change(made.weight)
        torch.testing.assert_close(made(x), 2 * before)


def test_a_change_through_data_is_seen_by_the_next_generation() -> None:
    """`weight.data.mul_` leaves no trace that torch counts; peft merges adapters so."""
    model = tiny_model("llama", "sdpa")
    engine = EagleFSD(TargetModel(pack_linears(model)), pack_linears(tiny_head()))
    prompt = prompts_of([7])
    before = engine.generate(prompt, max_new_tokens=12).new_tokens
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.3)
    wanted = tiny_model("llama", "sdpa")
    wanted.load_state_dict(model.state_dict())
    assert engine.generate(prompt, max_new_tokens=12).new_tokens == greedy_alone(wanted, prompt, 12) != before
    head = engine.head.fc
    head.weight.data.zero_()
    engine.generate(prompt, max_new_tokens=1)
    with torch.inference_mode():
        assert not head(torch.ones(1, head.in_features)).sub(0 if head.bias is None else head.bias).any()


def test_bfloat16_layers_are_packed_where_the_machine_has_it() -> None:
    plain = layer(torch.bfloat16)
    if not backend_for(plain.weight):
        pytest.skip("oneDNN has no bfloat16 on this machine")
    x = torch.randn(5, 48, dtype=torch.bfloat16)
    made = PackedLinear(plain, MKL)
    assert made.backend is ONEDNN  # MKL packs float32 alone
    with torch.inference_mode():
        torch.testing.assert_close(made(x), plain(x), rtol=2e-2, atol=2e-2)


def test_the_packed_weight_is_what_is_multiplied(backend: MatmulBackend) -> None:
    """Or all of this would hold for a stand-in that does nothing."""
    made = PackedLinear(layer(bias=False), backend)
    x = torch.randn(3, 48)
    with torch.inference_mode():
        before = made(x)
        made.weight.data.mul_(2.0)
        assert torch.equal(made(x), before)
        with plain_linears(made):
            torch.testing.assert_close(made(x), 2 * before, rtol=1e-5, atol=1e-6)
        assert torch.equal(made(x), before)


def test_a_packed_layer_moves_and_copies_with_its_weight(backend: MatmulBackend) -> None:
    made = PackedLinear(layer(), backend)
    x = torch.randn(3, 48)
    with torch.inference_mode():
        made.weight.data.mul_(2.0)
        torch.testing.assert_close(made.float()(x), nn.functional.linear(x, made.weight, made.bias))
        twin = copy.deepcopy(made)
        assert twin.packed is not None and twin.backend == backend and torch.equal(twin(x), made(x))
    assert made.double().packed is None and made(x.double()).dtype == torch.float64


def test_a_packed_layer_sees_weights_that_are_loaded(backend: MatmulBackend) -> None:
    made, other = PackedLinear(layer(), backend), nn.Linear(48, 80)
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


def test_no_backend_leaves_a_module_as_it_is() -> None:
    model = nn.Sequential(layer())
    assert pack_linears(model, None) is model and type(model[0]) is nn.Linear and backend_names(model) == []
    assert backend_names(pack_linears(model)) == ["oneDNN"]


@pytest.mark.parametrize(
    "seconds, wanted",
    [
        ({None: [2.0, 8.0], "oneDNN": [1.0, 4.0], "MKL": [2.0, 4.0]}, "oneDNN"),
        ({None: [2.0, 5.0], "oneDNN": [2.8, 4.4], "MKL": [2.0, 3.6]}, "MKL"),
        ({None: [2.0, 5.0], "oneDNN": [2.8, 4.4], "MKL": [1.9, 5.0]}, None),
    ],
)
def test_the_fastest_backend_is_taken(
    seconds: dict[str | None, list[float]], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ratios over one row and a tree's; a second copy of the weights must gain more than a little."""
    if not MKL.supports(torch.zeros(2, 2)):
        pytest.skip("torch is built without MKL")
    asked = iter([None, *(backend.name for backend in BACKENDS)])
    monkeypatch.setattr(matmul_backends, "time_products", lambda *_: [[one] for one in seconds[next(asked)]])
    monkeypatch.setattr(matmul_backends, "LEAST", 1)
    found, _ = measure_fastest_backend(nn.Sequential(layer()))
    assert (found and found.name) == wanted and next(asked, "all") == "all"


def test_a_backend_is_chosen_by_running_it(backend: MatmulBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow stand-ins for the others; a module of few weights is not measured at all."""
    calls = []

    def wait(x: torch.Tensor, *_: object) -> torch.Tensor:
        calls.append(len(x))
        time.sleep(0.05)
        return x

    slow = [replace(one, multiply=wait) for one in BACKENDS if one != backend]
    monkeypatch.setattr(matmul_backends, "BACKENDS", (*slow, backend))
    monkeypatch.setattr(matmul_backends.F, "linear", wait)
    small, large = nn.Sequential(layer()), nn.Sequential(nn.Linear(512, 9000))
    assert measure_fastest_backend(small)[0] is backend_for(small[0].weight) and not calls
    assert measure_fastest_backend(large)[0] is backend and set(calls) == set(matmul_backends.ROWS)
    assert measure_fastest_backend(nn.Sequential(nn.LayerNorm(4)))[0] is None


def test_the_backend_is_measured_once_on_a_quiet_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    monkeypatch.setattr(matmul_backends, "LEAST", 1)
    results = [(ONEDNN, 0.5), (ONEDNN, 0.01), (None, 0.01), (ONEDNN, 0.01), (MKL, 0.01)]  # the first two busy
    left = iter(results)
    monkeypatch.setattr(matmul_backends, "measure_fastest_backend", lambda _: next(left))
    model = nn.Sequential(layer())
    found = [find_fastest_backend(model)]
    taken = iter([{"1": (100, 0)}, {"1": (200, 50)}])  # by other work, for half of the time
    with monkeypatch.context() as patch:
        patch.setattr(timing, "thread_times", lambda: next(taken))
        found.append(find_fastest_backend(model))
    found += [find_fastest_backend(model) for _ in range(3)]
    assert found == [ONEDNN, ONEDNN, None, None, None], "stock layers are remembered too"
    assert find_fastest_backend(nn.Sequential(nn.Linear(24, 8))) is ONEDNN
    (tmp_path / "libraries.json").write_text("{")
    assert find_fastest_backend(model) is MKL and next(left, None) is None


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_a_layer_are_its_outputs(packed: bool, bias: bool) -> None:
    whole = PackedLinear(layer(bias=bias)) if packed else layer(bias=bias)
    rows = torch.tensor([7, 0, 79])
    made = take_rows(whole, rows, torch.device("cpu"))
    assert isinstance(made, PackedLinear) == packed
    x = torch.randn(4, 48)
    with torch.inference_mode():
        torch.testing.assert_close(made(x), whole(x)[:, rows], rtol=1e-5, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "phi"])
def test_packed_targets_write_the_same_texts(family: str, backend: MatmulBackend) -> None:
    model = tiny_model(family, "eager" if family == "gemma2" else "sdpa")
    ids = torch.tensor([prompts_of([12])[0]])
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    pack_linears(model, backend)
    target = TargetModel(model)
    assert backend_names(model) == [backend.name]
    assert isinstance(target.lm_head, PackedLinear)
    assert torch.equal(model.generate(ids, **options), wanted)
    drafted = torch.tensor([3, 11, 5])
    vocabulary = DraftVocabulary(target, drafted)
    features = torch.randn(2, target.hidden_size)
    with torch.inference_mode():
        torch.testing.assert_close(vocabulary.logits(features), target.logits(features)[:, drafted])
