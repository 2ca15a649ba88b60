"""What the pages for users name in code can be imported from `polydraft`, and what it exports is used or described."""

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
