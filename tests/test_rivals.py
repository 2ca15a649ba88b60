"""The page of other tools: its table follows from the records, and from nothing else."""

import importlib
import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = [
    ("polydraft", "float32", 0.0, "plain", [(64, 2.0, "aa"), (64, 1.0, "bb")]),
    ("polydraft", "float32", 0.0, "drafts", [(64, 1.0, "aa"), (64, 1.0, "bb")]),
    ("openvino", "int4", 0.0, "plain", [(64, 0.5, "aa"), (32, 0.25, "cc")]),
    ("openvino", "int4", 1.0, "plain", [(64, 0.8, "dd")]),
    ("openvino", "int4", 1.0, "drafts", [(64, 1.0, "dd")]),
]
CONDITIONS = {
    "processor": "a chip",
    "cores": 2,
    "threads": 2,
    "model": "smollm2",
    "prompts": "chat",
    "limit": 2,
    "lengths": [40, 112],
    "max_new_tokens": 64,
}
TABLE = """
| tool, weights | T = 0: plain | T = 0: drafts | T = 0: gain | T = 1: plain | T = 1: drafts | T = 1: gain | same text |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| polydraft float32 | 42.7 | 64.0 | 1.50x | - | - | - | 2/2 |
| openvino int4 | 128.0 | - | - | 80.0 | 64.0 | 0.80x | 1/2 |
"""


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs" / "rivals")
    return importlib.import_module("make")


@pytest.fixture
def records() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"conditions": CONDITIONS}]
    for tool, weights, temperature, arm, texts in TEXTS:
        found += [
            {"tool": tool, "weights": weights, "temperature": temperature, "arm": arm, "prompt": number}
            | {"new_tokens": new, "seconds": seconds, "mark": mark, "load": 1.5 + number, "date": "2026-11-27"}
            for number, (new, seconds, mark) in enumerate(texts)
        ]
    found += [{"tool": "openvino", "weights": "int4", "versions": {"openvino": "1.2.3"}}]
    found += [{"missing": "openvino", "weights": one, "why": "could not build"} for one in ("int4", "int8")]
    return found


def test_the_table_is_all_tokens_over_all_seconds(make: ModuleType, records: list[dict[str, Any]]) -> None:
    assert make.table(records) == TABLE.strip()


def test_the_page_gets_the_table_and_its_conditions_between_its_marks(
    make: ModuleType, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    page = tmp_path / "rivals.md"
    page.write_text("before\n<!-- table: rivals -->\nold\n<!-- end of table -->\nafter\n")
    make.write_page(records, page)
    text = page.read_text()
    assert text.startswith("before\n<!-- table: rivals -->\n| tool") and text.endswith("<!-- end of table -->\nafter\n")
    assert "a chip, 2 cores, 2 threads; up to 2.5 threads" in text and "2026-11-27. Versions: openvino 1.2.3." in text
    assert "* Missing: openvino int8, could not build.\n" in text and "openvino int4, could" not in text
    make.write_page(records, page)
    assert page.read_text() == text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no marks"):
        make.write_page(records, page)


def test_the_page_has_the_marks(make: ModuleType) -> None:
    assert make.MARKED.search(make.PAGE.read_text())


def test_a_record_that_was_cut_off_is_not_read(make: ModuleType, records: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "rivals.jsonl"
    assert make.read(path) == []
    path.write_text("".join(json.dumps(one) + "\n" for one in records)[:-5])
    assert make.read(path) == records[:-1]


def test_a_run_goes_on_where_it_stopped_and_leaves_out_what_is_missing(
    make: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = importlib.import_module("processes")
    written = list[tuple[Any, ...]]()

    class Fake:
        def __init__(self, tool: str, *others: object) -> None:
            self.versions = {tool: "1"}
            if tool == "openvino":
                raise processes.Missing("could not build")

        def warm(self, *asked: object) -> None: ...

        def close(self) -> None: ...

        def record(self, cell: list[Any], number: int, *asked: object) -> dict[str, Any]:
            written.append((*cell, number))
            if len(written) == 7:
                raise KeyboardInterrupt
            return dict(zip((*make.CELL, "prompt", "seconds"), (*cell, number, 1.0), strict=True))

    monkeypatch.setattr(processes, "Tool", Fake)
    path = tmp_path / "rivals.jsonl"
    given = Namespace(records=path, only=["transformers", "openvino"], temperature=[0.0, 1.0], max_new_tokens=4)
    given = Namespace(**vars(given), work=tmp_path, model=tmp_path, threads=2, name="x")
    with pytest.raises(KeyboardInterrupt):
        processes.measure(given, [[1], [2]], CONDITIONS)
    path.write_text(path.read_text() + '{"cut')
    processes.measure(given, [[1], [2]], CONDITIONS)
    assert len(written) == 17 and len({*written}) == 16, "the one that was interrupted is written again"
    assert [one[-1] for one in written[7:]] == sorted(one[-1] for one in written[7:]), "prompt by prompt"
    assert {one["missing"] for one in make.read(path) if "missing" in one} == {"openvino"}
    with pytest.raises(SystemExit, match="other conditions"):
        processes.measure(given, [[1], [2]], CONDITIONS | {"threads": 1})


def test_models_of_older_transformers_say_the_base_of_their_rotation(make: ModuleType, tmp_path: Path) -> None:
    model, older = tmp_path / "model", tmp_path / "older"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"rope_parameters": {"rope_theta": 5.0}}))
    (model / "weights").write_text("all")
    importlib.import_module("installing").write_older(model, older)
    assert json.loads((older / "config.json").read_text())["rope_theta"] == 5.0
    assert (older / "weights").read_text() == "all"
