"""Loops in machine code: compiled once, kept on disk or not, and no compiler where nothing is compiled."""

import subprocess
import sys

import numba
import numpy as np
import pytest

from polydraft.machine_code import compiled


def halves(values: np.ndarray) -> float:
    total = 0.0
    for value in values:
        total += 1 / value
    return total


def test_what_is_compiled_gives_what_python_gives_and_infinity_for_a_division_by_zero():
    machine_code = compiled(halves)
    assert machine_code(np.array([1.0, 2.0, 4.0])) == halves(np.array([1.0, 2.0, 4.0]))
    assert machine_code(np.array([0.0])) == np.inf
    assert machine_code.__name__ == "halves"


def test_it_is_compiled_where_nothing_can_be_kept_on_disk(monkeypatch: pytest.MonkeyPatch):
    plain, asked = numba.njit, []

    def without_a_disk(function: object, cache: bool = False, **options: object) -> object:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return plain(function, **options)

    monkeypatch.setattr(numba, "njit", without_a_disk)
    assert compiled(halves)(np.array([2.0])) == 0.5
    assert asked == [True, False]


def test_the_compiler_is_not_imported_before_it_is_needed():
    code = "import sys, polydraft; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
