"""Loads a target from disk and checks that its files hold all of it. Every error is one line."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from eagle_fsd.core.checks import one_line, require_choice
from eagle_fsd.core.devices import release_freed_memory, resolve_device, resolve_dtype
from eagle_fsd.hub.download import CHAT_FILES, TOKENIZER_FILES
from eagle_fsd.hub.head_checkpoint import CONFIG_NAME, format_keys
from eagle_fsd.hub.kept.weights_cache import Origin, find, find_origin, keep
from eagle_fsd.hub.loading.gguf_positions import read_positions
from eagle_fsd.hub.loading.gguf_reading import dequantize_options, forget_quantization, gguf_read_once
from eagle_fsd.hub.loading.gguf_vectors import check_vectors
from eagle_fsd.hub.loading.progress import hide_loading_bars, show_progress
from eagle_fsd.hub.loading.weights_on_disk import unpacking, widening
from eagle_fsd.hub.quantised_files import check_quantisation
from eagle_fsd.hub.resolve import TargetSource, name_of_source, resolve_target
from eagle_fsd.hub.split.plan import check_split, require_weights_of_its_own, split_options
from eagle_fsd.hub.target_files import (
    check_decoder,
    check_folder,
    check_plausible,
    check_sizes,
    check_tokens,
    reader_of,
    template_of_processor,
)
from eagle_fsd.runtime.ranks import ALONE, Ranks
from eagle_fsd.target.architecture import ATTENTION, end_tokens, longest_text
from eagle_fsd.text.chat import take_text

logger = logging.getLogger(__name__)

CONVERTER = f"transformers {transformers.__version__}"
# transformers patches its own classes while it loads. Threads that load at once undo each other's patches.
_one_at_a_time = threading.Lock()
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class TargetText:
    """The parts of a target that work without its weights, enough to count tokens.

    tokenizer: None if the source has none. The sizes and limits are those of TargetModel.
    """

    tokenizer: transformers.PreTrainedTokenizerBase | None
    hidden_size: int
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class LoadSettings:
    """The checked arguments of load_target: how a target is read. ranks: split it among them, if several."""

    dtype: torch.dtype
    device: torch.device
    device_map: str | dict[str, Any] | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    ranks: Ranks = ALONE

    @property
    def on_cpu(self) -> bool:
        """Whether all of it is on the CPU of one process."""
        return self.device.type == "cpu" and self.device_map is None and not self.ranks.several


Loaded = tuple["transformers.PreTrainedModel", "transformers.PreTrainedTokenizerBase | None"]


def load_target(
    source: TargetSource | str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    weights_cache: bool = True,
    ranks: Ranks = ALONE,
) -> Loaded:
    """Load a target in eval mode, and its tokenizer (None if the source has none).

    `device_map` places the layers and overrides `device`. A missing weight is an error. weights_cache: keep
    the converted weights of a .gguf file and read them the next time; see weights_cache.py. ranks: split the
    target among them by transformers' own plan, if there are several.
    """
    if not isinstance(source, TargetSource):
        source = resolve_target(name_of_source("target", source), trust_remote_code=trust_remote_code)
    place = resolve_device(device)
    settings = LoadSettings(
        resolve_dtype(dtype, place), place, device_map, attn_implementation, trust_remote_code, ranks
    )
    if attn_implementation is not None:
        require_choice("attn_implementation", attn_implementation, ATTENTION)
    if isinstance(device_map, str):
        require_choice("device_map", device_map, DEVICE_MAPS)
    if ranks.several:
        require_weights_of_its_own(source.name, source.gguf_file)
    with _one_at_a_time:
        return load_kept_or_convert(source, settings, weights_cache)


def load_kept_or_convert(source: TargetSource, settings: LoadSettings, weights_cache: bool) -> Loaded:
    """Load a target, a .gguf file from its converted weights if they are kept."""
    if source.gguf_file is None:
        show_progress(f"loading {source.name} ...")
        return load_files(source, settings)
    origin = find_gguf_origin(source) if weights_cache else None
    if origin is not None and (folder := find(origin, usable_dtypes(settings.dtype))):
        show_progress(f"loading {source.name} from its converted weights in {folder} ...")
        if (loaded := load_kept(source, origin, folder, settings)) is not None:
            return loaded
    show_progress(f"converting {source.gguf_file} ...")
    with gguf_read_once(), unpacking(source.folder / source.gguf_file, origin is not None):
        loaded = load_files(source, settings)
    # With a device_map some weights may be offloaded, so they cannot be saved from here.
    if origin is not None and settings.device_map is None and (folder := keep_converted(origin, *loaded)):
        show_progress(f"kept the converted weights in {folder} for the next start")
        if settings.device.type == "cpu" and (kept := load_kept(source, origin, folder, settings)):
            # Their memory is the file's, which the system takes back where it is short. No cycle holds the
            # model that was converted, so it goes with its last name, without a walk over every object.
            loaded = kept
            release_freed_memory()
    return loaded


def load_kept(source: TargetSource, origin: Origin, folder: Path, settings: LoadSettings) -> Loaded | None:
    """Load a .gguf file from its converted weights in a folder.

    Returns None if another process deletes them meanwhile, or puts others in their place.
    """
    try:
        loaded = load_files(TargetSource(source.name, folder), settings)
    except ValueError:
        if find(origin, usable_dtypes(settings.dtype)):
            raise
        return None
    return restore_name(source, loaded) if find(origin, usable_dtypes(settings.dtype)) else None


def load_files(source: TargetSource, settings: LoadSettings) -> Loaded:
    """Load a target from the source's own files."""
    if source.gguf_file is None:
        check_folder(source.folder, source.name, settings.trust_remote_code)
    options = reader_options(source, settings.trust_remote_code)
    config = load_config(source, options)
    method = None
    if source.gguf_file is None:
        check_plausible(config, source.folder, source.name)
        method = check_quantisation(config.to_dict(), source.name)
    if settings.ranks.several:
        check_split(config, settings.ranks.size, source.name)
    load_generation_config(source)  # transformers takes a broken one for none, and its end tokens are lost
    # Packages that quantise make their weights while they load, where these are to be.
    loads_there = method is not None and settings.device_map is None and not settings.ranks.several
    plain = source.gguf_file is None and method is None
    widens = plain and settings.on_cpu and settings.dtype == torch.float32
    place = widening(source.folder) if widens else contextlib.nullcontext()
    bars = hide_loading_bars(source.gguf_file is not None)
    # transformers would load to torch's default device, which is nobody's choice here.
    with torch.device("cpu"), one_line_errors(source.name), bars, place:
        model, report = reader_of(config).from_pretrained(
            source.folder,
            config=config,
            dtype=settings.dtype,
            device_map=settings.device if loads_there else settings.device_map,
            attn_implementation=settings.attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_whole reports them better
            **options,
            **split_options(settings.ranks),
            **(dequantize_options() if source.gguf_file is not None else {}),
        )
        if settings.device_map is None and not settings.ranks.several and not loads_there:
            model = model.to(settings.device)
    check_whole(report, source.name, method)
    if source.gguf_file is not None:
        check_vectors(model, str(source.folder / source.gguf_file), source.name)
        forget_quantization(model)
    return model.eval(), load_tokenizer(source, options)


def load_text(source: TargetSource, trust_remote_code: bool = False) -> TargetText:
    """Load the parts of a target that work without its weights, from its small files."""
    if source.gguf_file is None:
        check_folder(source.folder, source.name, trust_remote_code, weights=False)
    elif (origin := find_gguf_origin(source)) and (folder := find(origin)):
        source = TargetSource(source.name, folder)
    options = reader_options(source, trust_remote_code)
    with contextlib.nullcontext() if source.gguf_file is None else gguf_read_once():
        config, tokenizer = load_config(source, options), load_tokenizer(source, options)
    generation = load_generation_config(source)
    text = config.get_text_config(decoder=True)
    return TargetText(
        tokenizer=tokenizer,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_positions=longest_text(text),
        eos_token_ids=end_tokens(text, generation),
    )


# -- converted .gguf files ----------------------------------------


def find_gguf_origin(source: TargetSource) -> Origin | None:
    """Return a .gguf file with everything that affects how it is read; None if nothing is to be kept."""
    names = (CONFIG_NAME, *CHAT_FILES, *TOKENIZER_FILES)
    beside = [path for name in names for path in source.folder.glob(name)]
    return find_origin(source.folder / source.gguf_file, beside, CONVERTER)


def usable_dtypes(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the dtypes of converted weights that can serve this one: itself and float32.

    float32 serves because a .gguf file is unpacked to float32 and then rounded anyway.
    """
    return str(torch.float32), str(dtype)


def keep_converted(
    origin: Origin, model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> Path | None:
    """Keep the converted weights of a .gguf file and return their folder; None if that is not possible."""

    def save(folder: Path) -> None:
        with hide_loading_bars(gguf=False):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    size = sum({weight.data_ptr(): weight.nbytes for weight in model.state_dict().values()}.values())
    return keep(origin, str(model.dtype), size, save)


def restore_name(source: TargetSource, loaded: Loaded) -> Loaded:
    """Let a model and tokenizer name the source's folder, not the cache."""
    model, tokenizer = loaded
    model.config._name_or_path = model.name_or_path = str(source.folder)
    tokenizer.name_or_path = str(source.folder)
    return loaded


# -- reading ----------------------------------------


def reader_options(source: TargetSource, trust_remote_code: bool) -> dict[str, Any]:
    """Return the arguments that every reader of transformers needs for a source."""
    gguf = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    return {"trust_remote_code": trust_remote_code, **gguf}


def load_config(source: TargetSource, options: dict[str, Any]) -> transformers.PreTrainedConfig:
    """Load a target's config. Raises ValueError unless it is a supported decoder's."""
    with one_line_errors(source.name):
        config = transformers.AutoConfig.from_pretrained(source.folder, **options)
    check_sizes(config.to_dict(), source.name)  # for a .gguf file; check_folder did it for a folder
    check_decoder(config, source.name)
    if source.gguf_file is not None:
        read_positions(config, str(source.folder / source.gguf_file), source.name)
    return config


def load_generation_config(source: TargetSource) -> transformers.GenerationConfig | None:
    """Load the generation_config.json; None if the source has none."""
    if not (source.folder / transformers.utils.GENERATION_CONFIG_NAME).is_file():
        return None
    with one_line_errors(source.name):
        return transformers.GenerationConfig.from_pretrained(source.folder)


def load_tokenizer(
    source: TargetSource, options: dict[str, Any]
) -> transformers.PreTrainedTokenizerBase | None:
    """Load the tokenizer; None if the source has none."""
    if source.gguf_file is None and not any(any(source.folder.glob(name)) for name in TOKENIZER_FILES):
        return None
    with one_line_errors(source.name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, **options)
    check_tokens(tokenizer, source.name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = template_of_processor(source.folder)
    take_text(tokenizer)
    return tokenizer


def check_whole(report: dict[str, Any], name: str, method: str | None = None) -> None:
    """Raise ValueError if the files lack a weight or have it in another shape; warn of what is left out.

    method: that quantised them, if any.
    transformers would fill it with random values and only warn, and the command line turns its warnings off.
    """
    for key, found, wanted in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"target {name!r}: {key} is {list(found)} in its files and {list(wanted)} by its config.json: "
            "they must agree; download both again"
        )
    if missing := sorted(report["missing_keys"]):
        lost = f"{len(missing)} weights, such as {missing[0]}"
        if method is not None:
            raise ValueError(
                f"target {name!r} is quantised by {method}, and transformers does not find {lost}: it must "
                "read them; choose a checkpoint that another one made, or one that is not quantised"
            )
        raise ValueError(
            f"target {name!r} lacks {lost}: its files must hold all; choose a causal language model"
        )
    if left := sorted(report["unexpected_keys"]):
        logger.warning(
            "target %r: its files hold %s, for which its config.json has no place: they are left out, and "
            "texts may be wrong; check that both are of one model",
            *(name, format_keys(left)),
        )


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Turn any error of a broken, foreign or too large target into a ValueError of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"target {name!r} does not fit: the device must hold it; use a smaller dtype"
        ) from error
    except ImportError as error:
        raise ValueError(
            f"target {name!r} cannot be loaded ({one_line(error, 200)}): what it needs must be installed; "
            "install that, or choose another target"
        ) from error
    except Exception as error:  # readers' errors have no common base; tokenizers raises plain Exception
        text = one_line(error, 200)
        rule = (
            "it must be a whole model that transformers reads; get it again if it was cut short, or choose "
            "another"
        )
        raise ValueError(f"target {name!r} cannot be loaded ({text}): {rule}") from error
