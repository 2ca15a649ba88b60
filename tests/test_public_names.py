"""What the pages for users name in code can be imported from `polydraft`, and what it exports is used or described."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import polydraft

ROOT = Path(__file__).parents[1]
PAGES = ("docs/choosing.md", "docs/trees.md", "docs/acceptance.md")
ROOMS = ("drafters", "engine", "models", "planning", "schemes", "trees", "verifiers")
PARTS_OF_OTHERS = {"EntropyBound", "PathProbability", "Classifier", "GrowingPolicy", "Scheme", "TreePolicy"}
"""Named on the pages beside the policy that takes them, and imported from their room."""


def exported(room: str) -> set[str]:
    module = import_module(f"polydraft.{room}")
    return {name for name in module.__all__ if inspect.isclass(getattr(module, name))}


def named(text: str) -> set[str]:
    """Return the names that begin a piece of code in the text, with or without the package before them."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return {name for span in spans for name in re.findall(r"(?<![\w./])([A-Z]\w+)", span)}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_can_be_imported(page: str) -> None:
    classes = set[str]().union(*map(exported, ROOMS))
    found = named((ROOT / page).read_text()) & classes
    assert found, "the page names nothing, so this test would prove nothing"
    assert not found - {*polydraft.__all__} - PARTS_OF_OTHERS


@pytest.mark.parametrize("room", ["schemes", "verifiers"])
def test_every_scheme_and_rule_is_public(room: str) -> None:
    kinds = {name: vars(getattr(import_module(f"polydraft.{room}"), name)) for name in exported(room)}
    members = {name for name, own in kinds.items() if "name" in own and not own.get("_is_protocol")}
    assert len(members) >= 8
    assert not members - {*polydraft.__all__}


def test_names_are_found_in_code_alone() -> None:
    text = "A `Chain(5)` under `TopDown(Optimal())`; Widths is not code.\n```\nFixed\n```\n`polydraft.Race`"
    assert named(text) == {"Chain", "TopDown", "Optimal"}


@pytest.mark.parametrize(
    "name", ["align", "generate", "stream", "generate_many", "compare", "tune", "fetch", "load", "load_pair"]
)
def test_the_public_calls_are_functions(name: str) -> None:
    assert name in polydraft.__all__
    assert inspect.isfunction(getattr(polydraft, name))


@pytest.mark.parametrize("room", ROOMS)
def test_constants_that_a_room_exports_are_assigned_alone(room: str) -> None:
    """The site's reference finds no name that is assigned together with others, and `make site` fails."""
    package = ROOT / "src" / "polydraft" / room
    imports = [one for one in ast.parse((package / "__init__.py").read_text()).body if isinstance(one, ast.ImportFrom)]
    constants = 0
    for one in imports:
        path = (ROOT / "src").joinpath(*(one.module or "").split("."))
        body = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()).body
        targets = [target for line in body if isinstance(line, ast.Assign) for target in line.targets]
        together = {
            name.id
            for many in targets
            if isinstance(many, ast.Tuple)
            for name in ast.walk(many)
            if isinstance(name, ast.Name)
        }
        names = {alias.name for alias in one.names if alias.name.isupper()}
        constants += len(names)
        assert not names & together, f"{one.module} assigns {names & together} together with others"
    assert constants or room not in ("drafters", "models", "trees"), "nothing was looked at"
