"""Store sequences with the target's features in shards on disk. It knows no model and no loss.

A shard holds whole examples back to back: `tokens` int32 [T], `learn` bool [T], `features` [T, d] (after the
target's final norm) and `offsets` int64 [examples + 1]. For EAGLE-3 heads it also has `taps` [T, taps * d],
the states between layers side by side. Shards are written by rename, so a run that was stopped continues at
the first missing one. A manifest beside them names the target, the data and the taps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.atomic import atomic_path
from eagle_fsd.files.fingerprints import differences

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FeatureSequence:
    """One example with the target's features: tokens [n] int64, learn [n] bool, features [n, d].

    taps: [n, taps * d], what an EAGLE-3 head reads in place of the features; None for other heads.
    """

    tokens: Tensor
    learn: Tensor
    features: Tensor
    taps: Tensor | None = None

    @property
    def inputs(self) -> Tensor:
        """What a head reads at every token: the taps if there are any, else the features."""
        return self.features if self.taps is None else self.taps

    def to(self, device: torch.device | str) -> FeatureSequence:
        """Return the same sequence on a device."""
        parts = (self.tokens, self.learn, self.features, self.taps)
        return FeatureSequence(*(None if part is None else part.to(device) for part in parts))


class Features(Protocol):
    """A source of training examples: all tokens and masks at hand, features when they are read."""

    @property
    def tokens(self) -> Sequence[Tensor]: ...

    @property
    def learn(self) -> Sequence[Tensor]: ...

    def read(self, numbers: Sequence[int]) -> list[FeatureSequence]:
        """Return the examples of these numbers with their features, in that order."""


class StoredFeatures:
    """The sequences of folders of shards, in order.

    Tokens and masks are kept in memory. Features are read from their shard each time and not kept, so that
    memory does not grow with the data.
    """

    def __init__(
        self, folders: Sequence[str | Path], target: Mapping[str, str], taps: Sequence[int] = ()
    ) -> None:
        """Index the shards.

        target: see TargetModel.identity. A field that it lacks is not compared. taps: those to read beside
        the features. Shards may hold taps that are not asked for. Raises ValueError for a folder without
        shards, of another target, with other taps, or damaged.
        """
        self.names = ("features", "taps") if taps else ("features",)
        self.tokens: list[Tensor] = []
        self.learn: list[Tensor] = []
        self.places: list[tuple[Path, int, int]] = []  # shard, first token, token after the last
        for folder in folders:
            for path in finished_shards(Path(folder), target, taps):
                self._index(path)

    def _index(self, path: Path) -> None:
        with open_shard(path) as shard:
            tokens, learn, bounds = (
                shard.get_tensor(name).clone() for name in ("tokens", "learn", "offsets")
            )
            for name in self.names:
                if (rows := shard.get_slice(name).get_shape()[:1]) != list(tokens.shape[:1]):
                    raise ValueError(f"{name} has {rows} rows, tokens {list(tokens.shape[:1])}")
            ends = bounds.flatten().tolist()
            ascend = all(start < end for start, end in pairwise(ends))
            if not (ascend and ends[:1] == [0] and ends[-1] == len(tokens) == len(learn)):
                raise ValueError("its offsets do not divide its tokens into examples")
        for start, end in pairwise(ends):
            self.tokens.append(tokens[start:end].long())
            self.learn.append(learn[start:end])
            self.places.append((path, start, end))

    def read(self, numbers: Sequence[int]) -> list[FeatureSequence]:
        """Return the examples of these numbers with their features, in that order."""
        return [
            FeatureSequence(self.tokens[number], self.learn[number], *self._states(*self.places[number]))
            for number in numbers
        ]

    def _states(self, path: Path, start: int, end: int) -> list[Tensor]:
        """Read the features [end - start, d] of an example, and its taps if they are asked for."""
        with open_shard(path) as shard:
            return [shard.get_slice(name)[start:end].clone() for name in self.names]


def dtype_remedy(known: Any, wanted: Mapping[str, str]) -> str:
    """Return what else helps where the targets of some features and of this run differ in their dtype."""
    same = isinstance(known, Mapping) and known.get("dtype") == wanted.get("dtype")
    return "" if same else ", or name their dtype with --extract-dtype"


def taps_remedy(folder: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return what else helps where two manifests of a folder differ in nothing but the taps."""
    if differences({**known, "taps": None}, {**wanted, "taps": None}):
        return ""
    held = known.get("taps")
    if held and not wanted.get("taps"):
        return f", or read them with --shards {folder}: EAGLE-1/2 heads learn from them too"
    return "" if held else "; an EAGLE-3 head needs the taps, which these lack"


def finished_shards(folder: Path, target: Mapping[str, str], taps: Sequence[int] = ()) -> list[Path]:
    """Return a folder's shards. Raises ValueError if some are missing, of another target or other taps."""
    paths = sorted(folder.glob("shard_*.safetensors"))
    if not paths:
        inside = sorted(folder.glob("*/shard_*.safetensors"))  # a run keeps a folder for each source
        remedy = f"name {str(inside[0].parent)!r}, inside it" if inside else "run the extraction first"
        raise ValueError(f"no feature shards in {str(folder)!r}; {remedy}")
    manifest = read_manifest(folder)
    known = manifest.get("target")
    if isinstance(known, dict):
        known = {name: value for name, value in known.items() if name in target}
    if changed := differences({"target": known}, {"target": target}):
        raise ValueError(
            f"features in {folder} belong to another target ({changed}); extract them with this one"
            f"{dtype_remedy(known, target)}"
        )
    if taps and (held := manifest.get("taps")) != list(taps):
        raise ValueError(
            f"features in {folder} have {f'the taps {held}' if held else 'no taps'}: an EAGLE-3 head that "
            f"reads the taps {list(taps)} needs these; extract them with --eagle3 and --taps "
            f"{','.join(map(str, taps))}"
        )
    wanted = -(-manifest.get("count", 0) // manifest.get("shard_examples", 1))
    if len(paths) != wanted or paths != [shard_path(folder, number) for number in range(wanted)]:
        raise ValueError(
            f"{folder} has {len(paths)} of {wanted} shards: the extraction did not end; start it again"
        )
    return paths


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read what the features of a folder were made from. Raises ValueError if that cannot be read."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        if not all(isinstance(manifest.get(name, 1), int) for name in ("count", "shard_examples")):
            raise TypeError("its sizes are no numbers")
        return manifest
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{folder} has no readable {MANIFEST}: a folder of features must have one; remove the folder and "
            "extract them again"
        ) from error


def shard_counts(folders: Sequence[Path]) -> list[int]:
    """Return how many sequences the shards of each folder hold, as its manifest says.

    Raises ValueError for a folder whose shards are missing, whatever target they are of.
    """
    for folder in folders:
        finished_shards(folder, {})
    return [int(read_manifest(folder).get("count", 0)) for folder in folders]


@contextmanager
def open_shard(path: Path) -> Iterator[safe_open]:
    """Open a shard. What is read from it is copied: a view would keep the file mapped.

    Raises ValueError for one that is found to be damaged.
    """
    try:
        with safe_open(path, "pt") as shard:
            yield shard
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is no whole feature shard ({one_line(error, 80)}); remove it and extract again"
        ) from error


def write_shard(path: Path, sequences: Sequence[FeatureSequence], dtype: torch.dtype) -> None:
    """Write sequences as one shard; a reader sees all of it or nothing."""
    lengths = torch.tensor([0] + [len(sequence.tokens) for sequence in sequences])
    shard = {
        "tokens": torch.cat([sequence.tokens for sequence in sequences]).to(torch.int32),
        "learn": torch.cat([sequence.learn for sequence in sequences]),
        "features": torch.cat([sequence.features for sequence in sequences]).to(dtype),
        "offsets": lengths.cumsum(0),
    }
    if taps := [sequence.taps for sequence in sequences if sequence.taps is not None]:
        shard["taps"] = torch.cat(taps).to(dtype)
    with atomic_path(path) as partial:
        save_file(shard, partial)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:05d}.safetensors"
