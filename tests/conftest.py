"""Settings for all tests: Hypothesis and torch draw the same numbers in every run."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed torch before a test's fixtures are made, so that weights do not depend on the tests before it."""
    torch.manual_seed(0)
