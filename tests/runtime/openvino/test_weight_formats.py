"""Weights in few bits, and products with them in a graph, against plain twins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.weight_formats import (
    GROUP,
    Blocks,
    compress,
    integer_constant,
    multiply_blocks,
    round_to_int8,
)

openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")
ops = pytest.importorskip("openvino.opset13")
WIDTH = 2 * GROUP
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def random_blocks(rows: int, bits: int, offsets: bool, seed: int = 0) -> Blocks:
    draw = np.random.default_rng(seed)
    limit = 2 ** (bits - 1)
    integers = draw.integers(-limit, limit, (rows, WIDTH // GROUP, GROUP)).astype(np.int8)
    scales = np.abs(numbers(rows, WIDTH // GROUP, seed=seed)) / limit
    return Blocks(integers, scales, numbers(rows, WIDTH // GROUP, seed=seed + 1) if offsets else None, bits)


def compute(model: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    compiled = library.compile_graph(model, "f32", rounded_activations=False, threads=1)
    made = compiled(list(inputs))
    return [made[place].copy() for place in range(len(compiled.outputs))]


def kinds(model: Any) -> list[str]:
    return [node.get_type_name() for node in model.get_ordered_ops()]


# --- The formats themselves ---


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_rounding_moves_no_weight_by_more_than_half_a_step(size: float) -> None:
    weight = size * numbers(7, 3 * GROUP)
    blocks = round_to_int8(weight)
    assert blocks is not None and (blocks.bits, blocks.group, blocks.offsets) == (8, GROUP, None)
    error = np.abs(blocks.plain() - weight).reshape(blocks.integers.shape)
    assert (error <= 0.5001 * blocks.scales[:, :, None]).all()
    assert (np.abs(blocks.integers).max(-1) == 127).all()  # the whole range is used


def test_blocks_of_zeros_stay_zeros() -> None:
    weight = numbers(2, WIDTH)
    weight[0] = 0
    blocks = round_to_int8(weight)
    assert blocks is not None and not blocks.plain()[0].any() and blocks.plain()[1].any()


def test_rows_that_do_not_divide_are_not_rounded() -> None:
    assert round_to_int8(numbers(4, GROUP + 1)) is None


@pytest.mark.parametrize("offsets", [False, True])
def test_plain_and_join(offsets: bool) -> None:
    parts = [random_blocks(rows, 8, offsets, seed=rows) for rows in (3, 1, 5)]
    for part in parts:
        for row, group, place in np.ndindex(part.integers.shape):
            wanted = part.integers[row, group, place] * part.scales[row, group]
            wanted += 0 if part.offsets is None else part.offsets[row, group]
            assert part.plain()[row, group * GROUP + place] == pytest.approx(wanted, abs=1e-6)
    joined = Blocks.join(parts)
    assert joined.kind == parts[0].kind == (8, GROUP, offsets, None)
    np.testing.assert_array_equal(joined.plain(), np.concatenate([part.plain() for part in parts]))


# --- In graphs ---


@pytest.mark.parametrize("bits", [4, 8])
def test_a_constant_of_few_bits_keeps_its_integers(bits: int) -> None:
    blocks = random_blocks(5, bits, False)
    assert blocks.integers.min() == -(2 ** (bits - 1)) and blocks.integers.max() == 2 ** (bits - 1) - 1
    constant = integer_constant(blocks)
    assert constant.get_byte_size() == blocks.integers.size * bits // 8
    zero = ops.parameter([1], np.float32)
    model = openvino.Model([ops.add(ops.convert(constant, np.float32), zero)], [zero], "constant")
    np.testing.assert_array_equal(compute(model, np.zeros(1, dtype=np.float32))[0], blocks.integers)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_with_blocks_is_the_plain_product(bits: int, offsets: bool, rank: int) -> None:
    blocks = random_blocks(24, bits, offsets)
    rows = ops.parameter([-1] * (rank - 1) + [WIDTH], np.float32)
    model = openvino.Model(multiply_blocks(rows, [blocks]), [rows], "product")
    for shape in ((1, 3), (2, 5)):
        x = numbers(*shape[-(rank - 1) :], WIDTH)
        np.testing.assert_allclose(compute(model, x)[0], x @ blocks.plain().T, **CLOSE)


def products_model(weights: Sequence[np.ndarray], transposed: Sequence[bool]) -> Any:
    """Return a graph of products of one input, each an output of its own."""
    rows = ops.parameter([-1, -1, WIDTH], np.float32, name="rows")
    made = [
        ops.matmul(rows, ops.constant(np.ascontiguousarray(w if t else w.T)), False, t)
        for w, t in zip(weights, transposed, strict=True)
    ]
    return openvino.Model([ops.result(one) for one in made], [rows], "products")


@pytest.mark.parametrize("transposed", [(True, True), (True, False)])
def test_products_of_one_input_become_one(transposed: tuple[bool, bool]) -> None:
    weights = [numbers(8, WIDTH), numbers(24, WIDTH, seed=1)]
    model = products_model(weights, transposed)
    assert compress(model, round_to_int8, multiply_blocks) == 2
    assert kinds(model).count("MatMul") == 1 and kinds(model).count("VariadicSplit") == 1
    x = numbers(2, 3, WIDTH, seed=2)
    assert [made.shape for made in compute(model, x)] == [(2, 3, 8), (2, 3, 24)]
    for made, weight in zip(compute(model, x), weights, strict=True):
        rounded = round_to_int8(weight)
        assert rounded is not None
        np.testing.assert_allclose(made, x @ rounded.plain().T, **CLOSE)


def test_products_of_other_kinds_stay_apart() -> None:
    """Two with offsets, one without, and one whose encoder gives nothing."""
    weights = [numbers(size, WIDTH, seed=size) for size in (8, 16, 24, 32)]
    made = {
        8: random_blocks(8, 4, True),
        16: random_blocks(16, 4, False),
        24: random_blocks(24, 4, True, seed=5),
    }
    model = products_model(weights, [True] * 4)
    assert compress(model, lambda weight: made.get(len(weight)), multiply_blocks) == 3
    # One for the two with offsets, one for their sums, one without, one plain.
    assert kinds(model).count("MatMul") == 4
    x = numbers(1, 3, WIDTH)
    wanted = [made[len(w)].plain() if len(w) in made else w for w in weights]
    for result, weight in zip(compute(model, x), wanted, strict=True):
        np.testing.assert_allclose(result, x @ weight.T, **CLOSE)


def test_products_of_other_inputs_stay_apart() -> None:
    weight = numbers(WIDTH, WIDTH) / 8
    rows = ops.parameter([-1, -1, WIDTH], np.float32)
    first = ops.relu(ops.matmul(rows, ops.constant(weight), False, True))
    second = ops.matmul(first, ops.constant(weight), False, True)
    scores = ops.matmul(second, first, False, True)  # not with a constant
    model = openvino.Model([scores], [rows], "chain")
    assert compress(model, round_to_int8, multiply_blocks) == 2
    assert kinds(model).count("MatMul") == 3
    blocks = round_to_int8(weight)
    assert blocks is not None
    x = numbers(1, 4, WIDTH)
    hidden = np.maximum(x @ blocks.plain().T, 0)
    wanted = hidden @ blocks.plain().T @ hidden.transpose(0, 2, 1)
    np.testing.assert_allclose(compute(model, x)[0], wanted, rtol=1e-4, atol=1e-4)
