"""Reads files of tensors without running code from them. Every failure is a ValueError of one line."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eagle_fsd.core.checks import one_line

BIN_SUFFIXES = (".bin", ".pt", ".pth")


def read_tensors(path: Path, kind: str = "weights file") -> dict[str, Tensor]:
    """Return all tensors of a .safetensors or .bin file, on the CPU. Code in a .bin file is never run."""
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
    if unpacked_size(path) > path.stat().st_size:  # torch never compresses; such a file may fill all memory
        raise ValueError(
            f"{shown} is compressed inside: it must be as torch.save writes it; download it again"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: the errors below say what is wrong
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds code or objects ({code[1]})" if code else "is damaged, or holds code or objects"
        raise ValueError(
            f"{shown} {what}: it must hold tensors alone; download it again, or convert it to safetensors "
            "where you trust it"
        ) from error
    except Exception as error:  # the errors that an unpickler raises on a damaged file have no common base
        reason = one_line(error, 80)
        raise ValueError(f"{shown} is not a whole PyTorch file ({reason}): {again}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()
    ):
        raise ValueError(
            f"{shown} is not a dict of named tensors: it must be a head's state_dict; save that alone"
        )
    for key, value in tensors.items():
        # Such a tensor may claim any size in a small file, and reading it would then take all memory.
        if value.layout != torch.strided or value.device.type != "cpu" or not value.is_contiguous():
            raise ValueError(
                f"{shown}: {one_line(key, 80)} is not a plain tensor: the file must hold all of it; save "
                "contiguous tensors"
            )
    return tensors


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a file by name. A .safetensors file is not read beyond its head."""
    if path.suffix == ".safetensors" and path.is_file():
        try:
            with safe_open(path, framework="pt") as file:
                return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError):
            pass  # which read_tensors says better
    return {key: tuple(value.shape) for key, value in read_tensors(path).items()}


def unpacked_size(path: Path) -> int:
    """Return the unpacked bytes of a zip file; 0 for another kind, such as files of old torch versions."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(record.file_size for record in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return 0
