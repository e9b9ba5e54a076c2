"""Sizes that depend on the kind of device; a device object needs no such device."""

from __future__ import annotations

import torch

from eagle_fsd.core.devices import forward_size


def test_a_gpu_reads_more_tokens_at_once_and_all_rows_share_them() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert forward_size(512, cpu) == forward_size(512, cpu, rows=64) == 512
    assert [forward_size(512, gpu, rows) for rows in (1, 3, 8, 64)] == [4096, 1365, 512, 512]
