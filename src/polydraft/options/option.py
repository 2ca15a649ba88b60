"""An option: what it says of itself, and what it may be. It stands on a field of a dataclass, which has its default."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from math import inf
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from polydraft.errors import InvalidParameter, is_number, is_whole, shown

_KEY = "polydraft option"
LARGEST_COUNT, LARGEST_SEED = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True)
class Range:
    """The finite numbers from `least`, or above `above`, to `most`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            -inf < number < inf  # comparisons, since a whole number may be too large for a float
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
        )

    def __str__(self) -> str:
        """Return the numbers in words that stand behind "a finite number" or "an integer"; of an interval the whole."""
        if self.most is not None:
            return f"in ({self.above}, {self.most}]" if self.above is not None else f"in [{self.least}, {self.most}]"
        return f"> {self.above}" if self.above is not None else f">= {self.least}"


@dataclass(frozen=True)
class ServerField:
    """An option as a field of requests to the server.

    Args:
        default: what it is where a request does not say it.
        least, most: where requests are held to other bounds than `Option.range`.
        longest: the most characters of a text, which has one at least.
    """

    default: Any = None
    least: float | None = None
    most: float | None = None
    longest: int | None = None


@dataclass(frozen=True)
class Option:
    """What is known of an option but its name, type and default, which are those of the field that it stands on.

    Args:
        help: a sentence for users. `{words}` in it becomes the list of the words.
        panel: the heading under which help shows it; None for the first.
        least, most: the smallest and the largest number; help shows them.
        largest: a number beyond all reason, which is refused in a sentence of its own.
        range: the numbers that it may be where it is used; unlike bounds these do not stand in the help.
        words: the words that it may be; or the name of a kind of words, which whoever makes flags of it knows.
        flag: how it is spelt on the command line, with several names parted by spaces; "" for its field's name, None
            where the command line has no such option.
        field: how requests to the server have it; None where they do not.
        argument: whether it stands on the command line without a name.
        metavar: what help calls its value.
        check: looks at a value, and returns it as it is used.
        variable: an environment variable that may hold it.
    """

    help: str
    panel: str | None = None
    least: float | None = None
    most: float | None = None
    largest: int | None = None
    range: Range | None = None
    words: tuple[str, ...] | str = ()
    flag: str | None = ""
    field: ServerField | None = None
    argument: bool = False
    metavar: str | None = None
    check: Callable[[Any], Any] | None = None
    variable: str | None = None

    def usually(self, default: Any) -> Any:
        """Return a dataclass's field with this option and a default."""
        return field(default=default, metadata={_KEY: self})

    def needed(self) -> Any:
        """Return a dataclass's field with this option, which must be given."""
        return field(metadata={_KEY: self})

    def but(self, **changes: Any) -> "Option":
        """Return this option with something else of it."""
        return replace(self, **changes)


def option(default: Any, help: str, panel: str | None = None, **others: Any) -> Any:
    """Return a dataclass's field with an option that no other class has; see `Option`."""
    return Option(help, panel, **others).usually(default)


def count(default: Any, help: str, panel: str | None = None, least: int = 1, **others: Any) -> Any:
    """Return a dataclass's field with an option that is a number of things."""
    return option(default, help, panel, least=least, largest=LARGEST_COUNT, **others)


@dataclass(frozen=True)
class OptionField:
    """A field of a dataclass on which an option stands.

    Args:
        name: the field's name.
        kind: the type of one value.
        option: the option.
        default: what it usually is; `dataclasses.MISSING` if it must be given.
        several: whether it is a tuple of values.
        may_be_none: whether it may be None.
    """

    name: str
    kind: Any
    option: Option
    default: Any
    several: bool
    may_be_none: bool

    @property
    def is_needed(self) -> bool:
        """Whether it has no default."""
        return self.default is MISSING


@cache
def options_of(kind: type) -> tuple[OptionField, ...]:
    """Return the options of a dataclass in the order of its fields."""
    hints, found = get_type_hints(kind), list[OptionField]()
    for one in fields(kind):
        if _KEY in one.metadata:
            hint, may_be_none = _without_none(hints[one.name])
            several = get_origin(hint) is tuple
            of_one = get_args(hint)[0] if several else hint
            found.append(OptionField(one.name, of_one, one.metadata[_KEY], one.default, several, may_be_none))
    return tuple(found)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    kinds = [one for one in get_args(hint) if one is not NoneType]
    return (kinds[0] if len(kinds) == 1 else Union[tuple(kinds)]), len(kinds) < len(get_args(hint))  # noqa: UP007


def check(options: Any) -> None:
    """Check the options of a dataclass's instance; None is an option that was not given.

    Raises:
        InvalidParameter: a number is outside its bounds, or a word is none of those there are.
    """
    given = {one.name: getattr(options, one.name) for one in options_of(type(options))}
    check_keywords(type(options), {name: value for name, value in given.items() if value is not None})


def check_keywords(options: type, given: Mapping[str, Any]) -> None:
    """Check keywords that are named as the options of a dataclass.

    Raises:
        InvalidParameter: a number is outside its bounds, or a word is none of those there are.
    """
    for one in options_of(options):
        if one.name in given:
            value = given[one.name]
            for each in value if one.several else (value,):
                _check(one, each)


def _check(one: OptionField, value: Any) -> None:
    least, most, words = one.option.least, one.option.most, one.option.words
    check_range(one, value, one.name)
    if least is not None and not value >= least:
        raise InvalidParameter(f"{one.name} must be at least {least}, but is {value}.")
    if most is not None and not value <= most:
        raise InvalidParameter(f"{one.name} must be at most {most}, but is {value}.")
    if words and not isinstance(words, str) and value not in words:
        raise InvalidParameter(f"{one.name} must be one of {', '.join(words)}, but is {value!r}.")


def check_range(one: OptionField, value: Any, name: str) -> None:
    """Check that a number is in the range of an option, if that has one.

    Args:
        one: the option.
        value: the number.
        name: what the option is called where it was given.

    Raises:
        InvalidParameter: it is not.
    """
    bounds, whole = one.option.range, one.kind is int
    if bounds is not None and (not (is_whole(value) if whole else is_number(value)) or value not in bounds):
        kind = "" if bounds.most is not None else "an integer " if whole else "a finite number "
        raise InvalidParameter(f"{name} must be {kind}{bounds}, but is {shown(value)}.")
