"""The worked example of docs/tools.md, as it stands there."""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="grammars need llguidance")
PAGE = Path(__file__).parents[1] / "docs" / "tools.md"


def test_the_example_calls_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    names, arguments = capsys.readouterr().out.splitlines()
    assert names == "['weather']" and ast.literal_eval(arguments).keys() == {"city", "days"}
    assert f"  # {names}" in code
