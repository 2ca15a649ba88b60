"""Packages that only a part of polydraft needs: what each part needs, in which versions, and what to say without them.

polydraft itself is on no index, so a sentence names the packages and never an extra of ours.
"""

from dataclasses import dataclass
from importlib import import_module, metadata

from packaging.requirements import Requirement

from polydraft.errors import MissingExtra

BROKEN = (ImportError, AttributeError, OSError, ValueError)
"""What an import ends in where a package is damaged, or was made for other versions of what it stands on."""


@dataclass(frozen=True)
class Extra:
    """What a part of polydraft needs beyond what everything needs.

    Args:
        purpose: which part it is, as the beginning of a sentence: "Figures need".
        requirements: the packages and their versions in pip's words, as pyproject.toml has them.
    """

    purpose: str
    requirements: tuple[str, ...]

    def check(self) -> None:
        """Check that all of it can be used.

        Raises:
            MissingExtra: a package is not installed, has another version, or cannot be imported.
        """
        missing = self.missing
        if missing:
            names = " and ".join(", ".join(map(_name, missing)).rsplit(", ", 1))
            are, wanted = "is" if len(missing) == 1 else "are", " ".join(f'"{one}"' for one in missing)
            raise MissingExtra(f"{self.purpose} {names}, which {are} not installed: pip install {wanted}.")
        for one in self.requirements:
            self._check_version(one)
            self._check_import(one)

    @property
    def missing(self) -> tuple[str, ...]:
        """The requirements whose package is not installed."""
        return tuple(one for one in self.requirements if _is_missing(one))

    def _check_version(self, requirement: str) -> None:
        try:
            found = metadata.version(_name(requirement))
        except metadata.PackageNotFoundError:  # a package without a card says nothing of its version
            return
        if not Requirement(requirement).specifier.contains(found, prereleases=True):
            raise MissingExtra(f'{self.purpose} {requirement}, but {found} is installed: pip install "{requirement}".')

    def _check_import(self, requirement: str) -> None:
        try:
            import_module(_module(requirement))
        except BROKEN as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise MissingExtra(
                f"{self.purpose} {_name(requirement)}, which is installed but cannot be imported ({reason}): "
                f'pip install --upgrade "{requirement}".'
            ) from error


def _name(requirement: str) -> str:
    return Requirement(requirement).name


def _module(requirement: str) -> str:
    return _name(requirement).replace("-", "_")


def _is_missing(requirement: str) -> bool:
    try:
        import_module(_module(requirement))
    except ModuleNotFoundError as error:
        return error.name == _module(requirement)
    except BROKEN:
        return False
    return False


FIGURES = Extra("Figures need", ("matplotlib>=3.9",))
GGUF = Extra("Reading a GGUF file needs", ("accelerate>=1.4,<2", "gguf>=0.18"))
GRAMMAR = Extra("A grammar needs", ("llguidance>=1.3,<2",))
HTTP = Extra("Testing a server needs", ("httpx>=0.27,<1",))
RAY = Extra("A Ray cluster needs", ("ray[serve,data]>=2.60,<3",))
SERVE = Extra(
    "polydraft serve needs",
    ("fastapi>=0.115", "llguidance>=1.3,<2", "pydantic>=2.12,<3", "prometheus-client>=0.20", "uvicorn>=0.30"),
)
TRAIN = Extra("Training needs", ("accelerate>=1.4,<2",))
TUNE = Extra("Tuning skips needs", ("optuna>=4,<6",))
EXTRAS = {
    "serve": SERVE,
    "grammar": GRAMMAR,
    "gguf": GGUF,
    "train": TRAIN,
    "figures": FIGURES,
    "tune": TUNE,
    "http": HTTP,
    "ray": RAY,
}
"""All of them by their names in pyproject.toml."""
