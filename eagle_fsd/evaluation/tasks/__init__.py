"""The benchmarks that say what relaxed acceptance costs: prompts as data, scores from the text alone."""

from __future__ import annotations

from eagle_fsd.core.checks import require_choice
from eagle_fsd.evaluation.tasks.base import PROMPTS, Message, Sample, Task, cut
from eagle_fsd.evaluation.tasks.choice import COMMONSENSE_QA, MMLU
from eagle_fsd.evaluation.tasks.gsm8k import GSM8K
from eagle_fsd.evaluation.tasks.humaneval import HUMANEVAL
from eagle_fsd.evaluation.tasks.ifeval import IFEVAL
from eagle_fsd.evaluation.tasks.mt_bench import MT_BENCH

__all__ = ["PROMPTS", "TASKS", "Message", "Sample", "Task", "cut", "task_named"]

TASKS: dict[str, Task] = {
    task.name: task for task in (GSM8K, COMMONSENSE_QA, MMLU, HUMANEVAL, IFEVAL, MT_BENCH)
}


def task_named(name: str) -> Task:
    """Return the task of this name. Raises ValueError listing them."""
    require_choice("task", name, list(TASKS))
    return TASKS[name]
