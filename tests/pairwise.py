"""Which rows of a test with several parameters the fast suite runs: enough for every two values to meet.

A test of rules, trees and temperatures has a row for each combination. Mistakes hang on one value or on two of them
together, hardly ever on three; so the fast suite runs rows until every two values have met that meet anywhere, and
the other rows are slow (`make test-slow`). What one `parametrize` lists together meets as it is listed.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations, groupby

import pytest

Needs = frozenset[Hashable]


def covering(rows: Sequence[Needs]) -> set[int]:
    """Return the places of rows that have together what all rows have; those that bring much are taken first."""
    met, taken = set[Hashable](), set[int]()
    for least in range(max(map(len, rows), default=0), 0, -1):
        for place, own in enumerate(rows):
            if len(own - met) >= least:
                met |= own
                taken.add(place)
    return taken


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the rows of each test that the fast suite can do without."""
    rows = (one for one in items if isinstance(one, pytest.Function) and hasattr(one, "callspec"))
    for _, group in groupby(rows, key=lambda one: (one.path, one.cls, one.originalname)):
        fast = [one for one in group if not any(one.iter_markers("slow"))]
        taken = covering([needs_of(one) for one in fast])
        for place, one in enumerate(fast):
            if place not in taken:
                one.add_marker(pytest.mark.slow)


def needs_of(row: pytest.Function) -> Needs:
    """Return the row's pairs of values, and what each of its lists of parameters gives."""
    params: dict[str, object] = row.callspec.params  # pyright: ignore  not typed in pytest
    values = {name: id(value) for name, value in params.items()}  # rows share the objects that are listed
    lists = [one.args[0] for one in row.iter_markers("parametrize")]
    together = [tuple(one.replace(" ", "").split(",")) if isinstance(one, str) else tuple(one) for one in lists]
    listed = {names: tuple(values[name] for name in names) for names in together}
    return frozenset([*combinations(values.items(), 2), *listed.items()])
