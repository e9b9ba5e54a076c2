"""The baseline: the same prompts through the target's own Hugging Face `generate`, as an output of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eagle_fsd.core.checks import require_integer
from eagle_fsd.core.config import FORMS
from eagle_fsd.core.randomness.streams import SEED_LIMIT
from eagle_fsd.decoding.options import GenerationOptions
from eagle_fsd.decoding.outputs import GenerationOutput
from eagle_fsd.decoding.request import Prompts
from eagle_fsd.decoding.workspace import settle_seed
from eagle_fsd.target.hf_generate import generate_alone
from eagle_fsd.target.media.reading import tower_inputs
from eagle_fsd.target.model import TargetModel

# Options that Hugging Face's `generate` cannot serve: they need this package's own decoding loop.
STEPPED = ("eos_token_id", "observer", "logprobs", *FORMS)


def run_alone(
    target: TargetModel,
    input_ids: Tensor,
    options: GenerationOptions,
    prompts: Prompts,
    pad_token_id: int,
    inputs: Mapping[str, Any] | None = None,
) -> GenerationOutput:
    """Run the target alone on prompts; see EagleFSD.target_alone. Raises ValueError for what it cannot do."""
    asked = {name: getattr(options, name) for name in STEPPED} | {"stop_strings": options.stops or None}
    for name, value in asked.items():
        if value is not None:
            raise ValueError(
                f"{name} is not supported for the target alone: Hugging Face's generate decodes there, with "
                "the model's own end tokens and without steps; leave it out"
            )
    if max(map(max, prompts.rows)) >= target.vocab_size:
        raise ValueError(
            "the prompts have images or sound, which the target alone does not read from token ids: give "
            "inputs, what the processor made of one, and its input_ids, or leave them out"
        )
    given = None if inputs is None else tower_inputs(target, inputs, prompts.rows)
    sampling = options.sampling
    seed: Any = settle_seed(options.seed, sampling.greedy, target.ranks)
    require_integer("seed", seed, 0, "any will do", SEED_LIMIT - 1)
    settings = (sampling, seed, pad_token_id, options.processing, given)
    new_tokens, stats = generate_alone(target, prompts.rows, min(prompts.limits), *settings)
    used = None if sampling.greedy else seed
    return GenerationOutput.of(input_ids, new_tokens, stats, pad_token_id, seed=used)
