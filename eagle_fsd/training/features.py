"""The target's features for a list of examples, computed once and kept in shards on disk. Knows the target's
base model, no loss.

A shard holds whole examples back to back: `tokens` int32 [T], `learn` bool [T], `features` [T, d] (after the
target's final norm) and `offsets` int64 [examples + 1]. Shards are written by rename, so a run that was
stopped goes on at the first missing one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from eagle_fsd.training.data import Example

logger = logging.getLogger(__name__)


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
    """Indices grouped by similar length so that a padded batch holds at most `max_tokens` (at least one
    row).
    """
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

    Rows are padded on the right and attention is causal, so padding needs no mask: no real token ever sees
    it.
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
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_examples: int = 128,
    batch_tokens: int = 2048,
    device: torch.device | str = "cpu",
) -> Path:
    """Write the features of `examples` under `folder`, going on where an earlier run stopped; the folder is
    returned.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"examples": fingerprint(examples), "shard_examples": shard_examples, "dtype": str(dtype)}
    manifest_path = folder / "manifest.json"
    if manifest_path.is_file():
        found = json.loads(manifest_path.read_text())
        if found != manifest:
            raise ValueError(
                f"features in {folder} belong to other data or settings "
                f"({found}, now {manifest}); remove the folder or name another"
            )
    else:
        write_atomically(manifest_path, json.dumps(manifest))
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


def load_features(folders: Sequence[str | Path], limit: int | None = None) -> list[FeatureSequence]:
    """All sequences of the folders' finished shards, in order; `limit` takes the first so many of each."""
    sequences: list[FeatureSequence] = []
    for folder in folders:
        paths = sorted(Path(folder).glob("shard_*.safetensors"))
        if not paths:
            raise ValueError(f"no feature shards in {str(folder)!r}; run the extraction first")
        sequences += islice(chain.from_iterable(load_shard(path) for path in paths), limit)
    return sequences


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
    partial = path.with_suffix(".partial")
    save_file(shard, partial)
    partial.replace(path)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:05d}.safetensors"


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader never sees half of it."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
