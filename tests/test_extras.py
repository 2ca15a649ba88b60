"""Optional packages: pyproject's versions, and a true sentence where one is missing, too old, too new or broken."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from polydraft import extras
from polydraft.cluster import joined
from polydraft.errors import MissingExtra
from polydraft.extras import Extra

ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SOURCES = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.html"), *ROOT.glob("*.md"), *ROOT.glob("docs/**/*")]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages of the test's own, which are forgotten afterwards."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


def add(packages: Path, name: str, version: str | None = "2.5", text: str = "") -> None:
    """Write a package, with its card unless it has no version."""
    (packages / f"{name.replace('-', '_')}.py").write_text(text)
    if version is not None:
        card = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        card.mkdir()
        (card / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def said(*requirements: str) -> str:
    with pytest.raises(MissingExtra) as refused:
        Extra("Paint needs", requirements).check()
    return str(refused.value)


def test_extras_are_those_of_pyproject() -> None:
    found = {name.lower(): one.requirements for name, one in vars(extras).items() if isinstance(one, Extra)}
    assert found == {name: tuple(lines) for name, lines in DECLARED.items() if name not in ("dev", "docs")}
    apart = "ray"  # `make test-ray` has an environment of its own
    assert all(line in DECLARED["dev"] for name, lines in found.items() for line in lines if name != apart)


def test_what_is_there_is_taken(packages: Path) -> None:
    add(packages, "red-lead")
    add(packages, "ochre", "2.0rc1")
    add(packages, "umber", None)
    Extra("Paint needs", ("red-lead>=2,<3", "ochre>=1", "umber>=7")).check()


def test_all_that_is_missing_is_said_at_once(packages: Path) -> None:
    add(packages, "ochre")
    assert said("red-lead>=2") == 'Paint needs red-lead, which is not installed: pip install "red-lead>=2".'
    assert said("red-lead>=2", "ochre>=1", "umber", "lime<4") == (
        'Paint needs red-lead, umber and lime, which are not installed: pip install "red-lead>=2" "umber" "lime<4".'
    )


@pytest.mark.parametrize("version", ["1.9", "3.0"])
def test_another_version_is_said(packages: Path, version: str) -> None:
    add(packages, "ochre", version)
    assert said("ochre>=2,<3") == f'Paint needs ochre>=2,<3, but {version} is installed: pip install "ochre>=2,<3".'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import its_own_missing_part", "No module named 'its_own_missing_part'"),
        ("raise ImportError('made for\\nnumpy 1.')", "made for numpy 1"),
        ("raise OSError('libpaint.so is damaged')", "libpaint.so is damaged"),
        ("import sys\nsys.no_such_name", "module 'sys' has no attribute 'no_such_name'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_not_called_missing(packages: Path, text: str, reason: str) -> None:
    add(packages, "ochre", text=text)
    assert said("ochre>=2") == (
        f'Paint needs ochre, which is installed but cannot be imported ({reason}): pip install --upgrade "ochre>=2".'
    )


def test_no_page_and_no_sentence_installs_an_extra_of_polydraft_from_an_index() -> None:
    """The name is on no index: whoever takes it there could put anything into such a command."""
    command = re.compile(r"pip install[^\n]*[\"' ]polydraft\b")
    texts = {path: path.read_text(errors="replace") for path in SOURCES if path.is_file() and path.suffix != ".png"}
    assert (
        len(texts) > 100 and command.search('pip install "polydraft[gguf]"') and command.search("pip install polydraft")
    )
    assert [str(path) for path, text in texts.items() if command.search(text)] == []


def test_a_cluster_without_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra) as refused, joined(None):
        pass
    assert str(refused.value) == (
        'A Ray cluster needs ray, which is not installed: pip install "ray[serve,data]>=2.60,<3".'
    )
