"""The pages of docs/theory: every snippet runs as it stands, on its own; every page is listed; every link resolves."""

import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "docs" / "theory"
README = FOLDER / "README.md"
PAGES = sorted(FOLDER.glob("*.md"))
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PAIR = Path(__file__).parents[2] / "src" / "polydraft" / "data" / "pair" / "target" / "config.json"


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.stem}, line {self.line + 1}"


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [Snippet(page, text.count("\n", 0, found.start(1)), found[1]) for found in SNIPPET.finditer(text)]


def links(text: str) -> list[str]:
    """List what a page links to, without addresses of other sites."""
    return [target for target in LINK.findall(CODE.sub("", text)) if "://" not in target]


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    return {anchor(heading) for heading in HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))}


def broken(page: Path, text: str) -> list[str]:
    """List the links of a page that lead nowhere."""
    lost = []
    for link in links(text):
        name, _, place = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (place and place not in anchors(text if target == page else target.read_text())):
            lost.append(link)
    return lost


@pytest.mark.parametrize("snippet", [one for page in PAGES for one in snippets(page)], ids=str)
def test_the_snippet_runs_on_its_own(snippet: Snippet) -> None:
    if "load_pair" in snippet.code and not PAIR.is_file():
        pytest.skip("the embedded pair is not in src/polydraft/data/pair")
    assert "assert " in snippet.code
    with torch.random.fork_rng(devices=[]):
        exec(compile("\n" * snippet.line + snippet.code, str(snippet.page), "exec"), {"__name__": "theory"})


def test_every_page_is_listed_and_every_listed_page_is_there() -> None:
    listed = {link for link in links(README.read_text()) if link.endswith(".md") and "/" not in link}
    assert listed == {page.name for page in PAGES} - {README.name}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_resolves(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_a_link_that_leads_nowhere_is_seen() -> None:
    text = (
        "# One heading\n[a](errors.md) [b](#one-heading) [c](https://x.org/y) `[d](no.md)`\n```\n# no\n[e](no)\n```\n"
    )
    assert broken(README, text) == []
    assert broken(README, text + "[f](absent.md) [g](#no) [h](errors.md#no)") == ["absent.md", "#no", "errors.md#no"]


def test_the_pages_have_snippets() -> None:
    without = {page.stem for page in PAGES if not snippets(page)}
    assert without <= {"README", "limits"}


def test_the_tables_of_the_limits_are_those_that_were_measured() -> None:
    """A table put in by hand, or measured anew without the page, is found; so is a page without marks."""
    script = runpy.run_path(str(FOLDER / "limits" / "make.py"))
    page, tables = (FOLDER / "limits.md").read_text(), (FOLDER / "limits" / "tables.md").read_text()
    assert page.count("<!-- table: ") == 4
    assert script["with_tables"](page, tables) == page
    changed = page.replace("| &nbsp; k-seq |", "| &nbsp; k-seq | 1 |")
    assert script["with_tables"](changed, tables) == page
