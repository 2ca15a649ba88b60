"""Which packages are installed: those that polydraft needs, and those of its extras."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from polydraft.errors import MissingExtra, lowered
from polydraft.extras import EXTRAS, Extra


@dataclass(frozen=True)
class PackageState:
    """A package that polydraft needs.

    Args:
        name: its name.
        wanted: the versions that will do, in pip's words.
        version: the installed one; empty if there is none.
        problem: a sentence; empty if the package can be used.
    """

    name: str
    wanted: str
    version: str
    problem: str


@dataclass(frozen=True)
class ExtraState:
    """An extra: packages that a part of polydraft needs.

    Args:
        name: its name in pyproject.toml.
        serves: the part that needs it.
        install: the command that installs what is missing; empty if nothing is.
        problem: a sentence, if what is installed cannot be used.
    """

    name: str
    serves: str
    install: str
    problem: str


def package_states() -> tuple[PackageState, ...]:
    """Return the packages that polydraft needs; each is imported.

    Raises:
        PackageNotFoundError: polydraft is not installed, so that nothing says what it needs.
    """
    needed = map(Requirement, metadata.requires("polydraft") or ())
    return tuple(_package_state(one) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""}))


def _package_state(needed: Requirement) -> PackageState:
    needed.marker = None
    problem = _problem(Extra("polydraft needs", (str(needed),)).check)
    return PackageState(needed.name, str(needed.specifier), _version(needed.name), problem)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def extra_states() -> tuple[ExtraState, ...]:
    """Return the extras; the packages that are installed are imported."""
    return tuple(_extra_state(name, extra) for name, extra in EXTRAS.items())


def _extra_state(name: str, extra: Extra) -> ExtraState:
    missing = extra.missing
    wanted = " ".join(f'"{one}"' for one in missing)
    there = Extra(extra.purpose, tuple(one for one in extra.requirements if one not in missing))
    serves = extra.purpose.rpartition(" ")[0]
    return ExtraState(name, serves, f"pip install {wanted}" if missing else "", _problem(there.check))


def _problem(check: Callable[[], None]) -> str:
    try:
        check()
    except MissingExtra as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  nobody lists what the import of a damaged package raises
        return f"A package that is installed cannot be imported: {lowered(error)}"
    return ""
