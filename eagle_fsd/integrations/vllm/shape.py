"""What this integration needs of vLLM, checked at start: a version, settings, and attributes.

vLLM promises none of the attributes to others, so a version that was not tested is refused. Every error is
one line. Needs no vLLM: what is checked is passed in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from eagle_fsd.core.checks import format_value

SERIES = ("0.32.", "0.33.")
METHODS = ("eagle", "eagle3", "draft_model")  # that hand over the draft's distribution
LOGPROBS = ("raw_logprobs", "raw_logits")
REMEDY = "install vLLM 0.32 or 0.33, with which this was tested"

RUNNER = ("requests", "input_batch", "sampler", "drafter", "rejection_sampler", "speculative_config")
DRAFTER = ("_sample_draft_tokens", "take_last_draft_probs", "_last_draft_probs")
SAMPLER = ("sampler", "apply_logits_processors", "_get_logprobs_tensors", "is_processed_logprobs_mode")
# Functions that are called or replaced, and the parameters that they must have, in order.
SIGNATURES = {
    "rejection_sampler.forward": ("metadata", "draft_probs", "logits", "sampling_metadata"),
    "rejection_sampler.apply_logits_processors": ("logits", "sampling_metadata", "metadata"),
    "rejection_sampler._get_logprobs_tensors": (
        *("max_num_logprobs", "metadata", "logits", "target_logits", "bonus_logits", "sampled_token_ids"),
    ),
    "drafter._sample_draft_tokens": ("hidden_states", "sampling_metadata"),
    "_get_spec_decode_draft_probs": ("spec_decode_metadata",),
}


def require_version(version: str) -> None:
    """Raise ValueError unless this vLLM is of a series that was tested."""
    if not version.startswith(SERIES):
        raise ValueError(
            f"vLLM is {format_value(version)}: FSD takes parts of vLLM's insides, which change; it must be "
            f"{' or '.join(f'{one}*' for one in SERIES)}; {REMEDY}"
        )


def require_settings(config: Any) -> None:
    """Raise ValueError unless FSD can run with this VllmConfig."""
    speculation = config.speculative_config
    if speculation is None:
        raise ValueError(
            "fsd is set without a draft: vLLM must draft; add --speculative-config "
            '\'{"method": "eagle", "model": HEAD, "num_speculative_tokens": 4}\''
        )
    if speculation.method not in METHODS:
        raise ValueError(
            f"speculative method is {format_value(speculation.method)}: FSD compares the target with the "
            f"draft's distribution, so that it must be one of {', '.join(METHODS)}; choose one"
        )
    for name, wanted, why in (
        ("rejection_sample_method", "standard", "FSD takes its place"),
        ("parallel_drafting", False, "a token's distribution would not be that of its place"),
        ("use_local_argmax_reduction", False, "it makes no distribution"),
        ("use_heterogeneous_vocab", False, "target and draft must have one vocabulary"),
    ):
        value = getattr(speculation, name)
        if value != wanted:
            raise ValueError(f"{name} is {format_value(value)}: {why}; it must be {wanted!r}; leave it out")
    if config.use_v2_model_runner:
        raise ValueError(
            "vLLM's model runner is V2: FSD works in V1; set VLLM_USE_V2_MODEL_RUNNER=0 in the environment"
        )
    if config.model_config.logprobs_mode not in LOGPROBS:
        raise ValueError(
            f"logprobs_mode is {format_value(config.model_config.logprobs_mode)}: it must be one of "
            f"{', '.join(LOGPROBS)} with FSD; choose one"
        )
    if config.parallel_config.pipeline_parallel_size != 1:
        raise ValueError(
            f"pipeline_parallel_size is {config.parallel_config.pipeline_parallel_size}: it must be 1 with "
            "FSD; leave it out"
        )


def require_runner(runner: Any) -> None:
    """Raise ValueError unless a model runner has what FSD replaces and calls."""
    require_attributes("model runner", runner, RUNNER)
    require_attributes("drafter", runner.drafter, DRAFTER)
    require_attributes("rejection sampler", runner.rejection_sampler, SAMPLER)
    for path, wanted in SIGNATURES.items():
        found: Any = runner
        for name in path.split("."):
            found = getattr(found, name, None)
        if parameters_of(found) != wanted:
            raise ValueError(
                f"vLLM's {path} takes {', '.join(parameters_of(found) or ()) or 'nothing'}: it must take "
                f"{', '.join(wanted)}; {REMEDY}"
            )


def require_attributes(kind: str, thing: Any, names: tuple[str, ...]) -> None:
    """Raise ValueError unless a thing of vLLM has these attributes."""
    lost = [name for name in names if not hasattr(thing, name)]
    if lost:
        raise ValueError(
            f"vLLM's {kind} {type(thing).__name__} has no {', '.join(lost)}: FSD needs it; {REMEDY}"
        )


def parameters_of(function: Callable[..., Any] | None) -> tuple[str, ...] | None:
    """Return the names of a function's parameters; None if it is no function."""
    return tuple(inspect.signature(function).parameters) if callable(function) else None
