"""Options given as keywords of Python: outside their bounds they are refused by name."""

from collections.abc import Mapping
from typing import Any

from polydraft.errors import InvalidParameter, is_number, is_whole, shown
from polydraft.options.option import Given, options_of


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


def _check(one: Given, value: Any) -> None:
    least, most, words, bounds = one.option.least, one.option.most, one.option.words, one.option.range
    if bounds is not None:
        whole = one.kind is int
        if not (is_whole(value) if whole else is_number(value)) or value not in bounds:
            kind = "" if bounds.most is not None else "an integer " if whole else "a finite number "
            raise InvalidParameter(f"{one.name} must be {kind}{bounds}, but is {shown(value)}.")
    if least is not None and not value >= least:
        raise InvalidParameter(f"{one.name} must be at least {least}, but is {value}.")
    if most is not None and not value <= most:
        raise InvalidParameter(f"{one.name} must be at most {most}, but is {value}.")
    if words and not isinstance(words, str) and value not in words:
        raise InvalidParameter(f"{one.name} must be one of {', '.join(words)}, but is {value!r}.")
