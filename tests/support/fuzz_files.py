"""Malformed files against the functions that read them, in a process of its own; started by test_fuzz.py.

    PYTHONPATH=.:tests python -m support.fuzz_files CASES [FIRST_SEED] [KIND ...]

Prints a line of JSON for each kind: how many cases loaded, how many ended in one clear error line, and which
did neither. A case fails if it raises anything but a ValueError or an OSError of one readable line, if it
takes longer than SECONDS, or if it takes more than MEMORY beside what the process had. The name of every case
goes to stderr when it starts, so that a case that kills the process is named too.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from eagle_fsd import hub
from eagle_fsd.acceptance.calibration import (
    CalibratedThreshold,
    Calibration,
    find_calibration,
    read_calibrations,
    write_calibrations,
)
from eagle_fsd.autotune import tree_chooser
from eagle_fsd.autotune.step_costs import WIDTHS
from eagle_fsd.autotune.tree_search import Choice, Forwards, Observation
from eagle_fsd.core.config import AutoThreshold, SamplingConfig, TreeConfig
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.files.records import TREES_FILE, recall, remember
from eagle_fsd.hub.download import shard_names
from eagle_fsd.hub.head_checkpoint import read_head, save_head
from eagle_fsd.hub.resolve import TargetSource
from eagle_fsd.hub.target_loader import load_text
from support.fuzzing import odd_value, spoil_safetensors, spoil_text, spoil_value
from support.tiny_models import HIDDEN, VOCAB, randomize, tiny_model

SECONDS = 20  # of one case, on a busy machine
MEMORY = 400 * 2**20  # bytes that a case may add
LONGEST = 1500  # characters of a clear line
NO_MEMORY = ("MemoryError", "not enough memory", "allocate memory", "alloc_cpu")

Kind = Callable[[random.Random, Path], Callable[[], object]]


class Hung(BaseException):
    """A case that took too long; no reader catches it."""


def spoil_json(draw: random.Random, path: Path, extra: dict[str, object]) -> None:
    """Spoil a JSON file as a value, as text, or both."""
    value = json.loads(path.read_text(encoding="utf-8"))
    if draw.random() < 0.75:
        value = spoil_value(draw, value, extra)
    text = json.dumps(value)
    path.write_bytes(text.encode() if draw.random() < 0.75 else spoil_text(draw, text))


ROPE = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}}
HEAD_EXTRA = {**ROPE, "draft_vocab_size": 9, "trained_positions": 7, "num_hidden_layers": 2, "bias": True}
TARGET_EXTRA = {
    **ROPE,
    "sliding_window": 8,
    "layer_types": ["full_attention"],
    "eos_token_id": [1, 2],
    "quantization_config": {"quant_method": "gptq"},
    "is_encoder_decoder": True,
    "final_logit_softcapping": 30.0,
    "text_config": {"hidden_size": 8},
}
TARGETS = ("llama", "qwen2", "gemma3")  # of one kind of layer, and of two, whose configs list them
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "query_pre_attn_scalar"),
)
ABSURD = (0, -1, 2**20, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, 10**30, 1e30, -(2**63), 1.5, True, None)


def read_spoilt_head(folder: Path) -> object:
    return read_head(folder / "model.safetensors", "head", HIDDEN, VOCAB)


def head_config(draw: random.Random, folder: Path) -> Callable[[], object]:
    spoil_json(draw, folder / "config.json", HEAD_EXTRA)
    return lambda: read_spoilt_head(folder)


def head_weights(draw: random.Random, folder: Path) -> Callable[[], object]:
    path = folder / "model.safetensors"
    path.write_bytes(spoil_safetensors(draw, path.read_bytes()))
    return lambda: read_spoilt_head(folder)


def head_bin(draw: random.Random, folder: Path) -> Callable[[], object]:
    """Write a .bin file with tensors of any kind under the head's names."""
    head = read_head(folder / "model.safetensors", "head", HIDDEN, VOCAB)
    tensors: dict[object, object] = dict(head.state_dict())
    sizes: dict[str, object] = {}
    for _ in range(draw.choice((1, 2))):
        name = draw.choice(list(tensors))
        huge = torch.zeros(1).expand(draw.choice((2**20, 2**31 - 1)), 32)
        tensors[name] = draw.choice(
            (
                *(
                    huge,
                    huge.T,
                    torch.zeros(3, 4).to_sparse(),
                    torch.zeros(4, device="meta"),
                    torch.ones(2, 2),
                ),
                *(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), odd_value(draw), torch.nan),
                torch.full((HIDDEN, 2 * HIDDEN), torch.inf),
            )
        )
        sizes["intermediate_size"] = draw.choice((48, 2**20, 2**31 - 1))
    if draw.random() < 0.5:  # as if the head were as large as its tensors claim
        for name in ("gate", "up", "down"):
            wide = torch.zeros(1).expand(2**31 - 1, HIDDEN)
            tensors[f"layers.0.mlp.{name}_proj.weight"] = wide.T if name == "down" else wide
        sizes["intermediate_size"] = 2**31 - 1
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes))
    path = folder / "pytorch_model.bin"
    torch.save(tensors, path)
    if draw.random() < 0.3:
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(bytes(data[: draw.choice((len(data), len(data) // 2))]))
    return lambda: read_head(path, "head", HIDDEN, VOCAB)


def draft_vocabulary(draw: random.Random, folder: Path) -> Callable[[], object]:
    path = folder / "draft_vocabulary.safetensors"
    path.write_bytes(spoil_safetensors(draw, path.read_bytes()))
    if draw.random() < 0.3:
        spoil_json(draw, folder / "config.json", {"draft_vocab_size": 9})
    return lambda: read_spoilt_head(folder)


def calibration(draw: random.Random, folder: Path) -> Callable[[], object]:
    path = folder / "calibration.json"
    spoil_json(draw, path, {"version": 3, "calibrations": []})

    def use() -> None:
        models = {"target": {"name": "x", "weights": "1"}, "head": "2"}
        found = find_calibration(read_calibrations(path), models, SamplingConfig(0.6, 50, 0.9), "cpu")
        found.find(AutoThreshold(0.02))

    return use


def spoil_target(draw: random.Random, folder: Path) -> TargetSource:
    """Spoil the config.json of one of the targets; one in three claims an absurd size."""
    target = folder / draw.choice(TARGETS)
    config = target / "config.json"
    if draw.random() < 0.33:
        sizes = json.loads(config.read_text(encoding="utf-8"))
        known = [name for name in SIZES if name in sizes]
        for name in draw.sample(known, draw.choice((1, 1, 2))):
            sizes[name] = draw.choice(ABSURD)
        if draw.random() < 0.5:
            sizes.pop("layer_types", None)  # as older configs are, whose layers transformers lists itself
        config.write_text(json.dumps(sizes), encoding="utf-8")
    else:
        spoil_json(draw, config, TARGET_EXTRA)
    if draw.random() < 0.2:
        spoil_json(draw, target / "generation_config.json", {"eos_token_id": "x"})
    return TargetSource("target", target)


def target_config(draw: random.Random, folder: Path) -> Callable[[], object]:
    """Read the parts of a target that come before its weights."""
    source = spoil_target(draw, folder)
    return lambda: load_text(source)


def target_weights(draw: random.Random, folder: Path) -> Callable[[], object]:
    """Load a whole target with a spoilt config; the sizes that it claims must not be allocated."""
    source = spoil_target(draw, folder)
    return lambda: hub.load_target(source, "float32", "cpu")


def shard_index(draw: random.Random, folder: Path) -> Callable[[], object]:
    path = folder / "model.safetensors.index.json"
    path.write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}})
    )
    spoil_json(draw, path, {"weight_map": {"a": "../x"}})
    return lambda: shard_names(folder)


def trees(draw: random.Random, folder: Path) -> Callable[[], object]:
    """Spoil the file of remembered measurements; reading it is never an error."""
    spoil_json(draw, folder / TREES_FILE, {"x": {"version": 2, "measured": {}}})
    os.environ["EAGLE_FSD_CACHE"] = str(folder)
    return lambda: [recall(key, unpack) for key, (_, _, unpack) in measurements().items()]


def measurements() -> dict[str, tuple[object, Callable[[Any], object], Callable[[Any], object]]]:
    """Return one remembered value of every kind, with its functions to and from JSON."""
    forwards = Forwards(dict.fromkeys((1, *WIDTHS), 0.01), {2: (0.01, 0.002)})
    steps = [Observation([-1, 0, 0, 1], [0, 1, 1, 2], [0.0, -0.5, -1.0, -1.5], [1, 3])]
    choice = Choice(TreeConfig(16, 5, 8), 2.5, 40.0, 20.0)
    return {
        "forwards": (forwards, tree_chooser.forwards_to_json, tree_chooser.forwards_from_json),
        "steps": (steps, tree_chooser.observations_to_json, tree_chooser.observations_from_json),
        "choice": (choice, asdict, tree_chooser.choice_from_json),
    }


KINDS: dict[str, Kind] = {
    one.__name__: one
    for one in (
        *(head_config, head_weights, head_bin, draft_vocabulary, calibration, target_config, target_weights),
        *(shard_index, trees),
    )
}


def good_files(folder: Path) -> None:
    """Write correct files of every kind."""
    torch.manual_seed(0)
    head = DraftHead(HeadConfig(HIDDEN, 48, 4, 2, 8, VOCAB))
    randomize(head, 0)
    save_head(head.restrict(torch.arange(9)), folder)
    tree, sampling = TreeConfig(16, 5, 8), SamplingConfig(0.6, 50, 0.9)
    thresholds = tuple(
        CalibratedThreshold("js", "hybrid", "draft", t, t / 20, t / 15, 2.5, 2.2) for t in (0.1, 0.2)
    )
    models = {"target": {"name": "y", "weights": "1"}, "head": "2"}
    one = Calibration(models, sampling, tree, 0.9, 16, thresholds, {"commit": "abc"})
    write_calibrations(folder / "calibration.json", [one])
    os.environ["EAGLE_FSD_CACHE"] = str(folder)
    for key, (found, pack, _) in measurements().items():
        remember(key, pack(found))
    for family in TARGETS:
        tiny_model(family).save_pretrained(folder / family)
        transformers.GenerationConfig(eos_token_id=1).save_pretrained(folder / family)


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise Hung after SECONDS. If no Python runs any more by then, the process ends a little later."""

    def stop(*_: object) -> None:
        raise Hung

    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def in_use() -> int:
    """Return the bytes of address space that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def fault_of(call: Callable[[], object]) -> tuple[bool, str]:
    """Return whether the call returned, and what is wrong with its end; an empty text if nothing is."""
    try:
        with time_limit():
            call()
        return True, ""
    except (ValueError, OSError) as error:
        text = str(error)
        if any(word in text for word in NO_MEMORY):
            return False, f"took too much memory, and says {text[:200]!r}"
        ours = type(error) is ValueError or isinstance(error, OSError)  # none of json's, of codecs', ...
        if ours and len(text.splitlines()) == 1 and len(text) <= LONGEST:
            return False, ""
        return False, f"no clear line: {type(error).__name__} {text[:200]!r}"
    except Hung:
        return False, f"took more than {SECONDS} s"
    except BaseException as error:  # noqa: BLE001  any other exception is a bug
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return False, f"{type(error).__name__} {str(error)[:200]!r} at {place}"


def run(kind: str, cases: int, first: int, good: Path) -> dict[str, object]:
    """Run the cases of a kind, each on fresh files."""
    counts = {"loaded": 0, "refused": 0}
    failures = []
    for seed in range(first, first + cases):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "files"
            shutil.copytree(good, folder)
            sys.stderr.write(f"{kind} {seed}\n")
            call = KINDS[kind](random.Random(f"{kind} {seed}"), folder)
            usual = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (in_use() + MEMORY, usual[1]))
            try:
                loaded, fault = fault_of(call)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, usual)
            counts["loaded" if loaded else "refused"] += 1
            if fault:
                failures.append(f"{kind} {seed}: {fault}")
    return {"kind": kind, **counts, "failures": failures}


def main() -> None:
    cases, first, *kinds = [*sys.argv[1:], "0"][: max(2, len(sys.argv) - 1)]
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        good = Path(place)
        good_files(good)
        for kind in kinds or KINDS:
            sys.stdout.write(json.dumps(run(kind, int(cases), int(first), good)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
