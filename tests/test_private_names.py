"""Private attributes of other packages: all that the source names are listed, and all that are listed are there."""

import ast
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

import pytest
from private_names import PRIVATE, Private

SOURCE = Path(__file__).parents[1] / "src"
ASKING = ("getattr", "setattr", "delattr", "partial")
"""Calls that name an attribute by a string."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name.isidentifier()


def private_names(text: str) -> Iterator[str]:
    """Yield the private names of other packages in a file: what is read off something, and not defined in the file."""
    nodes = list(ast.walk(ast.parse(text)))
    own = {one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {one.id for one in nodes if isinstance(one, ast.Name)} | {
        one.attr
        for one in nodes
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id in ("self", "cls")
    }
    for one in nodes:
        found: list[object] = [one.attr] if isinstance(one, ast.Attribute) else []
        if isinstance(one, ast.ImportFrom) and not (one.module or "").startswith("polydraft"):
            found = [*(one.module or "").split("."), *[name.name for name in one.names]]
        if isinstance(one, ast.Import):
            found = [part for name in one.names for part in name.name.split(".")]
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in ASKING:
            found = [given.value for given in one.args if isinstance(given, ast.Constant)]
        yield from (str(name) for name in found if is_private(name) and name not in own)
    for one in ast.parse(text).body:  # names that are kept as constants of the file
        texts = [part.value for part in ast.walk(one) if isinstance(part, ast.Constant)] if is_constant(one) else []
        words = [word for value in texts if isinstance(value, str) for word in value.split()]
        yield from (word for word in words if is_private(word) and word not in own)


def is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None


def is_gone(one: Private) -> str:
    """Return what is gone, with the versions; nothing if it is there, or if its package is not installed."""
    try:
        installed = python_version() if one.package == "python" else version(one.package)
        held = one.holder()
    except (PackageNotFoundError, ModuleNotFoundError):
        return ""
    except AttributeError as error:
        return f"{one.package} {installed}: {error}"
    there = getattr(held, one.name, held) is not held
    return "" if there else f"{one.package} {installed} has no {one.name} (seen in {one.version}): {one.used}"


def test_every_private_name_of_another_package_is_listed() -> None:
    listed = {one.name for one in PRIVATE}
    named = {name: path.name for path in SOURCE.rglob("*.py") for name in private_names(path.read_text())}
    assert named.keys() - listed == set(), "add these to tests/private_names.py, or do without them"
    assert listed - named.keys() == set(), "these are named no more"


def test_none_of_them_is_gone() -> None:
    assert [said for said in map(is_gone, PRIVATE) if said] == []


def test_a_name_that_is_gone_is_told_with_the_version() -> None:
    gone = Private("_never_there", "torch", "2.0", lambda: object(), "nothing")
    assert is_gone(gone) == f"torch {version('torch')} has no _never_there (seen in 2.0): nothing"
    assert is_gone(Private("_x", "torch", "2.0", lambda: ast.never_there, "a module")).endswith("'never_there'")
    assert is_gone(Private("_x", "no-such-package", "2.0", lambda: None, "nothing")) == ""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("model._private", ["_private"]),
        ("model.config._private.x", ["_private"]),
        ("self._own; other._own; self.model._private", ["_private"]),
        ("def _own(): ...\nother._own; other.__dict__", []),
        ("from torch._inductor import config, _x", ["_inductor", "_x"]),
        ("import torch._dynamo", ["_dynamo"]),
        ("NAMES = frozenset('_private plain'.split())", ["_private"]),
        ("getattr(model, '_private', None); said.endswith('_created')", ["_private"]),
    ],
)
def test_what_is_a_private_name(text: str, names: list[str]) -> None:
    assert list(private_names(text)) == names
