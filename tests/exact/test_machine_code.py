"""Loops in machine code: compiled once, kept on disk or not, said but not counted, and never Ctrl-C's end."""

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from polydraft.machine_code import clock, compiled, standstill, told_first


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


@compiled
def half(value: float) -> float:
    return 1 / value


def halves_by_another(values: np.ndarray) -> float:
    total = 0.0
    for value in values:
        total += half(value)
    return total


def test_compiled_functions_of_a_file_call_each_other():
    assert compiled(halves_by_another)(np.array([1.0, 2.0, 4.0])) == halves(np.array([1.0, 2.0, 4.0]))


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


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_what_a_signal_raises_in_machine_code_is_raised_as_it_is(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    def beside_a_result(*_: object) -> object:
        raise SystemError("CPUDispatcher(...) returned a result with an exception set") from raised()

    monkeypatch.setattr("polydraft.machine_code._made", lambda _: beside_a_result)
    with pytest.raises(raised):
        compiled(halves)(np.array([1.0]))


def test_another_error_of_the_system_stays_one(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> object:
        raise SystemError("bad argument to internal function")

    monkeypatch.setattr("polydraft.machine_code._made", lambda _: broken)
    with pytest.raises(SystemError, match="bad argument"):
        compiled(halves)(np.array([1.0]))


def test_the_clock_stands_still_inside_and_in_this_thread_alone():
    begin, others = (time.perf_counter(), clock()), list[float]()
    with standstill():
        time.sleep(0.02)
        with standstill():
            time.sleep(0.02)
        time.sleep(0.02)
        thread = threading.Thread(target=lambda: others.append(time.perf_counter() - clock()))
        thread.start()
        thread.join()
    away = (time.perf_counter() - begin[0]) - (clock() - begin[1])
    assert 0.06 <= away <= time.perf_counter() - begin[0]
    assert others == pytest.approx([0.0], abs=1e-3)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Callable[..., Any]]:
    """Gives a function anew, as another process has it, whose machine code is kept in a folder of the test's own."""
    path = tmp_path / "loops.py"
    path.write_text(
        "def halves(values):\n    total = 0.0\n    for value in values:\n        total += value / 2\n    return total\n"
    )
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))

    monkeypatch.syspath_prepend(tmp_path)

    def made() -> Callable[..., Any]:
        monkeypatch.delitem(sys.modules, "loops", raising=False)
        return compiled(importlib.import_module("loops").halves)

    return made


SINGLE, DOUBLE = np.array([1.0, 2.0], np.float32), np.array([1.0, 2.0])


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said of compiling."""
    monkeypatch.setattr("polydraft.machine_code._TOLD", [])
    return []


def test_compiling_is_said_once_before_it_and_not_counted_and_loading_is_silent(
    kept: Callable[[], Callable[..., Any]], said: list[str]
):
    halves = kept()
    with told_first(lambda: said.append("compiling")):
        begin = time.perf_counter(), clock()
        assert halves(DOUBLE) == halves(SINGLE) == 1.5
        whole, counted = time.perf_counter() - begin[0], clock() - begin[1]
        assert said == ["compiling"] and counted < whole / 2
    with told_first(lambda: said.append("again")):
        assert kept()(DOUBLE) == 1.5
    assert said == ["compiling"]


def broken_index(files: list[Path]) -> None:
    for path in files:
        if path.suffix == ".nbi":
            path.write_bytes(path.read_bytes()[:20])


def broken_code(files: list[Path]) -> None:
    for path in files:
        if path.suffix == ".nbc":
            path.write_bytes(path.read_bytes()[:100])


def code_of_other_types(files: list[Path]) -> None:
    """As two processes leave it that have both found no file, and take the same name for different types."""
    first, second = (path for path in sorted(files) if path.suffix == ".nbc")
    second.write_bytes(first.read_bytes())


def no_code(files: list[Path]) -> None:
    for path in files:
        if path.suffix == ".nbc":
            path.unlink()


@pytest.mark.parametrize("harm", [broken_index, broken_code, code_of_other_types, no_code])
def test_what_is_broken_on_disk_is_made_anew(
    harm: Callable[[list[Path]], None], kept: Callable[[], Callable[..., Any]], said: list[str], tmp_path: Path
):
    halves = kept()
    assert halves(DOUBLE) == halves(SINGLE) == 1.5
    harm([path for path in (tmp_path / "kept").rglob("*") if path.is_file()])
    for process in range(3):
        with told_first(lambda process=process: said.append(f"compiling in process {process}")):
            again = kept()
            assert again(DOUBLE) == again(SINGLE) == 1.5
    assert said[0] == "compiling in process 0" and "compiling in process 2" not in said


@pytest.mark.skipif(os.name != "posix", reason="rights of folders")
def test_a_folder_that_loses_its_rights_is_no_error(
    kept: Callable[[], Callable[..., Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refused(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    halves = kept()
    assert halves(DOUBLE) == 1.5
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._open_for_write", refused)
    assert halves(SINGLE) == 1.5
    broken_index([*(tmp_path / "kept").rglob("*.nbi")])
    assert kept()(DOUBLE) == 1.5
