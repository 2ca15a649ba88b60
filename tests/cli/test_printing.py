"""Text from outside reaches a terminal without markup and without control characters, and a pipe byte for byte."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from polydraft.bench.speed import difference_table
from polydraft.bench.speed.equality import Difference
from polydraft.bench.speed.summary import TextDifference
from polydraft.cli.benchmark.bench import as_rich
from polydraft.cli.generation import one_text as generating
from polydraft.cli.generation.one_text import given_prompt
from polydraft.cli.printing import console, on_one_line, progress_bar, styled, visible
from polydraft.cli.process import exit_code_of, stopped
from polydraft.errors import InvalidParameter
from polydraft.models import StreamDecoder
from polydraft.training.token_files import train_tokenizer

STEERING = "\x1b[2J \x9b31m \a \b \r \x7f \u202e \u2066 \u2028"
MARKUP = "[/] [bold [red]x[/red] [link=a] :smile:"


def terminal(page: io.StringIO) -> Any:
    shown = console()
    shown.file, shown._force_terminal, shown.width = page, True, 200
    return shown


def test_control_characters_are_written_out_but_tab_and_newline() -> None:
    assert visible("a\tb\nc\x1b[31m\x9b\a\u202e\ud800é漢") == r"a" "\t" "b\n" r"c\x1b[31m\x9b\x07\u202e\ud800é漢"
    assert on_one_line("a\tb\nc\r") == r"a\tb\nc\x0d"


@given(st.text())
def test_what_is_visible_stays_so_and_steers_nothing(text: str) -> None:
    once = visible(text)
    assert visible(once) == once
    assert all(letter in "\t\n" or not 0 <= ord(letter) < 32 for letter in once)


WAYS: dict[str, Any] = {
    "a string": lambda text: text,
    "styled": lambda text: styled(text, "red"),
    "rich's own text": Text,
    "a panel": lambda text: Panel(Text(text), title="t"),
    "a cell": lambda text: table_of(text),
    "a benchmark's table": lambda text: as_rich(difference_table([found(text)])),
}


def table_of(text: str) -> Table:
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    return table


def found(text: str) -> Any:
    return TextDifference(text, text, text, 1, 0, Difference(0, 1, 2, 3, None, False))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", [STEERING, MARKUP])
def test_a_console_prints_any_text_as_it_is(way: str, text: str) -> None:
    page = io.StringIO()
    plain = console(width=200)
    plain.file = page
    plain.print(WAYS[way](text))
    shown = page.getvalue()
    assert visible(shown) == shown
    if text == MARKUP:
        assert MARKUP in shown
    else:
        assert r"\x9b31m" in shown and r"\u202e" in shown


def test_a_description_of_a_bar_is_no_markup() -> None:
    plain = console(width=200)
    plain.file = io.StringIO()
    with progress_bar(plain, silent=True) as bar:
        bar.add_task(MARKUP, total=2)
        plain.print(bar.get_renderable())
    assert MARKUP in plain.file.getvalue()


def test_an_escape_over_several_tokens_is_written_out_on_a_terminal_and_kept_in_a_pipe() -> None:
    tokenizer = train_tokenizer(["def add(a, b):\n    return a + b\n"] * 20, vocab_size=300, context=64)
    text = "a\x1b]0;title\a\x9b2Jé\tb"
    for is_terminal, expected in ((True, visible(text)), (False, text)):
        page = io.StringIO()
        shown = terminal(page)
        shown._force_terminal, shown._color_system = is_terminal, None
        decoder = StreamDecoder(tokenizer)
        ids = tokenizer(text)["input_ids"]
        assert len(ids) > 10
        for token in ids:
            generating.write_text(shown, decoder.add(token), "bold")
        generating.write_text(shown, decoder.rest(), "bold")
        assert page.getvalue().replace("        ", "\t") == expected.replace("        ", "\t")


def fails(error: BaseException) -> Any:
    def command() -> None:
        raise error

    return command


def test_an_error_of_ours_is_one_sentence_and_exit_code_70(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["polydraft"])
    assert exit_code_of(fails(KeyError("a\nb"))) == 70
    said = capsys.readouterr().err
    assert said.startswith("polydraft: unexpected error, please report") and said.count("\n") == 1
    assert "KeyError" in said and "Traceback" not in said
    monkeypatch.setenv("POLYDRAFT_DEBUG", "1")
    assert exit_code_of(fails(KeyError("a"))) == 70
    assert "Traceback" in capsys.readouterr().err


INTERRUPTED = "polydraft: Interrupted: nothing was kept.\n"


def beside_a_result(error: BaseException) -> SystemError:
    """What Python makes of an exception that comes while something in C returns a result."""
    made = SystemError("returned a result with an exception set")
    made.__cause__ = error
    return made


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, INTERRUPTED),
        (beside_a_result(KeyboardInterrupt()), 130, INTERRUPTED),
        (BrokenPipeError(), 141, ""),
        (InvalidParameter("x\x1b is\nbad."), 2, "polydraft: x\\x1b is\\nbad.\n"),
    ],
)
def test_how_a_command_ends(
    error: BaseException,
    code: int,
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["polydraft"])
    assert exit_code_of(fails(error)) == code
    assert capfd.readouterr().err == said


def test_ctrl_c_is_said_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["polydraft"])

    def command() -> None:
        stopped("one\nthing is kept")
        raise KeyboardInterrupt  # pressed again as what is kept was printed

    assert exit_code_of(command) == 130
    assert capfd.readouterr().err == "polydraft: Interrupted: one\\nthing is kept.\n"
    assert exit_code_of(fails(KeyboardInterrupt())) == 130
    assert capfd.readouterr().err == INTERRUPTED


def test_ctrl_c_that_the_parser_made_a_code_of_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["polydraft"])
    parser = typer.Typer()
    parser.command()(fails(KeyboardInterrupt()))  # as while a model loads, where no command catches it
    assert exit_code_of(lambda: parser([], standalone_mode=False)) == 130
    assert capfd.readouterr().err == INTERRUPTED
    assert exit_code_of(lambda: stopped("it is kept")) == 130
    assert capfd.readouterr().err == "polydraft: Interrupted: it is kept.\n"


def test_a_prompt_from_the_keyboard_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard = io.StringIO("def add")
    monkeypatch.setattr(keyboard, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", keyboard)
    assert given_prompt("-") == "def add"
    assert "Ctrl-D" in capsys.readouterr().err


def test_foreign_names_reach_no_console_but_ours() -> None:
    """Consoles come from one place, so that no command can forget what text from outside may hold."""
    rooms = Path(generating.__file__).parent.rglob("*.py")
    makers = [path.name for path in rooms if "Console(" in path.read_text() and path.parent.name != "printing"]
    assert makers == []
