"""Draft-head checkpoints in EAGLE-1/2's own layout: config.json beside a .safetensors or .bin file.

A head with a draft vocabulary has one more file, which other loaders can ignore:
draft_vocabulary.safetensors with `token_ids` int64 [K], most frequent first. Its config.json then has
draft_vocab_size, K.

Reading is strict: anything wrong with a file is a ValueError of one line. Knows no Hub.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_fsd.core.checks import format_value, one_line
from eagle_fsd.drafting.draft_vocabulary import check_draft_tokens
from eagle_fsd.drafting.eagle_config import CHECK, HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.files.atomic import name_full_disk
from eagle_fsd.files.tensor_files import read_tensors

CONFIG_NAME = "config.json"
SAFETENSORS_NAME = "model.safetensors"
BIN_NAME = "pytorch_model.bin"
VOCABULARY_NAME = "draft_vocabulary.safetensors"
TOKENS_KEY = "token_ids"
VOCABULARY_FIELD, TEXT_FIELD = "draft_vocab_size", "draft_text_tokens"
EMBEDDING_KEY = "embed_tokens.weight"
FC_BIAS_KEY = "fc.bias"
EAGLE12 = "EAGLE-1/2"
EAGLE3, MEDUSA = "EAGLE-3", "Medusa"
P_EAGLE, DFLASH, DSPARK, MLA = "P-EAGLE", "DFlash", "DSpark", "EAGLE-3 with MLA"
EAGLE3_KEYS = ("d2t", "t2d", "lm_head.weight", "norm.weight")
# Parts of other networks' keys.
OTHER_KEYS = {"kv_a_proj": MLA, "kv_b_proj": MLA, "mask_hidden": P_EAGLE, "markov": DSPARK}
# Medusa writes `medusa_head.0.0.linear.weight`, or the same without the prefix.
MEDUSA_KEY = re.compile(r"(medusa_head\.|\d+\.\d+\.linear\.|\d+\.\d+\.(weight|bias)$)")
QKV_BIAS_KEY = re.compile(r"layers\.0\.self_attn\.[qkv]_proj\.bias")
PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHOWN = 4  # how many keys an error names


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """Return the JSON object in a folder's config.json; `kind` ("target", "draft head") is for errors."""
    path = folder / CONFIG_NAME
    if not folder.is_dir():
        raise ValueError(f"{kind} {str(folder)!r} is not there: it must be a folder; check its spelling")
    if not path.is_file():
        raise ValueError(
            f"{kind} folder {str(folder)!r} has no {CONFIG_NAME}: it must have one; name the model's own"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} is not JSON ({one_line(error, 80)}): it must be; download it again"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(
            f"{str(path)!r} is a {type(config).__name__}: it must be a JSON object; download it again"
        )
    return config


def find_head_file(folder: Path, name: str) -> Path:
    """Return a head's weights file: model.safetensors, else pytorch_model.bin; `name` is for errors."""
    for file_name in (SAFETENSORS_NAME, BIN_NAME):
        if (folder / file_name).is_file():
            return folder / file_name
    if any(folder.glob("medusa_lm_head*")):
        refuse_kind(name, MEDUSA)
    raise ValueError(
        f"draft head {name!r} has no weights: its folder must hold {SAFETENSORS_NAME} or {BIN_NAME}; "
        "add one, or name a weights file"
    )


def kind_by_config(config: Mapping[str, Any]) -> str | None:
    """Return the kind of a head that its config.json names; None if it names none, as for EAGLE-1/2."""
    family = config.get("speculators_model_type")
    names = f"{config.get('architectures') or ''} {family or ''}".lower().replace("-", "").replace("_", "")
    layer = config.get("transformer_layer_config")
    if "medusa_num_heads" in config or "medusa" in names:
        return MEDUSA
    if "peagle" in names or "ptd_token_id" in config:
        return P_EAGLE
    if "dspark" in names:
        return DSPARK
    if "dflash" in names or "dflash_config" in config:
        return DFLASH
    if "deepseek" in names or "kv_lora_rank" in (layer if isinstance(layer, Mapping) else config):
        return MLA
    if "eagle3" in names:
        return "gated EAGLE-3" if "gated" in names else EAGLE3
    return None if family is None else format_value(family)


def kind_by_tensors(tensors: Mapping[str, Tensor | tuple[int, ...]]) -> str | None:
    """Return the kind of a head by its keys and the width of `fc`; None for an EAGLE-1/2 head.

    tensors: the tensors themselves, or their shapes.
    """
    for key in tensors:
        if other := next((kind for part, kind in OTHER_KEYS.items() if part in key), None):
            return other
    fc = tensors.get("fc.weight")
    shape = getattr(fc, "shape", fc) or ()
    wide = len(shape) == 2 and shape[1] == 3 * shape[0]
    names = {key.removeprefix("model.") for key in tensors}
    if wide or any(name in EAGLE3_KEYS or name.startswith("midlayer.") for name in names):
        return EAGLE3
    return MEDUSA if fc is None and any(MEDUSA_KEY.match(key) for key in tensors) else None


def refuse_half_vocabulary(folder: Path, config: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if a head's config names a draft vocabulary without a file, or the other way round."""
    size, there = config.get(VOCABULARY_FIELD), (folder / VOCABULARY_NAME).is_file()
    if size is not None and not there:
        raise ValueError(
            f"draft head {name!r} names {VOCABULARY_FIELD} {format_value(size)} but has no "
            f"{VOCABULARY_NAME}: an EAGLE-1/2 head must have both or neither, and these weights are not "
            "an EAGLE-3 head's; copy the file, or choose another head"
        )
    if size is None and there:
        raise ValueError(
            f"draft head {name!r} has {VOCABULARY_NAME} but its {CONFIG_NAME} names no {VOCABULARY_FIELD}: a "
            "head must have both or neither; copy both files of one head, or remove the vocabulary"
        )


def refuse_kind(name: str, kind: str | None, wanted: str = "EAGLE-1/2 or EAGLE-3") -> NoReturn:
    """Raise ValueError for a head of another kind."""
    raise ValueError(
        f"draft head {name!r} is of the {kind} kind: it must be an {wanted} head; choose one for this target"
    )


def read_head(path: Path, name: str, hidden_size: int, vocab_size: int) -> DraftHead:
    """Read the head in `path`, with the config.json beside it, for a target of this width and vocabulary.

    Every key of the layout must be there with its shape, and no other key. An `embed_tokens.weight` is
    allowed: it is checked and dropped, because the target's own is used. A draft vocabulary beside the head
    is read too. Returns the head in eval mode, float32, on the CPU.
    """
    data = read_config(path.parent, "draft head")
    if (kind := kind_by_config(data)) is not None:
        refuse_kind(name, kind, EAGLE12)
    tensors = read_tensors(path)
    if (kind := kind_by_tensors(tensors)) is not None:
        refuse_kind(name, kind, EAGLE12)
    refuse_half_vocabulary(path.parent, data, name)
    try:
        config = HeadConfig.from_dict(
            data, fc_bias=FC_BIAS_KEY in tensors, qkv_bias=any(QKV_BIAS_KEY.fullmatch(key) for key in tensors)
        )
    except ValueError as error:
        raise ValueError(f"draft head {name!r}: {one_line(error, 300)}") from error
    check_target(config, name, hidden_size, vocab_size)
    try:
        with torch.device("meta"):  # shapes without memory
            head = DraftHead(replace(config, draft_vocab_size=None))
    except RuntimeError as error:  # sizes beyond what a tensor can have
        raise ValueError(
            f"draft head {name!r} has impossible sizes ({one_line(error, 80)}): {CHECK}"
        ) from error
    expected = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    expected[EMBEDDING_KEY] = (config.vocab_size, config.hidden_size)
    check_tensors(tensors, expected, name)
    tensors.pop(EMBEDDING_KEY, None)
    head = head.to_empty(device="cpu").float()
    head.load_state_dict(tensors, strict=True)
    drafted = None
    if config.draft_vocab_size is not None:
        drafted = read_draft_tokens(path.parent / VOCABULARY_NAME, config)
    head.restrict(drafted, config.draft_text_tokens)
    return head.eval()


def read_draft_tokens(path: Path, config: HeadConfig) -> Tensor:
    """Read the draft vocabulary [K] int64 of a head. Raises ValueError unless it fits the head's config."""
    shown = f"draft vocabulary {str(path)!r}"
    remedy = "copy both files of one head"
    tensors = read_tensors(path, "draft vocabulary")
    if list(tensors) != [TOKENS_KEY]:
        raise ValueError(
            f"{shown} holds {format_keys(sorted(tensors)) or 'nothing'}: it must hold {TOKENS_KEY} alone; "
            f"{remedy}"
        )
    token_ids = tensors[TOKENS_KEY]
    check_draft_tokens(token_ids, config.vocab_size, shown, remedy)
    if len(token_ids) != config.draft_vocab_size:
        raise ValueError(
            f"{shown} has {len(token_ids)} token ids: {CONFIG_NAME}'s {VOCABULARY_FIELD} is "
            f"{config.draft_vocab_size} and they must agree; {remedy}"
        )
    return token_ids


def stored_dtype(file: Path) -> torch.dtype:
    """Return the dtype of a head's stored weights; of several, the smallest that holds all of them."""
    dtypes = {value.dtype for key, value in read_tensors(file).items() if key != EMBEDDING_KEY}
    return functools.reduce(torch.promote_types, dtypes)


def extra_fields(folder: Path, config: HeadConfig) -> dict[str, Any]:
    """Return the fields of a head's config.json that save_head does not write itself: its `extra`."""
    written = {*config.to_dict(), VOCABULARY_FIELD, TEXT_FIELD, "torch_dtype", "dtype"}
    return {key: value for key, value in read_config(folder, "draft head").items() if key not in written}


def check_target(config: HeadConfig, name: str, hidden_size: int, vocab_size: int) -> None:
    """Raise ValueError unless a head has its target's hidden size and vocabulary size."""
    for field, ours, wanted in (
        ("hidden_size", config.hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
    ):
        if ours != wanted:
            raise ValueError(
                f"draft head {name!r} has {field} {ours}: the target's is {wanted} and they must agree; "
                "choose the head that was trained for this target"
            )


def check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    name: str,
    kind: str = "an EAGLE-1/2",
    optional: Collection[str] = (EMBEDDING_KEY,),
) -> None:
    """Raise ValueError unless a checkpoint's keys and shapes fit the layout and its values are finite.

    optional: keys that may be missing, and whose values are not used.
    """
    where = f"draft head {name!r}"
    remedy = f"choose {kind} head with its own config.json"
    missing = sorted(expected.keys() - tensors.keys() - set(optional))
    if missing:
        raise ValueError(
            f"{where} lacks {format_keys(missing)}: every key of the layout must be there; {remedy}"
        )
    unexpected = sorted(tensors.keys() - expected.keys())
    if unexpected:
        raise ValueError(
            f"{where} has {format_keys(unexpected)}: no key outside the layout may be there; {remedy}"
        )
    for key, value in tensors.items():
        if tuple(value.shape) != expected[key]:
            raise ValueError(
                f"{where}: {key} is {list(value.shape)}, it must be {list(expected[key])}; {remedy}"
            )
        if value.dtype not in PLAIN_DTYPES:
            raise ValueError(
                f"{where}: {key} is {value.dtype}, it must be a plain float; save it unquantised"
            )
        if key not in optional and not value.isfinite().all():
            raise ValueError(
                f"{where}: {key} holds NaN or infinity, weights must be finite; download it again"
            )


def format_keys(keys: list[str]) -> str:
    """Return the first SHOWN keys, and how many more there are."""
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(one_line(key, 80) for key in keys[:SHOWN]) + more


def save_head(
    head: DraftHead,
    folder: str | Path,
    extra: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    written: Callable[[Path], None] | None = None,
) -> Path:
    """Write config.json and model.safetensors, as EAGLE, vLLM and SGLang read them; return the folder.

    A draft vocabulary is written beside them. `extra` adds fields to config.json but may not replace the
    head's own; `dtype` casts the weights. `fc.bias` is written only if the head has one; vLLM cannot read it
    (HeadConfig.to_dict says why). A new folder appears whole. In an existing one each file is replaced
    atomically, config.json last, and other files (a README) stay. written: is shown the folder in which the
    files are before they are moved.
    """
    folder = Path(folder)
    tensors = {key: value.detach().to("cpu", dtype).contiguous() for key, value in head.state_dict().items()}
    stored = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    config = head.config.to_dict() | {"torch_dtype": stored}
    taken = sorted(config.keys() & (extra or {}).keys())
    if taken:
        raise ValueError(f"extra has {format_keys(taken)}: it may not replace the head's fields; rename them")
    return write_head(folder, config | (extra or {}), tensors, head.draft_tokens, written)


def write_head(
    folder: Path,
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    vocabulary: Tensor | None = None,
    written: Callable[[Path], None] | None = None,
) -> Path:
    """Write the files of a head as `save_head` describes, and return the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with name_full_disk(folder):
            partial.chmod(0o755)  # mkdtemp's 0700 would hide a shipped head from other users
            (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, partial / SAFETENSORS_NAME, metadata={"format": "pt"})
            if vocabulary is not None:
                save_file(
                    {TOKENS_KEY: vocabulary.cpu()}, partial / VOCABULARY_NAME, metadata={"format": "pt"}
                )
            for file in partial.glob("*.safetensors"):
                file.chmod(0o644)  # safetensors writes with 0600
            if written is not None:
                written(partial)
            if not folder.exists():
                partial.rename(folder)
                return folder
            os.replace(partial / SAFETENSORS_NAME, folder / SAFETENSORS_NAME)
            if vocabulary is None:
                (folder / VOCABULARY_NAME).unlink(missing_ok=True)
            else:
                os.replace(partial / VOCABULARY_NAME, folder / VOCABULARY_NAME)
            os.replace(partial / CONFIG_NAME, folder / CONFIG_NAME)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
