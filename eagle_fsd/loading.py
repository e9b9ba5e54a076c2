"""A target on disk to a model in memory: what its files must hold, and every failure in one line."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from eagle_fsd.architecture import ATTENTION, check_supported, end_tokens, longest_text
from eagle_fsd.checkpoint import BIN_NAME, CONFIG_NAME, SAFETENSORS_NAME, read_config
from eagle_fsd.config import require_choice
from eagle_fsd.download import TOKENIZER_FILES, bars_wanted, has_whole_weights, shard_names
from eagle_fsd.messages import one_line
from eagle_fsd.placement import resolve_device, resolve_dtype

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class TargetSource:
    """A target on disk: `name` as the user gave it, its folder, and the .gguf file in it where it is one."""

    name: str
    folder: Path
    gguf_file: str | None = None


@dataclass(frozen=True)
class TargetText:
    """A target as far as its text goes: all that counting tokens needs of it.

    tokenizer: None where the source has none. The sizes and limits are those of TargetModel.
    """

    tokenizer: transformers.PreTrainedTokenizerBase | None
    hidden_size: int
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


def load_model(
    source: TargetSource,
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
    if attn_implementation is not None:
        require_choice("attn_implementation", attn_implementation, ATTENTION)
    if isinstance(device_map, str):
        require_choice("device_map", device_map, DEVICE_MAPS)
    if source.gguf_file is None:
        check_folder(source, trust_remote_code)
    options = options_of(source, trust_remote_code)
    config = load_config(source, options)
    with one_line_errors(source.name), quiet_loading(source.gguf_file is not None):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype,
            device_map=device_map,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_whole says it better
            **options,
            **(unpacked() if source.gguf_file is not None else {}),
        )
        if device_map is None:
            model = model.to(place)
    check_whole(report, source.name)
    if source.gguf_file is not None:
        forget_quantization(model)
    return model.eval(), load_tokenizer(source, options)


def load_text(source: TargetSource, trust_remote_code: bool = False) -> TargetText:
    """What a target says of its text, from its small files: its weights need not be there."""
    if source.gguf_file is None:
        check_folder(source, trust_remote_code, weights=False)
    options = options_of(source, trust_remote_code)
    config = load_config(source, options)
    generation = None
    if (source.folder / transformers.utils.GENERATION_CONFIG_NAME).is_file():
        with one_line_errors(source.name):
            generation = transformers.GenerationConfig.from_pretrained(source.folder)
    text = config.get_text_config(decoder=True)
    return TargetText(
        tokenizer=load_tokenizer(source, options),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_positions=longest_text(text),
        eos_token_ids=end_tokens(text, generation),
    )


def options_of(source: TargetSource, trust_remote_code: bool) -> dict[str, Any]:
    """What every reader of transformers is told of a source."""
    gguf = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    return {"trust_remote_code": trust_remote_code, **gguf}


def load_config(source: TargetSource, options: dict[str, Any]) -> transformers.PreTrainedConfig:
    """The config of a decoder; ValueError for what is none."""
    with one_line_errors(source.name):
        config = transformers.AutoConfig.from_pretrained(source.folder, **options)
    check_decoder(config, source.name)
    return config


def load_tokenizer(
    source: TargetSource, options: dict[str, Any]
) -> transformers.PreTrainedTokenizerBase | None:
    """The tokenizer, None where the source has none."""
    if source.gguf_file is None and not any(any(source.folder.glob(name)) for name in TOKENIZER_FILES):
        return None
    with one_line_errors(source.name):
        return transformers.AutoTokenizer.from_pretrained(source.folder, **options)


def check_folder(source: TargetSource, trust_remote_code: bool, weights: bool = True) -> None:
    """A folder must have a config and whole weights, where these are asked for; said here, since
    transformers' errors are long."""
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
    if not weights or has_whole_weights(folder):
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
    # Others, GPT-NeoX among them, say False and do not mean it.
    both_ways = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder
    if not causal or both_ways:
        raise ValueError(f"target {name!r} is not a decoder ({kind}): {rule}")
    try:
        check_supported(config)
    except ValueError as error:
        raise ValueError(f"target {name!r} cannot be used: {one_line(error, 300)}") from error


def check_whole(report: dict[str, Any], name: str) -> None:
    """transformers fills what the files lack or have in another shape at random and only warns."""
    for key, found, wanted in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"target {name!r}: {key} is {list(found)} in its files and {list(wanted)} by its config.json: "
            "they must agree; download both again"
        )
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
        text = one_line(error, 200)
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
