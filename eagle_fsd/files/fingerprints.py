"""Short digests that distinguish one target, or one run's data, from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from eagle_fsd.core.devices import DTYPES

SAMPLE = 64  # values of each weight that a target's digest reads


class Identified(Protocol):
    """A way to draft, with a digest of its weights and the weights themselves, None where it has none."""

    @property
    def identity(self) -> str | None: ...

    @property
    def network(self) -> nn.Module | None: ...


def target_identity(name: str, model: nn.Module) -> dict[str, str]:
    """Return what features and answers depend on: a target's name, a digest of its weights, and its dtype.

    The digest reads a few values of every weight, so that tuning only some layers changes it. It is the same
    in float32 and in bfloat16.
    """
    there = (whole(weight) for weight in stored(model) if not weight.is_meta)
    weights = [sample_values(part, SAMPLE) for weight in there for part in parts_of(weight)]
    return {"name": name, "weights": digest_weights(weights), "dtype": dtype_name(model)}


def dtype_name(module: nn.Module) -> str:
    """Return the name of the dtype of a module's first weight."""
    return str(next(module.parameters()).dtype).removeprefix("torch.")


def whole(weight: Any) -> Tensor:
    """Return a whole weight, also if each rank of a split model holds a part: then all must call this."""
    full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full


def stored(model: nn.Module) -> Iterator[Tensor]:
    """Yield a model's weights. Packages such as GPTQ's keep a quantised model's in buffers of integers."""
    yield from model.parameters()
    if getattr(model, "is_quantized", False):
        yield from (buffer for buffer in model.buffers() if not buffer.is_floating_point())


def is_plain(weight: object) -> TypeGuard[Tensor]:
    """Return whether a weight is a tensor of floats of torch's own, whole or split among ranks."""
    own = not hasattr(weight, "__tensor_flatten__") or hasattr(weight, "full_tensor")
    return isinstance(weight, Tensor) and own and weight.dtype in DTYPES.values()


def parts_of(weight: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a weight: several if it is of a class such as torchao's."""
    if hasattr(weight, "__tensor_flatten__"):
        for name in weight.__tensor_flatten__()[0]:
            yield from parts_of(getattr(weight, name))
    else:
        yield weight


def models_identity(target: dict[str, str], drafter: Identified | None) -> dict[str, Any]:
    """Return what identifies a pair of target and drafter by their own identities and the drafter's dtype."""
    network = None if drafter is None else drafter.network
    return {
        "target": target,
        "head": None if drafter is None else drafter.identity,
        "head_dtype": None if network is None else dtype_name(network),
    }


def state_of(modules: Iterable[nn.Module | None]) -> tuple[tuple[int, int], ...]:
    """Return where the weights of modules are, and how often each was changed in place, without reading them.

    A change through `.data` does not count, and none counts of weights that were made in inference mode.
    """
    weights = weights_of(modules)
    return tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights)


def weights_of(modules: Iterable[nn.Module | None]) -> Iterator[Tensor]:
    """Yield the parameters and buffers of modules; None has none."""
    for module in modules:
        if module is not None:
            yield from (*module.parameters(), *module.buffers())


def digest_weights(tensors: Iterable[Tensor]) -> str:
    """Return a digest of weights that is the same for float32 and for bfloat16."""
    return digest_tensors(one.bfloat16() if one.is_floating_point() else one for one in tensors)


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the tensors' dtypes, shapes and values."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        plain = tensor.detach().cpu().flatten().contiguous()
        found.update(plain.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def digest_json(*values: object) -> str:
    """Return a digest of values that JSON can hold.

    Nothing marks where one value ends and the next begins, so two numbers side by side belong in a list.
    """
    found = hashlib.sha256()
    for value in values:
        found.update(json.dumps(value, sort_keys=True).encode())
    return found.hexdigest()[:16]


def sample_values(tensor: Tensor, count: int) -> Tensor:
    """Return a view of about `count` evenly spaced values of a tensor."""
    # An odd stride is not a multiple of the usual widths, so the values come from different columns.
    return tensor.detach().flatten()[:: (tensor.numel() // count) | 1]


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> str:
    """Describe how two records differ, for an error: `name was A, now B`; nested names are dotted paths.

    Two names of one file are the same: a folder has a slash at its end or none, and is named from its root
    or from here.
    """
    parts = []
    for name in sorted(found.keys() | wanted.keys()):
        old, new = found.get(name), wanted.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            parts.append(differences(old, new, f"{prefix}{name}."))
        elif old != new and not same_files(old, new):
            parts.append(f"{prefix}{name} was {old}, now {new}")
    return ", ".join(filter(None, parts))


def same_files(one: Any, other: Any) -> bool:
    """Return whether two names are those of the same file or folder, which is here."""
    try:
        return Path(one).expanduser().samefile(Path(other).expanduser())
    except (OSError, RuntimeError, TypeError, ValueError):  # no path, no such home, nothing there
        return False
