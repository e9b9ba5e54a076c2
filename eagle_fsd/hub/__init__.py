"""Loads targets and draft heads by name: Hub ids, folders and .gguf files."""

from eagle_fsd.hub.eagle3_checkpoint import save_eagle3_head
from eagle_fsd.hub.head_checkpoint import save_head
from eagle_fsd.hub.resolve import (
    DEFAULT_TARGET,
    HeadSource,
    TargetSource,
    load_any_head,
    load_head,
    resolve_head,
    resolve_target,
)
from eagle_fsd.hub.target_loader import load_target, load_text

__all__ = [
    "DEFAULT_TARGET",
    "HeadSource",
    "TargetSource",
    "load_any_head",
    "load_head",
    "load_target",
    "load_text",
    "resolve_head",
    "resolve_target",
    "save_eagle3_head",
    "save_head",
]
