"""The examples of docs/conformance.md run as they stand, each on its own."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
FOUND = list(re.finditer(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.long(2)
@pytest.mark.parametrize(
    "snippet", FOUND, ids=lambda one: f"line {PAGE.read_text()[: one.start(1)].count(chr(10)) + 1}"
)
def test_the_example_runs(snippet: re.Match[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = PAGE.read_text()[: snippet.start(1)].count("\n")
    with torch.random.fork_rng(devices=[]):
        exec(compile("\n" * line + snippet[1], str(PAGE), "exec"), {"__name__": "conformance"})
    assert capsys.readouterr().out


def test_the_page_has_the_examples_it_promises() -> None:
    assert len(FOUND) == 5
    assert sum("assert not report.passed" in one[1] or '"deviates"' in one[1] for one in FOUND) == 2
