"""An option that is written once is a flag with its help, a checked keyword and a field of requests."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError, create_model
from typer.main import get_command
from typer.testing import CliRunner

from polydraft.catalogue import tables
from polydraft.cli.commands import app
from polydraft.cli.option_words import KINDS
from polydraft.errors import InvalidParameter
from polydraft.options.commands.generate_options import ChatOptions, GenerateOptions
from polydraft.options.commands.serve_options import Settings
from polydraft.options.flags import command
from polydraft.options.option import (
    LARGEST_COUNT,
    Option,
    Range,
    ServerField,
    check,
    check_keywords,
    count,
    option,
    options_of,
)
from polydraft.options.sampling_options import Sampling
from polydraft.options.server_fields import fields
from polydraft.probs import SamplingParams
from polydraft.server.wire.requests import ChatBody, CompletionBody


@dataclass(frozen=True, kw_only=True)
class Added(Sampling):
    """The options of sampling, and one more, which is written here and nowhere else."""

    warmth: float | None = option(
        None, "Warms the text.", "Sampling", range=Range(above=0, most=1), field=ServerField(0.5)
    )


@dataclass(frozen=True, kw_only=True)
class Odd:
    """Options of every kind."""

    files: tuple[Path, ...] = Option("What is read.", argument=True).needed()
    numbers: tuple[int, ...] = count((4, 5), "Several numbers.", "Numbers", least=2, flag="--number -n")
    level: str = option("low", "One of {words}.", words=("low", "high"))
    quiet: bool = option(False, "Say nothing.")
    hidden: int = option(7, "Only a keyword.", flag=None, least=1)
    plain: int = 3


def called(options: type, *arguments: str, kinds: Any = None) -> tuple[Any, str]:
    """Return the dataclass that a command makes of its arguments, and what it printed or complained of."""
    made, group = list[Any](), typer.Typer(add_completion=False)
    group.command()(command(options, made.append, kinds))
    done = CliRunner().invoke(group, arguments)
    error = done.exception if isinstance(done.exception, InvalidParameter) else ""
    return (made[0] if made else None), f"{done.output}{error}"


def test_an_added_option_is_a_flag_a_keyword_and_a_field() -> None:
    assert "Warms the text." in called(Added, "--help")[1]
    assert called(Added)[0].warmth is None and called(Added, "--warmth", "0.25")[0].sampling["temperature"] == 0
    assert called(Added, "--warmth", "0.25")[0].warmth == 0.25
    check_keywords(Added, {"warmth": 1})
    for wrong in (0, 2, float("nan"), True, "0.5"):
        with pytest.raises(InvalidParameter, match=r"^warmth must be in \(0, 1\], but is "):
            check_keywords(Added, {"warmth": wrong})
    body: Any = create_model("Body", **fields(Added))
    assert body().warmth == 0.5 and body(warmth=1).warmth == 1 and body().temperature == 1
    for wrong in (0, 2, float("nan"), True, "0.5", None):
        with pytest.raises(ValidationError):
            body(warmth=wrong)


@pytest.mark.parametrize("name", [one.name for one in options_of(Sampling) if one.option.field])
def test_every_option_of_sampling_is_everywhere(name: str) -> None:
    flag, wrong = f"--{name.replace('_', '-')}", -2.0 if name != "top_k" else -2
    shown: Any = get_command(app)
    for words in ("generate", "chat"):
        assert any(flag in one.opts for one in shown.commands[words].params)
    with pytest.raises(InvalidParameter, match=f"^{name} must be "):
        check_keywords(Sampling, {name: wrong})
    if name != "repetition_penalty":
        with pytest.raises(InvalidParameter, match=f"^{name} must be "):
            SamplingParams(**{name: wrong})
    given: dict[type, dict[str, Any]] = {CompletionBody: {"prompt": "a"}, ChatBody: {"messages": [{"role": "user"}]}}
    for body, least in given.items():
        assert name in body(**least).model_dump()
        with pytest.raises(ValidationError):
            body(**least, **{name: wrong})


def test_the_command_makes_the_dataclass() -> None:
    assert called(Odd, "a", "b")[0] == Odd(files=(Path("a"), Path("b")))
    found, _ = called(Odd, "a", "-n", "2", "--number", "3", "--level", "high", "--quiet")
    assert found == Odd(files=(Path("a"),), numbers=(2, 3), level="high", quiet=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing argument"),
        (("a", "--number", "1"), "--number"),
        (("a", "--number", str(2**40)), f"--number is at most {LARGEST_COUNT}, but {2**40} was given."),
        (("a", "--level", "hihg"), "did you mean high?"),
        (("a", "--hidden", "2"), "No such option"),
        (("a", "--plain", "2"), "No such option"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], says: str) -> None:
    found, said = called(Odd, *arguments)
    assert found is None and says in re.sub(r"[│\s]+", " ", said)


def test_wrong_keywords_are_refused() -> None:
    check(Odd(files=()))
    for wrong, says in (
        ({"numbers": (4, 1)}, "numbers must be at least 2, but is 1."),
        ({"level": "hihg"}, "level must be one of low, high, but is 'hihg'."),
        ({"hidden": 0}, "hidden must be at least 1, but is 0."),
    ):
        with pytest.raises(InvalidParameter, match=f"^{says}$"):
            check(Odd(files=(), **wrong))
    with pytest.raises(InvalidParameter, match=r"^plan must be one of auto, goodput, but is 'atuo'\.$"):
        Settings(plan="atuo")


def test_words_in_help_are_those_that_are_taken() -> None:
    said = called(Odd, "--help")[1]
    assert "One of low or high." in said
    shown: Any = get_command(app)
    helps = {one.name: one.help for one in shown.commands["generate"].params}
    assert all(line.word in helps["scheme"] for line in tables.SCHEMES)


def test_an_option_of_chat_is_that_of_generate() -> None:
    options = ChatOptions(temperature=0.5, target="x", seed=3, min_p=0.1)
    assert options.of_a_text == GenerateOptions(
        target="x", temperature=0.5, seed=3, min_p=0.1, max_new_tokens=options.max_new_tokens
    )
    assert options.sampling == {"temperature": 0.5, "min_p": 0.1, "top_k": 0}


@pytest.mark.parametrize(
    ("numbers", "inside", "outside", "words"),
    [
        (Range(0, 1), (0, 0.5, 1), (-0.1, 1.1), "in [0, 1]"),
        (Range(above=0, most=1), (0.1, 1), (0, 2), "in (0, 1]"),
        (Range(0), (0, 1e300, 10**400), (-1, float("inf"), float("nan")), ">= 0"),
        (Range(above=0), (1e-300,), (0, float("inf")), "> 0"),
    ],
)
def test_ranges(numbers: Range, inside: tuple[float | int, ...], outside: tuple[float, ...], words: str) -> None:
    assert all(one in numbers for one in inside) and not any(one in numbers for one in outside)
    assert str(numbers) == words


def test_every_kind_of_words_is_known() -> None:
    kinds: dict[str, Callable[..., Any]] = {}
    for options in (GenerateOptions, ChatOptions, Settings):
        for one in options_of(options):
            if isinstance(one.option.words, str):
                kinds[one.option.words] = options
    assert kinds.keys() <= KINDS.keys()
