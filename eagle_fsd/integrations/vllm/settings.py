"""What a request or a server asks of FSD, from JSON values to a rule. Needs no vLLM.

A server's defaults are in `--additional-config '{"fsd": {"threshold": 0.3}}'`. A request changes them by
`vllm_xargs` over HTTP, or `SamplingParams.extra_args`, with the same names after `fsd_`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.checks import format_value
from eagle_fsd.core.config import SamplingConfig

Rule = Fuzzy | Lossless
PREFIX = "fsd_"
CONFIG_KEY = "fsd"  # in vLLM's additional_config
FIELDS = tuple(field.name for field in dataclasses.fields(Fuzzy) if field.name != "child")
INFINITE = {"inf": math.inf, "Infinity": math.inf}  # JSON has no number for it
GREEDY_BELOW = 1e-5  # vLLM takes a temperature below this as 0


@dataclass(frozen=True)
class Terms:
    """What a request is accepted by. ends: the tokens that end its text."""

    rule: Rule
    sampling: SamplingConfig
    ends: tuple[int, ...] = ()


EXACT = Terms(Lossless(), SamplingConfig())


def fsd_arguments(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a request's arguments that begin with `fsd_`, without that; others are none of ours."""
    given = extra_args or {}
    return {key.removeprefix(PREFIX): given[key] for key in given if key.startswith(PREFIX)}


def server_defaults(additional_config: object) -> dict[str, Any]:
    """Return a server's defaults of a rule's fields. Raises ValueError for anything else under `fsd`."""
    found = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ValueError(
            f"fsd is {format_value(found)} in additional_config: it must be an object; "
            'write {"fsd": {"threshold": 0.3}}'
        )
    try:
        build_rule(found)
    except ValueError as error:
        raise ValueError(f"fsd in additional_config: {error}") from error
    return dict(found)


def request_rule(
    defaults: Mapping[str, Any], extra_args: Mapping[str, Any] | None, async_scheduling: bool = False
) -> Rule:
    """Return the rule of a request: its own fields over the server's. Raises ValueError with their names.

    async_scheduling: whether vLLM plans a step before it knows the tokens of the last one. The number of
    tokens that a text has is then not known in time, so that exact_prefix is refused.
    """
    try:
        rule = build_rule({**defaults, **fsd_arguments(extra_args)})
        if async_scheduling and rule.exact_prefix:
            raise ValueError(
                f"exact_prefix is {rule.exact_prefix}: with asynchronous scheduling a text's length is not "
                "known in time; start vLLM with --no-async-scheduling"
            )
    except ValueError as error:
        raise ValueError(f"{PREFIX}{error}") from error
    return rule


def build_rule(fields: Mapping[str, Any]) -> Rule:
    """Build the rule of these fields of Fuzzy. The threshold is 0, that is lossless, unless it is given."""
    if "child" in fields:
        raise ValueError(
            f"child is {format_value(fields['child'])}: vLLM drafts chains, in which no child is chosen; "
            "leave it out"
        )
    for name, value in fields.items():
        if name not in FIELDS:
            raise ValueError(
                f"{name} is {format_value(value)}: there is no such field; it must be one of "
                f"{', '.join(FIELDS)}"
            )
    values = {name: read_value(name, value) for name, value in fields.items()}
    rule = Fuzzy(**{"threshold": 0.0, **values})
    return rule if rule.threshold else Lossless()


def read_value(name: str, value: object) -> Any:
    """Return a JSON value as a field's: "inf" as a number, and 0 and 1 as bools where one is meant."""
    if name == "exact_eos":
        if isinstance(value, (bool, int)) and value in (0, 1):  # vLLM's server makes 1 of true
            return bool(value)
        raise ValueError(f"exact_eos is {format_value(value)}: it must be true or false; choose one")
    return INFINITE.get(value, value) if isinstance(value, str) else value


@functools.lru_cache(maxsize=4096)
def make_terms(rule: Rule, temperature: float, top_k: int, top_p: float, ends: tuple[int, ...]) -> Terms:
    """Return the terms of a request with vLLM's sampling parameters, in which a top_k of -1 is none."""
    if temperature < GREEDY_BELOW:
        return Terms(rule, SamplingConfig(), ends)
    return Terms(rule, SamplingConfig(temperature, max(top_k, 0), top_p), ends)
