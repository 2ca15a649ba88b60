"""Every answer says by which rule its drafts were verified, and whether its law is still the target's."""

import json
import logging
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving import PROMPT, ask, chunks, client

LOSSY = {"drafter": "model", "verifier": "typical"}
ROLLBACK = {"drafter": "model", "verifier": "rollback:2", "tree": "confident:10:0.6"}
RULES: list[tuple[dict[str, Any], str, bool]] = [
    ({"speculative": LOSSY}, "typical acceptance", False),
    ({"speculative": LOSSY, "n": 2, "echo": True, "logprobs": 1}, "typical acceptance", False),
    ({"speculative": {"drafter": "model", "verifier": "lenient"}, "prompt": ["a", "b"]}, "lenient", False),
    ({"speculative": {"drafter": "model", "verifier": "top-beta"}}, "top-beta", False),
    ({"speculative": ROLLBACK, "temperature": 0}, "rollback:2", False),
    ({"speculative": {"drafter": "model", "verifier": "block"}}, "block verification", True),
]


def counted(found: TestClient, name: str, lossless: bool) -> float:
    """Return how many requests the metrics count under a rule."""
    label = f'lossless="{str(lossless).lower()}",model_name="polydraft-embedded",verifier="{name}"'
    lines = found.get("/metrics").text.splitlines()
    values = [line.split()[-1] for line in lines if line.startswith("polydraft:request_verifier_total{" + label)]
    return float(values[0]) if values else 0.0


@pytest.mark.parametrize(("fields", "name", "lossless"), RULES, ids=str)
def test_a_rule_is_told_wherever_its_text_is(
    app: TestClient, fields: dict[str, Any], name: str, lossless: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rule, before = {"verifier": name, "lossless": lossless}, counted(app, name, lossless)
    fields = {"seed": 1, "max_tokens": 4, **fields}
    with caplog.at_level(logging.INFO, "polydraft.server"):
        whole = ask(app, **fields)
        for options in ({}, {"stream_options": {"include_usage": True}}):
            pieces = chunks(app, **fields, **options)
            (measured,) = [one["metrics"]["speculative_decoding"] for one in pieces if one.get("metrics")]
            assert rule.items() <= measured.items()
            last = [one for one in pieces if one["choices"]][-1]
            assert rule.items() <= last["polydraft"].items()
    assert (
        rule.items() <= whole["metrics"]["speculative_decoding"].items() and rule.items() <= whole["polydraft"].items()
    )
    assert counted(app, name, lossless) == before + 3
    told = [getattr(record, "told", {}) for record in caplog.records if record.getMessage() == "request"]
    assert len(told) == 3 and all(rule.items() <= one.items() for one in told)


def test_a_lossy_rule_is_told_where_nothing_else_is() -> None:
    with client(draft_metrics="none", drafter="model", verifier="typical") as found:
        rule = {"verifier": "typical acceptance", "lossless": False}
        whole = ask(found, seed=1)
        assert whole["metrics"] is None and rule.items() <= whole["polydraft"].items()
        assert rule.items() <= chunks(found, seed=1)[-1]["polydraft"].items()
        assert rule.items() <= found.get("/v1/models").json()["data"][0].items()
        assert rule.items() <= found.get("/v1/models/polydraft-embedded").json().items()
        assert found.get("/polydraft/options").json()["defaults"]["lossless"] is False


def test_what_is_not_verified_has_no_rule(app: TestClient) -> None:
    nothing = {"verifier": None, "lossless": True}
    assert nothing.items() <= ask(app, prompt=PROMPT, max_tokens=0, echo=True)["polydraft"].items()
    plain = ask(app, speculative={"enabled": False})["polydraft"]
    assert plain["lossless"] is True and plain["verifier"]
    card = app.get("/v1/models").json()["data"][0]
    assert card["lossless"] is True and json.dumps(card["verifier"]) != "null"
    assert app.get("/polydraft/options").json()["defaults"]["lossless"] is True


def test_a_rule_for_temperature_0_alone_is_refused_above_it(app: TestClient) -> None:
    told = "The verifier rollback:2 is for temperature 0 alone, but the temperature is 1"
    for speculative, more in ((ROLLBACK, told), ({**ROLLBACK, "verifier": "rollback:x"}, "takes a number behind")):
        answer = app.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "speculative": speculative})
        assert answer.status_code == 400 and more in answer.json()["error"]["message"]


def test_a_server_may_have_a_rule_for_temperature_0_alone() -> None:
    with client(drafter="model", verifier="rollback:2", tree="chain:4") as found:
        rule = {"verifier": "rollback:2", "lossless": False}
        assert rule.items() <= ask(found, temperature=0)["polydraft"].items()
        assert rule.items() <= found.get("/v1/models").json()["data"][0].items()
        refused = found.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
        assert refused.status_code == 400 and "for temperature 0 alone" in refused.json()["error"]["message"]
