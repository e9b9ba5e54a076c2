"""Draws docs/step.svg, one step of the README: python docs/make_picture.py [FILE]

Plain SVG text on a light card of its own, so that it reads on light and dark pages alike.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 960, 376
COLUMNS = (80, 270, 460, 650, 840)
PATH_Y, ROW = 70, 54
BOX_WIDTH, BOX_HEIGHT = 92, 42

INK, FAINT, CARD = "#1f2328", "#6e7781", "#ffffff"
EXACT, FUZZY, OWN = "#1a7f37", "#bc4c00", "#0550ae"

# The draft tree: what hangs below each node of the path, the followed child first, with its q.
TREE = (
    [("blue", 0.61), ("clear", 0.17), ("dark", 0.05)],
    [("due", 0.44), ("and", 0.21), (",", 0.12)],
    [("to", 0.93)],
    [("a", 0.38), ("how", 0.22)],
)
# What happens at each node of the path: the lines below it, and their colour.
STORY = (
    (EXACT, ("target draws “blue”:", "a child, so follow it", "exact accept")),
    (
        FUZZY,
        (
            "target draws “because”: no child,",
            "but D(p, q) = 0.11 ≤ T:",
            "fuzzy accept of what q chose",
        ),
    ),
    (EXACT, ("target draws “to”:", "a child, so follow it", "exact accept")),
    (OWN, ("target draws “the”: no child,", "and D(p, q) = 0.47 > T:", "stop, emit the draw")),
)


def text(x: float, y: float, words: str, size: int = 14, colour: str = INK, **style: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="middle"'
    return f'<text {place} fill="{colour}"{extra}>{escape(words)}</text>'


def box(
    x: float, y: float, word: str, note: str, colour: str, dashed: bool = False, solid: bool = False
) -> str:
    """A node: its token, and a small note under it."""
    dash = ' stroke-dasharray="5 3"' if dashed else ""
    fill = colour if solid else CARD
    return (
        f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y - BOX_HEIGHT / 2:g}" rx="8" '
        f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
        f'fill="{fill}" stroke="{colour}" stroke-width="2"{dash}/>'
        + text(x, y + 1, word, 15, CARD if solid else INK)
        + text(x, y + 15, note, 10, CARD if solid else FAINT)
    )


def edge(column: int, row: int, colour: str, width: float, dashed: bool = False) -> str:
    """From the path's node in this column to the child in that row of the next."""
    x1, x2 = COLUMNS[column] + BOX_WIDTH / 2, COLUMNS[column + 1] - BOX_WIDTH / 2
    y2, middle = PATH_Y + row * ROW, (x1 + x2) / 2
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return (
        f'<path d="M{x1:g} {PATH_Y} C{middle:g} {PATH_Y} {middle:g} {y2} {x2:g} {y2}" fill="none" '
        f'stroke="{colour}" stroke-width="{width:g}"{dash}/>'
    )


def picture() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" role="img" '
        'aria-label="One step: two exact accepts, one fuzzy accept, and the target&#39;s own token">',
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12" '
        f'fill="{CARD}" stroke="#d0d7de"/>',
    ]
    for column, children in enumerate(TREE):
        colour = STORY[column][0]
        for row, (word, q) in enumerate(children):
            followed = row == 0 and column < len(TREE) - 1
            # Below the last node nothing is followed: its drafts hang under the target's own token.
            place = row if column < len(TREE) - 1 else row + 1
            shade = colour if followed else FAINT
            fuzzy = followed and colour == FUZZY
            parts.append(edge(column, place, shade, 3 if followed else 1.2, dashed=fuzzy))
            y = PATH_Y + place * ROW
            parts.append(box(COLUMNS[column + 1], y, word, f"q = {q:.2f}", shade, dashed=not followed))
    parts.append(edge(3, 0, OWN, 3))
    parts.append(box(COLUMNS[4], PATH_Y, "the", "drawn from p", OWN, solid=True))
    parts.append(box(COLUMNS[0], PATH_Y, "is", "root", INK, solid=True))
    for column, (colour, lines) in enumerate(STORY):
        x = (COLUMNS[column] + COLUMNS[column + 1]) / 2
        for number, line in enumerate(lines):
            weight = "bold" if number == len(lines) - 1 else "normal"
            parts.append(text(x, 246 + 19 * number, line, 12, colour, font_weight=weight))
    parts.append(f'<line x1="40" y1="312" x2="{WIDTH - 40}" y2="312" stroke="#d0d7de"/>')
    nodes = 1 + sum(map(len, TREE))
    outcome = f"T = 0.3: one target forward over {nodes} nodes, and four tokens emitted: blue due to the"
    parts.append(text(WIDTH / 2, 346, outcome, 15))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("step.svg")
    target.write_text(picture(), encoding="utf-8")
