"""The pages for users: links lead somewhere, and pictures show what tables say."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
"""All but those of docs/theory, which have tests of their own."""
PAIR = ROOT / "src" / "polydraft" / "data" / "pair" / "target" / "config.json"


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def broken(page: Path, text: str) -> Iterator[str]:
    """Return the links of a page to files or headings that there are not."""
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        place, _, heading = link.partition("#")
        path = page.parent / place if place else page
        if link.startswith("http"):
            continue
        if not path.exists():
            yield link
        elif heading and heading not in map(anchor, re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken(page, page.read_text()))


def test_a_broken_link_is_seen() -> None:
    text = "[a](docs/design.md) [b](absent.md) [c](docs/design.md#no-such) ![d](docs/pictures/none.svg)"
    assert list(broken(ROOT / "README.md", text)) == ["absent.md", "docs/design.md#no-such", "docs/pictures/none.svg"]


def drawing(name: str = "draw_pictures") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "lab" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not PAIR.is_file(), reason="the embedded pair is not in src/polydraft/data/pair")
def test_the_pictures_are_what_the_command_draws(tmp_path: Path) -> None:
    module = drawing()
    for path in module.draw(tmp_path):
        shipped = ROOT / "docs" / "pictures" / path.name
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert ElementTree.parse(shipped).getroot().tag.endswith("svg")
    assert (tmp_path / "tree.svg").read_text() == (ROOT / "docs" / "pictures" / "tree.svg").read_text()
    assert 'fill="#1a7f37"' in (tmp_path / "tree.svg").read_text(), "some drafts were kept"


def test_the_figure_shows_the_numbers_of_the_table() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    module = drawing()
    found = {(one.arm, one.temperature): one.speed_up.total for one in module.results(page)}
    assert len(found) == 2 * sum(map(len, module.SHOWN.values()))
    for estimate in found.values():
        assert f"{estimate.mean:.2f}x" in page
        assert f"({estimate.low:.2f} to {estimate.high:.2f})" in page
    with pytest.raises(ValueError, match="has no speed-up"):
        module.results(page.replace("2.93x (2.47 to 3.61)", "fast"))


def test_the_figure_of_stores_is_drawn_from_its_table(tmp_path: Path) -> None:
    page, module = (ROOT / "docs" / "performance.md").read_text(), drawing("stores")
    found, alone = module.read(page)
    assert [one.tokens for one in found] == list(module.SIZES) and 0 < alone.hits < found[-1].both.hits < 1
    for one in found:
        assert module.row(one) in page
        assert 8 <= one.width < 8.1 and one.rest.hits < one.suffix.hits < one.both.hits
    picture = module.save(lambda: module.draw(found, alone), tmp_path / "stores.svg")
    for path in (picture, ROOT / "docs" / "pictures" / "stores.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    with pytest.raises(ValueError, match="no table of stores"):
        module.read(page.replace("table: stores", "table"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_the_table_of_large_stores_is_what_its_script_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "lab")  # it takes over how its neighbour asks
    module = drawing("measure_stores")
    texts = module.Texts.of(0)
    assert (texts[7] == texts[7]).all() and (texts[7] != texts[8]).any()
    read, grows = tmp_path / "rest", tmp_path / "suffix"
    filled = module.built(read, 50, texts), module.grown(grows, 500, 1_000_000, texts)
    asked = [module.by_kind(path.name, path, [texts[3], texts[1 << 40]]) for path in (read, grows)]
    assert filled[0].given == filled[0].tokens == 50 * module.LENGTH and filled[1].tokens < filled[1].given
    assert filled[1].size <= 1_000_000 and len(filled[1].waits) == 501
    assert asked[0].hits >= asked[0].right > 0.4, "one of the two texts is in the store"
    for one in (*filled, *asked):
        assert 0 < one.memory[0] <= one.memory[1] and one.memory[2] > 0
    names = [
        line.split("|")[1]
        for line in module.rows(*(one.cells() + two.cells() for one, two in zip(filled, asked, strict=True)))
    ]
    page = [line.split("|")[1] for line in (ROOT / "docs" / "performance.md").read_text().splitlines() if "|" in line]
    begin = page.index(names[2])
    assert page[begin : begin + len(names) - 2] == names[2:]
