"""One app for all tests that need no settings of their own, and the pair behind it."""

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from fastapi.testclient import TestClient
from serving import client

from polydraft.models import Pair, load_pair


@pytest.fixture(scope="session")
def app() -> Iterator[TestClient]:
    """Return a client of an app with the embedded pair."""
    with client(batch_size=4, chunk=16) as found:
        yield found


@pytest.fixture(scope="session")
def pair() -> Pair:
    """Return the embedded pair, for single runs."""
    return load_pair()
