"""Compute the target's features of examples: once into shards, or whenever a batch needs them."""

from __future__ import annotations

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

from eagle_fsd.core.padding import pad_right
from eagle_fsd.files.atomic import write_atomically
from eagle_fsd.files.fingerprints import differences, digest_json
from eagle_fsd.target.taps import TappedDecoder, plain_tapped_decoder
from eagle_fsd.training.data.examples import Example, batches_by_length
from eagle_fsd.training.data.shards import (
    MANIFEST,
    FeatureSequence,
    dtype_remedy,
    read_manifest,
    shard_path,
    taps_remedy,
    write_shard,
)

logger = logging.getLogger(__name__)


@torch.inference_mode()
def compute_features(
    base_model: nn.Module, examples: Sequence[Example], batch_tokens: int, tapped: TappedDecoder | None = None
) -> list[list[Tensor]]:
    """Compute the final-norm features [n, d] of every example, in order, and its taps [n, taps * d] if any.

    tapped: a decoder of the same weights that shows the taps.
    Rows are padded on the right and attention is causal: no real token sees padding, so it needs no mask.
    """
    device = next(base_model.parameters()).device
    made: dict[int, list[Tensor]] = {}
    for group in batches_by_length([len(example.tokens) for example in examples], batch_tokens):
        ids = pad_right([examples[index].tokens for index in group], 0)  # [B, L]
        inputs = {"input_ids": ids.to(device), "use_cache": False}
        output, taps = (base_model(**inputs), []) if tapped is None else tapped(**inputs)
        states = [output.last_hidden_state.cpu()]  # [B, L, d]
        if taps:
            states.append(torch.cat([tap.cpu() for tap in taps], dim=-1))  # [B, L, taps * d]
        for row, index in enumerate(group):
            made[index] = [state[row, : len(examples[index].tokens)] for state in states]
    return [made[index] for index in range(len(examples))]


def tapped_decoder(base_model: nn.Module, taps: Sequence[int]) -> TappedDecoder | None:
    """Return a decoder that shows these taps; None if there are none. See target.taps."""
    return plain_tapped_decoder(base_model, base_model.config.num_hidden_layers, taps) if taps else None


class OnlineFeatures:
    """Examples whose features the target computes each time they are read. Nothing is stored.

    taps: those to compute beside the features.
    """

    def __init__(
        self,
        base_model: nn.Module,
        examples: Sequence[Example],
        batch_tokens: int = 2048,
        taps: Sequence[int] = (),
    ) -> None:
        self.base_model, self.examples, self.batch_tokens = base_model, examples, batch_tokens
        self.tapped = tapped_decoder(base_model, taps)
        self.tokens = [torch.tensor(example.tokens) for example in examples]
        self.learn = [torch.tensor(example.learn) for example in examples]

    def read(self, numbers: Sequence[int]) -> list[FeatureSequence]:
        """Return the examples of these numbers with their features, in that order."""
        examples = [self.examples[number] for number in numbers]
        made = compute_features(self.base_model, examples, self.batch_tokens, self.tapped)
        return [
            # A tensor made in inference mode cannot take part in training; a copy can.
            FeatureSequence(self.tokens[number], self.learn[number], *(state.clone() for state in states))
            for number, states in zip(numbers, made, strict=True)
        ]


@dataclass(frozen=True)
class Cost:
    """What an extraction still needs: tokens to read, bytes of disk, seconds of one process."""

    tokens: int
    size: int
    seconds: float

    def __str__(self) -> str:
        if not self.tokens:
            return "all are there"
        size = f"{self.size / 1e9:.2f} GB" if self.size >= 1e8 else f"{self.size / 1e6:.2f} MB"
        minutes = f"about {self.seconds / 60:.1f} minutes" if self.seconds >= 60 else "less than a minute"
        return f"{self.tokens:,} tokens, {size} on disk, {minutes}"


@dataclass(frozen=True)
class Extraction:
    """Writes the features of examples into folders of shards.

    base_model: the target's decoder, and target: who that is (see TargetModel.identity). dtype: how features
    are stored. taps: those that are stored beside the features; each takes as much disk as these.
    """

    base_model: nn.Module
    target: Mapping[str, str]
    dtype: torch.dtype = torch.bfloat16
    taps: Sequence[int] = ()
    batch_tokens: int = 2048
    shard_examples: int = 128

    def estimate(self, files: Mapping[Path, Sequence[Example]]) -> Cost:
        """Estimate what `write` into these folders still costs, by timing the target on one batch.

        Raises ValueError if `write` would refuse a folder, be it the last one, and OSError if a folder's disk
        is too small for all of it.
        """
        left: list[Example] = []
        for folder, examples in files.items():
            self.own_manifest(folder, examples)
            left += [
                one for path, part in self.shards(folder, examples) if not path.is_file() for one in part
            ]
        tokens = sum(len(example.tokens) for example in left)
        if not tokens:
            return Cost(0, 0, 0.0)
        last = left[-64:]
        lengths = [len(example.tokens) for example in last]
        sample = [last[place] for place in next(batches_by_length(lengths, self.batch_tokens))]
        tapped = tapped_decoder(self.base_model, self.taps)
        parts = (self.base_model, sample, self.batch_tokens, tapped)
        width = sum(state.shape[1] for state in compute_features(*parts)[0])  # this first call warms up
        started = time.perf_counter()
        compute_features(*parts)
        per_token = (time.perf_counter() - started) / sum(len(example.tokens) for example in sample)
        size = tokens * (width * self.dtype.itemsize + 4 + 1)  # a feature with its taps, a token, a flag
        cost = Cost(tokens, size, tokens * per_token)
        for folder in files:
            place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
            if cost.size > (free := shutil.disk_usage(place).free):
                raise OSError(
                    f"features of {cost} do not fit beside {folder}, which has {free / 1e9:.2f} GB free: "
                    "name a folder on a larger disk, give fewer rows, or train with --online, which stores "
                    "nothing"
                )
        return cost

    def write(self, files: Mapping[Path, Sequence[Example]], share: tuple[int, int] = (0, 1)) -> None:
        """Write the features of all files into their folders, or continue an earlier run there.

        share: this process's number, and the number of processes. They take the shards in turn, and each
        folder begins with another one, so that many small folders are not all left to the first. Raises
        ValueError for a folder of another target, of other examples or with other taps.
        """
        process, count = share
        for number, (folder, examples) in enumerate(files.items()):
            self.write_folder(folder, examples, ((process + number) % count, count))

    def write_folder(self, folder: Path, examples: Sequence[Example], share: tuple[int, int]) -> None:
        """Write this process's share of one folder; see `write`."""
        folder.mkdir(parents=True, exist_ok=True)
        manifest = self.own_manifest(folder, examples)
        if not (folder / MANIFEST).is_file():  # processes that start together all write the same whole file
            write_atomically(folder / MANIFEST, json.dumps(manifest))
        mine = self.shards(folder, examples)[share[0] :: share[1]]
        missing = [(path, part) for path, part in mine if not path.is_file()]
        settled = {"total": len(mine), "initial": len(mine) - len(missing), "disable": not missing}
        name = f"features of {folder.name}"
        for path, part in tqdm(missing, name, unit="shard", mininterval=5, **settled):
            if path.is_file():  # another run has made it meanwhile
                continue
            made = OnlineFeatures(self.base_model, part, self.batch_tokens, self.taps)
            write_shard(path, made.read(range(len(part))), self.dtype)

    def shards(self, folder: Path, examples: Sequence[Example]) -> list[tuple[Path, Sequence[Example]]]:
        """Return the path and the examples of every shard of a folder."""
        size = self.shard_examples
        starts = range(0, len(examples), size)
        return [(shard_path(folder, at), examples[start : start + size]) for at, start in enumerate(starts)]

    def own_manifest(self, folder: Path, examples: Sequence[Example]) -> dict[str, Any]:
        """Return the manifest of the features of `examples`.

        Raises ValueError if the folder has other features, or shards of which nothing says what they are.
        """
        manifest = {
            "target": dict(self.target),
            "examples": digest_json(*([one.tokens, [int(flag) for flag in one.learn]] for one in examples)),
            "count": len(examples),
            "shard_examples": self.shard_examples,
            "stored": str(self.dtype).removeprefix("torch."),
            **({"taps": list(self.taps)} if self.taps else {}),
        }
        orphans = any(folder.glob("shard_*"))  # looked for first: a manifest is written before its shards
        if (folder / MANIFEST).is_file():
            known = read_manifest(folder)
            if changed := differences(known, manifest):
                raise ValueError(
                    f"features in {folder} belong to another target, other data or settings ({changed}); "
                    f"remove the folder or name another{dtype_remedy(known.get('target'), self.target)}"
                    f"{taps_remedy(folder, known, manifest)}"
                )
        elif orphans:
            raise ValueError(
                f"{folder} has shards and no {MANIFEST}: nothing says what they are of; remove the folder or "
                "name another"
            )
        return manifest
