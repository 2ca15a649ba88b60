"""The rows that the fast suite runs: every two values meet in them, and rows that were listed by hand all stay."""

from itertools import combinations
from pathlib import Path

import pytest
from pairwise import mark_the_rest

TABLE = """
import pytest

BY_HAND = [(1, "one", 0), (2, "two", 0), (3, "one", 1), (1, "two", 1), (2, "one", 0)]


@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("c", [True, False])
def test_three(a, b, c): ...


@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", "xyz")
def test_two(a, b): ...


@pytest.mark.parametrize(("a", "b", "c"), BY_HAND)
def test_by_hand(a, b, c): ...


@pytest.mark.parametrize("a, b, c", BY_HAND)
@pytest.mark.parametrize("d", [5, pytest.param(6, marks=pytest.mark.slow), 7])
def test_by_hand_and_more(a, b, c, d): ...
"""


def kept(folder: Path) -> dict[str, list[dict[str, object]]]:
    """Return the rows of the tests above that are not slow."""
    (folder / "test_table.py").write_text(TABLE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow")
    found: dict[str, list[dict[str, object]]] = {}

    class Hooks:
        @staticmethod
        def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
            mark_the_rest(items)
            for one in items:
                if not any(one.iter_markers("slow")):
                    found.setdefault(one.originalname, []).append(one.callspec.params)

    assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", str(folder)], plugins=[Hooks()]) == 0
    return found


def test_every_two_values_meet_and_rows_by_hand_stay(tmp_path: Path) -> None:
    rows = kept(tmp_path)
    assert len(rows["test_two"]) == 12 and len(rows["test_by_hand"]) == 5
    three = rows["test_three"]
    met = {pair for row in three for pair in combinations(sorted(row.items()), 2)}
    assert len(met) == 4 * 3 + 4 * 2 + 3 * 2 and 12 <= len(three) <= 14
    more = rows["test_by_hand_and_more"]
    assert {tuple(row[name] for name in "abc") for row in more} >= {(2, "two", 0), (1, "two", 1), (2, "one", 0)}
    assert len({tuple(row[name] for name in "abc") for row in more}) == 5 and {row["d"] for row in more} == {5, 7}
    assert {(row["a"], row["d"]) for row in more} == {(a, d) for a in (1, 2, 3) for d in (5, 7)}
