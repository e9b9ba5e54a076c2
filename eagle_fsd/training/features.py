"""The target's features for a list of examples, computed once and kept in shards on disk; knows no loss.

A shard holds whole examples back to back: `tokens` int32 [T], `learn` bool [T], `features` [T, d] (after the
target's final norm) and `offsets` int64 [examples + 1]. Shards are written by rename, so a run that was
stopped goes on at the first missing one. A manifest beside them names the target and the data.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from eagle_fsd.checkpoint import one_line
from eagle_fsd.identity import differences
from eagle_fsd.training.data import Example

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FeatureSequence:
    """One example with the target's features: tokens [n] int64, learn [n] bool, features [n, d]."""

    tokens: Tensor
    learn: Tensor
    features: Tensor


def fingerprint(examples: Sequence[Example]) -> str:
    """A digest of the examples' tokens and masks: features on disk belong to exactly one."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.tokens, [int(flag) for flag in example.learn]]).encode())
    return digest.hexdigest()[:16]


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices grouped by length so that a padded batch holds at most `max_tokens`, or a single row."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * lengths[index] > max_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


@torch.inference_mode()
def features_of(
    base_model: nn.Module, examples: Sequence[Example], batch_tokens: int, device: torch.device | str
) -> list[Tensor]:
    """The final-norm features [n, d] of every example, in order.

    Rows are padded on the right and attention is causal: no real token sees padding, which needs no mask.
    """
    result: list[Tensor | None] = [None] * len(examples)
    for group in batches_by_length([len(example.tokens) for example in examples], batch_tokens):
        longest = max(len(examples[index].tokens) for index in group)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)  # [B, L]
        for row, index in enumerate(group):
            ids[row, : len(examples[index].tokens)] = torch.tensor(examples[index].tokens)
        hidden = base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state.cpu()  # [B, L, d]
        for row, index in enumerate(group):
            result[index] = hidden[row, : len(examples[index].tokens)].clone()
    return [features for features in result if features is not None]


def extract(
    base_model: nn.Module,
    examples: Sequence[Example],
    folder: str | Path,
    target: Mapping[str, str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_examples: int = 128,
    batch_tokens: int = 2048,
    device: torch.device | str = "cpu",
) -> Path:
    """Write the features of `examples` under `folder`, which is returned; goes on with an earlier run's.

    target: who computes them (see target_identity); features of another, or of other examples, are refused.
    dtype: what they are stored in.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "target": dict(target),
        "examples": fingerprint(examples),
        "shard_examples": shard_examples,
        "stored": str(dtype).removeprefix("torch."),
    }
    if (folder / MANIFEST).is_file():
        if changed := differences(read_manifest(folder), manifest):
            raise ValueError(
                f"features in {folder} belong to another target, other data or settings ({changed}); "
                "remove the folder or name another"
            )
    else:
        write_atomically(folder / MANIFEST, json.dumps(manifest))
    starts = range(0, len(examples), shard_examples)
    for number, start in enumerate(tqdm(starts, desc="features", unit="shard", mininterval=5)):
        path = shard_path(folder, number)
        if path.is_file():
            continue
        part = examples[start : start + shard_examples]
        features = features_of(base_model, part, batch_tokens, device)
        made = [
            FeatureSequence(torch.tensor(example.tokens), torch.tensor(example.learn), rows)
            for example, rows in zip(part, features, strict=True)
        ]
        write_shard(path, made, dtype)
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the features of a folder were made from; ValueError where it does not say."""
    try:
        return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{folder} has no readable {MANIFEST}: a folder of features must have one; extract them again"
        ) from error


def load_features(folder: str | Path, target: Mapping[str, str]) -> list[FeatureSequence]:
    """All sequences of a folder's finished shards, in order; ValueError for features of another target."""
    folder = Path(folder)
    paths = sorted(folder.glob("shard_*.safetensors"))
    if not paths:
        raise ValueError(f"no feature shards in {str(folder)!r}; run the extraction first")
    if changed := differences({"target": read_manifest(folder).get("target")}, {"target": target}):
        raise ValueError(
            f"features in {folder} belong to another target ({changed}); extract them with this one"
        )
    return list(chain.from_iterable(load_shard(path) for path in paths))


def load_shard(path: Path) -> list[FeatureSequence]:
    """The sequences of one shard; their tensors are views of it."""
    try:
        shard = load_file(path)
        tokens, learn, features = shard["tokens"].long(), shard["learn"], shard["features"]
        bounds = shard["offsets"].tolist()
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"{path} is no whole feature shard ({error}); remove it and extract again"
        ) from error
    return [
        FeatureSequence(tokens[start:end], learn[start:end], features[start:end])
        for start, end in pairwise(bounds)
    ]


def write_shard(path: Path, sequences: Sequence[FeatureSequence], dtype: torch.dtype) -> None:
    """Write sequences as one shard; a reader sees all of it or nothing."""
    lengths = torch.tensor([0] + [len(sequence.tokens) for sequence in sequences])
    shard = {
        "tokens": torch.cat([sequence.tokens for sequence in sequences]).to(torch.int32),
        "learn": torch.cat([sequence.learn for sequence in sequences]),
        "features": torch.cat([sequence.features for sequence in sequences]).to(dtype),
        "offsets": lengths.cumsum(0),
    }
    with whole_file(path) as partial:
        save_file(shard, partial)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:05d}.safetensors"


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader never sees half of it."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what then takes the place of `path`; OSError where the disk does not take it."""
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        yield partial
    except (RuntimeError, SafetensorError) as error:  # torch's and safetensors' word for a full disk
        raise OSError(
            f"{path} cannot be written ({one_line(error, 80)}): free some space and start again"
        ) from error
    partial.replace(path)
