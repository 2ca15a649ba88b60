"""Settings for all tests: the same numbers in every run, rows that the fast suite does without, little to walk."""

import gc
import os
from collections.abc import Generator

import pytest
import torch
from doubles import OWN
from hypothesis import settings
from pairwise import mark_the_rest
from typechecking import compile_sources

from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel

os.environ.setdefault("POLYDRAFT_MEASURE", "no")  # default trees are the same whatever this machine's passes take
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


class Deaf(list[object]):
    """Forgets at once who is to be told."""

    def append(self, _: object) -> None:
        return


@pytest.fixture(autouse=True)
def nobody_is_told_of_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether machine code is on disk already must not show in what commands say."""
    monkeypatch.setattr("polydraft.machine_code._TOLD", Deaf())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the suites run over models' own modules, too."""
    parser.addoption("--passes", choices=("fused", "own"), default="fused", help="by which passes models are run")


@pytest.fixture(scope="session", autouse=True)
def sources_are_compiled(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("jaxtyping_packages"):
        compile_sources()


@pytest.fixture(autouse=True)
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run models by the passes that were asked for."""
    if request.config.getoption("--passes") == "own":
        if request.node.get_closest_marker("fuses"):
            pytest.skip(OWN)
        monkeypatch.setattr(HuggingFaceModel, "_fuse", lambda _: OWN)


def pytest_runtest_setup() -> None:
    """Seed torch before a test's fixtures are made, so that weights do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark rows as slow before slow ones are left out."""
    mark_the_rest(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip a test that compiles passes where torch is too old for it and polydraft says so."""
    try:
        return (yield)
    except InvalidParameter as refusal:
        if str(refusal).startswith("Compiling needs torch"):
            pytest.skip(str(refusal))
        raise


def pytest_collection_finish() -> None:
    """Spare garbage collection what stays to the end; walking it again and again took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)
