"""Sizes that depend on the kind of device; a device object needs no such device."""

from __future__ import annotations

import pytest
import torch

from eagle_fsd.core.devices import forward_size, resolve_dtype


def test_a_gpu_reads_more_tokens_at_once_and_all_rows_share_them() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert forward_size(512, cpu) == forward_size(512, cpu, rows=64) == 512
    assert [forward_size(512, gpu, rows) for rows in (1, 3, 8, 64)] == [4096, 1365, 512, 512]


def test_a_gpu_that_only_emulates_bfloat16_gets_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 and an H100 in one machine, of which the T4 is torch's current device."""
    capabilities = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    old, new, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
    found = [resolve_dtype(None, device) for device in (old, new, cpu)]
    assert found == [torch.float16, torch.bfloat16, torch.float32]
    assert resolve_dtype("bfloat16", old) == torch.bfloat16
