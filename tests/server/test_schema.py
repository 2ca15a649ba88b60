"""The server's own description of itself, by which it is sent thousands of bodies."""

import httpx
import pytest
from fastapi.testclient import TestClient
from serving import served

CASES = 60


def test_every_address_is_described(app: TestClient) -> None:
    told = app.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= told["paths"].keys()
    fields = told["components"]["schemas"]["CompletionBody"]
    assert fields["additionalProperties"] is False and "speculative" in fields["properties"]
    assert "422" not in str(told["paths"]["/v1/completions"]["post"]["responses"].keys())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_body_is_an_error_of_ours() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings

    with served(batch_size=16, max_length=24) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.method.upper() != "POST":
                continue

            @given(case=operation.as_strategy())
            @settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            def send(case: object) -> None:
                answer = case.call(base_url=address, timeout=240)  # pyright: ignore
                assert answer.status_code < 500, answer.text
                assert answer.status_code < 300 or answer.json()["error"]["message"].endswith(".")

            send()
        assert httpx.get(f"{address}/health").status_code == 200
