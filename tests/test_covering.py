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
    names = {
        item.name: item for item in request.session.items if item.originalname == request.node.originalname
    }
    if len(names) == 6:  # slow tests run as well
        assert sum(item.get_closest_marker("slow") is None for item in names.values()) == 3
    else:
        assert request.node.get_closest_marker("slow") is None
