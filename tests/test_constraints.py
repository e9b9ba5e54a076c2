"""The tested versions: they are for every Python that setup.py admits, and inside setup.py's bounds."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FIRST, LATEST = "3.10", "3.13"  # of Python


def pins(name: str) -> dict[str, Requirement]:
    """Return the requirements of a file of constraints by package."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in found}


def bounds() -> dict[str, SpecifierSet]:
    """Return what setup.py asks of each package."""
    found: dict[str, SpecifierSet] = {}
    for line in requires("eagle-fsd") or ():
        one = Requirement(line)
        name = canonicalize_name(one.name)
        found[name] = found.get(name, SpecifierSet()) & one.specifier
    found.pop("eagle-fsd", None)  # extras that name other extras
    return found


def lower_bounds(asked: SpecifierSet) -> list[str]:
    return [one.version for one in asked if one.operator == ">="]


def version_of(pin: Requirement) -> Version:
    (one,) = pin.specifier
    return Version(one.version)


def pinned_on(pin: Requirement, python: str) -> bool:
    return pin.marker is None or pin.marker.evaluate({"python_version": python})


@pytest.mark.parametrize("name", list(pins("constraints.txt")))
def test_a_tested_version_is_pinned_only_where_it_can_be_installed(name: str) -> None:
    pin = pins("constraints.txt")[name]
    assert pinned_on(pin, LATEST)
    try:
        needed = metadata(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if needed["Version"] not in pin.specifier:
        pytest.skip(f"{name} is installed in another version than the tested one")
    if FIRST not in SpecifierSet(needed["Requires-Python"] or ""):
        assert not pinned_on(pin, FIRST), f"{pin} is not for Python {FIRST}: give it a marker"


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_pinned_versions_are_inside_the_bounds(file: str) -> None:
    asked = bounds()
    for name, pin in pins(file).items():
        assert version_of(pin) in asked.get(name, SpecifierSet()), f"{pin}: setup.py asks for {asked[name]}"


def test_the_oldest_versions_are_the_bounds() -> None:
    asked, oldest = bounds(), pins("constraints-oldest.txt")
    for name in (oldest.keys() & asked.keys()) - {"torch"}:  # whose file says why it is another one
        mine = version_of(oldest[name])
        lowest = {(one.major, one.minor) for one in map(Version, lower_bounds(asked[name]))}
        assert (mine.major, mine.minor) in lowest, f"{oldest[name]}: setup.py asks for {asked[name]}"
