"""Words in requests: slips are answered with what was meant, shown names are taken, and no file is ever run."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from fastapi.testclient import TestClient
from serving import PROMPT

SLIPS = [
    ({"drafter": "n-gram"}, "did you mean ngram?"),
    ({"drafter": "Sufix"}, "did you mean suffix?"),
    ({"verifier": "optimall"}, "did you mean optimal?"),
    ({"tree": "chian:3"}, "did you mean one such as chain:5?"),
    ({"tree": "goodputt"}, "did you mean goodput?"),
]


def asked(app: TestClient, speculative: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = app.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "speculative": speculative})
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("fields", "says"), SLIPS)
def test_a_slip_in_a_request_is_answered_with_what_was_meant(
    app: TestClient, fields: dict[str, Any], says: str
) -> None:
    status, told = asked(app, fields)
    assert status == 400 and says in told["error"]["message"], told
    assert told["error"]["param"] == f"speculative.{next(iter(fields))}" and told["error"]["message"].endswith(".")


@pytest.mark.parametrize("fields", [{"verifier": "naive match"}, {"verifier": "optimal, bottom up"}])
def test_names_that_are_shown_are_taken(app: TestClient, fields: dict[str, Any]) -> None:
    status, told = asked(app, {"drafter": "model", **fields})
    assert status == 200, told


@pytest.mark.parametrize("field", ["drafter", "verifier", "tree"])
def test_a_request_never_runs_a_file(app: TestClient, field: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark.py"
    mark.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nclass Rule: ...\n")
    for name in (f"{mark}:Rule", str(mark), f"{mark}:"):
        status, told = asked(app, {field: name})
        assert status == 400 and told["error"]["param"] == f"speculative.{field}", told
    assert not (tmp_path / "ran").exists()
