"""MT-Bench's first turns: prompts for speed (arXiv 2306.05685). No judge, no score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_fsd.evaluation.tasks.base import Asked, Task, user


def ask(row: Mapping[str, Any], place: int) -> Asked:
    """Ask the first turn; the later ones, which need its answer, are kept in the reference."""
    turns = row["turns"] if "turns" in row else row["prompt"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"turns is {turns!r:.40}: it must be a list of texts")
    name = row.get("question_id", row.get("prompt_id", place))
    return str(name), [user(turns[0])], {"category": row.get("category"), "turns": turns}


MT_BENCH = Task(
    name="mt_bench",
    version=1,
    files=("prompts_mt_bench.jsonl", "mt_bench.jsonl"),
    fields="`turns` (or `prompt`), a list of texts",
    hub=("HuggingFaceH4/mt_bench_prompts", None, "train"),
    ask=ask,
    max_new_tokens=1024,
)
