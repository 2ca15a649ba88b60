"""Flags of the command line, made of the options of a dataclass."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from polydraft.errors import InvalidParameter, near
from polydraft.options.option import OptionField, check_range, options_of
from polydraft.options.value_checks import listed


@dataclass(frozen=True)
class Words:
    """A kind of words.

    Args:
        listed: lists them for help.
        check: checks one and returns it as it is used; None where that comes later.
        offered: what a shell completes; every word that it returns can be given.
    """

    listed: Callable[[], str] = str
    check: Callable[[Any], Any] | None = None
    offered: Callable[[], Sequence[str]] = tuple


def flags(options: type, kinds: Mapping[str, Words] | None = None) -> list[inspect.Parameter]:
    """Return the parameters of a command whose flags are a dataclass's options, as typer reads them."""
    return [_parameter(one, kinds or {}) for one in options_of(options) if one.option.flag is not None]


def command(
    options: type, call: Callable[..., Any], kinds: Mapping[str, Words] | None = None, before: Sequence[Any] = ()
) -> Callable[..., None]:
    """Return a function for typer that makes a dataclass of its flags and calls `call` with it.

    Parameters `before` are no options, such as the context, and are handed on first.
    """

    def called(**given: Any) -> None:
        others = [given.pop(one.name) for one in before]
        call(*others, options(**dict(_values(options, given))))

    parameters = [*before, *flags(options, kinds)]
    called.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def one_of(word: str, words: Sequence[str], meant: str | None = None) -> str:
    """Return a word that is among others; `meant` is what it was likely to be, None for the nearest, empty for nothing.

    Raises:
        BadParameter: it is not.
    """
    if word in words:
        return word
    meant = near(word, words) if meant is None else meant
    if meant:
        raise typer.BadParameter(f"{word!r} is not known (did you mean {meant}?).")
    raise typer.BadParameter(f"{word!r} is not one of {', '.join(map(repr, words))}.")


def _values(options: type, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of which something was given: of several values none means the default."""
    for one in options_of(options):
        if one.name not in given:
            continue
        value = given[one.name]
        if not one.several:
            yield one.name, value
        elif value:
            yield one.name, tuple(value)


def _parameter(one: OptionField, kinds: Mapping[str, Words]) -> inspect.Parameter:
    option = one.option
    hint = list[one.kind] if one.several else one.kind
    default = inspect.Parameter.empty if one.is_needed else None if one.several else one.default
    hint = hint | None if one.may_be_none or (one.several and not one.is_needed) else hint
    shown: dict[str, Any] = {"help": option.help, "metavar": option.metavar, "rich_help_panel": option.panel}
    words = _words(option.words, kinds)
    shown["help"] = shown["help"].replace("{words}", words.listed()) if words else shown["help"]
    shown |= {"min": option.least, "max": option.most, "envvar": option.variable}
    shown["callback"] = _check(one, words)
    shown["autocompletion"] = _completion(words)
    names = () if option.argument else (option.flag or f"--{one.name.replace('_', '-')}").split()
    info = typer.Argument(**shown) if option.argument else typer.Option(*names, **shown)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(one.name, kind, default=default, annotation=Annotated[hint, info])


def _words(words: tuple[str, ...] | str, kinds: Mapping[str, Words]) -> Words | None:
    if isinstance(words, str):
        return kinds[words]
    return Words(lambda: listed(words), lambda word: one_of(word, words), lambda: words) if words else None


def _completion(words: Words | None) -> Callable[[str], list[str]] | None:
    """Return what typer calls with the beginning of a word; None where files are completed."""
    if words is None:
        return None
    return lambda incomplete: [word for word in words.offered() if word.startswith(incomplete)]


def _check(one: OptionField, words: Words | None) -> Callable[[Any], Any] | None:
    """Return what typer calls with a value: bounds, then words, then the option's own check."""
    option = one.option
    flag = (option.flag or f"--{one.name.replace('_', '-')}").split()[0]
    each = words.check if words else None
    if option.largest is None and option.range is None and each is None and option.check is None:
        return None

    def checked(value: Any) -> Any:
        several = value if isinstance(value, list) else [] if value is None else [value]
        for number in several if option.largest is not None else ():
            if number > option.largest:
                raise InvalidParameter(f"{flag} is at most {option.largest}, but {number} was given.")
        for number in several:
            check_range(one, number, flag)
        if each is not None and value is not None:
            value = [each(word) for word in value] if isinstance(value, list) else each(value)
        return value if option.check is None or value is None else option.check(value)

    return checked
