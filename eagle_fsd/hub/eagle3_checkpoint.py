"""EAGLE-3 checkpoints, as SafeAILab, SpecForge, AngelSlim, NVIDIA and the speculators library write them.

They differ in the names of a few keys and in where config.json keeps its fields. Reading is strict, as for
EAGLE-1/2 heads: anything wrong with a file is a ValueError of one line. Knows no Hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.core.checks import format_value, one_line
from eagle_fsd.drafting.eagle3.config import (
    Eagle3Config,
    Reading,
    Structure,
    layer_fields,
    possible_readings,
)
from eagle_fsd.drafting.eagle3.export import EAGLE, exported_config, exported_tensors
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.files.tensor_files import read_shapes, read_tensors
from eagle_fsd.hub.head_checkpoint import (
    EAGLE3,
    EMBEDDING_KEY,
    VOCABULARY_FIELD,
    check_tensors,
    kind_by_config,
    kind_by_tensors,
    read_config,
    refuse_kind,
    write_head,
)

D2T, T2D = "d2t", "t2d"  # target id minus draft id, [W]; which target ids are drafted, [V]
LM_HEAD_KEY = "lm_head.weight"
# The target's own weights, which speculators may leave in a file, and what can be computed.
NOT_READ = re.compile(r"verifier_.*|.*rotary_emb\.inv_freq")
LAYER = re.compile(r"layers\.(\d+)\.")
MOST_LAYERS = 64
LATER_NORM = re.compile(r"(layers\.[1-9]\d*)\.hidden_norm\.weight")  # SGLang's name for a Llama's own norm
KIND = "an EAGLE-3"
WHOLE = "choose a whole EAGLE-3 head with its own config.json"


def is_eagle3(path: Path, name: str) -> bool:
    """Return whether a weights file with the config.json beside it is an EAGLE-3 head.

    Raises ValueError for a head of another kind than EAGLE-1/2 and EAGLE-3.
    """
    kinds = (kind_by_config(read_config(path.parent, "draft head")), kind_by_tensors(read_shapes(path)))
    for kind in kinds:
        if kind not in (None, EAGLE3):
            refuse_kind(name, kind)
    return EAGLE3 in kinds


def read_eagle3_head(
    path: Path,
    name: str,
    hidden_size: int,
    vocab_size: int,
    target_layers: int,
    taps: Sequence[int] | None = None,
    norm_output: bool | None = None,
) -> Eagle3Head:
    """Read the EAGLE-3 head in `path`, with the config.json beside it, for a target of these sizes.

    is_eagle3 has checked its kind. taps, norm_output: how to read the config where it can be read in two
    ways; None leaves that open. The head has the likeliest reading, and all of them in `readings`. Returns it
    in eval mode, on the CPU, in the dtypes of its file.
    """
    data = read_config(path.parent, "draft head")
    tensors = canonical_keys(read_tensors(path), name)
    maps = {key: tensors.pop(key) for key in (D2T, T2D) if key in tensors}
    found = structure_of(tensors)
    if found.fc_inputs == 0:
        raise ValueError(f"draft head {name!r}: fc.weight is a number, it must be a matrix; {WHOLE}")
    try:
        check_sizes(data, found, hidden_size, vocab_size)
        readings = possible_readings(data, found.fc_inputs, hidden_size, target_layers, taps, norm_output)
        config = Eagle3Config.from_dict(data, found, readings[0])
        drafted = drafted_tokens(maps, config)
        with torch.device("meta"):  # shapes without memory
            head = Eagle3Head(replace(config, draft_vocab_size=vocab_size))
            expected = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    except (ValueError, RuntimeError) as error:  # sizes beyond what a tensor can have
        raise ValueError(f"draft head {name!r}: {one_line(error, 300)}") from error
    if config.lm_head:
        expected[LM_HEAD_KEY] = (config.draft_vocab_size, config.hidden_size)
    check_tensors(tensors, expected, name, KIND, optional=())
    return built(config, readings, drafted, tensors)


def built(
    config: Eagle3Config, readings: Sequence[Reading], drafted: Tensor | None, tensors: dict[str, Tensor]
) -> Eagle3Head:
    """Return the head with these tensors, which are taken and not copied."""
    with torch.device("meta"):
        head = Eagle3Head(config, drafted)
    head.load_state_dict(tensors, strict=True, assign=True)
    head.readings = tuple(readings)
    return head.eval().requires_grad_(False)


def canonical_keys(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors by the names that Eagle3Head gives them.

    Some files say `midlayer` for the first layer, and some have a prefix.
    """
    found: dict[str, Tensor] = {}
    for key, value in tensors.items():
        short = key.removeprefix("model.")
        if NOT_READ.fullmatch(short):
            continue
        if short.startswith("midlayer."):
            short = "layers.0." + short.removeprefix("midlayer.")
        short = LATER_NORM.sub(r"\1.input_layernorm.weight", short)
        if short in found:
            raise ValueError(
                f"draft head {name!r} has {one_line(short, 80)} twice, once as {one_line(key, 80)}: every "
                f"weight must be there once; {WHOLE}"
            )
        found[short] = value
    return found


def structure_of(tensors: Mapping[str, Tensor]) -> Structure:
    """Return what the names and shapes of tensors say of a head."""
    fc, lm_head = tensors.get("fc.weight"), tensors.get(LM_HEAD_KEY)
    numbers = [int(match[1]) for match in map(LAYER.match, tensors) if match and len(match[1]) < 9]
    attention = "layers.0.self_attn."
    return Structure(
        fc_inputs=None if fc is None else fc.shape[-1] if fc.ndim else 0,
        draft_vocab_size=None if lm_head is None else lm_head.shape[0] if lm_head.ndim else 0,
        layers=min(max(numbers, default=0) + 1, MOST_LAYERS),
        embeddings=EMBEDDING_KEY in tensors,
        fc_bias="fc.bias" in tensors,
        qkv_bias=attention + "q_proj.bias" in tensors,
        o_bias=attention + "o_proj.bias" in tensors,
        qk_norm=attention + "q_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_before_fc="input_norm.weight" in tensors,
    )


def check_sizes(data: Mapping[str, Any], found: Structure, hidden_size: int, vocab_size: int) -> None:
    """Raise ValueError unless a config agrees with its target and with the rows of its lm_head."""
    layer = layer_fields(data)
    width = data.get("target_hidden_size") or layer.get("hidden_size", hidden_size)
    for field, ours, wanted in (
        ("target hidden_size", width, hidden_size),
        ("vocab_size", layer.get("vocab_size", vocab_size), vocab_size),
    ):
        if ours != wanted:
            raise ValueError(
                f"its {field} is {format_value(ours)}: the target's is {wanted} and they must agree; choose "
                "the head that was trained for this target"
            )
    named, rows = data.get(VOCABULARY_FIELD), found.draft_vocab_size
    if rows is None and named not in (None, vocab_size):
        raise ValueError(
            f"{VOCABULARY_FIELD} is {format_value(named)} and it has no {LM_HEAD_KEY}: a head that drafts "
            f"some tokens must have its own; {WHOLE}"
        )
    if rows is not None and named not in (None, rows):
        raise ValueError(
            f"{VOCABULARY_FIELD} is {format_value(named)} and {LM_HEAD_KEY} has {rows} rows: they must "
            f"agree; {WHOLE}"
        )


def drafted_tokens(maps: Mapping[str, Tensor], config: Eagle3Config) -> Tensor | None:
    """Return the ids [W] int64 of the tokens that a head drafts, ascending; None if these are all.

    d2t is an offset: draft token i is the target's token i + d2t[i]. t2d marks the same tokens.
    """
    count, vocab = config.draft_vocab_size, config.vocab_size
    d2t, t2d = maps.get(D2T), maps.get(T2D)
    if t2d is not None and (t2d.shape != (vocab,) or t2d.is_floating_point() or t2d.is_complex()):
        raise ValueError(
            f"{T2D} is {list(t2d.shape)} {t2d.dtype}: it must be [{vocab}] and mark tokens; {WHOLE}"
        )
    marked = None if t2d is None else t2d.bool().nonzero()[:, 0]
    if d2t is None:
        if marked is not None and len(marked) == count:
            return None if count == vocab else marked
        if count == vocab:
            return None
        raise ValueError(
            f"it drafts {count} of {vocab} tokens and has no {D2T}: that must say which they are; {WHOLE}"
        )
    if d2t.shape != (count,) or d2t.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{D2T} is {list(d2t.shape)} {d2t.dtype}: it must be [{count}], integers; {WHOLE}")
    tokens = d2t.long() + torch.arange(count, device=d2t.device)
    rule = "draft token i is the target's token i + d2t[i]"
    if count and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab or bool((tokens.diff() <= 0).any())):
        raise ValueError(f"{D2T} is broken: {rule}, and these must ascend within 0..{vocab - 1}; {WHOLE}")
    if marked is not None and not torch.equal(tokens, marked):
        raise ValueError(f"{D2T} and {T2D} name different tokens: {rule}, and {T2D} marks them; {WHOLE}")
    return None if count == vocab else tokens


def save_eagle3_head(
    head: Eagle3Head,
    folder: str | Path,
    target_layers: int,
    layout: str = EAGLE,
    dtype: torch.dtype | None = None,
    target: str = "",
    extra: Mapping[str, Any] | None = None,
    written: Callable[[Path], None] | None = None,
) -> Path:
    """Write an EAGLE-3 head in one of export.LAYOUTS and return the folder; see save_head for how.

    target_layers: of the target. dtype: of the weights. target: its name, for speculators files. extra,
    written: see save_head.
    """
    tensors = {
        key: (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for key, value in exported_tensors(head, layout).items()
    }
    config = exported_config(head.config, layout, target_layers, target)
    config["torch_dtype"] = str(tensors["norm.weight"].dtype).removeprefix("torch.")
    return write_head(Path(folder), config | dict(extra or {}), tensors, written=written)
