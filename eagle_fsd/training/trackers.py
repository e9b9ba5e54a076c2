"""Who else may follow a run's figures: trackers that accelerate speaks to, if they are installed."""

from __future__ import annotations

from importlib.util import find_spec

TRACKERS = ("tensorboard", "wandb", "trackio")


def require_tracker(name: str) -> str | None:
    """The tracker's name for accelerate, None for "none"; ValueError for one that is not installed."""
    if name == "none":
        return None
    if find_spec(name) is None:
        raise ValueError(f"--report-to is {name}: the package is missing; pip install {name}")
    return name
