"""The target's features for a list of examples: computed once into shards, or when a batch asks for them."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.fingerprints import differences
from eagle_fsd.training.data.examples import Example, batches_by_length
from eagle_fsd.training.data.shards import MANIFEST, FeatureSequence, read_manifest, shard_path, write_shard

logger = logging.getLogger(__name__)


def fingerprint(examples: Sequence[Example]) -> str:
    """A digest of the examples' tokens and masks: features on disk belong to exactly one."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.tokens, [int(flag) for flag in example.learn]]).encode())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def features_of(base_model: nn.Module, examples: Sequence[Example], batch_tokens: int) -> list[Tensor]:
    """The final-norm features [n, d] of every example, in order.

    Rows are padded on the right and attention is causal: no real token sees padding, which needs no mask.
    """
    device = next(base_model.parameters()).device
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


class OnlineFeatures:
    """Examples whose features the target computes each time they are read; nothing is stored."""

    def __init__(self, base_model: nn.Module, examples: Sequence[Example], batch_tokens: int = 2048) -> None:
        self.base_model, self.examples, self.batch_tokens = base_model, examples, batch_tokens
        self.tokens = [torch.tensor(example.tokens) for example in examples]
        self.learn = [torch.tensor(example.learn) for example in examples]

    def read(self, numbers: Sequence[int]) -> list[FeatureSequence]:
        """The examples of these numbers with their features, in that order."""
        made = features_of(self.base_model, [self.examples[number] for number in numbers], self.batch_tokens)
        return [
            # A tensor made under inference mode takes no part in training: a copy does.
            FeatureSequence(self.tokens[number], self.learn[number], rows.clone())
            for number, rows in zip(numbers, made, strict=True)
        ]


@dataclass(frozen=True)
class Cost:
    """What an extraction still takes: tokens to read, bytes of disk, seconds on one process."""

    tokens: int
    size: int
    seconds: float

    def __str__(self) -> str:
        minutes = self.seconds / 60
        return f"{self.tokens:,} tokens, {self.size / 1e9:.2f} GB on disk, about {minutes:.1f} minutes"


def estimate(
    base_model: nn.Module,
    files: Mapping[Path, Sequence[Example]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_examples: int = 128,
    batch_tokens: int = 2048,
) -> Cost:
    """What `extract` into these folders still costs, by timing the target on one batch of the examples.

    Raises OSError where a folder's disk is too small for all of it.
    """
    left: list[Example] = []
    for folder, examples in files.items():
        starts = range(0, len(examples), shard_examples)
        missing = [start for number, start in enumerate(starts) if not shard_path(folder, number).is_file()]
        left += [example for start in missing for example in examples[start : start + shard_examples]]
    tokens = sum(len(example.tokens) for example in left)
    if not tokens:
        return Cost(0, 0, 0.0)
    last = left[-64:]
    sample = [last[i] for i in next(batches_by_length([len(one.tokens) for one in last], batch_tokens))]
    width = features_of(base_model, sample, batch_tokens)[0].shape[1]  # the first call warms up
    started = time.perf_counter()
    features_of(base_model, sample, batch_tokens)
    per_token = (time.perf_counter() - started) / sum(len(example.tokens) for example in sample)
    size = tokens * (width * dtype.itemsize + 4 + 1)  # a feature, a token, a flag
    cost = Cost(tokens, size, tokens * per_token)
    for folder in files:
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if cost.size > (free := shutil.disk_usage(place).free):
            raise OSError(
                f"features of {cost} do not fit beside {folder}, which has {free / 1e9:.2f} GB free: name a "
                "folder on a larger disk, give fewer rows, or train with --online, which stores nothing"
            )
    return cost


def extract(
    base_model: nn.Module,
    examples: Sequence[Example],
    folder: str | Path,
    target: Mapping[str, str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_examples: int = 128,
    batch_tokens: int = 2048,
    share: tuple[int, int] = (0, 1),
) -> Path:
    """Write the features of `examples` under `folder`, which is returned; goes on with an earlier run's.

    target: who computes them (see target_identity); features of another, or of other examples, are refused.
    dtype: what they are stored in. share: this process's number and how many there are; they take the shards
    in turn.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "target": dict(target),
        "examples": fingerprint(examples),
        "count": len(examples),
        "shard_examples": shard_examples,
        "stored": str(dtype).removeprefix("torch."),
    }
    orphans = any(folder.glob("shard_*"))  # looked for first: a manifest is written before its shards
    if (folder / MANIFEST).is_file():
        if changed := differences(read_manifest(folder), manifest):
            raise ValueError(
                f"features in {folder} belong to another target, other data or settings ({changed}); "
                "remove the folder or name another"
            )
    elif orphans:
        raise ValueError(
            f"{folder} has shards and no {MANIFEST}: nothing says what they are of; remove the folder or "
            "name another"
        )
    else:  # processes that start together write the same, each as a whole
        write_atomically(folder / MANIFEST, json.dumps(manifest))
    starts = list(enumerate(range(0, len(examples), shard_examples)))[share[0] :: share[1]]
    for number, start in tqdm(starts, desc=f"features of {folder.name}", unit="shard", mininterval=5):
        path = shard_path(folder, number)
        if path.is_file():
            continue
        part = OnlineFeatures(base_model, examples[start : start + shard_examples], batch_tokens)
        write_shard(path, part.read(range(len(part.tokens))), dtype)
    return folder


def extract_all(
    base_model: nn.Module,
    files: Mapping[Path, Sequence[Example]],
    target: Mapping[str, str],
    *,
    share: tuple[int, int] = (0, 1),
    **settings: Any,
) -> list[Path]:
    """`extract` into every folder with these settings; the folders are returned.

    Each folder begins with another process, so that many small ones are not all the first one's.
    """
    process, count = share
    return [
        extract(base_model, examples, folder, target, share=((process + number) % count, count), **settings)
        for number, (folder, examples) in enumerate(files.items())
    ]
