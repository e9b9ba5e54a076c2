"""Reports an answer on the command line: as one JSON object, or as one line of summary."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

# torch takes seconds to import. It is imported only to run a model, so that --help answers at once.
if TYPE_CHECKING:
    from eagle_fsd.acceptance.accept import AcceptanceRule
    from eagle_fsd.core.config import TreeConfig
    from eagle_fsd.core.stats import GenerationStats
    from eagle_fsd.decoding.options import GenerationOptions
    from eagle_fsd.decoding.request import TokenLogprob
    from eagle_fsd.engine import EagleFSD

STATS_KEYS = (
    "steps", "tau", "exact_accepts", "fuzzy_accepts", "accept_histogram", "sources", "reused_tokens",
    "seconds", "prefill_seconds", "draft_seconds", "verify_seconds", "tokens_per_second",
)  # fmt: skip
JSON_KEYS = (
    "text", "prompt_tokens", "token_ids", "new_tokens", *STATS_KEYS, "finish_reason",
    "rule", "threshold", "divergence", "mode", "base_model", "ea_model", "dtype", "runtime",
    "weight_format", "device", "tree", "seed",
)  # fmt: skip


class Settled(Protocol):
    """A stream of tokens or of texts, as far as its rule and tree go."""

    rule: AcceptanceRule
    tree: TreeConfig


@dataclass
class Answer:
    """The answer to one prompt: new token ids, text, statistics, and what the target alone gave."""

    prompt_tokens: int
    stats: GenerationStats
    tree: str
    rule: AcceptanceRule
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    interrupted: bool = False
    seed: str | None = None  # as --seed takes it; None if nothing was sampled
    ignored_defaults: str = ""  # options of the model's generation_config that were not applied
    logprobs: list[TokenLogprob] | None = None  # if they were asked for
    memory: list[dict[str, int]] | None = None  # of each rank, if the target is split
    baseline: GenerationStats | None = None
    baseline_ids: list[int] | None = None
    budget: float | None = None  # of quality, if the rule was found by one
    number: int | None = None  # counted from 1, with --batch-size

    @classmethod
    def of(
        cls, prompt_tokens: int, stats: GenerationStats, made: Settled, options: GenerationOptions
    ) -> Answer:
        """Return an answer that has no token yet. made: what was settled for it by the options."""
        budget = getattr(options.rule, "quality_budget", None)
        return cls(prompt_tokens, stats, str(made.tree), made.rule, budget=budget)

    @property
    def finish_reason(self) -> str | None:
        return self.stats.finish_reason or ("interrupted" if self.interrupted else None)

    @property
    def speedup(self) -> float | None:
        if self.baseline is None or not self.baseline.tokens_per_second:
            return None
        return self.stats.tokens_per_second / self.baseline.tokens_per_second


def to_json(model: EagleFSD, answer: Answer, baseline: bool) -> str:
    """Return one line of JSON with JSON_KEYS.

    It also has draft_vocab_size if the head has one, logprobs with --logprobs, ranks with --tp-plan, number
    with --batch-size, and behind mode a plan's price and cost and other fields of the rule that differ from
    their defaults. With --baseline the keys of the target alone follow (null if interrupted).
    """
    from eagle_fsd.acceptance.rule_names import rule_fields

    stats = answer.stats.to_dict()
    record = {
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "token_ids": answer.token_ids,
        "new_tokens": len(answer.token_ids),
        **{key: stats[key] for key in STATS_KEYS},
        "finish_reason": answer.finish_reason,
        **rule_fields(answer.rule),
        "base_model": model.base_model,
        "ea_model": model.ea_model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "runtime": model.runtime,
        "weight_format": model.weight_format,
        "device": str(model.device),
        "tree": answer.tree,
        "seed": answer.seed,
    }
    if answer.number is not None:
        record["number"] = answer.number
    if answer.logprobs is not None:
        record["logprobs"] = [one._asdict() for one in answer.logprobs]
    if answer.memory is not None:
        record["ranks"] = answer.memory
    if model.draft_vocab_size is not None:
        record["draft_vocab_size"] = model.draft_vocab_size
    if baseline:
        alone = answer.baseline
        record |= {
            "baseline_new_tokens": alone and alone.new_tokens,
            "baseline_seconds": alone and alone.seconds,
            "baseline_tokens_per_second": alone and alone.tokens_per_second,
            "baseline_same_tokens": alone and answer.baseline_ids == answer.token_ids,
            "speedup": answer.speedup,
        }
    return json.dumps(record, allow_nan=False)


def summary(answer: Answer) -> str:
    """Return one line of summary, and the comparison with the target alone if there is one.

    For example: `128 tokens in 3.2 s (40.0 tok/s), tau 2.31, 17 fuzzy accepts, js <= 0.3 hybrid, tree 8/4/4`.
    """
    stats = answer.stats
    name, has_threshold = name_rule(answer)
    accepts = f"{'fuzzy' if has_threshold else 'relaxed'} accept{'s' * (stats.fuzzy_accepts != 1)}"
    line = format_speed(stats)
    line += f", tau {stats.tau:.2f}, {stats.fuzzy_accepts} {accepts}, {name}, tree {answer.tree}"
    if answer.seed is not None:
        line += f", seed {answer.seed}"
    if answer.interrupted:
        line += ", interrupted"
    if answer.baseline is not None and answer.baseline_ids is not None:
        same = "the same text" if answer.baseline_ids == answer.token_ids else "another text"
        without = f" without {answer.ignored_defaults}" if answer.ignored_defaults else ""
        line += f"; target alone{without}: {format_speed(answer.baseline)}, {same}"
        line += f"; speed ratio {answer.speedup:.2f}" if answer.speedup is not None else ""
    return line


def name_rule(answer: Answer) -> tuple[str, bool]:
    """Return a rule as the summary names it, and whether it has a threshold.

    A plan is told by its price, and by a threshold only if that is below inf. A budget is named beside the
    rule that was found for it, lossless text included.
    """
    from eagle_fsd.acceptance.rule_names import rule_fields

    fields = rule_fields(answer.rule)
    threshold, divergence = fields["threshold"], fields["divergence"]
    budget = "" if answer.budget is None else f" (budget {answer.budget:g})"
    if divergence is None:
        return fields["rule"] + budget, threshold is not None
    limit = f"{divergence} <= {threshold} {fields['mode'] or fields['rule']}"
    if "price" in fields:
        paid = divergence if fields["cost"] == "divergence" else fields["cost"]
        plan = f"plan, price {float(fields['price']):g} of {paid}"
        limit = plan if threshold == "inf" else f"{plan}, {limit}"
    return limit + budget, True


def format_speed(stats: GenerationStats) -> str:
    """Return how many tokens came in how many seconds."""
    tokens = stats.new_tokens
    return (
        f"{tokens} token{'s' * (tokens != 1)} in {stats.seconds:.1f} s ({stats.tokens_per_second:.1f} tok/s)"
    )
