"""Which rows of a test with several parameters the fast suite runs: enough for every two values to meet.

A test of rules, trees and temperatures has a row for each combination. Mistakes hang on one value or on two of them
together, hardly ever on three; so the fast suite runs rows until every two values have met that meet anywhere, and
the other rows are slow (`make test-slow`). What one `parametrize` lists together meets as it is listed. Of a test that
takes long (`pytest.mark.long`) the fast suite runs rows until every value was met, or no more than it says.
"""

from collections import Counter
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


def spread(rows: Sequence[Needs]) -> set[int]:
    """Return the same of rows that take long: of those that bring equally much, one whose values were met least."""
    met, taken = Counter[Hashable](), set[int]()
    while True:
        new = {place: len(own - met.keys()) for place, own in enumerate(rows)}
        most = max(new.values(), default=0)
        if not most:
            return taken
        place = min((one for one in new if new[one] == most), key=lambda one: sum(met[value] for value in rows[one]))
        met.update(rows[place])
        taken.add(place)


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the rows of each test that the fast suite can do without."""
    rows = (one for one in items if isinstance(one, pytest.Function) and hasattr(one, "callspec"))
    for _, group in groupby(rows, key=lambda one: (one.path, one.cls, one.originalname)):
        fast = [one for one in group if not any(one.iter_markers("slow"))]
        needs = [needs_of(one) for one in fast]
        taken = thinned(spread(needs), fast[0]) if fast and is_long(fast[0]) else covering(needs)
        for place, one in enumerate(fast):
            if place not in taken:
                one.add_marker(pytest.mark.slow)


def thinned(taken: set[int], row: pytest.Function) -> set[int]:
    """Return as many rows as a test that takes long may have, from the first to the last."""
    places, (most, *_) = sorted(taken), [*(one.args[0] for one in row.iter_markers("long") if one.args), len(taken)]
    step = max(1, -(-len(places) // most))
    return set(places[::step])


def needs_of(row: pytest.Function) -> Needs:
    """Return what each of the row's lists of parameters gives, and unless the test is long, its pairs of values."""
    params: dict[str, object] = row.callspec.params  # pyright: ignore  not typed in pytest
    values = {name: id(value) for name, value in params.items()}  # rows share the objects that are listed
    lists = [one.args[0] for one in row.iter_markers("parametrize")]
    together = [tuple(one.replace(" ", "").split(",")) if isinstance(one, str) else tuple(one) for one in lists]
    listed = {names: tuple(values[name] for name in names) for names in together}
    pairs = () if is_long(row) else combinations(values.items(), 2)
    return frozenset([*pairs, *listed.items()])


def is_long(row: pytest.Item) -> bool:
    """Tell whether a test takes long."""
    return any(row.iter_markers("long"))
