"""vLLM's worker with FSD in it: `--worker-cls eagle_fsd.integrations.vllm.worker.FSDWorker`.

The plugin names it where FSD is asked for, so that this flag is only needed without the plugin.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform

from eagle_fsd.integrations.vllm.sampler import FSDRejectionSampler, keep_q
from eagle_fsd.integrations.vllm.settings import server_defaults
from eagle_fsd.integrations.vllm.shape import (
    require_attributes,
    require_runner,
    require_settings,
    require_version,
)

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(f"vllm.{__name__}")


class FSDWorker(Worker):
    """The platform's worker, whose model runner accepts drafted tokens by this package's rules."""

    def init_device(self) -> None:
        require_version(vllm.__version__)
        require_settings(self.vllm_config)
        super().init_device()
        install(self.model_runner, self.vllm_config)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        require_attributes("draft model", self.model_runner.drafter.model, ("compute_logits",))

    def fsd_counts(self) -> dict[str, int]:
        """Return how many tokens were drafted and accepted so far; for `collective_rpc`."""
        return self.model_runner.rejection_sampler.counts.read()


def install(runner: Any, config: Any) -> None:
    """Put FSD in the place of a model runner's rejection sampler. Raises ValueError if it does not fit."""
    require_runner(runner)
    defaults = server_defaults(config.additional_config)
    runner.rejection_sampler = FSDRejectionSampler(runner, defaults, config.scheduler_config.async_scheduling)
    keep_q(runner.drafter)
    logger.info("FSD accepts drafted tokens. Defaults of requests: %s", defaults or "lossless")
