"""Fetch something once: download, check, make, and only then give it its name, so that what is there is complete."""

import os
import shutil
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock, Timeout

from polydraft.errors import FetchError, InvalidParameter, hint, shown
from polydraft.fetched import PLACE, is_there, place
from polydraft.fetching.catalogue import FETCHABLE, Fetchable
from polydraft.fetching.downloading import by_address, by_pip, hash_of, is_as_known

WAITING, DOWNLOADING, CHECKING, MAKING = "waiting", "downloading", "checking", "making"
Report = Callable[[str, int], None]
"""Told the step in progress and the bytes that are there."""


def fetch(what: str | Fetchable, source: str | Path | None = None, report: Report | None = None) -> Path:
    """Bring something into the cache folder, unless it is there, and return its place.

    An attempt that was interrupted is gone on from: a download that was finished is not repeated. Two attempts at the
    same time wait for one another.

    Args:
        what: a word of `FETCHABLE`, such as "smollm2".
        source: the file that would be downloaded, where it is at hand.
        report: told what is being done.

    Raises:
        InvalidParameter: there is nothing of that word.
        FetchError: it cannot be downloaded, is not what it should be, or cannot be kept; why.
        MissingExtra: a package that is needed to make it is not installed.
    """
    one = _named(what)
    tell = report or _tell_nobody
    goal = place(one.word)
    try:
        if is_there(one.word):
            if source is not None:  # what is given is looked at, whether or not it is needed
                _given(one, Path(source), tell)
            return goal
        if goal.exists():
            raise FetchError(f"{one.word} cannot be kept as {goal}: something else lies there; move it away.")
        goal.parent.mkdir(parents=True, exist_ok=True)
        with _alone(goal, tell):
            if not goal.exists():
                _fetch(one, goal, None if source is None else Path(source), tell)
    except OSError as error:
        raise FetchError(
            f"{one.word} cannot be kept in {goal.parent}: {error.strerror or error}; {PLACE} names another folder."
        ) from error
    except HTTPException as error:
        raise FetchError(f"{one.word} cannot be fetched: the server answers with {type(error).__name__}.") from error
    return goal


def _named(what: str | Fetchable) -> Fetchable:
    if isinstance(what, Fetchable):
        return what
    if not isinstance(what, str) or what not in FETCHABLE:
        there = f"there is {' and '.join(FETCHABLE)}"
        raise InvalidParameter(f"There is no {shown(what)} to fetch{hint(what, FETCHABLE)}; {there}.")
    return FETCHABLE[what]


def _tell_nobody(step: str, done: int) -> None:
    return


class _alone:
    """Hold the lock of a place; say so if it must be waited for."""

    def __init__(self, goal: Path, tell: Report) -> None:
        self.lock, self.tell = FileLock(goal.parent / f".{goal.name}.lock"), tell

    def __enter__(self) -> None:
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            self.tell(WAITING, 0)
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def _fetch(one: Fetchable, goal: Path, source: Path | None, tell: Report) -> None:
    work, half = goal.parent / f".{goal.name}.work", goal.parent / f".{goal.name}.half"
    _remove(half)
    work.mkdir(exist_ok=True)
    _check_space(one, goal.parent)
    file = _downloaded(one, work, tell) if source is None else _given(one, source, tell)
    tell(MAKING, one.remote.size)
    try:
        one.make(file, half)
        os.replace(half, goal)
    finally:
        _remove(half)
    _remove(work)


def _downloaded(one: Fetchable, work: Path, tell: Report) -> Path:
    """Return the file, downloaded now or by an earlier attempt.

    Raises:
        FetchError: it is another one than is known.
    """
    remote, whole = one.remote, work / one.remote.name
    if is_as_known(whole, remote.size, remote.sha256):
        return whole
    tell(DOWNLOADING, 0)

    def progress(done: int) -> None:
        tell(DOWNLOADING, min(done, remote.size))

    if remote.requirement:
        found = by_pip(remote.requirement, remote.name, work, progress)
    else:
        found = by_address(remote.url, work / f"{remote.name}.part", remote.size, progress)
    tell(CHECKING, remote.size)
    if not is_as_known(found, remote.size, remote.sha256):
        sentence = _other(one, found, "what was downloaded")
        found.unlink()
        raise FetchError(f"{sentence}; it was deleted.")
    os.replace(found, whole)
    return whole


def _given(one: Fetchable, source: Path, tell: Report) -> Path:
    """Return the file that the user has.

    Raises:
        FetchError: it is another one than is known.
    """
    tell(CHECKING, one.remote.size)
    if not source.is_file():
        raise FetchError(f"There is no file {source}; give {one.remote.name}.")
    if not is_as_known(source, one.remote.size, one.remote.sha256):
        raise FetchError(f"{_other(one, source, str(source))}.")
    return source


def _other(one: Fetchable, found: Path, name: str) -> str:
    size, remote = found.stat().st_size, one.remote
    if size != remote.size:
        return f"{remote.name} has {remote.size} bytes, but {name} has {size}"
    return f"{remote.name} has the SHA-256 {remote.sha256}, but {name} has {hash_of(found)}"


def _check_space(one: Fetchable, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < one.space:
        raise FetchError(
            f"Fetching {one.word} needs {_megabytes(one.space)}, but {folder} has {_megabytes(free)} left; free some, "
            f"or name another folder in {PLACE}."
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
