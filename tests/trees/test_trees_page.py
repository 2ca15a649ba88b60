"""The page on trees: its snippets run, and the policies in its table are read."""

import re
from pathlib import Path

import pytest

from polydraft.catalogue import parse_policy

PAGE = (Path(__file__).parents[2] / "docs" / "trees.md").read_text()
TABLE = PAGE.split("## The policies")[1].split("The first four")[0]


@pytest.mark.parametrize("row", [row for row in TABLE.splitlines() if row.startswith("| `")])
def test_every_text_in_the_table_is_a_policy(row: str) -> None:
    texts = re.findall(r"`([^`]+)`", row.split("|")[1])
    assert texts
    for text in texts:
        assert parse_policy(text).shape.size > 1


def test_the_snippets_run() -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "trees.md", "exec"), {})
