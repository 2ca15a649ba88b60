"""What a wheel holds: every file of the package, as setuptools lists them, without building one."""

import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTING = """
import json, sys
from setuptools.dist import Distribution
found = Distribution({"script_name": "setup.py"})
found.parse_config_files()
found.get_option_dict("egg_info")["egg_base"] = ("the test", sys.argv[1])
command = found.get_command_obj("build_py")
command.ensure_finalized()
command.build_lib = ""
print(json.dumps(command.get_outputs(include_bytecode=False)))
"""


def test_a_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    # Its number alone: imported here, setuptools refuses a process that has the standard library's distutils already.
    if not find_spec("setuptools") or int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools 77 reads licences as this project's file writes them")
    call = [sys.executable, "-c", LISTING, str(tmp_path)]
    ended = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {path.lstrip("/") for path in json.loads(ended.stdout.splitlines()[-1])}
    source = ROOT / "src"
    there = {path.relative_to(source).as_posix() for path in (source / "polydraft").rglob("*") if path.is_file()}
    there = {path for path in there if "__pycache__" not in path}
    assert {"polydraft/py.typed", "polydraft/__main__.py", "polydraft/server/page/index.html"} <= there
    assert listed == there | {"polydraft_command.py"}
