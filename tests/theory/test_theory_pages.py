"""The pages of docs/theory: every snippet runs as it stands, on its own; every page is listed; every link resolves."""

import inspect
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import polydraft
from polydraft.catalogue import tables

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


@pytest.mark.long(16)
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
    script = runpy.run_path(str(FOLDER.parents[1] / "lab" / "make_limits.py"))
    page, tables = (FOLDER / "limits.md").read_text(), (FOLDER / "limits" / "tables.md").read_text()
    assert page.count("<!-- table: ") == 4
    assert script["with_tables"](page, tables) == page
    changed = page.replace("| &nbsp; k-seq |", "| &nbsp; k-seq | 1 |")
    assert script["with_tables"](changed, tables) == page


ROW = re.compile(r"^\| (.*) \| `(\w+)` \| `([\w-]+)` \| \[.*\]\((.*)\) \|$", re.MULTILINE)
PAPER = re.compile(r"arxiv\.org/abs/(\d{4}\.\d{5})")
PACKAGE = Path(polydraft.__file__).parent


def table(title: str) -> dict[str, tuple[str, str]]:
    """Return the rows of one of the tables of methods: by word the class, and the papers."""
    part = README.read_text().partition(f"| paper of the {title} | class | word | page |")[2].partition("\n\n")[0]
    return {word: (kind, paper) for paper, kind, word, _ in ROW.findall(part)}


MEMBERS = {
    "rule": {line.word: type(line.usual) for line in tables.RULES},
    "way of drawing": {line.word: type(line.scheme) for line in tables.SCHEMES},
    "drafter": {line.word: line.kind for line in tables.DRAFTERS},
}


@pytest.mark.parametrize("title", MEMBERS)
def test_every_member_of_the_catalogue_stands_in_the_table_of_papers(title: str) -> None:
    members, rows = MEMBERS[title], table(title)
    assert {word: kind for word, (kind, _) in rows.items()} == {word: kind.__name__ for word, kind in members.items()}
    for word, (kind, paper) in rows.items():
        assert getattr(polydraft, kind) is members[word]
        lossy = title == "rule" and not members[word]().lossless
        assert lossy == ("(lossy)" in paper), word


def test_papers_of_rules_are_those_that_the_classes_name() -> None:
    for word, (_, paper) in table("rule").items():
        source = inspect.getsource(sys.modules[MEMBERS["rule"][word].__module__])
        assert all(number in source for number in PAPER.findall(paper)), word
        assert PAPER.findall(paper) or paper.startswith("no "), word


def test_every_paper_of_the_page_is_named_elsewhere_too() -> None:
    known = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    known += (FOLDER.parent / "notation.md").read_text()
    found = PAPER.findall(README.read_text())
    assert len(found) > 40 and not [number for number in found if number not in known]
    page = README.read_text().partition("**What to cite.**")[2].partition("\n## ")[0]
    assert {"2502.18779", "2310.15141", "2410.18234"} <= {*PAPER.findall(page)} and "`Optimal`" in page
