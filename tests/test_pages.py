"""The pages: links lead somewhere, none is long, the site has all of them, and figures are those of their tables."""

import importlib
import importlib.util
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from doubles import tiny_model

import polydraft
from polydraft import Recent
from polydraft.models import HuggingFaceModel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
PERFORMANCE = sorted((DOCS / "performance").glob("*.md"))
LONGEST_PAGE, LONGEST_ENTRY = 300, 40
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_is_long(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= LONGEST_PAGE


def test_the_newest_entry_of_the_changelog_is_short() -> None:
    entry = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    assert len(entry.strip().splitlines()) <= LONGEST_ENTRY


def test_the_log_lists_every_finding_with_its_date_and_a_verdict() -> None:
    rows = re.findall(r"^\| (\S+) \| \[(.+)\]\((log/.+)\) \| (.+) \|$", (DOCS / "log.md").read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True), "newest first"
    assert {DOCS / row[2] for row in rows} == {*(DOCS / "log").glob("*.md")}
    for date, title, place, verdict in rows:
        lines = (DOCS / place).read_text().splitlines()
        assert lines[:3] == [f"# {title}", "", date] and Path(place).name.startswith(date)
        assert re.match("taken|not taken|mended|known|open|corrected", verdict), place


def test_pages_that_the_source_names_are_there() -> None:
    files = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "lab").rglob("*.py"),
        ROOT / "Makefile",
    ]
    named = {name for path in files for name in re.findall(r"docs/[\w./-]+\.(?:md|py|svg)\b", path.read_text())}
    theirs = {"docs/gguf.md", "docs/pictures/none.svg"}  # of another repository, and of the test above
    assert len(named) > 20
    assert not [name for name in sorted(named - theirs) if not (ROOT / name).is_file()]


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_results_are_those_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure put in by hand is found, and so is a record that changed without the page."""
    module, page = script("docs/results/make.py"), (DOCS / "results.md").read_text()
    assert module.page() == page
    records = sorted((DOCS / "results").glob("*.jsonl"))
    assert records and page.count("\n## ") == len(records) and page.count("* Machine: ") == len(records)
    run = re.compile(r'"new_tokens": (\d+), "target_calls": (\d+)')
    changed = run.sub(r'"new_tokens": \1, "target_calls": 1\2', records[0].read_text())
    (tmp_path / records[0].name).write_text(changed)
    monkeypatch.setattr(module, "RECORDS", tmp_path)
    assert module.page() not in page


def test_the_table_of_bild_is_that_of_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Threshold 0 and the exact default write the greedy text; what changed without the page is found."""
    module, page = script("docs/bild/make.py"), (DOCS / "bild.md").read_text()
    assert module.with_table(page) == page and (DOCS / "pictures" / "bild.svg").is_file()
    exact = [one for one in module.summaries() if one.arm == module.EXACT or one.arm[0] == 0]
    assert len(exact) == 5 and all(one.same == one.own == 1 for one in exact)
    (tmp_path / "pair.jsonl").write_text(module.RECORD.read_text().replace('"calls": 1', '"calls": 2'))
    monkeypatch.setattr(module, "RECORD", tmp_path / "pair.jsonl")
    assert module.with_table(page) != page


def test_the_tables_of_views_are_those_of_their_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Views of all keys write the greedy text of plain decoding; what changed without the page is found."""
    module = script("docs/itself/measure.py")
    page, summary = module.PAGE.read_text(), module.SUMMARY.read_text()
    assert module.with_table(page, module.tables()) == page and module.with_table(summary, module.summary()) == summary
    bursts, texts, memory, whole = module.record()
    assert {one["arm"] for one in memory} == {*module.ARMS} and {one["arm"] for one in whole} <= {*module.WHOLE}
    greedy = {(one["burst"], one["arm"]): one["mark"] for one in texts if not one["temperature"]}
    assert len(greedy) >= len(module.ARMS) and {one["burst"] for one in bursts} == {one["burst"] for one in texts}
    assert all(mark == greedy[burst, module.PLAIN] for (burst, _), mark in greedy.items())
    (tmp_path / "record.jsonl").write_text(module.RECORD.read_text().replace('"calls": 1', '"calls": 2'))
    monkeypatch.setattr(module, "RECORD", tmp_path / "record.jsonl")
    assert module.with_table(page, module.tables()) != page


def test_the_figure_of_views_is_drawn_from_their_record(tmp_path: Path) -> None:
    """A line for each view and length that the record has, and the file beside the page is of these numbers."""
    module = script("docs/itself/measure.py")
    for axis, (batch, temperature) in zip(module.curves().axes, product(module.DRAWN, (0.0, 1.0)), strict=True):
        drawn = {line.get_label(): line for line in axis.get_lines()}
        assert {*module.ARMS} - {module.PLAIN} <= {*drawn}
        for known, speed_up in drawn["self:int8"].get_xydata():
            own = [
                one
                for one in module.record()[1]
                if (one["known"], one["temperature"], one["batch"]) == (known, temperature, batch)
            ]
            assert speed_up == statistics.median(module.speed_ups(own, "self:int8"))
        assert {*drawn["self:int8"].get_xdata()} == {
            one["known"] for one in module.record()[1] if one["batch"] == batch
        }
    path, shipped = module.save(module.curves, tmp_path / "itself.svg"), ROOT / "docs" / "pictures" / "itself.svg"
    assert all(ElementTree.parse(one).getroot().tag.endswith("svg") for one in (path, shipped))


def test_the_tables_of_overlaps_are_those_of_their_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, page = script("docs/itself/overlap.py"), (DOCS / "itself.md").read_text()
    assert module.with_tables(page) == page
    (tmp_path / "overlap.jsonl").write_text(module.RECORD.read_text().replace("0.9", "0.8"))
    monkeypatch.setattr(module, "RECORD", tmp_path / "overlap.jsonl")
    assert module.with_tables(page) != page


def test_overlaps_are_those_of_the_full_pass_and_of_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys overlap wholly, as does a budget that holds all; and what is dropped by hand is what few keys say."""
    module = script("docs/itself/overlap.py")
    monkeypatch.setattr(module, "DISTANCES", (0, 5))
    monkeypatch.setattr(module, "RUN", 2)
    model = tiny_model("llama", num_hidden_layers=2)
    target, tokens = HuggingFaceModel(model), torch.arange(30) * 7 % 24
    with torch.inference_mode():
        piece = module.Piece.of(target, tokens, 16)
        assert piece.overlaps(target, None).tolist() == pytest.approx([1.0] * 4)
        assert piece.overlaps(target, Recent(1, 20, room=32)).tolist() == pytest.approx([1.0] * 4)
        found = piece.overlaps(target, Recent(1, 4, room=32))
        mask = torch.ones(1, 1, 30, 30).tril().bool()
        mask[..., 16:, 1:12] = False
        row = model(tokens[None], attention_mask=mask, use_cache=False).logits[0, 16].softmax(-1)
    assert float(found[0]) == pytest.approx(float(row.minimum(piece.laws[0]).sum()), abs=1e-5)
    assert found[0] < 0.9995


def test_the_tables_of_trees_are_those_of_their_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What changed without the page is found; no rule keeps more than the bound on exact rules beyond its error."""
    module, page = script("docs/theory/optimum/measure.py"), (DOCS / "theory" / "optimum" / "trees.md").read_text()
    assert module.with_tables(page) == page
    lines = [one for one in module.record() if "bound" in one]
    assert {one["drafts"] for one in lines} <= {*module.SUBJECTS} and len(module.record()) == len(module.done())
    assert lines and all(max(one["kept"].values()) < one["bound"] + 3 * one["bound error"] for one in lines)
    (tmp_path / "record.jsonl").write_text(module.RECORD.read_text().replace('"valued": 1', '"valued": 2'))
    monkeypatch.setattr(module, "RECORD", tmp_path / "record.jsonl")
    assert module.with_tables(page) != page


def test_trees_within_widened_ones_have_the_shape_and_rows_at_leaves() -> None:
    module = script("docs/theory/optimum/measure.py")
    shapes = [module.shape_of(word) for word in (*module.SHAPES, *module.CHAINS)]
    for shape in shapes:
        wide, kept = module.widened(shape)
        place = {node: number for number, node in enumerate(kept)}
        assert tuple(place.get(wide.parents[node], -1) for node in kept) == shape.parents
        above_last = [node for node, own in enumerate(kept) if own < wide.levels[-1].start]
        assert {*wide.parents} >= {kept[node] for node in above_last} and wide.depth == shape.depth


def test_times_of_a_busy_machine_are_left_out() -> None:
    module = script("docs/results/make.py")
    assert [module.is_busy({"machine": {"threads": 2}}, load) for load in (None, 9.5, 3.0, 0.1)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of the site, as `make site` gathers them."""
    folder = tmp_path_factory.mktemp("site")
    script("docs/gather_pages.py").gather(folder)
    return folder


def test_every_public_name_stands_in_the_reference(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "reference").glob("*.md"))
    shown = re.findall(r"^::: polydraft\.([\w.]+)$", text, re.MULTILINE)
    assert {one.rpartition(".")[2] for one in shown} >= {*polydraft.__all__} - {"__version__", "PolydraftError"}
    assert "errors" in shown and "`polydraft.__version__`" in text
    assert len(shown) == len({*shown}), "once each"
    for name in shown:
        room, _, last = f"polydraft.{name}".rpartition(".")
        assert hasattr(importlib.import_module(room), last), name


def test_the_site_has_every_page(site: Path) -> None:
    """All but the log's findings, which its index lists, stand in the navigation."""
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.md")}
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"([\w./-]+\.md)$", nav, re.MULTILINE)
    assert len(listed) == len({*listed})
    assert pages - {*listed} == {f"log/{path.name}" for path in (DOCS / "log").glob("*.md")}
    assert {*listed} <= pages


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    lost = {path.name: [*broken(path, path.read_text())] for path in site.rglob("*.md")}
    assert not {name: links for name, links in lost.items() if links}


@pytest.mark.skipif(not PAIR.is_file(), reason="the embedded pair is not in src/polydraft/data/pair")
def test_the_pictures_are_what_the_command_draws(tmp_path: Path) -> None:
    module = script("lab/draw_pictures.py")
    for path in module.draw(tmp_path):
        shipped = ROOT / "docs" / "pictures" / path.name
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert ElementTree.parse(shipped).getroot().tag.endswith("svg")
    assert (tmp_path / "tree.svg").read_text() == (ROOT / "docs" / "pictures" / "tree.svg").read_text()
    assert 'fill="#1a7f37"' in (tmp_path / "tree.svg").read_text(), "some drafts were kept"


def test_the_figure_shows_the_numbers_of_the_table() -> None:
    module = script("lab/draw_pictures.py")
    page = module.measured()
    assert all(path.read_text() in page for path in PERFORMANCE)
    found = {(one.arm, one.temperature): one.speed_up.total for one in module.results(page)}
    assert len(found) == 2 * sum(map(len, module.SHOWN.values()))
    for estimate in found.values():
        assert f"{estimate.mean:.2f}x" in page
        assert f"({estimate.low:.2f} to {estimate.high:.2f})" in page
    with pytest.raises(ValueError, match="has no speed-up"):
        module.results(page.replace("2.93x (2.47 to 3.61)", "fast"))


def test_the_figure_of_stores_is_drawn_from_its_table(tmp_path: Path) -> None:
    page, module = (DOCS / "performance" / "stores.md").read_text(), script("lab/stores.py")
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
    module = script("lab/measure_stores.py")
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
    lines = (DOCS / "performance" / "stores.md").read_text().splitlines()
    page = [line.split("|")[1] for line in lines if "|" in line]
    begin = page.index(names[2])
    assert page[begin : begin + len(names) - 2] == names[2:]
