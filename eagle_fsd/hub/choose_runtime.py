"""Which runtime computes a target, and in which weight format: checked early, measured where it is open."""

from __future__ import annotations

import functools
import logging
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eagle_fsd.core.checks import require_choice
from eagle_fsd.core.devices import ran_out_of_memory, resolve_dtype
from eagle_fsd.core.tree import root_only
from eagle_fsd.files.provenance import cores, processor
from eagle_fsd.files.records import BACKENDS_FILE, recall, record_key, remember
from eagle_fsd.runtime.openvino import library
from eagle_fsd.runtime.openvino.weight_formats import BFLOAT16, FEW_BITS, FLOAT32, FORMATS, OWN_BLOCKS, PACKED
from eagle_fsd.runtime.timing import BUSY, Call, CoreWait, disagreement, time_in_turn
from eagle_fsd.target.graph_decoder import CONVERTER
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession
from eagle_fsd.version import __version__

logger = logging.getLogger(__name__)

AUTO, TORCH, OPENVINO = "auto", "torch", "openvino"
RUNTIMES = (AUTO, TORCH, OPENVINO)
USUAL = "EAGLE_FSD_RUNTIME"  # the environment variable that names the runtime where auto is asked for
LEAST = 2**26  # weights of a model; torch computes smaller ones, unmeasured: there is little to gain
NODES, CONTEXT = (1, 8), 256  # what is timed


@dataclass(frozen=True)
class Plan:
    """How a target is computed. runtime: AUTO if it is still to be measured. dtype: of the torch model.

    keeps_blocks: whether OpenVINO reads a .gguf file's weights in the file's own blocks.
    """

    runtime: str
    weight_format: str
    dtype: torch.dtype
    keeps_blocks: bool = False


def plan_runtime(
    runtime: str,
    weight_format: str | None,
    dtype: torch.dtype | str | None,
    device: torch.device,
    movable: bool,
    gguf: bool,
) -> Plan:
    """Return how a target is computed, by what was asked for. Raises ValueError if that cannot be.

    movable: whether a device_map places it. gguf: whether it comes from a .gguf file.
    """
    require_choice("runtime", runtime, RUNTIMES)
    if weight_format is not None:
        require_choice("weight_format", weight_format, FORMATS)
    here = device.type == "cpu" and not movable
    if runtime == AUTO and (usual := os.environ.get(USUAL)):
        require_choice(USUAL, usual, RUNTIMES)
        # A preference: what a runtime cannot do is done by the other.
        can = usual == TORCH or (here and library.is_installed())
        runtime = usual if can and weight_format not in FEW_BITS else AUTO
    plain = weight_format if weight_format in (FLOAT32, BFLOAT16) else None
    if (
        dtype is not None
        and weight_format is not None
        and resolve_dtype(dtype, device) != resolve_dtype(plain or FLOAT32, device)
    ):
        raise ValueError(
            f"dtype is {dtype} with weight_format {weight_format!r}: they must agree; leave dtype out"
        )
    wanted = resolve_dtype(plain or dtype, device)
    name = weight_format or str(wanted).removeprefix("torch.")
    few_bits, keeps_blocks = name in FEW_BITS, gguf and name in OWN_BLOCKS
    if few_bits and runtime == TORCH:
        raise ValueError(
            f"weight_format is {name!r} with runtime torch: torch multiplies with plain weights here; use "
            "runtime openvino"
        )
    if name == PACKED and not gguf:
        raise ValueError(
            "weight_format is 'packed': the target must be a .gguf file, whose own blocks are kept; use int8"
        )
    if (few_bits or runtime == OPENVINO) and not here:
        where, remedy = f"for device {str(device)!r}", "use device cpu"
        if movable:
            where, remedy = "with a device_map", "leave device_map out"
        raise ValueError(
            f"runtime openvino is for a whole target on the CPU, not {where}; {remedy}, or use runtime torch "
            "without int8 or packed"
        )
    if few_bits or runtime == OPENVINO:
        library.require()
        if name not in FORMATS:
            raise ValueError(
                f"dtype is {name!r} with runtime openvino: it must be float32 or bfloat16; use one"
            )
        return Plan(OPENVINO, name, torch.float32, keeps_blocks)
    if runtime == TORCH or not here or name not in FORMATS or not library.is_installed():
        return Plan(TORCH, name, wanted)
    return Plan(AUTO, name, wanted, keeps_blocks)


def argument_for_openvino(runtime: str, weight_format: str | None) -> str | None:
    """Return the argument that asks for OpenVINO, and its value, for an error; None if none does."""
    if runtime == OPENVINO:
        return f"runtime is {runtime!r}"
    return f"weight_format is {weight_format!r}" if weight_format in FEW_BITS else None


def settle(
    plan: Plan,
    shapes: Sequence[Sequence[int]],
    torch_target: Callable[[], TargetModel],
    graph_target: Callable[[], TargetModel],
) -> TargetModel:
    """Return the target on the faster runtime, measured once for models of these shapes, then remembered.

    shapes: of all its weights. It is not remembered if the repeats disagree, as they do on a busy machine.
    """
    if sum(map(math.prod, shapes)) < LEAST:
        return torch_target()
    releases = [__version__, torch.__version__, library.version(), CONVERTER]
    here = [processor(), cores(), torch.get_num_threads(), *releases]
    key = record_key("runtime", here, plan.weight_format, plan.keeps_blocks, shapes)
    known = recall(key, str, BACKENDS_FILE)
    if known == TORCH:
        return torch_target()
    try:
        graphs = graph_target()
    except ValueError as error:  # this model cannot be converted
        logger.info("OpenVINO is not used: %s", error)
        if not may_pass(error):
            remember(key, TORCH, BACKENDS_FILE)
        return torch_target()
    if known == OPENVINO:
        return graphs
    plain = torch_target()
    seconds, slowed = time_forwards({TORCH: plain, OPENVINO: graphs})
    found = min(seconds, key=seconds.__getitem__)
    logger.info(
        "runtime %s: torch takes %.1f ms for a small tree, OpenVINO %.1f",
        *(found, 1e3 * seconds[TORCH], 1e3 * seconds[OPENVINO]),
    )
    if slowed <= BUSY:
        remember(key, found, BACKENDS_FILE)
    return plain if found == TORCH else graphs


def may_pass(error: BaseException | None) -> bool:
    """Return whether the reason of an error may be gone at the next start: there was no room, say."""
    while error is not None:
        if isinstance(error, OSError) or ran_out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@torch.inference_mode()
def time_forwards(targets: dict[str, TargetModel]) -> tuple[dict[str, float], float]:
    """Return the seconds of each target's forwards over NODES, and how much other work slowed them down.

    That is the repeats' median disagreement, or how long threads waited for a core.
    """
    calls = {}
    for name, target in targets.items():
        session = TargetSession(target, 1, CONTEXT + max(NODES))
        length = min(CONTEXT, target.max_positions - max(NODES))
        session.prefill(torch.zeros(1, length, dtype=torch.int64, device="cpu"), [length])
        root = torch.zeros(1, dtype=torch.int64, device="cpu")
        for nodes in NODES:
            tree = root_only(root, target.vocab_size, nodes).filled_up()
            # In a session all trees have one size, so the change of sizes between two calls is not timed.
            verify = functools.partial(session.verify, tree)
            calls[name, nodes] = Call(verify, verify)
    waiting = CoreWait()
    repeats = time_in_turn(calls, torch.device("cpu"), waiting=waiting)
    seconds = {
        name: sum(statistics.median(repeats[name, nodes]) for nodes in NODES) / len(NODES) for name in targets
    }
    return seconds, max(statistics.median(map(disagreement, repeats.values())), waiting.share)
