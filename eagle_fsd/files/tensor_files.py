"""Files of tensors, read without running what is in them; whatever is wrong is a ValueError of one line."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle_fsd.core.checks import one_line

BIN_SUFFIXES = (".bin", ".pt", ".pth")


def read_tensors(path: Path, kind: str = "weights file") -> dict[str, Tensor]:
    """All tensors of a .safetensors or .bin file, on the CPU; a .bin is never run as code."""
    again = "it must be; download or copy it again"
    shown = f"{kind} {str(path)!r}"
    if not path.is_file():
        raise ValueError(f"{shown} does not exist: it must be a .safetensors or .bin file; check the path")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(
                f"{shown} is not a whole safetensors file ({one_line(error, 80)}): {again}"
            ) from error
    if path.suffix not in BIN_SUFFIXES:
        raise ValueError(f"{shown} has an unknown suffix: it must be .safetensors or .bin; convert it")
    if unpacked_size(path) > path.stat().st_size:  # torch never compresses: this would fill the memory
        raise ValueError(
            f"{shown} is compressed inside: it must be as torch.save writes it; download it again"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: what is wrong is said below
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds code or objects ({code[1]})" if code else "is damaged, or holds code or objects"
        raise ValueError(
            f"{shown} {what}: it must hold tensors alone; download it again, or convert it to safetensors "
            "where you trust it"
        ) from error
    except Exception as error:  # what an unpickler raises on a damaged file has no common base
        reason = one_line(error, 80)
        raise ValueError(f"{shown} is not a whole PyTorch file ({reason}): {again}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()
    ):
        raise ValueError(
            f"{shown} is no dict of named tensors: it must be a head's state_dict; save that alone"
        )
    for key, value in tensors.items():
        # Such a tensor may claim any size in a small file: what reads it whole would take all memory.
        if value.layout != torch.strided or value.device.type != "cpu" or not value.is_contiguous():
            raise ValueError(
                f"{shown}: {one_line(key, 80)} is no plain tensor: each must lie whole in the file; save "
                "contiguous tensors"
            )
    return tensors


def unpacked_size(path: Path) -> int:
    """Bytes of what a zip file holds; 0 for a file of another kind, as of old versions of torch."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(record.file_size for record in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return 0
