"""The cases of a large grid that quick tests run cover what they say, and those that are left are slow."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from support.covering import covering


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_all_combinations_of_as_many_values_come(strength: int) -> None:
    cases = [(*case, "same") for case in product("abcd", "xyz", "01") if case != ("a", "x", "0")]
    chosen = [cases[place] for place in covering(cases, strength)]

    def seen(some: list[tuple[str, ...]]) -> set[object]:
        return {combined for case in some for combined in combinations(enumerate(case), strength)}

    assert seen(chosen) == seen(cases)
    assert len(chosen) < len(cases) if strength < 3 else len(chosen) == len(cases)
    assert strength > 1 or len(chosen) == 4


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("second", [1, 2])
def test_what_is_not_chosen_is_slow(first: int, second: int, request: pytest.FixtureRequest) -> None:
    mine = request.node.originalname
    grid = [item for item in request.session.items if getattr(item, "originalname", None) == mine]
    slow = sum(item.get_closest_marker("slow") is not None for item in grid)
    if len(grid) == 6:  # of a run of quick and slow tests
        assert slow == 3
    elif len(grid) == 3:  # of a run of either
        assert slow in (0, 3)
