"""The largest entries of long rows, and their sums, against torch's own argmax, topk and logsumexp."""

from __future__ import annotations

import math

import pytest
import torch

from eagle_fsd.core.long_rows import first_largest, logsumexp, topk

LENGTHS = (1, 7, 63, 64, 65, 1000, 1024, 1025, 4096, 5003, 49152)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_largest_is_argmax(length: int, dtype: torch.dtype) -> None:
    """Ties (rounded numbers) go to the first place, NaN is largest, and a row of -inf gives place 0."""
    rows = (torch.randn(6, 2, length, generator=generator(length)) * 3).to(dtype)
    rows[1] = rows[1].round()
    rows[2] = rows[2].masked_fill(torch.rand(2, length, generator=generator(1)) < 0.7, -math.inf)
    rows[3] = -math.inf
    rows[4, :, length // 2 :] = math.nan
    rows[5, 0, -1] = math.inf
    values, places = first_largest(rows)
    assert torch.equal(places, rows.argmax(-1))
    assert torch.equal(values.nan_to_num(77.0), rows.amax(-1).nan_to_num(77.0))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("k", [1, 2, 8, 51, 1025])
def test_topk_is_torchs_topk(length: int, k: int) -> None:
    """The values always; the places where no values tie, else places that hold the values, once each."""
    k = min(k, length)
    rows = torch.randn(4, 2, length, generator=generator(length)) * 3
    values, places = topk(rows, k)
    wanted = rows.topk(k, dim=-1)
    if rows.unique().numel() == rows.numel():
        assert torch.equal(places, wanted.indices)
    for kind in (rows, rows.round(), rows.masked_fill(rows > 1.0, math.nan)):
        values, places = topk(kind, k)
        wanted = kind.topk(k, dim=-1).values
        assert torch.equal(values.nan_to_num(77.0), wanted.nan_to_num(77.0))
        assert torch.equal(kind.gather(-1, places).nan_to_num(77.0), values.nan_to_num(77.0))
        assert all(len(set(row)) == k for row in places.flatten(0, 1).tolist())


def test_topk_of_rows_with_few_numbers() -> None:
    """Entries of -inf are entries too, in places of the row that differ."""
    rows = torch.full((3, 5003), -math.inf)
    rows[1, [5002, 7]] = torch.tensor([1.0, 2.0])
    values, places = topk(rows, 8)
    assert values.tolist()[1] == [2.0, 1.0, *[-math.inf] * 6] and places[1, :2].tolist() == [7, 5002]
    assert all(len(set(row)) == 8 and max(row) < 5003 for row in places.tolist())


@pytest.mark.parametrize("length", [1, 1000, 8192, 8193, 49152, 100_003])
@pytest.mark.parametrize("scale", [3.0, 1e4, 1e-6])
def test_logsumexp_is_torchs(length: int, scale: float) -> None:
    """Infinities and NaN included; no row depends on the others."""
    rows = torch.randn(6, 2, length, generator=generator(length)) * scale
    rows[2] = rows[2].masked_fill(torch.rand(2, length, generator=generator(1)) < 0.7, -math.inf)
    rows[3] = -math.inf
    rows[4, 0, length // 2 :] = math.nan
    rows[4, 1, -1] = math.inf
    given, found = rows.clone(), logsumexp(rows)
    assert torch.equal(rows.nan_to_num(7.0), given.nan_to_num(7.0))
    torch.testing.assert_close(found, rows.logsumexp(-1, keepdim=True), equal_nan=True)
    if length > 8192:
        exact = rows.double().logsumexp(-1, keepdim=True).float()
        torch.testing.assert_close(found, exact, atol=2e-6, rtol=1e-6, equal_nan=True)
    for row in range(6):
        assert torch.equal(logsumexp(rows[row, :1]).nan_to_num(7.0), found[row, :1].nan_to_num(7.0))
