"""Our own server with real models over HTTP: right with drafts in chains and trees, and caught where it is lossy."""

import pytest
from serving import served

from polydraft.conformance.http.copied_law import CopiedModel
from polydraft.conformance.http.served_tests import ServerReport, ServerTest, check_copy, check_tiny
from polydraft.conformance.http.server_client import ServerClient
from polydraft.models import export_tiny, load, load_pair
from polydraft.probs import SamplingParams

pytest.importorskip("fastapi", reason="the server needs the extra serve")


def silent(what: str, done: int, total: int) -> None:
    assert what and done <= total


def checked(test: ServerTest, **settings: object) -> ServerReport:
    pair = load_pair(dtype="float32")
    with served(batch_size=32, **settings) as address:
        client = ServerClient(address)
        try:
            copy = CopiedModel(pair.target, pair.tokenizer, pair.draft, test.params)
            return check_copy(client, copy, test, silent)
        finally:
            client.close()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.8, 1.0])
@pytest.mark.parametrize("tree", ["chain:4", "3,2"])
def test_thirty_thousand_tokens_of_the_embedded_pair_pass(temperature: float, tree: str) -> None:
    report = checked(ServerTest(params=SamplingParams(temperature=temperature)), tree=tree)
    assert report.passed and report.tokens >= 30_000, report


@pytest.mark.slow
def test_a_lossy_rule_is_caught_by_its_drafts() -> None:
    report = checked(ServerTest(most_tokens=15_000), tree="chain:4", verifier="lenient")
    assert not report.passed and report.culprit is not None
    assert "draft" in report.culprit.feature or "tokens" in report.culprit.feature, report.culprit


@pytest.mark.slow
def test_fifty_thousand_texts_of_the_tiny_model_pass(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    export_tiny(folder)
    tiny = load(folder, dtype="float64")
    with served(target=str(folder), dtype="float32", batch_size=32, drafter="ngram") as address:
        client = ServerClient(address)
        try:
            copy = CopiedModel(tiny.target, tiny.tokenizer, None, SamplingParams())
            report = check_tiny(client, copy, ServerTest(most_tokens=150_000), silent)
        finally:
            client.close()
    assert report.passed and report.texts == 50_000, report
