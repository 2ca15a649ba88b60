"""Drawings of a token tree: as indented text for the terminal, and as an SVG picture."""

# torch's stubs do not say what Tensor.tolist returns:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import cast
from unicodedata import combining, east_asian_width

from polydraft.trees.tree import TokenTree

Label = Callable[[int], str]
CELL, HEIGHT, PADDING = 8, 22, 7
"""The width of a letter, the height of a box, and the room at both sides of its text, in pixels."""
BETWEEN, ROW, MARGIN = 24, 30, 16
"""The room between two columns of boxes, from one row to the next, and around the picture."""
LONGEST = 14
"""The most cells that the text of a box takes."""


@dataclass(frozen=True)
class Box:
    """A node's rectangle: its left border, the height of its middle, and its text with its width in cells."""

    left: int
    middle: float
    text: str
    cells: int

    @property
    def width(self) -> int:
        """The width of the rectangle."""
        return CELL * self.cells + 2 * PADDING

    @property
    def right(self) -> int:
        """The right border, where edges begin."""
        return self.left + self.width


def draw_text(tree: TokenTree, label: Label, accepted: Sequence[int] = (), row: int = 0) -> str:
    """Draw one row's tree as indented text; accepted nodes carry a check mark.

    Args:
        tree: the batch of trees.
        label: gives the text of a token id.
        accepted: the accepted nodes, without the root.
        row: which row of the batch to draw.
    """
    children = _children(tree, row)
    tokens = cast(list[int], tree.tokens[row].tolist())
    lines = [repr(label(tokens[0]))]
    below = {child: node for node, nodes in enumerate(children) for child in nodes}
    indents = {0: ""}
    for node in _depth_first(children)[1:]:
        parent = below[node]
        last = node == children[parent][-1]
        mark = " ✓" if node in accepted else ""
        lines.append(f"{indents[parent]}{'└─' if last else '├─'} {label(tokens[node])!r}{mark}")
        indents[node] = indents[parent] + ("   " if last else "│  ")
    return "\n".join(lines)


def draw_svg(tree: TokenTree, label: Label, accepted: Sequence[int] = (), row: int = 0) -> str:
    """Draw one row's tree as a self-contained SVG picture, root on the left, accepted nodes filled green."""
    children = _children(tree, row)
    tokens = cast(list[int], tree.tokens[row].tolist())
    depth = cast(list[int], tree.depth[row].tolist())
    heights = _heights(children)
    names = {node: _short(label(tokens[node])) for node in heights}
    column = BETWEEN + 2 * PADDING + CELL * max(map(cells_of, names.values()))
    boxes = {
        node: Box(MARGIN + column * depth[node], MARGIN + HEIGHT / 2 + ROW * height, names[node], cells_of(names[node]))
        for node, height in heights.items()
    }
    kept = {0, *accepted}
    parts = [_edge(boxes[node], boxes[child], child in kept) for node in boxes for child in children[node]]
    parts += [_drawn(box, node in kept, node == 0) for node, box in boxes.items()]
    width = MARGIN + max(box.right for box in boxes.values())
    height = 2 * MARGIN + HEIGHT + ROW * max(heights.values())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'font-family="monospace" font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _children(tree: TokenTree, row: int) -> list[list[int]]:
    rows = cast(list[list[int]], tree.children[row].tolist())
    return [[child for child in nodes if child >= 0] for nodes in rows]


def _depth_first(children: list[list[int]]) -> list[int]:
    """Return the nodes that hang below the root in reading order; without recursion, for chains of thousands."""
    order: list[int] = []
    waiting = [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting.extend(reversed(children[node]))
    return order


def _heights(children: list[list[int]]) -> dict[int, float]:
    order = _depth_first(children)
    leaves = [node for node in order if not children[node]]
    heights = {node: float(height) for height, node in enumerate(leaves)}
    for node in reversed(order):
        if children[node]:
            heights[node] = (heights[children[node][0]] + heights[children[node][-1]]) / 2
    return heights


def cells_of(text: str) -> int:
    """Return how many cells of a terminal a text takes: two for wide letters, none for marks that combine."""
    return sum(0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _short(text: str) -> str:
    """Return a token's text with blanks made visible and control characters written out, cut to `LONGEST` cells."""
    letters = text.replace("\n", "⏎").replace(" ", "·")
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in letters) or "∅"
    if cells_of(shown) <= LONGEST:
        return shown
    while cells_of(shown) >= LONGEST:
        shown = shown[:-1]
    return shown + "…"


def _edge(parent: Box, child: Box, kept: bool) -> str:
    """Draw a curve from the middle of the parent's right border to the middle of the child's left one."""
    colour, width = ("#1a7f37", 2.5) if kept else ("#b0b7bf", 1.2)
    bend = (child.left - parent.right) / 2
    return (
        f'<path d="M{parent.right},{parent.middle:.1f} C{parent.right + bend:.1f},{parent.middle:.1f} '
        f'{child.left - bend:.1f},{child.middle:.1f} {child.left},{child.middle:.1f}" '
        f'fill="none" stroke="{colour}" stroke-width="{width}"/>'
    )


def _drawn(box: Box, kept: bool, root: bool) -> str:
    """Draw a box; its text is stretched to its cells, so that it fits whatever the font."""
    fill, ink = ("#0969da", "white") if root else ("#1a7f37", "white") if kept else ("#eef1f4", "#24292f")
    return (
        f'<rect x="{box.left}" y="{box.middle - HEIGHT / 2:.1f}" width="{box.width}" height="{HEIGHT}" rx="5" '
        f'fill="{fill}"/><text x="{box.left + PADDING}" y="{box.middle + 4.5:.1f}" textLength="{CELL * box.cells}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{ink}">{escape(box.text)}</text>'
    )
