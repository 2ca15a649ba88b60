from xml.etree import ElementTree

import pytest
import torch

from polydraft.trees import TokenTree, Topology, draw_svg, draw_text

SVG = "{http://www.w3.org/2000/svg}"
GREEN = "#1a7f37"
WORDS = ["", "the", " cat", " dog\n", "<b>&\"'", " sat", "a very long token indeed"]


def tree() -> TokenTree:
    """Return 1 -> (2 -> (5, 6), 3, 4) and a second row whose only valid draft is node 3."""
    parents = torch.tensor([[-1, 0, 0, 0, 1, 1]] * 2)
    valid = torch.tensor([[True] * 6, [True, False, False, True, False, False]])
    return TokenTree(torch.tensor([[1, 2, 3, 4, 5, 6]] * 2), Topology(parents), valid)


def label(token: int) -> str:
    return WORDS[token]


def boxes(svg: str) -> dict[str, str]:
    """Return the fill of each box by the text in it."""
    root = ElementTree.fromstring(svg)
    fills = [rect.attrib["fill"] for rect in root.iter(SVG + "rect")][1:]
    return dict(zip([text.text for text in root.iter(SVG + "text")], fills, strict=True))


def test_text_is_indented_and_marks_what_is_accepted():
    assert draw_text(tree(), label, accepted=(1, 5)).splitlines() == [
        "'the'",
        "├─ ' cat' ✓",
        "│  ├─ ' sat'",
        "│  └─ 'a very long token indeed' ✓",
        "├─ ' dog\\n'",
        "└─ '<b>&\"\\''",
    ]


def test_text_draws_the_row_asked_for_without_its_padding():
    assert draw_text(tree(), label, row=1).splitlines() == ["'the'", "└─ '<b>&\"\\''"]


def test_svg_is_valid_xml_with_one_box_per_node_and_one_edge_per_draft():
    svg = draw_svg(tree(), label)
    assert set(boxes(svg)) == {"the", "·cat", "·sat", "a·very·long·t…", "·dog⏎", "<b>&\"'"}
    assert len(list(ElementTree.fromstring(svg).iter(SVG + "path"))) == 5


def test_svg_fills_what_is_accepted_green():
    svg = draw_svg(tree(), label, accepted=(1, 5))
    assert {text for text, fill in boxes(svg).items() if fill == GREEN} == {"·cat", "a·very·long·t…"}
    edges = [path.attrib["stroke"] for path in ElementTree.fromstring(svg).iter(SVG + "path")]
    assert edges.count(GREEN) == 2


def test_svg_draws_the_row_asked_for_without_its_padding():
    assert set(boxes(draw_svg(tree(), label, row=1))) == {"the", "<b>&\"'"}


def test_svg_boxes_lie_inside_the_picture_and_do_not_overlap():
    root = ElementTree.fromstring(draw_svg(tree(), label))
    frame, *places = [
        [
            float(rect.attrib.get(name, "0").replace("100%", root.attrib.get(name, "")))
            for name in ("x", "y", "width", "height")
        ]
        for rect in root.iter(SVG + "rect")
    ]
    for x, y, width, height in places:
        assert x >= 0
        assert y >= 0
        assert x + width <= frame[2]
        assert y + height <= frame[3]
    for i, (x, y, width, height) in enumerate(places):
        for other_x, other_y, _, _ in places[:i]:
            assert not (other_x <= x < other_x + width and abs(other_y - y) < height)


@pytest.mark.parametrize("text", ["\x00", "\x1b[0m", "\ud800", "\t", "", "�", "]]>", "é漢"])
def test_svg_of_odd_tokens_is_valid_xml(text: str):
    svg = draw_svg(tree(), lambda token: text)
    assert len(list(ElementTree.fromstring(svg.encode()).iter(SVG + "text"))) == 6
    assert draw_text(tree(), lambda token: text).encode()


def test_a_very_deep_chain_can_be_drawn():
    parents = torch.arange(-1, 1999).unsqueeze(0)
    chain = TokenTree(torch.zeros_like(parents), Topology(parents), torch.ones_like(parents, dtype=torch.bool))
    assert len(draw_text(chain, str).splitlines()) == 2000
    assert len(boxes(draw_svg(chain, str))) == 1


LABELS = {
    "short": ["a", "b", "c", "d", "e", "f", "g"],
    "long": ["a very long token indeed"] * 7,
    "mixed": ["x", "return", "a very long token indeed", "(", "\n", " ", "lambda"],
    "wide": ["漢字漢字", "点" * 20, "é", "e\u0301te\u0301", "ー", "한국어", "x"],
    "control": ["\x1b[31m", "\x9b1m", "\a", "\u202e", "\ud800", "\x00", ""],
}


@pytest.mark.parametrize("name", LABELS)
def test_edges_begin_and_end_on_the_borders_of_their_boxes(name: str):
    root = ElementTree.fromstring(draw_svg(tree(), lambda token: LABELS[name][token]).encode())
    rects = [
        {key: float(rect.attrib[key]) for key in ("x", "y", "width", "height")}
        for rect in [*root.iter(SVG + "rect")][1:]
    ]
    rights = {(rect["x"] + rect["width"], rect["y"] + rect["height"] / 2) for rect in rects}
    lefts = {(rect["x"], rect["y"] + rect["height"] / 2) for rect in rects}
    paths = [path.attrib["d"].replace("M", "").replace("C", "").split() for path in root.iter(SVG + "path")]
    ends = [tuple(tuple(map(float, points[place].split(","))) for place in (0, -1)) for points in paths]
    assert len(ends) == 5 and all(start in rights and end in lefts and start[0] < end[0] for start, end in ends)
    assert {end for _, end in ends} == lefts - {min(lefts)}
    for text, rect in zip(root.iter(SVG + "text"), rects, strict=True):
        assert float(text.attrib["textLength"]) == rect["width"] - 14 and text.text and text.text.isprintable()


def test_control_characters_are_written_out_and_wide_letters_take_two_cells():
    svg = draw_svg(tree(), lambda token: ["", "\x1b[3m", "漢字", "\u202e", "x", "x", "x"][token])
    assert {r"\x1b[3m", "漢字", r"\u202e"} <= set(boxes(svg))
    widths = {text.text: text.attrib["textLength"] for text in ElementTree.fromstring(svg).iter(SVG + "text")}
    assert (widths["漢字"], widths["x"]) == ("32", "8")
