"""TileProduct against plain products: every kind of blocks, any shape, on each level of this processor."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_gguf import plain_rows, random_rows

from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.gguf_blocks import unpack
from eagle_fsd.runtime.openvino.network import Request
from eagle_fsd.runtime.openvino.operators import compiler
from eagle_fsd.runtime.openvino.operators.tile_layout import SPANS, tiles_of
from eagle_fsd.runtime.openvino.operators.tile_product import multiply_tiles
from eagle_fsd.runtime.openvino.weight_formats import Blocks, compress, round_to_int8

openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
pytest.importorskip("gguf")
ops = openvino.opset13

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "int8")
HALF_A_STEP = 0.51 / 127  # what rounding moves an activation by at most, of the largest of its group


@pytest.fixture(autouse=True)
def operator() -> Path:
    found = library.operator()
    if found is None:
        pytest.skip(f"the operator cannot be compiled here (processor: {compiler.level()})")
    return found


def weight_of(kind: str, rows: int, columns: int) -> tuple[np.ndarray, Blocks]:
    """Return a random weight [rows, columns] and its blocks."""
    if kind == "int8":
        blocks = round_to_int8(np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32))
        assert blocks is not None
        return blocks.plain(), blocks
    packed = random_rows(kind, rows, columns)
    return plain_rows(kind, packed), unpack(kind, packed)


def product_of(blocks: Blocks, columns: int, threads: int = 2) -> Any:
    rows = ops.parameter([-1, -1, columns], np.float32)
    model = openvino.Model(multiply_tiles(rows, [blocks]), [rows], "product")
    assert [node.get_type_name() for node in model.get_ordered_ops()].count("TileProduct") == 1
    return library.compile_graph(model, "f32", True, threads)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rounded(rows: np.ndarray) -> np.ndarray:
    """Round rows [..., in] to 8 bits in groups of 32, the plain way."""
    groups = rows.astype(np.float64).reshape(*rows.shape[:-1], -1, 32)
    scales = np.abs(groups).max(-1, keepdims=True) / 127
    safe = np.where(scales > 0, scales, 1)
    return (np.rint(groups / safe) * scales).reshape(rows.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 16, 100])
def test_a_product_is_that_of_rounded_activations(kind: str, width: int) -> None:
    """Of 1 to 21 rows, in float64 with activations rounded the plain way: only float32's rounding is left."""
    weight, blocks = weight_of(kind, width, 512)
    product = product_of(blocks, 512)
    for count in (1, 2, 3, 5, 8, 21):
        rows = numbers(1, count, 512, seed=count)
        wanted = rounded(rows) @ weight.T.astype(np.float64)
        made = product(rows)[0]
        assert made.shape == (1, count, width)
        sizes = np.abs(rounded(rows)) @ np.abs(weight.T.astype(np.float64))
        # A number in the middle of two may be rounded either way.
        slack = HALF_A_STEP * np.abs(rows).max() * np.abs(weight).max() * 2
        assert (np.abs(made - wanted) <= 2e-6 * sizes + slack).all()
        assert np.median(np.abs(made - wanted) / sizes) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    """Bit for bit, on one thread and on two."""
    _, blocks = weight_of(kind, 200, 512)
    rows = numbers(1, 19, 512)
    whole = product_of(blocks, 512)(rows)[0]
    alone = product_of(blocks, 512, threads=1)
    for begin, end in ((0, 1), (3, 5), (5, 12), (7, 19)):
        assert np.array_equal(alone(rows[:, begin:end])[0], whole[:, begin:end])


def test_several_threads_do_not_disturb_each_other() -> None:
    _, blocks = weight_of("Q4_1", 400, 512)
    compiled = product_of(blocks, 512)
    given = [numbers(1, count, 512, seed=count) for count in (1, 3, 8, 20)]
    wanted = [compiled(rows)[0].copy() for rows in given]

    def work(place: int) -> bool:
        request = Request(compiled)
        for _ in range(100):
            request.give(0, torch.from_numpy(given[place]))
            request.infer.infer()
            if not np.array_equal(request.infer.output_tensors[0].data, wanted[place]):
                return False
        return True

    with ThreadPoolExecutor(len(given)) as pool:
        assert all(pool.map(work, range(len(given))))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "int8"])
def test_numbers_that_are_not_finite_are_seen(kind: str) -> None:
    """In their own row alone: whoever samples must be able to tell."""
    _, blocks = weight_of(kind, 32, 512)
    rows = numbers(1, 4, 512)
    rows[0, 1, 40], rows[0, 2, 300] = np.nan, np.inf
    made = product_of(blocks, 512)(rows)[0]
    assert np.isnan(made[0, 1:3]).all() and np.isfinite(made[0, [0, 3]]).all()
    zeros = product_of(blocks, 512)(np.zeros((1, 2, 512), dtype=np.float32))[0]
    assert (zeros == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_do_not_overflow(kind: str) -> None:
    """All integers and all activations as large as they may be, of either sign."""
    if kind == "int8":
        blocks = round_to_int8(np.where(np.arange(16 * 512).reshape(16, 512) % 2, -1, 1).astype(np.float32))
        assert blocks is not None
        weight = blocks.plain()
    else:
        packed = random_rows(kind, 16, 512)
        floats = packed.copy()
        packed[:] = 255  # all bits of the integers and of their scales, and then the floats again
        packed = with_floats_of(kind, packed, floats)
        weight, blocks = plain_rows(kind, packed), unpack(kind, packed)
    for sign in (1, -1):
        rows = np.full((1, 3, 512), sign * 3.0, dtype=np.float32)
        wanted = rows.astype(np.float64) @ weight.T.astype(np.float64)
        made = product_of(blocks, 512)(rows)[0]
        sizes = np.abs(rows).astype(np.float64) @ np.abs(weight.T)
        assert (np.abs(made - wanted) <= 1e-5 * sizes).all()


def with_floats_of(kind: str, packed: np.ndarray, other: np.ndarray) -> np.ndarray:
    from eagle_fsd.runtime.openvino.gguf_blocks import LAYOUTS

    layout = np.dtype(LAYOUTS[kind].fields)
    made, floats = packed.reshape(-1).view(layout), other.reshape(-1).view(layout)
    for name in {"d", "m"} & {*layout.names}:
        made[name] = floats[name]
    return made.view(np.uint8).reshape(packed.shape)


def test_other_weights_are_left_to_openvino() -> None:
    """Those of other widths, with offsets that are of no file, or of 4 bits that are of none."""
    _, odd = weight_of("Q4_0", 8, 96)
    _, half = weight_of("Q8_0", 8, 512)
    loose = Blocks(half.integers, half.scales, half.scales, 8)
    for blocks in (odd, loose):
        assert tiles_of(blocks) is None
        columns = blocks.integers[0].size
        rows = ops.parameter([-1, columns], np.float32)
        model = openvino.Model(multiply_tiles(rows, [blocks]), [rows], "product")
        assert "TileProduct" not in {node.get_type_name() for node in model.get_ordered_ops()}
        given = numbers(3, columns)
        made = library.compile_graph(model, "f32", False, 1)(given)[0]
        np.testing.assert_allclose(made, given @ blocks.plain().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_take_no_more_than_the_blocks_of_a_file(kind: str) -> None:
    """But for what fills lines and tiles: a tenth of a bit a weight, where scales have 6 bits in a file."""
    _, blocks = weight_of(kind, 64, 1024)
    tiles = tiles_of(blocks)
    assert tiles is not None and tiles.span == SPANS.get(kind, 64)
    in_file = blocks.integers.size + blocks.scales.nbytes if kind == "int8" else blocks.source.rows.nbytes
    assert in_file <= tiles.data.nbytes <= in_file + 64 * 1024 * 0.2 / 8


def test_products_of_one_input_become_one() -> None:
    parts = [weight_of("Q4_1", rows, 128) for rows in (16, 40, 7, 33)]  # some end within a tile
    found = {len(weight): blocks for weight, blocks in parts}
    rows = ops.parameter([-1, 128], np.float32)
    made = [ops.matmul(rows, ops.constant(weight), False, True) for weight, _ in parts]
    model = openvino.Model([ops.result(one) for one in made], [rows], "products")
    assert compress(model, lambda weight: found[len(weight)], multiply_tiles) == 4
    kinds = [node.get_type_name() for node in model.get_ordered_ops()]
    assert kinds.count("TileProduct") == 1 and not {"MatMul", "VariadicSplit"} & {*kinds}
    given = numbers(3, 128)
    results = library.compile_graph(model, "f32", True, 1)(given)
    for place, (weight, _) in enumerate(parts):
        wanted = rounded(given) @ weight.T.astype(np.float64)
        assert np.abs(results[place] - wanted).max() < 0.01 * np.abs(wanted).max()


def test_a_graph_is_kept_and_read_again(tmp_path: Path) -> None:
    """With its compiled form, by a process that has compiled nothing."""
    _, blocks = weight_of("Q4_K", 48, 256)
    rows = ops.parameter([-1, 256], np.float32)
    model = openvino.Model(multiply_tiles(rows, [blocks]), [rows], "product")
    openvino.save_model(model, tmp_path / "graph.xml", compress_to_fp16=False)
    given = numbers(3, 256)
    np.save(tmp_path / "rows.npy", given)
    script = (
        "import sys, numpy as np; from pathlib import Path; from eagle_fsd.runtime.openvino import library\n"
        "folder = Path(sys.argv[1]); model = library.core().read_model(folder / 'graph.xml')\n"
        "made = library.compile_graph(model, 'f32', True, 1, folder)(np.load(folder / 'rows.npy'))[0]\n"
        "np.save(folder / 'made.npy', made)"
    )
    wanted = library.compile_graph(model, "f32", True, 1)(given)[0]
    for _ in range(2):  # the second one reads the compiled form
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True)
        assert np.array_equal(np.load(tmp_path / "made.npy"), wanted)


# -- levels ----------------------------------------

LEVEL_SCRIPT = """
import sys
from eagle_fsd.runtime.openvino.operators import compiler
compiler.level = lambda flags=None: sys.argv[1]
import pytest
chosen = "product_is or overflow or finite or beside"
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[2], "-k", chosen]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", compiler.LEVELS)
def test_each_level_that_this_processor_has(name: str) -> None:
    from eagle_fsd.files.provenance import processor_flags

    if not processor_flags().issuperset(compiler.LEVELS[name]):
        pytest.skip(f"this processor is not {name}")
    done = subprocess.run(
        [sys.executable, "-c", LEVEL_SCRIPT, name, __file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_graphs_with_the_same_weights_and_with_others_do_not_mix() -> None:
    """Graphs share copies of weights, which neither others of that size nor graphs that go may change."""
    blocks = [weight_of("Q4_1", 48, 512)[1] for _ in range(2)]
    other = round_to_int8(numbers(48, 512, seed=5))
    changed = unpack("Q4_1", random_rows("Q4_1", 48, 512, seed=9))
    assert other is not None
    rows = numbers(1, 5, 512)
    first, again = (product_of(one, 512) for one in blocks)
    wanted = first(rows)[0].copy()
    assert not np.array_equal(product_of(changed, 512)(rows)[0], wanted)
    product_of(other, 512)(rows)
    del first
    assert np.array_equal(again(rows)[0], wanted)
    assert np.array_equal(product_of(blocks[0], 512)(rows)[0], wanted)
