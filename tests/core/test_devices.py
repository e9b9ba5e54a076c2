"""Sizes that depend on the kind of device; a device object needs no such device."""

from __future__ import annotations

import pytest
import torch

from eagle_fsd.core.devices import (
    forward_size,
    multiplies_bfloat16,
    ran_out_of_memory,
    resolve_device,
    resolve_dtype,
)


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
    assert (multiplies_bfloat16(old), multiplies_bfloat16(new)) == (False, True)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
@pytest.mark.parametrize("fast", [True, False])
def test_a_processor_multiplies_bfloat16_where_onednn_does(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    assert multiplies_bfloat16(torch.device("cpu")) == fast


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),  # of the driver, as when a graph is made
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=str,
)
def test_lack_of_memory_is_known_by_its_words(error: Exception) -> None:
    assert ran_out_of_memory(error)
    assert not ran_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not ran_out_of_memory(RuntimeError("Expected all tensors to be allocated on the same device"))


@pytest.mark.parametrize(
    "words",
    [
        "The tensor has a non-zero number of elements, but its data is not allocated yet.",  # of torch
        "Error memory is not allocated for edge: 3",  # of OpenVINO, as the next one
        "primitive: input memory was not allocated",
    ],
)
def test_memory_that_nobody_allocated_is_no_lack_of_it(words: str) -> None:
    assert not ran_out_of_memory(RuntimeError(words))


@pytest.mark.parametrize(
    ("count", "there"), [(0, "use cpu"), (1, "use cpu or cuda:0"), (2, "use cpu or cuda:0 or cuda:1")]
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    count: int, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=f"^device 'gpu' is not there .*; {there}$"):
        resolve_device("gpu")
