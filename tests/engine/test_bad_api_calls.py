"""Bad calls of `generate`, `stream` and `generate_many`: a result or one sentence, never a raw error, never a hang."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doubles import tiny_model

import polydraft
from polydraft import Chain
from polydraft.errors import InvalidParameter

PROGRAM = Path(__file__).parent / "bad_api_calls.py"


def tried(number: int, seed: int, patience: float) -> dict[str, int]:
    """Run so many calls in a process of their own; the tests' type checks would answer before the package does."""
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(number), str(seed)],
        capture_output=True,
        text=True,
        timeout=patience,
        check=True,
    )
    result = json.loads(run.stdout.splitlines()[-1])  # some calls print
    assert not result["wrong"], "\n\n".join(result["wrong"])
    return result["counts"]


def test_bad_calls_are_answered_in_a_sentence() -> None:
    counts = tried(60, 8, patience=300)
    assert counts["refused"] > 25
    assert counts["fine"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_three_hundred_bad_calls(seed: int) -> None:
    counts = tried(300, seed, patience=1500)
    assert sum(counts.values()) == 300


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"policy": torch.zeros(2, 3)}, "policy must be a tree policy"),
        ({"policy": Chain}, "policy must be a tree policy"),
        ({"stopping_criteria": torch.tensor(1)}, "stopping_criteria must be criteria"),
        ({"stopping_criteria": ["stop"]}, "stopping_criteria must be criteria"),
    ],
)
@pytest.mark.wrong_types
def test_what_is_almost_an_argument_is_refused(given: dict[str, object], told: str) -> None:
    target = tiny_model(seed=1)
    with pytest.raises(InvalidParameter, match=told):
        polydraft.generate(target, [[1, 2, 3]], max_new_tokens=2, **given)
