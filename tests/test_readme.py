"""README as a newcomer takes it: its install lines, its blocks and what they print, its commands, as they stand."""

import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from polydraft.fetched import place

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
SPEED = re.compile(r"[\d.]+ tokens/s, [\d.]+ tokens per call")
"""What depends on the machine."""


def snippets(text: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield the blocks of Python: the line before each, its code, and what the page says that it prints, or None."""
    fences = list(FENCE.finditer(text))
    for one, behind in zip(fences, [*fences[1:], None], strict=True):
        if one[1] == "python":
            told = behind is not None and text[one.end() : behind.start()].strip() == "prints"
            yield text[: one.start(2)].count("\n"), one[2], behind[2] if told and behind is not None else None


def run(snippet: str, line: int = 0) -> None:
    exec(compile("\n" * line + snippet, "README.md", "exec"), {"__name__": "readme"})


def commands(text: str) -> Iterator[list[str]]:
    """Yield the command lines of fences and of inline code that call polydraft."""
    lines = [line for one in FENCE.finditer(text) if not one[1] for line in one[2].splitlines()]
    for line in [*lines, *re.findall(r"`([^`\n]+)`", FENCE.sub("", text))]:
        words = shlex.split(line, comments=True) if line.startswith("polydraft ") else []
        if words[1:]:
            yield words


def installs(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every `pip install`."""
    for line in re.findall(r"^pip install .*$|`pip install [^`]+`", text, re.MULTILINE):
        yield shlex.split(line.strip("`"), comments=True)[2:]


@pytest.mark.parametrize(("line", "snippet", "said"), [*snippets(README)])
def test_a_block_runs_and_prints_what_is_said(
    line: int,
    snippet: str,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run(snippet, line)
    printed = capsys.readouterr().out
    assert printed == said if said is not None else bool(printed) == ("print(" in snippet)


def test_the_quick_start_is_short_and_says_what_it_prints() -> None:
    _, code, said = next(snippets(README))
    assert len([line for line in code.splitlines() if line.strip()]) <= 10 and said is not None


def test_install_lines_name_extras_that_there_are() -> None:
    found = list(installs(README))
    assert len(found) >= 4
    for given in found:
        own = [one for one in given if one.startswith(".")]
        assert own or given == ["torch", "--index-url", "https://download.pytorch.org/whl/cpu"]
        extras = {extra for one in own for extra in one[1:].strip("[]").split(",") if extra}
        assert extras <= PROJECT["optional-dependencies"].keys()
    named = set(re.findall(r"`(\w+)`", README.split("Other extras")[1].split("Versions:")[0]))
    assert named | {"gguf", "dev"} == PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("words", [*commands(README)], ids=" ".join)
def test_commands_are_known(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from typer.main import get_command

    from polydraft.cli.commands import app

    known, rest = get_command(app), words[1:]
    while rest and rest[0] in getattr(known, "commands", {}):
        known, rest = known.commands[rest[0]], rest[1:]
    assert known.name not in (None, "polydraft"), words
    options = {name for one in known.params for name in one.opts}
    assert {word for word in rest if word.startswith("-")} <= options


@pytest.mark.smollm2
def test_the_conversation_is_what_chat_shows(tmp_path: Path) -> None:
    assert place("smollm2").is_dir(), "run `polydraft fetch smollm2` first"
    said = next(one[2] for one in FENCE.finditer(README) if one[2].startswith("smollm2, a context"))
    shown = talked(re.findall(r"^> (.*)$", said, re.MULTILINE), tmp_path)
    lines = [SPEED.sub("SPEED", line) for line in shown.splitlines()]
    for line in SPEED.sub("SPEED", said).splitlines():
        assert line in lines, f"{line!r} is not in {lines}"
        lines = lines[lines.index(line) + 1 :]


def talked(messages: list[str], folder: Path, seconds: float = 300.0) -> str:
    """Return what `polydraft chat` shows to somebody who types these messages at a terminal, and then Ctrl-D."""
    ours, theirs = pty.openpty()
    start = [sys.executable, "-c", "from polydraft_command import main; main()", "chat"]
    shown, late = "", time.monotonic() + seconds
    told = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(start, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=told) as chat:
        for answered, message in enumerate([*(f"{one}\n" for one in messages), "\x04"], start=1):
            while len(re.findall(r"^> ", shown, re.MULTILINE)) < answered:
                assert chat.poll() is None and time.monotonic() < late, shown
                if select.select([ours], [], [], 0.2)[0]:
                    shown = COLOURS.sub("", shown + os.read(ours, 65536).decode(errors="replace")).replace("\r", "")
            os.write(ours, message.encode())
        assert chat.wait(60) == 0
    os.close(ours)
    os.close(theirs)
    return shown


def test_what_is_wrong_is_seen() -> None:
    text = "a\n```python\nx = 1\n```\nprints\n```\n1\n```\n```python\n1 / 0\n```\n"
    text += "```\npolydraft bench --runs 3  # b\n```\n"
    assert list(snippets(text)) == [(2, "x = 1\n", "1\n"), (9, "1 / 0\n", None)]
    with pytest.raises(ZeroDivisionError):
        run("1 / 0")
    with pytest.raises(NameError):
        run("x")
    assert list(commands(text + "`polydraft chat`, `polydraft`, `make`")) == [
        ["polydraft", "bench", "--runs", "3"],
        ["polydraft", "chat"],
    ]
    assert list(installs('pip install ".[a,b]"  # c\n(`pip install ".[d]"`)')) == [[".[a,b]"], [".[d]"]]
