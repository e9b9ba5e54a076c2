"""Attention in two parts against attention in one, and targets that go through a stand-in for flash-attn."""

from __future__ import annotations

import logging
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.fake_flash import HALVES, FakeFlash, plain_prefix
from support.tiny_models import VOCAB, KnowingEngine, greedy_alone, prompts_of, tiny_model
from torch import Tensor
from transformers.integrations import sdpa_attention

from eagle_fsd import Lossless, TreeConfig
from eagle_fsd.core.padding import pad_left, pad_right
from eagle_fsd.core.tree import DraftTree, additive, ancestors, visible_slots
from eagle_fsd.runtime import flash_attention
from eagle_fsd.runtime.flash_attention import (
    FlashPlan,
    flash_available,
    flash_causal,
    flash_prefix,
    prefix_and_tree,
    supports_heads,
)
from eagle_fsd.runtime.grouped_attention import grouped_attention
from eagle_fsd.target.admission import checks
from eagle_fsd.target.hf_attention import grouped_attention_forward
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

FLOATS = (torch.float32, torch.float64, *HALVES)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    """flash-attn is installed, takes every float, and is available on the CPU."""
    return install(monkeypatch, FLOATS)


def install(monkeypatch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, ...]) -> FakeFlash:
    module = FakeFlash(dtypes)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(checks, "flash_available", lambda device, dtype: True)
    return module


# --- the two parts ---


def relation_of(shape: str, batch: int, count: int, g: torch.Generator) -> Tensor:
    """[B, N, N] of a random tree in every row, or of a chain, or of a root with children only."""
    rows = []
    for _ in range(batch):
        below = [int(torch.randint(0, node, (1,), generator=g)) for node in range(1, count)]
        rows.append([-1, *{"tree": below, "chain": range(count - 1), "star": [0] * (count - 1)}[shape]])
    return ancestors(torch.tensor(rows), count)


SHAPES = [
    # what, N, committed lengths, S
    ("tree", 16, [7], 23),
    ("tree", 13, [0, 5, 31], 50),
    ("tree", 60, [40, 1], 100),
    ("chain", 6, [12, 3], 18),
    ("chain", 9, [0], 9),
    ("star", 8, [5, 0], 13),
    ("tree", 1, [9, 0, 4], 10),
]


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(("shape", "count", "lengths", "view"), SHAPES)
@pytest.mark.parametrize("prefix", [plain_prefix, flash_prefix])
def test_two_parts_are_one_softmax(
    prefix: flash_attention.Prefix,
    shape: str,
    count: int,
    lengths: list[int],
    view: int,
    kv_heads: int,
    fake: FakeFlash,
) -> None:
    g = torch.Generator().manual_seed(count * kv_heads)
    batch, heads, scale = len(lengths), 6, 0.4
    q = torch.randn(batch, heads, count, 8, generator=g, dtype=torch.float64)
    k, v = (torch.randn(batch, kv_heads, view, 8, generator=g, dtype=torch.float64) for _ in range(2))
    relation = relation_of(shape, batch, count, g)
    ends = torch.tensor(lengths)
    slots = ends[:, None] + torch.arange(count)
    visible = visible_slots(ends, slots, relation, view)[:, None]
    for row, length in enumerate(lengths):  # scratch that must not matter
        k[row, :, length + count :] = 9.0
        v[row, :, length + count :] = 1e6
    many_k, many_v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    wanted = (scale * q @ many_k.mT).masked_fill(~visible, -torch.inf).softmax(-1) @ many_v

    out = prefix_and_tree(q, k, v, ends.to(torch.int32), relation, scale, prefix)
    # flash-attn's log-sum-exp is float32 whatever its inputs
    tight = 1e-12 if prefix is plain_prefix else 3e-6
    torch.testing.assert_close(out, wanted, atol=tight, rtol=tight)
    grouped = grouped_attention(q, k, v, visible, scale)
    torch.testing.assert_close(out, grouped, atol=tight, rtol=tight)
    assert fake.called == (["prefix"] if prefix is flash_prefix else [])


@pytest.mark.parametrize("prefix", [plain_prefix, flash_prefix])
def test_an_empty_prefix_has_no_weight(prefix: flash_attention.Prefix, fake: FakeFlash) -> None:
    """flash-attn itself says +inf there, which would be all the weight."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 8, generator=g), *torch.randn(2, 2, 2, 5, 8, generator=g)
    out, lse = prefix(q, k, v, torch.tensor([0, 2], dtype=torch.int32), 0.3)
    assert out.shape == q.shape and lse.shape == (2, 4, 3)
    assert (lse[0] == -torch.inf).all() and (out[0] == 0).all()
    assert lse[1].isfinite().all() and (out[1] != 0).all()


def test_half_precision_keeps_its_dtype_and_rounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, HALVES)
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        x.bfloat16()
        for x in (torch.randn(1, 6, 12, 16, generator=g), *torch.randn(2, 1, 2, 40, 16, generator=g))
    )
    relation = relation_of("tree", 1, 12, g)
    for prefix in (plain_prefix, flash_prefix):
        lengths = torch.tensor([28], dtype=torch.int32)
        out = prefix_and_tree(q, k, v, lengths, relation, 0.25, prefix)
        exact = prefix_and_tree(q.double(), k.double(), v.double(), lengths, relation, 0.25, plain_prefix)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact, atol=0.004, rtol=0.008)  # two roundings of 2^-8


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize(("count", "view"), [(5, 5), (4, 11), (1, 8)])
def test_a_chunk_of_a_prompt_sees_what_is_before_it(
    count: int, view: int, kv_heads: int, fake: FakeFlash
) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, count, 8, generator=g)
    k, v = torch.randn(2, 2, kv_heads, view, 8, generator=g)
    slots = torch.arange(view - count, view)
    visible = (torch.arange(view) <= slots[:, None]).expand(2, 1, -1, -1)
    wanted = grouped_attention(q, k, v, visible, 0.3)
    torch.testing.assert_close(flash_causal(q, k, v, 0.3), wanted)
    assert fake.called == ["causal"]


# --- when it is used ---


def test_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlash())
    assert all(flash_available(cuda, dtype) for dtype in HALVES)
    assert not flash_available(torch.device("cpu"), torch.bfloat16)
    assert not flash_available(cuda, torch.float32)
    capability = (7, 5)
    assert not flash_available(cuda, torch.float16)


def test_heads() -> None:
    assert all(supports_heads(*torch.empty(2, 1, 1, 1, size)) for size in (8, 64, 128, 256))
    assert not any(supports_heads(*torch.empty(2, 1, 1, 1, size)) for size in (4, 60, 264))
    assert not supports_heads(torch.empty(1, 1, 1, 192), torch.empty(1, 1, 1, 128))  # DeepSeek's


@pytest.mark.parametrize(
    "source",
    ["import no_such_module", "raise OSError('libcudart')", "raise RuntimeError('undefined symbol')", ""],
    ids=["import", "library", "torch", "namesake"],
)
def test_a_broken_flash_attn_is_none(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert not flash_available(torch.device("cuda"), torch.bfloat16)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


def test_the_package_does_not_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # to import it is an ImportError
    assert runpy.run_path(flash_attention.__file__)["flash_available"]


def test_it_is_not_used_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeFlash(FLOATS)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    for dtype in (torch.float32, torch.bfloat16):
        target = TargetModel(tiny_model("llama").to(dtype))
        assert not target.flash and not module.calls


# Family -> how many of its two layers attend to everything and to nothing but keys.
LAYERS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "phi3", "olmo2", "gpt2", "gpt_neox", "phi"), 2),
    **dict.fromkeys(("qwen3_moe", "granite", "cohere"), 2),
    **{"gemma3": 1, "qwen2-window": 1, "mistral": 0, "mixtral": 0, "phi3-window": 0},
}


def tree_of(batch: int) -> DraftTree:
    """One tree of 13 nodes with other tokens in every row."""
    parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3]
    depths = [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 3]
    return DraftTree(
        tokens=torch.tensor(prompts_of((13,) * batch, seed=2)),
        parents=torch.tensor([parents] * batch),
        depths=torch.tensor([depths] * batch),
        log_q=torch.empty(batch, 0, VOCAB),
        owners=torch.empty(batch, 0, dtype=torch.int64),
        depth=6,
    )


@torch.inference_mode()
def two_steps(target: TargetModel, chunk: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Features of a ragged batch's prompts, the middle row's being empty, and the logits of two trees with an
    accepted path between them."""
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", chunk)
    lengths = [4, 0, 11]
    session = TargetSession(target, batch=3, capacity=8)
    features = session.prefill(pad_right(prompts_of(lengths, seed=1), 0), lengths)
    seen = [features[0, :4], features[2]]
    seen.append(session.verify(tree_of(3))[0])
    session.keep(torch.tensor([[0, 2, 4], [0, 1, -1], [0, -1, -1]]), [3, 2, 1])
    seen.append(session.verify(tree_of(3))[0])
    return seen


@pytest.mark.covering(1)
@pytest.mark.parametrize("chunk", [512, 4])
@pytest.mark.parametrize("family", LAYERS)
def test_verify_and_prefill_are_the_usual_ones(
    family: str,
    chunk: int,
    fake: FakeFlash,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = TargetModel(tiny_model(family))
    layers = LAYERS[family]
    assert target.flash == (layers > 0) and not caplog.records
    fake.calls.clear()
    through = two_steps(target, chunk, monkeypatch)
    chunks = -(-11 // chunk)
    assert fake.called == ["causal"] * layers * chunks + ["prefix"] * layers * 2
    fake.calls.clear()
    target.flash = False
    usual = two_steps(target, chunk, monkeypatch)
    assert not fake.calls
    for mine, wanted in zip(through, usual, strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-5, rtol=2e-5)


def test_heads_of_another_size_do_not_use_it(fake: FakeFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel(tiny_model("llama", head_dim=12))
    assert two_steps(target, 4, monkeypatch) and not fake.calls


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_eager_attention_does_not_use_it(family: str, fake: FakeFlash) -> None:
    """Gemma 2 has no other: its soft-cap is more than sdpa does."""
    target = TargetModel(tiny_model(family, "eager"))
    assert not target.flash and not fake.calls


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_texts_are_those_of_generate(family: str, fake: FakeFlash) -> None:
    model = tiny_model(family)
    prompts = prompts_of((3, 17, 10))
    wanted = greedy_alone(model, prompts, 20)
    target = TargetModel(model)
    fake.calls.clear()
    ids, mask = pad_left(prompts, pad=0)
    out = KnowingEngine(target, wanted).generate(
        ids, mask, max_new_tokens=20, rule=Lossless(), tree=TreeConfig(16, 5, 3)
    )
    assert out.new_tokens == wanted
    assert all(stats.tau > 2 for stats in out.stats)
    assert {"causal", "prefix"} == set(fake.called)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_what_it_takes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = two_steps(TargetModel(tiny_model("llama").to(dtype).float()), 4, monkeypatch)
    module = install(monkeypatch, HALVES)
    target = TargetModel(tiny_model("llama").to(dtype))
    assert target.flash and target.dtype == dtype
    through = two_steps(target, 4, monkeypatch)
    target.flash = False
    usual = two_steps(target, 4, monkeypatch)
    assert module.calls

    def distance(ours: list[Tensor]) -> float:
        pairs = zip(ours, exact, strict=True)
        return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)

    assert distance(through) < 1.5 * distance(usual) + 1e-3, "no further from float32 than sdpa is"


def test_the_cache_is_read_where_it_lies(fake: FakeFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the keys, neither for the layout nor for a group of heads."""
    target = TargetModel(tiny_model("llama"))
    session = TargetSession(target, batch=2, capacity=32)
    fake.calls.clear()
    with torch.inference_mode():
        session.prefill(torch.tensor(prompts_of((7, 7))), [7, 5])
        session.verify(tree_of(2))
    assert [k.shape for _, _, k in fake.calls] == [(2, 7, 2, 8)] * 2 + [(2, 20, 2, 8)] * 2
    stored = [keys.data_ptr() for keys, _ in session.cache.layers.values()]
    assert [k.data_ptr() for _, _, k in fake.calls] == stored * 2


def test_rows_that_start_at_different_slots_keep_their_mask(fake: FakeFlash) -> None:
    """A second prompt behind texts of different lengths: no causal mask of flash-attn's fits every row."""
    target = TargetModel(tiny_model("llama"))
    first, second = torch.tensor(prompts_of((6, 6))), torch.tensor(prompts_of((5, 5), seed=3))

    @torch.inference_mode()
    def features() -> Tensor:
        session = TargetSession(target, batch=2, capacity=32)
        session.prefill(first, [6, 3])
        fake.calls.clear()
        return session.prefill(second, [5, 5])

    through = features()
    assert not fake.calls
    target.flash = False
    torch.testing.assert_close(through, features())


# --- one layer ---


class Layer(torch.nn.Module):
    num_key_value_groups = 2


@pytest.fixture
def layer(fake: FakeFlash) -> tuple[list[Tensor], Tensor, FlashPlan]:
    """q, k and v of a tree of 5 behind 6 slots, its mask and its plan."""
    g = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 4, 5, 8, generator=g), *torch.randn(2, 1, 2, 11, 8, generator=g)]
    relation = relation_of("tree", 1, 5, g)
    lengths = torch.tensor([6])
    mask = additive(visible_slots(lengths, lengths + torch.arange(5)[None], relation, 11), torch.float32)
    return qkv, mask, FlashPlan(mask, lengths.to(torch.int32), relation)


@pytest.mark.parametrize("scaling", [None, 0.7])
def test_a_layer_goes_by_the_plan_if_it_is_given_the_plans_mask(
    scaling: float | None, layer: tuple[list[Tensor], Tensor, FlashPlan], fake: FakeFlash
) -> None:
    qkv, mask, plan = layer
    wanted, _ = grouped_attention_forward(Layer(), *qkv, mask, scaling=scaling)
    assert not fake.calls
    out, _ = grouped_attention_forward(Layer(), *qkv, mask, scaling=scaling, flash_plan=plan)
    assert fake.called == ["prefix"] and out.shape == (1, 5, 4, 8) and out.is_contiguous()
    torch.testing.assert_close(out, wanted)
    fake.calls.clear()
    narrow = mask.clone()
    narrow[..., :3] = torch.finfo(torch.float32).min
    wanted, _ = grouped_attention_forward(Layer(), *qkv, narrow, scaling=scaling)
    out, _ = grouped_attention_forward(Layer(), *qkv, narrow, scaling=scaling, flash_plan=plan)
    assert not fake.calls and torch.equal(out, wanted)


def test_a_layer_that_is_more_than_a_mask_does_not_use_it(
    layer: tuple[list[Tensor], Tensor, FlashPlan], fake: FakeFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, mask, plan = layer
    bias = torch.randn(1, 4, 5, 11, generator=torch.Generator().manual_seed(1))
    keys, values = (x.repeat_interleave(2, dim=1) for x in qkv[1:])
    wanted = F.scaled_dot_product_attention(qkv[0], keys, values, attn_mask=mask + bias).transpose(1, 2)
    out, _ = grouped_attention_forward(Layer(), *qkv, mask, flash_plan=plan, position_bias=bias)
    torch.testing.assert_close(out, wanted)
    seen: dict[str, object] = {}
    monkeypatch.setattr(
        sdpa_attention, "sdpa_attention_forward", lambda *_, **more: (seen.update(more), None)
    )
    grouped_attention_forward(Layer(), *qkv, mask, flash_plan=plan, softcap=30.0)
    assert seen["softcap"] == 30.0, "transformers refuses it, or not"
    assert not fake.calls


# --- a flash-attn that does not do what it should ---


@pytest.mark.parametrize("fault", ["raises", "sees all", "not causal", "no scale"])
def test_one_that_is_wrong_here_is_not_used(
    fault: str, fake: FakeFlash, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found on the small tree at construction; the target is then the usual one."""
    cached, plain = fake.flash_attn_with_kvcache, fake.flash_attn_func

    def raising(*tensors: Tensor, **options: object) -> None:
        raise RuntimeError("FlashAttention only supports\nAmpere GPUs or newer.")

    def seeing_all(q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, **options: object) -> object:
        return cached(q, k, v, cache_seqlens=torch.full_like(cache_seqlens, k.shape[1]), **options)

    def not_causal(*qkv: Tensor, causal: bool, **options: object) -> Tensor:
        return plain(*qkv, **options)

    def unscaled(*qkv: Tensor, softmax_scale: float, **options: object) -> object:
        return cached(*qkv, softmax_scale=1.0, **options)

    name, wrong = {
        "raises": ("flash_attn_with_kvcache", raising),
        "sees all": ("flash_attn_with_kvcache", seeing_all),
        "not causal": ("flash_attn_func", not_causal),
        "no scale": ("flash_attn_with_kvcache", unscaled),
    }[fault]
    monkeypatch.setattr(fake, name, wrong)
    model = tiny_model("llama")
    with caplog.at_level(logging.WARNING, logger="eagle_fsd.target"):
        target = TargetModel(model)
    assert not target.flash
    (record,) = caplog.records
    assert record.getMessage().startswith("flash-attn is not used on this 'llama' model: ")
    assert "\n" not in record.getMessage()
    assert ("Ampere" if fault == "raises" else "a tree differs") in record.getMessage()
    fake.calls.clear()
    prompt = prompts_of((9,))
    wanted = greedy_alone(model, prompt, 12)
    assert KnowingEngine(target, wanted).generate(prompt, max_new_tokens=12).new_tokens == wanted
    assert not fake.calls
