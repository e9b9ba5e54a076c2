"""Checks of a target's folder and config before anything is built from them. Every error is one line.

transformers builds what a config asks for, whatever the size, and some config classes make lists as long as
their sizes. So the sizes are checked in the JSON first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

from eagle_fsd.core.checks import format_value, one_line
from eagle_fsd.hub.download import has_whole_weights, shard_names
from eagle_fsd.hub.head_checkpoint import BIN_NAME, CONFIG_NAME, SAFETENSORS_NAME, read_config
from eagle_fsd.target.architecture import check_supported

# The sizes that a config may name, and the largest allowed value of each, far beyond any existing model.
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
WIDTHS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "n_embd", "n_head", "n_inner", "d_model", "ffn_dim", "num_experts", "num_local_experts",
)  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
MOST = {**dict.fromkeys(LAYERS, 1024), **dict.fromkeys(WIDTHS, 2**24), **dict.fromkeys(POSITIONS, 2**40)}
INTEGER = 2**63  # no tensor's size or token id reaches this
# Kinds that have a class for text alone beside one for their whole, and the latter's names.
WITH_TOWERS = ("qwen3_5", "qwen3_5_moe")
WHOLE = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
PROCESSOR_TEMPLATE = "chat_template.json"
SLACK = 16  # weights per byte: more than any format packs, even with shared layers


def check_folder(folder: Path, name: str, trust_remote_code: bool, weights: bool = True) -> None:
    """Raise ValueError unless a folder has a config and, with `weights`, all its weights.

    It is checked here because transformers' errors are long.
    """
    where = f"target {name!r}"
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / CONFIG_NAME).is_file():
        raise ValueError(
            f"{where} has no {CONFIG_NAME}: a folder must have one; name its file {str(files[0])!r}"
        )
    config = read_config(folder, "target")
    check_sizes(config, name)
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
    """Raise ValueError unless this is a supported causal decoder; target/admission tests it later."""
    rule = "it must be a decoder; choose a causal language model"
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"target {name!r} is an encoder-decoder ({kind}): {rule}")
    causal = is_causal(config) or type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    # BERT-like models have a causal class too, but attend both ways unless the config sets is_decoder.
    # Real decoders, such as GPT-NeoX, may leave it False, so only models with a masked-LM class are asked.
    both_ways = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder
    if not causal or both_ways:
        raise ValueError(f"target {name!r} is not a decoder ({kind}): {rule}")
    try:
        check_supported(config)
    except ValueError as error:
        raise ValueError(f"target {name!r} cannot be used: {one_line(error, 300)}") from error


def is_causal(config: transformers.PreTrainedConfig) -> bool:
    """Return whether a config's kind has a class that reads text alone.

    Many kinds of models that read images or sound as well have none: their text is written by the whole.
    """
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return remote or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def reader_of(config: transformers.PreTrainedConfig) -> Any:
    """Return the class of transformers that reads a checkpoint: with its towers, where it has any.

    llama4's whole cannot read text alone.
    """
    towers = config.model_type in WITH_TOWERS and not set(config.architectures or ()).isdisjoint(WHOLE)
    if is_causal(config) and not towers:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForMultimodalLM


def check_sizes(config: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if a config's sizes are impossible: no integers, below 1 or beyond any model."""
    again = "download its config.json again"
    for key, value in integers(config):
        most = MOST.get(key, INTEGER - 1)
        if not -INTEGER < value <= most:
            raise ValueError(
                f"target {name!r}: {key} is {format_value(value, 40)}: it must be at most {most}; {again}"
            )
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in sorted(part.keys() & MOST.keys()):
            values = part[key] if isinstance(part[key], list) else [part[key]]  # per layer, or one for all
            for value in values:
                is_integer = isinstance(value, int) and not isinstance(value, bool)
                if value is not None and not (is_integer and value >= 1):
                    raise ValueError(
                        f"target {name!r}: {key} is {format_value(value, 40)}: it must be an integer from "
                        f"1 to {MOST[key]}; {again}"
                    )


def integers(part: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield every integer in a config with its field's name."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            yield from integers(value, str(name))
    elif isinstance(part, list):
        for value in part:
            yield from integers(value, key)
    elif isinstance(part, int):
        yield key, part


def check_plausible(config: transformers.PreTrainedConfig, folder: Path, name: str) -> None:
    """Raise ValueError if a config asks for far more weights than the folder's files can hold.

    transformers would allocate the missing weights before it could report them.
    """
    text = config.get_text_config(decoder=True)
    names = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
    hidden, words, layers, heads = (getattr(text, size, None) for size in names)
    if not all(isinstance(size, int) for size in (hidden, words, layers, heads)):
        return
    head_dim, inner = (getattr(text, size, None) for size in ("head_dim", "intermediate_size"))
    attention = heads * head_dim if isinstance(head_dim, int) else hidden
    weights = hidden * (words + (inner if isinstance(inner, int) else 0) + layers * attention)
    files = {SAFETENSORS_NAME, BIN_NAME, *shard_names(folder)}
    size = sum((folder / file).stat().st_size for file in files if (folder / file).is_file())
    if weights > SLACK * size:
        raise ValueError(
            f"target {name!r} cannot be loaded (its config.json asks for {weights} weights or more, its "
            f"files have {size} bytes): they must be of one model; download both again"
        )


def check_tokens(tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> None:
    """Raise ValueError for a tokenizer of special tokens alone, to which any prompt is nothing.

    Most classes of transformers make such a one where the file of the vocabulary is missing or empty; T5's
    also has the mark of a space.
    """
    if len(tokenizer) - len(getattr(tokenizer, "added_tokens_decoder", ())) < 2:
        raise ValueError(
            f"target {name!r} has a tokenizer without a vocabulary: its tokenizer.json, or such a file, must "
            "be whole; download it again"
        )


def template_of_processor(folder: Path) -> str | None:
    """Return the chat template that lies beside a tokenizer for a processor of images; None: there is none.

    Older repositories have it in a file of its own, which tokenizers do not read.
    """
    path = folder / PROCESSOR_TEMPLATE
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    except (ValueError, LookupError, TypeError):
        return None
    return template if isinstance(template, str) else None
