"""A browser, the page's server, and what tests of the page do again and again.

They need Debian's Chromium (or another by `POLYDRAFT_CHROMIUM`), playwright, starlette and uvicorn, and are skipped
with the reason where one is missing; those of accessibility need axe-core's `axe.min.js` as well, which
`make test-browser` fetches (or `POLYDRAFT_AXE` names). `POLYDRAFT_SCREENSHOTS` names a folder for a picture of every
page at the end of its test, to be looked at.
"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from chatml import save_chat_model

HERE = Path(__file__).parent
CHROMIUM = os.environ.get("POLYDRAFT_CHROMIUM", "/usr/bin/chromium")
AXE = Path(os.environ.get("POLYDRAFT_AXE") or Path(sys.prefix) / "axe-core" / "package" / "axe.min.js")


PICTURES = os.environ.get("POLYDRAFT_SCREENSHOTS")
SERVE = ("-c", "from polydraft_command import main; main()", "serve", "--threads", "1", "--port", "{port}")


class Serving:
    """A server as a process, which can die and come back at the same address."""

    def __init__(self, *command: str) -> None:
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [sys.executable, *(word.format(port=self.port) for word in command)]
        self.url = f"http://127.0.0.1:{self.port}/"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)
        end = time.monotonic() + 240
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(self.url + "health", timeout=2).close()
                return
            except OSError:
                assert self.process.poll() is None, "the server ended instead of starting"
                time.sleep(0.1)
        raise TimeoutError("the server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Let it end its own processes."""
        self.process.terminate()
        self.process.wait(30)


class FakeServer(Serving):
    """The fake server."""

    def __init__(self) -> None:
        super().__init__(str(HERE / "fake_server.py"), "{port}")


@pytest.fixture(scope="session")
def server() -> Iterator[FakeServer]:
    pytest.importorskip("starlette", reason="the fake server needs starlette")
    pytest.importorskip("uvicorn", reason="the fake server needs uvicorn")
    server = FakeServer()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def real_server() -> Iterator[Serving]:
    """The real server with the embedded pair."""
    pytest.importorskip("fastapi", reason="the server needs the extra serve")
    server = Serving(*SERVE)
    yield server
    server.end()


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The real server with a tiny chat model, whose words are random."""
    pytest.importorskip("fastapi", reason="the server needs the extra serve")
    folder = save_chat_model(tmp_path_factory.mktemp("models") / "chat")
    server = Serving(*SERVE, "--target", str(folder), "--model-name", "tiny-chat")
    yield server
    server.end()


@pytest.fixture(scope="session")
def browser() -> Iterator:
    api = pytest.importorskip("playwright.sync_api", reason="tests of the page need playwright")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no Chromium at {CHROMIUM}; name one with POLYDRAFT_CHROMIUM")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, request: pytest.FixtureRequest) -> Iterator[Callable]:
    """Open the page in a window of its own; at the end no script may have failed and no policy been broken."""
    contexts, failures = [], []

    def opened(url: str = "", width: int = 1280, height: int = 800, watch: Callable | None = None, **options):
        url = url or request.getfixturevalue("server").url
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda said: failures.append(said.text) if "Content Security Policy" in said.text else None)
        if watch:
            watch(page)
        page.goto(url)
        page.wait_for_selector("#link[data-state=well]")
        return page

    yield opened
    if PICTURES:
        save_pictures([page for context in contexts for page in context.pages], Path(PICTURES), request.node.name)
    for context in contexts:
        context.close()
    assert not failures


def save_pictures(pages: Sequence, folder: Path, name: str) -> None:
    """Save how pages look from top to bottom, under the name of their test."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, page in enumerate(pages):
        place = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:120]
        page.screenshot(path=folder / f"{place}-{number}.png", full_page=True)


@pytest.fixture
def page(open_page: Callable):
    return open_page()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    if not AXE.is_file():
        pytest.skip(
            f"accessibility was not checked: no axe-core at {AXE}; `make test-browser` fetches it if npm is there"
        )
    return AXE.read_text()


def pytest_terminal_summary(terminalreporter) -> None:
    """Say what was skipped and why, also where pytest was not asked."""
    if terminalreporter.hasopt("s"):
        return
    for report in terminalreporter.stats.get("skipped", ()):
        if "server_page" in report.nodeid:
            terminalreporter.write_line(f"SKIPPED {report.nodeid}: {report.longrepr[2]}")
