"""Draw docs/architecture.svg, the package's wings and their imports: python docs/make_architecture.py [FILE]

Which folders there are, what is in them and who imports whom is read from the source. Only the columns are
chosen by hand. An arrow that follows from others is left out.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from functools import cache
from html import escape
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "eagle_fsd"
COLUMNS = {"acceptance": 0, "drafting": 2, "hub": 2, "evaluation": 2, "integrations": 2}
COLUMNS |= {"training": 3, "text": 3, "serving": 0, "serve": 0}
USUAL_COLUMN = 1
SINGLES = {"version", "storage", "__main__"}  # modules on their own that would only clutter the picture

BOX_WIDTH, LINE, GAP_X, GAP_Y, MARGIN = 214, 14, 24, 34, 24
CHARACTERS = 33  # of a line in a box
INK, FAINT, CARD, WING, ARROW = "#1f2328", "#57606a", "#ffffff", "#eef3fb", "#8c959f"

Graph = dict[str, set[str]]  # a wing and those that it imports


def wing_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def sources() -> dict[str, list[Path]]:
    """Return the files of every wing; the package's own `__init__.py` belongs to none."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "__init__.py" and wing_of(path) not in SINGLES:
            found.setdefault(wing_of(path), []).append(path)
    return found


def imported(path: Path) -> set[str]:
    """Return the wings that a file imports, anywhere in its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = (name.split(".")[1] for name in names if name.startswith("eagle_fsd."))
    return {wing for wing in inside if wing in sources() and wing != wing_of(path)}


def graph() -> Graph:
    return {wing: set().union(*map(imported, files)) for wing, files in sources().items()}


def below(wings: Graph, wing: str) -> set[str]:
    """Return all wings that a wing imports, itself or through others."""
    return wings[wing].union(*(below(wings, other) for other in wings[wing]))


def without_detours(wings: Graph) -> Graph:
    """Leave out every import of a wing that one of the other imports reaches too."""
    return {
        wing: {one for one in found if not any(one in below(wings, other) for other in found)}
        for wing, found in wings.items()
    }


def ranks(wings: Graph) -> dict[str, int]:
    """Return how high each wing stands: one above the highest that it imports."""

    @cache
    def rank(wing: str) -> int:
        return 1 + max(map(rank, wings[wing]), default=-1)

    return {wing: rank(wing) for wing in wings}


def contents(wing: str) -> list[str]:
    """Return the lines of a box: the modules and folders of a wing."""
    folder = PACKAGE / wing
    if not folder.is_dir():
        return ["a module of its own"]
    parts = {path.relative_to(folder).parts for path in sources()[wing] if path.name != "__init__.py"}
    modules = sorted(parts[0].removesuffix(".py") for parts in parts if len(parts) == 1)
    folders = sorted({f"{parts[0]}/" for parts in parts if len(parts) > 1})
    return textwrap.wrap(", ".join([*modules, *folders]), CHARACTERS, break_on_hyphens=False)


def text(x: float, y: float, words: str, size: int, colour: str, weight: str = "normal") -> str:
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="middle" font-weight="{weight}"'
    return f'<text {place} fill="{colour}">{escape(words)}</text>'


class Layout:
    """Where everything stands: rows by rank, the lowest wing at the bottom."""

    def __init__(self) -> None:
        self.wings = graph()
        self.rank = ranks(self.wings)
        self.lines = {wing: contents(wing) for wing in self.wings}
        top = max(self.rank.values())
        self.tops: dict[int, float] = {}
        y = float(MARGIN)
        for rank in range(top, -1, -1):
            self.tops[rank] = y
            y += max(map(self.height, (wing for wing in self.wings if self.rank[wing] == rank))) + GAP_Y
        self.full_height = y - GAP_Y + MARGIN
        self.full_width = 2 * MARGIN + 4 * BOX_WIDTH + 3 * GAP_X

    def height(self, wing: str) -> float:
        return 34 + LINE * len(self.lines[wing])

    def left(self, column: int) -> float:
        return MARGIN + column * (BOX_WIDTH + GAP_X)

    def column(self, wing: str) -> int:
        return COLUMNS.get(wing, USUAL_COLUMN)

    def middle(self, wing: str) -> float:
        return self.left(self.column(wing)) + BOX_WIDTH / 2

    def top(self, wing: str) -> float:
        return self.tops[self.rank[wing]]

    def bottom(self, wing: str) -> float:
        return self.top(wing) + self.height(wing)

    def box(self, wing: str) -> str:
        x, y, height = self.left(self.column(wing)), self.top(wing), self.height(wing)
        title = f"{wing}/" if (PACKAGE / wing).is_dir() else f"{wing}.py"
        parts = [
            f'<rect x="{x:g}" y="{y:g}" rx="8" width="{BOX_WIDTH}" height="{height:g}" fill="{WING}" '
            f'stroke="{INK}" stroke-width="1.4"/>',
            text(self.middle(wing), y + 20, title, 15, INK, "bold"),
        ]
        for number, line in enumerate(self.lines[wing]):
            parts.append(text(self.middle(wing), y + 38 + LINE * number, line, 11, FAINT))
        return "\n".join(parts)

    def arrow(self, wing: str, other: str) -> str:
        """Draw an import: straight down where nothing stands between, else round the boxes."""
        x1, y1, x2, y2 = self.middle(wing), self.bottom(wing), self.middle(other), self.top(other) - 5
        between = [
            one
            for one in self.wings
            if self.rank[other] < self.rank[one] < self.rank[wing] and self.column(one) == self.column(other)
        ]
        leave = self.tops[self.rank[wing] - 1] - GAP_Y / 2  # the gap below the wing's row
        arrive = self.top(other) - GAP_Y / 2  # and that above the other's
        if between:
            aside = self.left(self.column(other)) - GAP_X / 2
            turns = [(x1, leave), (aside, leave), (aside, arrive), (x2, arrive)]
        else:
            turns = [] if x1 == x2 else [(x1, leave), (x2, leave)]
        points = [(x1, y1), *turns, (x2, y2)]
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        return f'<path d="{path}" fill="none" stroke="{ARROW}" stroke-width="1.6" marker-end="url(#head)"/>'


def picture() -> str:
    layout = Layout()
    arrows = [
        layout.arrow(wing, other)
        for wing, found in sorted(without_detours(layout.wings).items())
        for other in sorted(found)
    ]
    width, height = layout.full_width, layout.full_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" role="img" '
        'aria-label="The wings of eagle_fsd; every import points downward">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{ARROW}"/></marker></defs>',
        f'<rect x="1" y="1" rx="12" width="{width - 2:g}" height="{height - 2:g}" '
        f'fill="{CARD}" stroke="#d0d7de"/>',
        *arrows,
        *map(layout.box, sorted(layout.wings)),
        "</svg>\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("architecture.svg")
    target.write_text(picture(), encoding="utf-8")
