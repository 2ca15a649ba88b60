"""What the package loads: a name when it is asked for, and nothing heavy for words, help and wrong calls."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import polydraft

HEAVY = ("torch", "transformers", "numba", "scipy", "numpy", "fastapi", "jaxtyping")
STUB = Path(polydraft.__file__).with_suffix(".pyi")


def loaded_by(code: str) -> list[str]:
    """Return which heavy packages a new process has loaded behind some code, whatever that printed."""
    told = f"{code}\nimport json, sys\nprint(json.dumps([one for one in {HEAVY!r} if one in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def called(*arguments: str) -> str:
    return (
        f"import sys\nsys.argv = {['polydraft', *arguments]!r}\nfrom polydraft.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import polydraft\npolydraft.__version__, dir(polydraft)",
        "from polydraft.catalogue import *\nparts = rule_words(), drafter_spellings(2), example_trees(growing=True)",
        called("--help"),
        called("--version"),
        called("generate", "--help"),
        called("bench", "--help"),
        called("generate", "x", "--drafter", "n-gram"),
        called("generate", "x", "--verifier", "optimul"),
        called("generate", "x", "--temperature", "hot"),
        called("serve", "--port", "many"),
        called("chatt"),
        called("completion", "fish"),
        "import runpy, sys\nsys.argv = ['polydraft', '--version']\n"
        "try:\n    runpy.run_module('polydraft', run_name='__main__')\nexcept SystemExit:\n    pass",
    ],
)
def test_words_help_and_wrong_calls_load_nothing_heavy(code: str) -> None:
    assert loaded_by(code) == []


def test_a_public_name_loads_what_it_needs() -> None:
    assert "torch" in loaded_by("from polydraft import TopDown")


def test_every_public_name_is_there_and_no_other() -> None:
    exported = ast.literal_eval(next(node.value for node in ast.parse(STUB.read_text()).body if is_list(node)))
    assert exported == polydraft.__all__ or {*exported} == {*polydraft.__all__, "__version__"}
    assert {*polydraft.__all__} <= {*dir(polydraft)}
    for name in exported:
        assert getattr(polydraft, name) is getattr(polydraft, name) is not None
    with pytest.raises(AttributeError, match="No polydraft attribute Generate"):
        _ = polydraft.Generate


def is_list(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
