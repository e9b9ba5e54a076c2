"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`).

It does nothing until a server is started with `fsd` in its additional_config. Then it names the worker with
FSD, and every request's `fsd_` arguments are checked where the request comes in, so that a wrong value is an
error of that request alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from eagle_fsd.core.checks import format_value
from eagle_fsd.integrations.vllm.settings import (
    CONFIG_KEY,
    PREFIX,
    fsd_arguments,
    request_rule,
    server_defaults,
)
from eagle_fsd.integrations.vllm.shape import require_settings, require_version

WORKER = "eagle_fsd.integrations.vllm.worker.FSDWorker"


@functools.cache
def register() -> None:
    """Add FSD to vLLM in this process. Calling it again does no more."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    EngineArgs.create_engine_config = with_worker(EngineArgs.create_engine_config)
    InputProcessor.__init__ = with_check(InputProcessor.__init__)


def with_worker(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap EngineArgs.create_engine_config: where FSD is asked for, the worker is the one that has it."""

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = isinstance(self.additional_config, Mapping) and CONFIG_KEY in self.additional_config
        if asked:
            if self.worker_cls not in ("auto", WORKER):
                raise ValueError(
                    f"worker_cls is {format_value(self.worker_cls)} with fsd in additional_config: FSD has a "
                    "worker of its own; leave worker_cls out"
                )
            self.worker_cls = WORKER
        config = create(self, *args, **kwargs)
        if config.parallel_config.worker_cls == WORKER:
            import vllm

            require_version(vllm.__version__)
            require_settings(config)
            defaults = server_defaults(config.additional_config)
            request_rule(defaults, None, config.scheduler_config.async_scheduling)
        return config

    return create_engine_config


def with_check(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap InputProcessor.__init__: its check of a request's logits processors also checks `fsd_`."""

    @functools.wraps(init)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        before = self.validate_logits_processors_params

        def check(params: Any) -> None:
            before(params)
            check_request(vllm_config, params.extra_args)

        self.validate_logits_processors_params = check

    return __init__


def check_request(config: Any, extra_args: Mapping[str, Any] | None) -> None:
    """Raise vLLM's error of a request, which its server answers with status 400, for wrong `fsd_` values."""
    from vllm.exceptions import VLLMValidationError

    try:
        if config.parallel_config.worker_cls == WORKER:
            asynchronous = config.scheduler_config.async_scheduling
            request_rule(server_defaults(config.additional_config), extra_args, asynchronous)
        elif given := fsd_arguments(extra_args):
            name, value = next(iter(given.items()))
            raise ValueError(
                f"{PREFIX}{name} is {format_value(value)}: this engine runs without FSD; start it with "
                "--additional-config '{\"fsd\": {}}', or leave it out"
            )
    except ValueError as error:
        raise VLLMValidationError(str(error)) from error
