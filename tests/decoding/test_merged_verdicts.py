"""Verdicts on groups of rows become one in the order of the batch."""

from __future__ import annotations

from dataclasses import fields

import torch

from eagle_fsd.acceptance.accept import Verdict
from eagle_fsd.decoding.steps.rules import merge_verdicts

NODES, DEPTH = 4, 2


def of_rows(rows: list[int]) -> Verdict:
    """Return a verdict whose numbers tell the row that each belongs to."""
    alone = torch.tensor(rows)
    wide, nodes = alone[:, None].expand(-1, DEPTH + 1), alone[:, None].expand(-1, NODES).float()
    odd = wide % 2 == 1
    return Verdict(wide + 10, alone + 20, wide + 30, alone + 40, odd, ~odd, alone + 50, nodes, nodes)


def test_rows_of_several_groups_come_in_the_batchs_order() -> None:
    """Without what a rule said of every node: it belongs to the groups, whose trees it is about."""
    merged, wanted = (
        merge_verdicts([([2, 0], of_rows([2, 0])), ([3, 1], of_rows([3, 1]))]),
        of_rows([0, 1, 2, 3]),
    )
    for field in fields(Verdict):
        if field.name in ("chances", "weak"):
            assert getattr(merged, field.name) is None
        else:
            assert getattr(merged, field.name).equal(getattr(wanted, field.name)), field.name


def test_a_verdict_alone_is_kept_whole() -> None:
    alone = of_rows([0, 1])
    assert merge_verdicts([([0, 1], alone)]) is alone
