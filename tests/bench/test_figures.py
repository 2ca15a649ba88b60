"""Tables and figures: complete, readable by a machine, and the same every time."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from polydraft.bench.style import save
from polydraft.errors import MissingExtra
from polydraft_lab.limits import (
    LimitsSettings,
    Models,
    Record,
    all_tables,
    as_document,
    conditions_of,
    draw_figures,
    summarise,
)
from polydraft_lab.limits.figures import without_naive
from polydraft_lab.limits.summary import NodeResult, TreeResult
from polydraft_lab.limits.three_tokens import acceptance_of_rules, draw_three_tokens, family

Results = tuple[list[NodeResult], list[TreeResult]]


@pytest.fixture(scope="module")
def results(records: list[Record]) -> Results:
    return summarise(records)


@pytest.mark.slow
def test_figures_exist_are_svg_and_do_not_change(results: Results, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        assert [path.name for path in draw_figures(results[0], folder)] == [
            "acceptance_by_temperature.svg",
            "acceptance_by_drafts.svg",
            "gap_by_rule.svg",
        ]
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert b"<dc:date>" not in path.read_bytes() and str(tmp_path).encode() not in path.read_bytes()


def test_sweeps_of_one_value_are_not_drawn(results: Results, tmp_path: Path) -> None:
    one = [each for each in results[0] if each.temperature == 0.8 and each.k == 2]
    assert [path.name for path in draw_figures(one, tmp_path)] == ["gap_by_rule.svg"]


def test_naive_match_is_left_out_only_beside_other_rules(results: Results) -> None:
    shown = {(one.scheme, one.rule) for one in without_naive(results[0])}
    assert ("top-k", "naive match") in shown
    assert ("iid", "naive match") not in shown and ("iid", "recursive rejection") in shown


def test_without_matplotlib_the_error_names_the_extra(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match='pip install "matplotlib>'):
        draw_figures(results[0], tmp_path)


def test_three_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft_lab.limits.three_tokens.STEPS", 24)
    for first, reaches_one in ((1 / 3, True), (1 / 6, False)):
        second, rows = family(first)
        rates = acceptance_of_rules(rows, 2)
        torch.testing.assert_close(rates["importance weighted"], rates["optimum"], rtol=0, atol=1e-7)
        for name, rate in rates.items():
            assert bool((rate <= rates["optimum"] + 1e-7).all()), name
        # For two independent drafts the optimum is 1 iff no set H has draft(H)^2 > target(H) (arXiv 2410.18234).
        largest = rows.amax(-1)
        full = (largest.square() <= 1 / 3 + 1e-12) & ((1 - rows.amin(-1)).square() <= 2 / 3 + 1e-12)
        assert torch.equal(rates["optimum"] > 1 - 1e-9, full) and bool(full.any()) == reaches_one
        assert len(second) == len(rows) and not bool(full.all())
    paths = [save(draw_three_tokens, tmp_path / name) for name in ("a.svg", "b.svg")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_tables_hold_every_rule(results: Results) -> None:
    for brief in (True, False):
        tables = all_tables(*results, brief=brief)
        assert [table.title for table in tables][:3] == [
            "Acceptance by task, temperature 0.8, 3 drafts",
            "Acceptance by temperature, 3 drafts, task: all",
            "Acceptance by number of drafts, temperature 0.8, task: all",
        ]
        by_task = tables[0]
        assert by_task.header == ("scheme: optimum, %", "code", "tale", "all")
        rules = {(one.scheme, one.rule) for one in results[0] if one.k == 3}
        assert len([row for row in by_task.rows if row]) == len(rules) + len({scheme for scheme, _ in rules})
        for table in tables:
            assert all(len(row) in (0, len(table.header)) for row in table.rows)


def test_a_wide_table_is_split(results: Results) -> None:
    table = all_tables(*results, brief=True)[0]
    for width in (20, 40, 60, 80):
        parts = table.split(width)
        assert [name for part in parts for name in part.header[1:]] == list(table.header[1:])
        assert all(len(part.rows) == len(table.rows) and part.header[0] == table.header[0] for part in parts)
        for part in parts:
            columns = zip(part.header, *filter(None, part.rows), strict=True)
            assert sum(max(map(len, column)) + 2 for column in columns) <= width or len(part.header) == 2
    assert table.split(200) == [table]


def test_the_document_has_conditions_tables_and_figures(
    models: Models, settings: LimitsSettings, results: Results
) -> None:
    conditions = conditions_of(models, settings, ("the-target", "the-draft"))
    tables = all_tables(*results, brief=False)
    page = as_document(conditions, {"code": 2, "tale": 1}, tables, ["gap_by_rule.svg"])
    for words in ("the-target", "the-draft", "2 of code, 1 of tale", "![gap_by_rule](gap_by_rule.svg)", "float64"):
        assert words in page
    assert page.count("\n| --- | ---:") == len(tables)
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in lines) and "\u2212" not in page
