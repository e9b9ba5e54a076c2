"""vLLM's rejection sampler, with this package's acceptance in its place; and the draft's q, kept for it.

Everything else is vLLM's own: processors of logits, the draw after a chain, log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from eagle_fsd.core.checks import one_line
from eagle_fsd.core.long_rows import first_largest
from eagle_fsd.integrations.vllm.chain import Chains, Counts, Row, accept_chains
from eagle_fsd.integrations.vllm.settings import EXACT, Terms, make_terms, request_rule

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own logger, so that its lines are shown


class FSDRejectionSampler(RejectionSampler):
    """Accepts drafted tokens by every request's own rule. runner: the model runner that it serves."""

    def __init__(self, runner: Any, defaults: Mapping[str, Any], async_scheduling: bool) -> None:
        super().__init__(runner.sampler, runner.speculative_config, runner.device)
        self.runner, self.defaults, self.async_scheduling = runner, dict(defaults), async_scheduling
        self.most = runner.speculative_config.num_speculative_tokens + 1
        self.counts = Counts()

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Return the tokens of every request: [B, longest chain + 1] int32, -1 padded.

        draft_probs: [T, V], log q; see `keep_q`. logits: [T + B, V]. The names are vLLM's.
        """
        bonus = self.sampler(
            logits=logits[metadata.bonus_logits_indices],
            sampling_metadata=replace(sampling_metadata, max_num_logprobs=-1),
            predict_bonus_token=True,
            logprobs_mode_override="raw_logits",
        )
        raw = logits[metadata.target_logits_indices].to(torch.float32)  # [T, V]
        processed = self.apply_logits_processors(raw.clone(), sampling_metadata, metadata)
        rows = [
            self._row(number, drafted, sampling_metadata)
            for number, drafted in enumerate(metadata.num_draft_tokens)
        ]
        chains = Chains(metadata.draft_token_ids.long(), processed, draft_probs)
        emitted = accept_chains(rows, chains, bonus.sampled_token_ids, self.most, self.counts)
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            raw_bonus = bonus.logprobs_tensors.logprobs
            most = sampling_metadata.max_num_logprobs
            logprobs = self._get_logprobs_tensors(most, metadata, logits, raw, raw_bonus, emitted)
        return SamplerOutput(sampled_token_ids=emitted, logprobs_tensors=logprobs)

    def _row(self, number: int, drafted: int, sampling_metadata: SamplingMetadata) -> Row:
        """Return a request of the batch; when vLLM warms up, there is none behind a number."""
        names = self.runner.input_batch.req_ids
        request = self.runner.requests.get(names[number]) if number < len(names) else None
        if request is None or request.sampling_params is None:
            return Row(drafted)
        generator = sampling_metadata.generators.get(number)
        return Row(drafted, self._terms(request.sampling_params), len(request.output_token_ids), generator)

    def _terms(self, asked: Any) -> Terms:
        """Return the terms that a request's SamplingParams ask for."""
        try:
            rule = request_rule(self.defaults, asked.extra_args, self.async_scheduling)
        except ValueError as error:
            # The plugin has refused it before it came here, unless it is not loaded there. An error here
            # would end the engine, and all its requests.
            logger.warning("A request is answered without FSD: %s", one_line(error))
            rule = EXACT.rule
        ends = tuple(sorted(asked.all_stop_token_ids))
        return make_terms(rule, asked.temperature, asked.top_k, asked.top_p, ends)


def keep_q(drafter: Any) -> None:
    """Let a drafter draft q's likeliest token always, and hand over log q at temperature 1.

    vLLM's own hands over no q in a batch of greedy requests, and else q at the request's temperature. The
    divergence is of the distributions as they are. One token is tried at each place, so that the likeliest
    is accepted most often, also when sampling.
    """

    def sample(hidden_states: Tensor, sampling_metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
        logits = drafter.model.compute_logits(hidden_states).float()  # [B, V]
        return first_largest(logits)[1], logits.log_softmax(-1)

    drafter._sample_draft_tokens = sample
