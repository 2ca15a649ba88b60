"""Drawings of a token tree: as indented text for the terminal, and as an SVG picture."""

# torch's stubs do not say what Tensor.tolist returns:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from html import escape
from typing import cast

from polydraft.trees.tree import TokenTree

Label = Callable[[int], str]


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
    column = 30 + 8 * max(len(name) for name in names.values())
    place = {node: (16 + column * depth[node], 22 + 30 * height) for node, height in heights.items()}
    kept = {0, *accepted}
    parts = [_edge(place[node], place[child], child in kept, column) for node in place for child in children[node]]
    parts += [_box(place[node], names[node], node in kept, node == 0) for node in place]
    width = 16 + column * (1 + max(depth[node] for node in place))
    height = 44 + 30 * max(heights.values())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
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


def _short(text: str, longest: int = 14) -> str:
    visible = text.replace("\n", "⏎").replace(" ", "·") or "∅"
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in visible)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _edge(start: tuple[float, float], end: tuple[float, float], kept: bool, column: float) -> str:
    colour, width = ("#1a7f37", 2.5) if kept else ("#b0b7bf", 1.2)
    bend, right = column / 2, start[0] + column - 30
    return (
        f'<path d="M{right:.1f},{start[1]:.1f} C{right + bend / 3:.1f},{start[1]:.1f} '
        f'{end[0] - bend / 3:.1f},{end[1]:.1f} {end[0]:.1f},{end[1]:.1f}" '
        f'fill="none" stroke="{colour}" stroke-width="{width}"/>'
    )


def _box(place: tuple[float, float], name: str, kept: bool, root: bool) -> str:
    fill, ink = ("#0969da", "white") if root else ("#1a7f37", "white") if kept else ("#eef1f4", "#24292f")
    wide = 14 + 8 * len(name)
    return (
        f'<rect x="{place[0]:.1f}" y="{place[1] - 11:.1f}" width="{wide}" height="22" rx="5" fill="{fill}"/>'
        f'<text x="{place[0] + 7:.1f}" y="{place[1] + 4.5:.1f}" fill="{ink}">{escape(name)}</text>'
    )
