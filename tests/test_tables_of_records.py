"""Tables of pages are those of the records beside the scripts that wrote them."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def script(place: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a script of the documentation has, which may import those beside it."""
    monkeypatch.syspath_prepend(str((DOCS / place).parent))
    found = runpy.run_path(str(DOCS / place))
    sys.modules.pop("arms", None)
    return found


@pytest.mark.parametrize(
    ("place", "made"),
    [("alignment/published.py", "tables"), ("alignment/specdec.py", "table"), ("alignment/consistency.py", "table")],
)
def test_a_page_has_the_table_of_its_record(place: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = script(place, monkeypatch)
    begins, ends = found["MARKS"]
    assert found["PAGE"].read_text(encoding="utf-8").split(begins)[1].split(ends)[0] == found[made]()


def test_the_page_of_learning_has_the_tables_of_its_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    found = script("learning/curve.py", monkeypatch)
    text = found["PAGE"].read_text(encoding="utf-8")
    assert found["SETTINGS"] and all(found["with_table"](text, one) == text for one in found["SETTINGS"].values())
